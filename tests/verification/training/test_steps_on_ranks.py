"""Steps of every wrapper, kind of checkpointing, kind of model, label and handle hold on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reference.pattern import Pattern
from tests.support.training_cases import small_model, small_step
from verification.run.backends import GlooBackend
from verification.training.training_case import CHECKPOINTING, HANDLES, LABELS, WRAPPERS
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

pytestmark = pytest.mark.ranks

LLAMA = small_model(kind="llama", layers=2, dim=8, heads=4, kv_heads=2, head_dim=4, qk_norm=True, positions="rotary")
LONGNET: dict[str, Any] = {
    "model": small_model(
        kind="longnet", norm="layer", bias=True, subln=True, dim=8, heads=2, kv_heads=1, head_dim=4, tied=True
    ),
    "pattern": Pattern.longnet([4, 8], [1, 2], 2, True, "torchscale"),
}


@pytest.fixture(scope="module")
def backend() -> Iterator[GlooBackend]:
    backend = GlooBackend(20.0, preload=TRAINING_PRELOAD)
    backend.start(4)
    yield backend
    backend.close()


# Wrappers and kinds of checkpointing are paired so that each has its turn with some of the others.
STEPS: list[dict[str, Any]] = [
    *(
        {
            "wrapper": wrapper, "checkpointing": CHECKPOINTING[number], "accumulation": 2, "clipping": 0.1, "steps": 2,
            "optimiser": "adamw", "labels": "some", "order": "zigzag", "model": LLAMA, "arrangement": "strided",
            "batch": 2,
        }
        for number, wrapper in enumerate(WRAPPERS)
    ),
    *({"wrapper": wrapper, "dtype": "bfloat16", "model": LLAMA, "clipping": 0.1} for wrapper in WRAPPERS),
    *({"labels": labels, "accumulation": 2, "wrapper": "ddp", "seed": 1} for labels in LABELS),
    *({"handle": handle, "model": LLAMA, "loss": "scaled"} for handle in HANDLES),
    {**LONGNET, "data": 1, "order": "striped", "exchange": "ring"},
    {"model": small_model(positions="learned"), "loss": "given", "drops_zeros": True, "spoilt": "inf"},
    {"cuts": (0, 0, 8), "wrapper": "fsdp2", "checkpointing": "selective"},
    {"data": 1, "tokens": 2, "wrapper": "ddp"},
    {"pattern": Pattern.dense(documents=(3, 5)), "own_documents": (1, 7), "steps": 2, "later_documents": ((8,),)},
    *(
        {
            **LONGNET, "wrapper": wrapper, "arrangement": "strided", "accumulation": 2, "clipping": 0.1, "steps": 3,
            "optimiser": "adamw", "labels": "some", "order": "zigzag", "resumed": "striped", "batch": 2,
        }
        for wrapper in WRAPPERS
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes", STEPS, ids=range(len(STEPS)))
def test_a_step_holds(backend: GlooBackend, changes: dict[str, Any]) -> None:
    ratios = TRAINING.check(backend, small_step(4, **{"data": 2} | changes))
    assert "dtype" in changes or max(ratios.values()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("wrapper", ("ddp", "fsdp2"))  # those that compile the model, and its layers
def test_a_compiled_step_holds(backend: GlooBackend, wrapper: str, checkpointing: str) -> None:
    case = small_step(
        4, data=2, wrapper=wrapper, checkpointing=checkpointing, accumulation=2, clipping=0.1, labels="some",
        order="zigzag", model=small_model(layers=2, positions="learned"), arrangement="strided", handle="mesh",
        compiled="aot_eager",
    )  # fmt: skip
    ratios = TRAINING.check(backend, case)
    assert max(ratios.values()) < 1e-3 and ratios["runs of compiled graphs"] == 0


@pytest.mark.slow
def test_a_process_keeps_the_graphs_of_one_case(backend: GlooBackend) -> None:
    """dynamo compiles code anew only so often: then, or if an earlier graph ran, fewer graphs would be counted."""
    for seed in range(10):
        TRAINING.check(backend, small_step(4, handle="group", compiled="aot_eager", seed=seed, tokens=4 + seed))
