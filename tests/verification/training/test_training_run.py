"""Steps hold on real ranks; a run finds a planted fault, shrinks it, saves it, and a replay finds it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
from torch import Tensor, hub

from reference.pattern import Pattern
from tests.support.backends import shared
from tests.support.printed import recording
from tests.support.training_cases import small_model, small_step
from verification.models.step_case import CHECKPOINTING, LABELS, WRAPPERS
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.runner import Profile, RunPlan
from verification.training.rank import rank_step
from verification.training.rank.graphs import Graphs
from verification.training.training_case import HANDLES, TrainingCase
from verification.training.training_run import TRAINING, TRAINING_PRELOAD, run_training

SHORT = Profile("for tests", 40, budget=600)  # whatever shrinks, shrinks to its end
LLAMA = small_model(kind="llama", layers=2, dim=8, heads=4, kv_heads=2, head_dim=4, qk_norm=True, positions="rotary")
LONGNET: dict[str, Any] = {
    "model": small_model(
        kind="longnet", norm="layer", bias=True, subln=True, dim=8, heads=2, kv_heads=1, head_dim=4, tied=True
    ),
    "pattern": Pattern.longnet([4, 8], [1, 2], 2, True, "torchscale"),
}
# In pairs, so that each wrapper and kind of checkpointing, label and handle has its turn.
STEPS: list[dict[str, Any]] = [
    *(
        {
            "wrapper": wrapper, "checkpointing": checkpointing, "accumulation": 2, "clipping": 0.1, "steps": 2,
            "optimiser": "adamw", "labels": "some", "order": "zigzag", "model": LLAMA, "arrangement": "strided",
            "batch": 2,
        }
        for wrapper, checkpointing in zip(WRAPPERS, CHECKPOINTING, strict=False)
    ),
    *({**LONGNET, "wrapper": wrapper, "steps": 3, "resumed": "striped", "accumulation": 2} for wrapper in WRAPPERS),
    *({"labels": labels, "accumulation": 2, "wrapper": "ddp", "seed": 1} for labels in LABELS),
    *({"handle": handle, "model": LLAMA, "loss": "scaled"} for handle in HANDLES),
    {**LONGNET, "data": 1, "order": "striped", "exchange": "ring"},
    {"model": small_model(positions="learned"), "loss": "given", "drops_zeros": True, "spoilt": "inf"},
    {"cuts": (0, 0, 8), "wrapper": "fsdp2", "checkpointing": "selective", "dtype": "bfloat16"},
    {"data": 1, "tokens": 2, "wrapper": "ddp"},
    {"pattern": Pattern.dense(documents=(3, 5)), "own_documents": (1, 7), "steps": 2, "later_documents": ((8,),)},
]  # fmt: skip


def gloo(prepare: Callable[[], None] | None = None) -> GlooBackend:
    return GlooBackend(20.0, prepare, TRAINING_PRELOAD)


def quiet() -> Report:
    return Report(recording())


backend = shared(gloo, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("changes", STEPS, ids=range(len(STEPS)))
def test_a_step_holds(backend: GlooBackend, changes: dict[str, Any]) -> None:
    ratios = TRAINING.check(backend, small_step(4, **{"data": 2} | changes))
    assert "dtype" in changes or max(ratios.values()) < 1e-3


@pytest.mark.ranks
@pytest.mark.slow
def test_a_process_keeps_the_graphs_of_one_case(backend: GlooBackend) -> None:
    """dynamo compiles code anew only so often: then, or if an earlier graph ran, fewer graphs would be counted."""
    for seed in range(10):
        wrapper, checkpointing = ("ddp", "fsdp2")[seed % 2], CHECKPOINTING[seed // 2 % 4]
        case = small_step(4, handle="group", compiled="aot_eager", seed=seed, tokens=4 + seed, wrapper=wrapper)
        ratios = TRAINING.check(backend, replace(case, checkpointing=checkpointing, data=2, accumulation=2))
        assert max(ratios.values()) < 1e-3 and ratios["runs of compiled graphs"] == 0


def _plant_loss_of_steps() -> None:
    """From the second step on, the loss is noted a thousandth too large."""
    real = rank_step.note_step

    def spoiled(seen: Any, step: int, loss: Tensor, norm: Any) -> None:
        real(seen, step, loss * 1.001 if step else loss, norm)

    rank_step.note_step = spoiled  # type: ignore[assignment]


@pytest.mark.ranks
@pytest.mark.slow
def test_sound_runs_hold_and_record_deviations(tmp_path: Path) -> None:
    data = run_training(RunPlan((1, 2), SHORT, 15, 3, "gloo", tmp_path), quiet(), gloo()).to_dict()
    assert data["held"] and data["examples"] == 34 and data["distributed"] == 17, "with a share on other ranks"
    assert data["coverage"]["cases"] == 34 and data["coverage"]["features"]["wrapper ddp"] > 0
    kept = {(entry["property"], entry["world"]): entry for entry in data["deviations"] if entry["dtype"] == "float64"}
    assert 0 < len(kept["gradients after step one", 2]["ratios"]) <= 17
    assert max(kept["gradients after step one", 2]["ratios"]) < 1e-2, "rounding is far below what is allowed"
    assert data["tolerance"]["float64"] == 1e-9
    json.dumps(data, allow_nan=False)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_wrong_loss_is_found_shrunk_saved_and_replayed(tmp_path: Path) -> None:
    plan = RunPlan((2,), SHORT, None, 7, "gloo", tmp_path)
    first, *_ = run_training(plan, quiet(), gloo(_plant_loss_of_steps)).failures
    assert (first.kind, first.broken, first.world) == ("wrong result", "losses, norms of later steps", 1)
    case = TrainingCase.from_dict(first.record["training"])
    assert (case.steps, case.model.layers, case.accumulation, case.wrapper) == (2, 1, 1, "none")
    file = Path(shlex.split(first.replay)[-1])
    assert TrainingCase.from_dict(json.loads(file.read_text())["training"]) == case
    again = replay(file, quiet(), gloo(_plant_loss_of_steps))
    assert [failure.broken for failure in again.failures] == ["losses, norms of later steps"]
    assert not replay(file, quiet(), gloo()).failures, "without the fault it holds"


def test_models_are_compiled_where_tqdm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.hub has a bar of its own there."""
    monkeypatch.setattr(hub, "tqdm", hub._Faketqdm)
    with torch._dynamo.config.patch(recompile_limit=8):  # it sets another
        assert Graphs("aot_eager").runs == 0
