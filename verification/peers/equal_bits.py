"""Counts the examples in which results of peers have the same bits on other ranks, and for an entry of a batch alone.

    python -m verification.peers.equal_bits [NAME ...]

Default: this project's attention without `same_bits`, by each exchange, and all peers. A `Peer` alone promises bits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from reference.fast_oracle import QUANTITIES
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.checks import compared
from verification.check.laws.law import How
from verification.check.laws.same_bits import SAME_BITS, differences, observe_both, other_of
from verification.failures import Refused, VerificationFailure
from verification.peers import claims
from verification.peers.adapters.own_ring import attend
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer import Peer
from verification.peers.peer_experiment import experiment, implementation
from verification.run.backends import GlooBackend

EXAMPLES, TOKENS = 10, 96  # for each number of ranks; fewest tokens
CHANGES = ("other ranks", "alone")


def own(exchange: str, same_bits: tuple[str, ...] = ()) -> Peer:
    def claimed(case: Case) -> Case:
        case = claims.dense(claims.all_ranks(claims.without_own_settings(case)), True)
        case = replace(case, order=case.order if case.order == "zigzag" else "contiguous", exchange=exchange)
        return claims.divisible_heads(case, case.world) if exchange == "all-to-all" else case

    name, supported = f"ring_attention/{exchange}", "dense causal, all ranks"
    return Peer(name, supported, claimed, attend, (1, 2, 3, 4), same_bits=same_bits)


by_heads, by_ring, directly, gathered = own("all-to-all", QUANTITIES), own("ring"), own("direct"), own("gather")
OWN = [f"verification.peers.equal_bits:{name}" for name in ("by_heads", "by_ring", "directly", "gathered")]


def usual(case: Case) -> Case:
    """Return the Case with numbers whose sums depend on their order. BLAS has other products for 1 or 5 dims."""
    case = case.lengthened(max(case.tokens, TOKENS), cuts=None, head_dim=16, value_dim=None)
    return replace(case, values="normal", score_scale=1.0, scale=None, strided=False)


def count(name: str) -> list[str]:
    """Return a cell for each of CHANGES, of the peer on all its ranks: its results with their numbers of examples."""
    attention, equal, run = implementation(name), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    quick = settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None, deadline=None,
                     suppress_health_check=list(HealthCheck))  # fmt: skip
    with closing(GlooBackend()) as backend:

        def compare(subject: tuple[Case, How]) -> None:
            case, how = subject
            same = {field: getattr(case, field) for field in how if field != "entry"}
            for change, way in zip(CHANGES, (how | {"entry": None}, same | {"entry": 0}), strict=True):
                other = other_of(case, way)
                if (change == CHANGES[0] and case.world == 1) or other == case or attention.claims(other) != other:
                    continue
                both = observe_both(AttentionOnRanks(backend, attention), case, way)
                names = set(compared(case)) & set(QUANTITIES)
                run.update((change, x) for x in names)
                equal.update((change, x) for x in names - set(differences(case, way, both, names)))

        experiment(name).prepare(backend)
        for world in ready(name).worlds:
            backend.start(world)
            subjects = SAME_BITS.draw(world, lambda case: attention.claims(usual(case)))
            with suppress(Unsatisfiable):
                seed(0)(quick(given(subjects)(compare)))()
    cells = ([f"{x} {equal[change, x]}/{run[change, x]}" for x in QUANTITIES if run[change, x]] for change in CHANGES)
    return [", ".join(cell) or "-" for cell in cells]


def main(names: Sequence[str]) -> None:
    """Print a row of a Markdown table for each peer, also why it did not run."""
    print(f"| implementation | {' | '.join(CHANGES)} |\n|---|{'---|' * len(CHANGES)}")
    for name in dict.fromkeys(peer for given_name in names or [*OWN, *KNOWN] for peer in selected(given_name)):
        try:
            cells = count(name)
        except (Refused, VerificationFailure) as error:
            cells = [f"not run: {str(error).splitlines()[0]}"]
        print(f"| {load(name).name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
