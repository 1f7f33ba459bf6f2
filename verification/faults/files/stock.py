"""Records of every kind that a replay reads, as runs save them."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, find, settings

from verification.check.laws import LAWS
from verification.experiments import EXAMPLES, law_experiment
from verification.faults.fault_experiment import FAULTS
from verification.models.strategies import model_cases
from verification.peers.peer_experiment import LAWS_OF_ANY, experiment, law_of
from verification.peers.training.step_peer_experiment import step_experiment
from verification.search.experiment import Experiment
from verification.training.training_run import TRAINING

WORLD = 2
_FIRST = settings(
    phases=[Phase.generate], database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@cache
def stock() -> list[dict[str, Any]]:
    """Return a record of each kind, of each law too, on WORLD ranks."""
    experiments = [EXAMPLES, FAULTS, TRAINING, *map(law_experiment, LAWS)]
    experiments += [experiment("ring-attention-pytorch"), law_of("ring-attention-pytorch", LAWS_OF_ANY[0])]
    experiments.append(step_experiment("fairscale/guarded"))
    model = find(model_cases(WORLD), lambda case: True, settings=_FIRST)
    return [
        *map(_record, experiments),
        {"model": "trap:adapter", "case": model.to_dict()},
        {"real_size": {"world": WORLD, "tokens": 512, "seed": 0}},
        {"links": {"world": WORLD}},
        {"long": {"world": WORLD, "tokens": 64, "kind": "own", "seed": 0, "line": "tokens=64 causal=true"}},
        {"training_fault": {"kind": "flip", "seed": 1}},
        {"file_fault": {"kind": "bits", "seed": 1}},
    ]


def _record(experiment: Experiment) -> dict[str, Any]:
    return experiment.record_of(find(experiment.draw(WORLD), lambda subject: subject is not None, settings=_FIRST))
