"""Every wrapper, kind of checkpointing, kind of model, label and handle, on real ranks: one example each holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reference.pattern import Pattern
from tests.support.training_cases import magnifying_step, small_model, small_step
from verification.run.backends import GlooBackend
from verification.training.training_case import (
    ARRANGEMENTS,
    CHECKPOINTING,
    HANDLES,
    LABELS,
    WRAPPERS,
    TrainingCase,
)
from verification.training.training_model import Model
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

pytestmark = pytest.mark.ranks

LLAMA = small_model(kind="llama", layers=2, dim=8, heads=4, kv_heads=2, head_dim=4, qk_norm=True, positions="rotary")
LONGNET = small_model(
    kind="longnet", norm="layer", bias=True, subln=True, dim=8, heads=2, kv_heads=1, head_dim=4, tied=True
)
TORCHSCALE = Pattern.longnet([4, 8], [1, 2], 2, True, "torchscale")


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooBackend]:
    backend = GlooBackend(20.0, preload=TRAINING_PRELOAD)
    backend.start(4)
    yield backend
    backend.close()


def holds(backend: GlooBackend, case: TrainingCase) -> dict[str, float]:
    return TRAINING.check(backend, case)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_wrappers_and_checkpointing(ranks: GlooBackend, wrapper: str, checkpointing: str) -> None:
    case = small_step(
        4, data=2, wrapper=wrapper, checkpointing=checkpointing, accumulation=2, clipping=0.1, steps=2,
        optimiser="adamw", labels="some", order="zigzag", model=LLAMA, arrangement="strided", batch=2,
    )  # fmt: skip
    ratios = holds(ranks, case)
    assert max(ratios.values()) < 1e-3


def test_rounding_that_norms_of_two_numbers_magnify_is_no_error(ranks: GlooBackend) -> None:
    """Parameters are off by five times the threshold of fp64, by rounding alone."""
    holds(ranks, magnifying_step(4))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_lower_precisions(ranks: GlooBackend, wrapper: str, dtype: str) -> None:
    holds(ranks, small_step(4, data=2, wrapper=wrapper, dtype=dtype, model=LLAMA, steps=2, clipping=0.1))


@pytest.mark.parametrize(
    ("model", "pattern"),
    [(LLAMA, Pattern.dense(causal=True)), (LONGNET, TORCHSCALE), (small_model(positions="learned"), Pattern.dense())],
    ids=("llama", "longnet", "sdpa"),
)
def test_models(ranks: GlooBackend, model: Model, pattern: Pattern) -> None:
    holds(ranks, small_step(4, model=model, pattern=pattern, order="striped", exchange="ring"))


@pytest.mark.parametrize("labels", LABELS)
def test_labels(ranks: GlooBackend, labels: str) -> None:
    holds(ranks, small_step(4, data=2, labels=labels, accumulation=2, wrapper="ddp", seed=1))


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_handles_and_arrangements(ranks: GlooBackend, handle: str, arrangement: str) -> None:
    holds(ranks, small_step(4, data=2, handle=handle, arrangement=arrangement, model=LLAMA))


@pytest.mark.parametrize("data", (1, 2, 4))
def test_meshes_with_empty_and_uneven_shards(ranks: GlooBackend, data: int) -> None:
    context = 4 // data
    cuts = (0,) * context + (8,)
    holds(ranks, small_step(4, data=data, cuts=cuts, wrapper="fsdp2", checkpointing="selective"))
    holds(ranks, small_step(4, data=data, tokens=2, wrapper="ddp"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_run_is_taken_up_on_another_mesh(ranks: GlooBackend, wrapper: str) -> None:
    """From two context groups that are not contiguous to one of all ranks, with momentum and tied weights."""
    case = small_step(
        4, data=2, arrangement="strided", wrapper=wrapper, accumulation=2, clipping=0.1, steps=3, optimiser="adamw",
        labels="some", order="zigzag", resumed="striped", model=LONGNET, pattern=TORCHSCALE, batch=2,
    )  # fmt: skip
    assert max(holds(ranks, case).values()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("wrapper", ("ddp", "fsdp2"))  # those that compile the model, and its layers
def test_compiled_steps(ranks: GlooBackend, wrapper: str, checkpointing: str) -> None:
    case = small_step(
        4, data=2, wrapper=wrapper, checkpointing=checkpointing, accumulation=2, clipping=0.1, labels="some",
        order="zigzag", model=small_model(layers=2, positions="learned"), arrangement="strided", handle="mesh",
        compiled="aot_eager",
    )  # fmt: skip
    ratios = holds(ranks, case)
    assert max(ratios.values()) < 1e-3 and ratios["runs of compiled graphs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model": LLAMA, "dtype": "bfloat16"},
        {"model": LLAMA, "dtype": "bfloat16", "wrapper": "fsdp2"},
        {"model": LONGNET, "pattern": TORCHSCALE, "exchange": "ring"},
        {"cuts": (0, 0, 1, 8, 8), "batch": 2},
        {"steps": 2, "resumed": "striped", "wrapper": "ddp", "optimiser": "adamw"},
        {"steps": 2, "resumed": "striped", "wrapper": "hsdp2", "data": 2},
    ],
    ids=("bfloat16", "bfloat16 fsdp2", "longnet", "empty shards", "resumed ddp", "resumed hsdp2"),
)
def test_compiled_steps_of_all_kinds(ranks: GlooBackend, changes: dict[str, Any]) -> None:
    holds(ranks, small_step(4, **{"handle": "group", "compiled": "aot_eager"} | changes))


@pytest.mark.slow
def test_a_process_keeps_the_graphs_of_one_case(ranks: GlooBackend) -> None:
    """dynamo compiles code anew only so often: then, or if an earlier graph ran, fewer graphs would be counted."""
    for seed in range(10):
        holds(ranks, small_step(4, handle="group", compiled="aot_eager", seed=seed, tokens=4 + seed))
