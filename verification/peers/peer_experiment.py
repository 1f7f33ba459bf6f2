"""A peer as Experiments: the plain examples and the laws of any attention, on Cases that it claims to support."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from reference.fast_oracle import Expectation, Inputs, evaluate
from reference.roundoff import Arithmetic
from verification.case import Case
from verification.causes.find import find_cause
from verification.check import properties
from verification.check.attention_on_ranks import AttentionOnRanks, Implementation, claimed
from verification.check.expectation import make_arithmetic, sum_lengths
from verification.check.laws import LAWS, Law
from verification.check.laws.same_bits import SAME_BITS
from verification.check.numbered_exchange import with_number
from verification.experiments import law_experiment
from verification.failures import Refused, VerificationFailure, WrongResult
from verification.peers import claims, interpolated_merge
from verification.peers.known_peers import load, ready
from verification.peers.peer import Peer
from verification.peers.peer_rank import REPEATING, RUNS, observe_peer, prepare
from verification.run.backends import Backend
from verification.run.observation import Observation
from verification.search.claim import apply_claim
from verification.search.experiment import Experiment, ToolError
from verification.strategies.cases import LARGE, cases_of_others, large_cases
from verification.wording import counted

# The `checks.CHECKS` for any implementation; those of messages, bytes and buffers are for this project's own.
APPLICABLE = ("answers", "unseen", "finite", "values", "gradients", "inputs", "repeat")
TITLES = tuple(
    p.title for p in properties.PROPERTIES if p is properties.EVERY_RANK_ANSWERS or set(p.checks) <= set(APPLICABLE)
)
LAWS_OF_ANY = tuple(law for law in LAWS if law.of_any)
REHEARSED = 20  # Cases on each world size
LAW_SHARE = 0.1  # of the plain examples, for each law


def implementation(name: str, device: str = "cpu") -> Implementation:
    """Return the attention of the peer of that name. Raises Refused if there is no such Peer."""
    peer = load(name)
    return Implementation(
        observe_peer, (name,), partial(nearest_claimed, peer, device=device), partial(peer_arithmetic, peer),
        partial(evaluate_for, peer), lambda case: peer.same_bits,
    )  # fmt: skip


def on_ranks(name: str) -> dict[str, Any]:
    """Return the fields of an Experiment on what ranks of a peer need."""
    return {"timeout": load(name).timeout, "prepare_rank": partial(prepare, name), "calls": f"attend of {name}"}


def experiments(
    name: str, world: int, examples: int, only: Collection[str] = (), device: str = "cpu"
) -> list[tuple[Experiment, int]]:
    """Return the Experiments of a peer on a world size, each with its number of examples: plain ones, then laws.

    Args:
        name: the peer's. Raises Refused if there is no such Peer.
        world: number of ranks.
        examples: plain ones.
        only: titles of properties and laws, each on as many examples; none: all, laws on fewer.
        device: "cpu" or "cuda".
    """
    checks = [check for check in properties.select_checks(only or TITLES) if check in APPLICABLE]
    plain = [(experiment(name, device, checks), examples)] if not only or set(only) & set(TITLES) else []
    if plain and (large := min(len(LARGE), examples * len(LARGE) // 100)):
        own, nearest = plain[0][0], partial(claimed, implementation(name, device).claims)
        drawn = dataclasses.replace(own, name=f"{own.name}, large", draw=lambda world: large_cases(world).map(nearest))
        plain.append((drawn, large))
    laws = [law for law in LAWS_OF_ANY if law.fewest_ranks <= world and (not only or law.name in only)]
    count = examples if only else math.ceil(examples * LAW_SHARE)
    return plain + [(peer_law(name, law, device), min(count, law.most)) for law in laws]


def experiment(name: str, device: str = "cpu", checks: Sequence[str] = APPLICABLE) -> Experiment:
    """Return the Experiment with plain examples of the peer of that name. Raises Refused if there is no such Peer."""
    attention = implementation(name, device)

    def draw(world: int) -> SearchStrategy[Case]:
        return cases_of_others(world).map(partial(claimed, attention.claims))

    return Experiment(
        f"peer {load(name).name}", draw, partial(check, attention, checks),
        kind="peer", names={"peer": name},
        validate=partial(must_be_claimed, attention), explain=partial(cause_of, name, attention),
        **on_ranks(name),
    )  # fmt: skip


def peer_law(name: str, law: Law, device: str = "cpu") -> Experiment:
    """Return the Experiment of a law with the peer of that name, on subjects to which the law applies."""
    attention = implementation(name, device)
    own = law_experiment(law, attention)
    promises = law is not SAME_BITS or bool(load(name).same_bits)

    def applicable(subject: Any) -> Any:
        try:
            precondition(subject)
        except ValueError:
            reject()
        return subject

    def precondition(subject: Any) -> None:
        must_be_claimed(attention, subject[0])
        law.validate(*subject)
        law.of_others(attention.claims, *subject)

    return dataclasses.replace(
        own, name=f"peer {load(name).name}, {law.name}",
        draw=lambda world: law.draw(world, attention.claims).map(applicable) if promises else st.builds(reject),
        kind="peer law", names={"peer": name, "law": law.name}, validate=precondition,
        without_subjects=f"{law.name}: does not apply: {law.of_any}", **on_ranks(name),
    )  # fmt: skip


def check(attention: Implementation, checks: Sequence[str], backend: Backend, case: Case) -> dict[str, float]:
    """Return the worst ratio (error / bound) of each property; 0 is exact. Raises the first failure."""
    observations, expectation = AttentionOnRanks(backend, attention).observe_and_expect(case, repeat=True)
    return properties.check(case, expectation, observations, checks)


def cause_of(
    name: str, attention: Implementation, failure: WrongResult, backend: Backend, minimal: Case, first: Case
) -> str | None:
    """Return the cause of a peer's wrong numbers in words, or None. first: the example before it was shrunk."""
    if failure.check == "repeat" and minimal.again in ("between", "pipelined"):
        return _shared_by_calls(attention, backend, minimal)
    if failure.check not in properties.OF_NUMBERS:
        return None

    def results(backend: Backend, case: Case) -> tuple[Expectation, list[Observation]]:
        observations, expectation = AttentionOnRanks(backend, attention).observe_and_expect(case)
        return expectation, observations

    larger = min((world for world in load(name).worlds if world > minimal.world), default=minimal.world)
    cause = find_cause(results, backend, minimal, first, attention.claims, larger)
    if cause is None and minimal.dtype in ("bfloat16", "float16") and load(name).arithmetic == "math":
        return (
            "note: no usual mistake reproduces these 16-bit numbers; check float32 as well, where rounding hides less. "
            'arithmetic="half" is for kernels that are documented to round probabilities or partial results: it would '
            "also hide 16-bit sums, a 16-bit lse, or a scale off by 1 %"
        )
    return cause and f"cause: {cause}"


