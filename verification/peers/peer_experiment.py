"""A peer as an Experiment: Cases drawn through its claim, results compared within the bounds of its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hypothesis.strategies import SearchStrategy

from reference.fast_oracle import Expectation, evaluate
from reference.roundoff import Arithmetic
from verification.case import Case
from verification.check import properties
from verification.check.expectation import counts_of, inputs_of
from verification.peers import interpolated_merge
from verification.peers.known_peers import load
from verification.peers.peer import Peer
from verification.peers.peer_rank import observe_peer
from verification.run.backends import Backend
from verification.search.experiment import Experiment, ToolError, case_record
from verification.strategies.cases import cases
from verification.training.training_case import TrainingCase

AnyCase = TypeVar("AnyCase", Case, TrainingCase)

# The `checks.CHECKS` that concern any implementation; those of messages, bytes and buffers concern this project's own.
APPLICABLE = ("answers", "unseen", "finite", "values", "gradients", "inputs", "repeat")


def experiment(name: str) -> Experiment:
    """Cases are drawn through the claim of the peer of that name. Raises Refused where there is no such Peer."""
    peer = load(name)

    def draw(world: int) -> SearchStrategy[Case | None]:
        return cases(world).map(partial(claimed, peer)).filter(lambda case: case is not None)

    judge = partial(check, name, peer)
    return Experiment(f"peer {peer.name}", draw, judge, record_of=lambda x: {"peer": name, "case": case_record(x)})


def claimed(peer: Peer, case: Case) -> Case | None:
    """Take the Case to the nearest one that the peer claims. Raises ToolError, as `settled`."""
    found = settled(peer.name, peer.claims, case)
    # How the second run differs, and what is measured, concerns this project's own implementation only.
    return found and dataclasses.replace(found, again="alike", measured=False)


def settled(name: str, claims: Callable[[AnyCase], AnyCase | None], case: AnyCase) -> AnyCase | None:
    """Return `claims(case)`. Raises ToolError for a claim that raises, returns anything but a Case of that world, or
    would change the returned Case again: these are faults of the adapter, and no counter-examples."""
    try:
        found = claims(case)
    except Exception as error:
        raise ToolError(f"claims of {name} raised {type(error).__name__}: {error}") from error
    if found is None:
        return None
    if not isinstance(found, type(case)) or found.world != case.world:
        kind = type(case).__name__
        raise ToolError(f"claims of {name} gave {found!r}; it must be a {kind} with world {case.world}, or None")
    if claims(found) != found:
        raise ToolError(f"claims of {name} does not support what it made itself: {found.to_json()}")
    return found


def check(name: str, peer: Peer, backend: Backend, case: Case) -> dict[str, float]:
    """The worst error of each property as a fraction of its bound, 0 where it is exact. Raises the first failure."""
    backend.submit(observe_peer, case, name)
    expectation = expect(peer, case)
    observations = backend.collect()
    malformed = [x for x in observations if isinstance(x, str)]
    if malformed:
        raise ToolError(f"the adapter {name}: {malformed[0]}")
    return properties.check(case, expectation, observations, APPLICABLE)


def expect(peer: Peer, case: Case) -> Expectation:
    """Exact values, with the bounds of a sound implementation of the peer's class: the counts (keys per row, partial
    results, blocks) come from the Case, the roundings from the class."""
    sixteen = case.dtype in ("bfloat16", "float16")
    kernel = "math" if peer.arithmetic == "half" and not sixteen else peer.arithmetic
    r = Arithmetic.of(case.dtype, kernel, case.head_dim, case.softmax_scale, counts_of(case, "math"))
    expectation = evaluate(inputs_of(case, case.tensors()), r)
    if peer.merge == "interpolated":
        interpolated_merge.allow(expectation, r)
    return expectation
