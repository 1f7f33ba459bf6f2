"""Saved counter-examples of peers in training steps: {"step_peer": name, "training_case": ...}."""

from __future__ import annotations

from functools import partial
from typing import Any

from reference import validators
from verification.peers.saved_peer import SavedPeerExample
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS, load_step_peer
from verification.peers.training.step_peer_experiment import prepare_step_peer, step_experiment
from verification.replay.registry import Saved, experiment_with
from verification.run.backends import Backend
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD

TIMEOUT = 30.0  # seconds per example: ZeRO 3 is slow on a loaded machine


class SavedStepPeerExample(SavedPeerExample):
    """A counter-example that runs the TrainingCase as saved, without applying the peer's claim."""

    def prepare_ranks(self, backend: Backend) -> None:
        name = self.record["step_peer"]
        backend.timeout, backend.prepare = TIMEOUT, partial(prepare_step_peer, name)
        backend.preload = (*TRAINING_PRELOAD, *load_step_peer(name).preload)


def read_step_peer_example(record: dict[str, Any]) -> Saved:
    """Read a saved record. Raises ValueError if it is malformed or its peer cannot be loaded."""
    validators.exactly("a counter-example of a peer in a training step", record, ["step_peer", "training_case"])
    case = TrainingCase.from_dict(record["training_case"])
    form = f"package.module:adapter, or one of {', '.join(KNOWN_STEP_PEERS)}"
    return SavedStepPeerExample(experiment_with(record, "step_peer", form, step_experiment), case, record)
