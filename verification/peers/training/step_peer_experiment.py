"""A peer in training steps as an Experiment: TrainingCases mapped by its claim, with the checks of any step."""

from __future__ import annotations

from functools import partial

from hypothesis.strategies import SearchStrategy

from ring.comm.transport import Transport
from verification.peers.training.known_step_peers import load_step_peer, ready_step_peer
from verification.peers.training.step_peer import StepPeer
from verification.run.backends import Backend
from verification.search.claim import apply_claim
from verification.search.experiment import Experiment
from verification.training.step_checks import STEP_CHECKS, check_step
from verification.training.step_expectation import expect_training
from verification.training.step_observation import StepObservation
from verification.training.strategies import training_cases
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD

TIMEOUT = 30.0  # seconds per example: ZeRO 3 is slow on a loaded machine
# Expected bytes are those of this project's own attention.
APPLICABLE_TO_STEPS = tuple(name for name in STEP_CHECKS if name != "bytes")


def step_experiment(name: str) -> Experiment:
    """Return the Experiment with the peer of that name. Raises Refused if there is no such peer."""
    peer = load_step_peer(name)
    title, draw, check = f"training steps with {peer.name}", partial(draw_steps, peer), partial(check_peer_step, name)
    return Experiment(
        title, draw, check, kind="step peer", names={"step_peer": name}, timeout=TIMEOUT,
        preload=(*TRAINING_PRELOAD, *peer.preload), prepare_rank=partial(ready_step_peer, name),
    )  # fmt: skip


def draw_steps(peer: StepPeer, world: int) -> SearchStrategy[TrainingCase | None]:
    """Draw TrainingCases, each mapped to the nearest one that the peer claims."""
    return training_cases(world).map(partial(claimed_step, peer)).filter(lambda case: case is not None)


def claimed_step(peer: StepPeer, case: TrainingCase) -> TrainingCase | None:
    """Return the nearest TrainingCase that the peer claims. Raises ToolError, as `apply_claim`."""
    return apply_claim(peer.name, peer.claims, case)


def check_peer_step(name: str, backend: Backend, case: TrainingCase) -> dict[str, float]:
    """Return the worst ratio (deviation / allowed) by property. Raises the first failure."""
    backend.submit(observe_step_peer, case, name)
    expectation = expect_training(case)
    return check_step(case, expectation, backend.collect(), APPLICABLE_TO_STEPS)


def observe_step_peer(transport: Transport, case: TrainingCase, name: str) -> StepObservation:
    return ready_step_peer(name).train(transport, case)