def _shared_by_calls(attention: Implementation, backend: Backend, case: Case) -> str | None:
    """Return the cause of a second run that differs where another call comes between, if a plain one repeats."""
    try:
        check(attention, APPLICABLE, backend, dataclasses.replace(case, again="alike"))
    except VerificationFailure:
        return None
    return (
        "cause: the run repeats, but not with another call between its forward and backward: what the backward reads, "
        "such as a saved tensor, a buffer or a cache, is shared by calls"
    )


def rehearse(name: str) -> None:
    """Do the imports of a peer, and apply its claim to some Cases of each world size. Raises Refused for a peer that
    cannot be loaded, or a claim that is at fault."""
    peer = ready(name)
    quickly = settings(
        max_examples=REHEARSED, phases=[Phase.generate], database=None, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    claimed_some: list[bool] = []

    def claim(case: Case) -> None:
        claimed_some.append(nearest_claimed(peer, case) is not None)

    try:
        for world in peer.worlds:
            quickly(given(cases_of_others(world))(claim))()
    except ToolError as error:
        raise Refused(str(error)) from error
    if not any(claimed_some):
        raise Refused(
            f"claims of {peer.name} returned None for all {len(claimed_some)} Cases that it was given; it must return "
            "the nearest Case that the implementation supports"
        )


def must_be_claimed(attention: Implementation, case: Case) -> None:
    """Raise ValueError for a Case that the attention does not claim to support: it names the fields that differ."""
    nearest = attention.claims(case)
    if nearest is None:
        raise ValueError("the claim returns None for this Case; it must be one that the claim leaves as it is")
    if nearest != case:
        before, after = ({**fields, **fields.pop("pattern")} for fields in (case.to_dict(), nearest.to_dict()))
        changed = [
            f"{name}={json.dumps(after[name])}, not {json.dumps(x)}" for name, x in before.items() if x != after[name]
        ]
        raise ValueError(f"the claim changes {counted(len(changed), 'field')} of the Case: {'; '.join(changed)}")


def nearest_claimed(peer: Peer, case: Case, device: str = "cpu") -> Case | None:
    """Return the nearest Case on that device that the peer claims; None on ranks that it does not take. Raises
    ToolError, as `apply_claim`."""
    if case.world not in peer.worlds:
        return None
    claim = partial(claims.applied, peer.claims)
    nearest = apply_claim(peer.name, claim, dataclasses.replace(case, device=device))
    if nearest is None:
        return None
    # Other variations of the second run, and measurements, are for this project's own implementation only.
    runs = () if peer.arrays != "torch" else RUNS if nearest.backward else REPEATING
    again = nearest.again if nearest.again in runs else "alike"
    return dataclasses.replace(nearest, again=again, measured=False)


def arithmetic_named(name: str, case: Case) -> Arithmetic:
    """Return the arithmetic of the peer of that name, as `peer_arithmetic`."""
    return peer_arithmetic(load(name), case)


def peer_arithmetic(peer: Peer, case: Case) -> Arithmetic:
    """Return the arithmetic of a correct implementation of the peer's class. The Case determines the counts (keys per
    row, partial results, blocks), the class the roundings."""
    narrow = case.dtype in ("bfloat16", "float16")
    kernel = "math" if peer.arithmetic in ("half", "gpu") and not narrow else peer.arithmetic
    counts = sum_lengths(with_number(case), "gpu" if kernel == "gpu" else "math")
    return make_arithmetic(case, kernel, counts)


def evaluate_for(peer: Peer, inputs: Inputs, arithmetic: Arithmetic) -> Expectation:
    """Return exact values with the bounds of that arithmetic, wider for a peer that merges by interpolation."""
    expectation = evaluate(inputs, arithmetic)
    if peer.merge == "interpolated":
        interpolated_merge.widen_bounds(expectation, arithmetic)
    return expectation
