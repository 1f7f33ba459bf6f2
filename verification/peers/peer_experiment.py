"""A peer as an Experiment: Cases mapped by its claim, results compared within the bounds of its class."""

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
from verification.protocols import Example
from verification.run.backends import Backend
from verification.search.experiment import Experiment, ToolError, case_record
from verification.strategies.cases import cases

AnyCase = TypeVar("AnyCase", bound=Example)

# The `checks.CHECKS` for any implementation; those of messages, bytes and buffers are for this project's own.
APPLICABLE = ("answers", "unseen", "finite", "values", "gradients", "inputs", "repeat")


def experiment(name: str) -> Experiment:
    """Return the Experiment with the peer of that name. Raises Refused if there is no such Peer."""
    peer = load(name)

    def draw(world: int) -> SearchStrategy[Case | None]:
        return cases(world).map(partial(claimed, peer)).filter(lambda case: case is not None)

    judge = partial(check, name, peer)
    return Experiment(f"peer {peer.name}", draw, judge, record_of=lambda x: {"peer": name, "case": case_record(x)})


def claimed(peer: Peer, case: Case) -> Case | None:
    """Return the nearest Case that the peer claims. Raises ToolError, as `apply_claim`."""
    nearest = apply_claim(peer.name, peer.claims, case)
    # Variations of the second run, and measurements, are for this project's own implementation only.
    return nearest and dataclasses.replace(nearest, again="alike", measured=False)


def apply_claim(name: str, claims: Callable[[AnyCase], AnyCase | None], case: AnyCase) -> AnyCase | None:
    """Return `claims(case)`. Raises ToolError for a claim that raises, returns anything but a Case of that world, or
    changes its own result: these are faults of the adapter, not counter-examples."""
    try:
        nearest = claims(case)
    except Exception as error:
        raise ToolError(f"claims of {name} raised {type(error).__name__}: {error}") from error
    if nearest is None:
        return None
    if not isinstance(nearest, type(case)) or nearest.world != case.world:
        kind = type(case).__name__
        raise ToolError(f"claims of {name} gave {nearest!r}; it must be a {kind} with world {case.world}, or None")
    if claims(nearest) != nearest:
        raise ToolError(f"claims of {name} changes its own result: {nearest!r}; it must return that unchanged")
    return nearest


def check(name: str, peer: Peer, backend: Backend, case: Case) -> dict[str, float]:
    """Return the worst ratio (error / bound) of each property; 0 is exact. Raises the first failure."""
    backend.submit(observe_peer, case, name)
    expectation = expect(peer, case)
    observations = backend.collect()
    malformed = [x for x in observations if isinstance(x, str)]
    if malformed:
        raise ToolError(f"the adapter {name}: {malformed[0]}")
    return properties.check(case, expectation, observations, APPLICABLE)


def expect(peer: Peer, case: Case) -> Expectation:
    """Return exact values with the bounds of a correct implementation of the peer's class. The Case determines the
    counts (keys per row, partial results, blocks), the class the roundings."""
    narrow = case.dtype in ("bfloat16", "float16")
    kernel = "math" if peer.arithmetic == "half" and not narrow else peer.arithmetic
    r = Arithmetic.of(case.dtype, kernel, case.head_dim, case.softmax_scale, counts_of(case, "math"))
    expectation = evaluate(inputs_of(case, case.tensors()), r)
    if peer.merge == "interpolated":
        interpolated_merge.widen_bounds(expectation, r)
    return expectation
