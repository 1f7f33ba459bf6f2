"""Users' steps have the same bits on any ranks, or a counter-example names the first result that has not."""

from __future__ import annotations

import io
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import model_defects
from tests.support.backends import shared
from tests.support.commands import ROOT, verification
from tests.support.drawing import draw_many
from verification.console import Console
from verification.failures import Refused, WrongResult
from verification.models import ModelCase, check_model
from verification.models.model_run import PROFILE, ModelExperiment, list_preload, run_model
from verification.models.probing import SMALLEST
from verification.models.same_bits import SAME_WEIGHTS
from verification.models.step_case import Split
from verification.replay.registry import parse
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.runner import RunPlan

EXAMPLES, DEFECTS = "tests.support.model_examples", model_defects.__name__
ALONE = Split(
    world=1, data=1, accumulation=1, batch=2, arrangement="contiguous", order="chunks", exchange="direct",
    checkpointing="none",
)  # fmt: skip


def two_ranks(**changes: Any) -> ModelCase:
    """Two sequences of three chunks on two ranks, and on one."""
    case = replace(SMALLEST, world=2, tokens=41, order="chunks", same_bits=16, seed=3, steps=2, other_ranks=ALONE)
    return replace(case, **changes)


backend = shared(lambda: GlooBackend(30.0, preload=list_preload(f"{EXAMPLES}:build")), 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("build", {"packed": (18, 0, 23), "optimiser": "adamw", "clipping": 0.02, "labels": "some"}),
        ("longnet", {"data": 2, "batch": 1, "dtype": "float32", "padding": True, "checkpointing": "selective"}),
        ("llama", {"other_ranks": replace(ALONE, world=2, data=2, accumulation=1, batch=1), "order": "dealt chunks"}),
    ],
)
def test_a_step_of_same_weights_holds(backend: GlooBackend, name: str, changes: dict[str, Any]) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    with closing(run := ModelExperiment(f"{EXAMPLES}:{name}")):
        assert run.check(backend, two_ranks(**changes))[SAME_WEIGHTS.title] == 0.0


UPDATED = (
    r"gradients: .*; parameters: \S+ after step 1 at .* on rank 0 of 2 ranks, data \d x context \d and on rank 0 of 1 r"
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "changes", "said", "cause"),
    [
        ("AveragedByDdp", {}, UPDATED, "the logits of step one "),  # which products differ depends on the machine
        ("AveragedByDdp", {"data": 2, "batch": 1}, UPDATED, "the logits of step one "),
        # Of many steps, since the sum of one has the same bits by chance, which depends on the machine.
        (
            "LossOfRanks",
            {"steps": 12},
            r"losses: step \d+ is .* of 1 rank,",
            "same bits, the loss has not: it is summed",
        ),
        ("OwnShards", {"same_bits": None, "order": "zigzag"}, UPDATED, "the logits of step one "),
    ],
)
def test_sums_in_the_order_of_ranks_are_found(
    backend: GlooBackend, name: str, changes: dict[str, Any], said: str, cause: str
) -> None:
    if "order" in changes:
        changes = changes | {"other_ranks": replace(ALONE, order=changes["order"])}
    case = two_ranks(**changes)
    with closing(run := ModelExperiment(f"{DEFECTS}:{name}")):
        with pytest.raises(WrongResult, match=said) as caught:
            run.check(backend, case)
        assert caught.value.broken == SAME_WEIGHTS.title
        (note,) = caught.value.__notes__
        assert re.match(f"cause: .*{cause}", note)
        record = run.experiment().record_of(case)
    saved = parse(record, f"{DEFECTS}:{name}")  # as `replay --model` reads it
    assert saved.case == case and saved.experiment is not None


@pytest.mark.parametrize("name", ["build", "OwnShards"])
def test_other_ranks_are_drawn_as_the_claim_has_them(name: str) -> None:
    run = ModelExperiment(f"{EXAMPLES if name == 'build' else DEFECTS}:{name}", same_bits=32)
    cases = [case for case in draw_many(run.draw(3), 60) if case is not None]
    for case in cases:
        run.validate(case)
        assert ModelCase.from_dict(case.to_dict()) == case and case.elsewhere.sequences == case.sequences
    assert {case.same_bits for case in cases} == {32 if name == "build" else None}
    assert {case.elsewhere.world for case in cases} == {1, 2, 3}
    assert any(case.elsewhere.accumulation != case.accumulation for case in cases)
    with pytest.raises(ValueError, match="does not support"):
        run.validate(replace(cases[0], other_ranks=None))


@pytest.mark.parametrize(
    ("changes", "chunk", "said"),
    [
        ({"worlds": (1,)}, 16, "compares N ranks with 1 to N: each of --world must be at least 2, got 1"),
        ({"worlds": (1, 2)}, 16, "at least 2, got 1,2"),
        ({}, 24, "--same-bits must be a multiple of 16 tokens, up to 672, got 24"),
        ({}, 4096, "up to 672, got 4096"),
        ({"backend": "nccl"}, 16, "--same-bits must be a multiple of 128 tokens, up to 640, got 16"),
        ({"only": (SAME_WEIGHTS.title,)}, None, "'same weights on any ranks', which does not apply without --same-bit"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], chunk: int | None, said: str) -> None:
    plan = replace(RunPlan((2,), PROFILE, 5, 0, "gloo", Path()), **changes)
    with pytest.raises(Refused, match=re.escape(said)):
        run_model(f"{EXAMPLES}:build", plan, Report(Console(io.StringIO())), chunk)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapped", ["SameWeights(model, run.mesh, compare=False)", "nn.parallel.DistributedDataParallel(model)"]
)
def test_the_example_of_the_page(wrapped: str, tmp_path: Path) -> None:
    """It holds; with DDP instead it is found, shrunk and replayed."""
    page, holds = (ROOT / "verification/README.md").read_text(), wrapped.startswith("SameWeights")
    for name in ("my_block", "my_bits"):
        (code,) = re.findall(rf"```python\n(# {name}\.py.*?)```", page, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(code.replace("SameWeights(model, run.mesh, compare=False)", wrapped))
    where = ("--same-bits", "--world", "2", "--seed", "3", "--examples", "4")
    done = verification(tmp_path, "model", "my_bits:Bits", *where)
    assert done.returncode == (0 if holds else 1), done.stdout + done.stderr
    if not holds:
        assert '"steps": 1' in done.stdout and "cause: the logits of step one" in done.stdout, done.stdout
        (saved,) = (tmp_path / ".verification/failures").iterdir()
        again = verification(tmp_path, "replay", "--model", "my_bits:Bits", str(saved))
        assert again.returncode == 1 and "cause: the logits of step one" in again.stdout, again.stdout


@pytest.mark.ranks
@pytest.mark.slow
def test_the_function_for_tests_takes_same_bits(tmp_path: Path) -> None:
    check_model(f"{EXAMPLES}:longnet", examples=6, same_bits=16, failures=tmp_path)
    with pytest.raises(AssertionError, match="must be the same"):
        check_model(f"{DEFECTS}:AveragedByDdp", examples=6, worlds=(2,), same_bits=16, failures=tmp_path)
