"""Prints which results of peers have the same bits on other ranks, and for an entry of the batch alone.

    python -m verification.peers.equal_bits [NAME ...] [--examples N] [--seed N]

A cell is the examples with equal bits, of those that were run. Nothing is promised by it: a `Peer` promises.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from reference.fast_oracle import QUANTITIES
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims
from verification.check.checks import compared
from verification.check.laws.law import How
from verification.check.laws.same_bits import SAME_BITS, differences, observe_both, other_of
from verification.failures import Refused, VerificationFailure
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer_experiment import experiment, implementation
from verification.run.backends import GlooBackend

TOKENS = 96  # at least
CHANGES = ("other ranks", "alone")
OWN = tuple(f"verification.peers.adapters.own:{name}" for name in ("by_heads", "by_ring", "directly", "gathered"))


def usual(case: Case) -> Case:
    """Return the Case with enough tokens, and numbers whose sums depend on their order. Heads have 16 dims: by other
    products BLAS takes vectors of 1 or 5, for a head alone or beside others."""
    numbers: dict[str, Any] = {"values": "normal", "score_scale": 1.0, "scale": None, "strided": False}
    sizes: dict[str, Any] = {"head_dim": 16, "value_dim": None}
    return replace(case.lengthened(max(case.tokens, TOKENS), cuts=None), **numbers, **sizes)


def subjects(claims: Claims, world: int, number: int, seeds: int) -> list[tuple[Case, How]]:
    """Return drawn pairs of a Case and its change, fewer where the claim allows no other."""
    drawn: list[tuple[Case, How]] = []

    def keep(subject: tuple[Case, How]) -> None:
        if subject not in drawn:
            drawn.append(subject)

    quick = settings(
        max_examples=number, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        seed(seeds)(quick(given(SAME_BITS.draw(world, lambda case: claims(usual(case))))(keep)))()
    except Unsatisfiable:
        return []
    return drawn


def changes(case: Case, how: How, claims: Claims) -> Iterator[tuple[str, How]]:
    """Yield each of CHANGES that the claim allows, with how it changes the Case."""
    alone = {field: getattr(case, field) for field in how if field != "entry"} | {"entry": 0}
    for change, way in zip(CHANGES, (how | {"entry": None}, alone), strict=True):
        other = other_of(case, way)
        if (case.world > 1 or change == "alone") and other != case and claims(other) == other:
            yield change, way


def count(name: str, examples: int, seeds: int) -> dict[str, str]:
    """Return a cell for each of CHANGES, of the peer on all its ranks: each result with its numbers of examples."""
    attention, equal, run = implementation(name), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with closing(GlooBackend()) as backend:
        experiment(name).prepare(backend)
        for world in ready(name).worlds:
            backend.start(world)
            for case, how in subjects(attention.claims, world, examples, seeds):
                for change, way in changes(case, how, attention.claims):
                    both = observe_both(AttentionOnRanks(backend, attention), case, way)
                    names = [result for result in compared(case) if result in QUANTITIES]
                    run.update((change, result) for result in names)
                    equal.update((change, result) for result in set(names) - set(differences(case, way, both, names)))
    return {
        change: ", ".join(f"{x} {equal[change, x]}/{run[change, x]}" for x in QUANTITIES if run[change, x]) or "-"
        for change in CHANGES
    }


def main(arguments: Sequence[str]) -> int:
    """Print a row of a Markdown table for each peer, also why it did not run. Return the exit status: 0."""
    parser = argparse.ArgumentParser(prog="python -m verification.peers.equal_bits", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", default=[*OWN, *KNOWN], help="peers; default: all, and ours"
    )
    parser.add_argument("--examples", type=int, default=10, help="for each number of ranks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"| implementation | {' | '.join(CHANGES)} |\n|---|{'---|' * len(CHANGES)}")
    for name in dict.fromkeys(peer for names in options.names for peer in selected(names)):
        try:
            cells = [*count(name, options.examples, options.seed).values()]
        except (Refused, VerificationFailure) as error:
            cells = [f"not run: {str(error).splitlines()[0]}"]
        print(f"| {load(name).name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
