"""Users' setups: sound ones hold, planted defects are found, and the module at fault is named."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.support import model_defects, model_examples
from tests.support.backends import shared
from tests.support.commands import ROOT, verification
from tests.support.model_defects import DEFECTS, Defect
from tests.support.printed import recording
from verification.failures import WrongResult
from verification.models import ModelCase, Setup, check_model
from verification.models.batches import global_batch
from verification.models.model_case import MODEL_DTYPES
from verification.models.model_run import PROFILE, ModelExperiment, list_preload, run_model
from verification.models.observation import ModelObservation
from verification.models.probing import SMALLEST
from verification.models.recording import train_in_one_process
from verification.models.strategies import model_cases
from verification.models.whole_batch import Rows, whole_batches
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.runner import RunPlan

EXAMPLES = "tests.support.model_examples"
QUICK = ("AttentionNotSharded", "NormOverSequence", "AveragedTwice", "LabelsShiftedAfterSharding")
CASES: list[dict[str, Any]] = [
    {"tokens": 9, "order": "zigzag", "packed": (4, 0, 5), "wrapper": "ddp", "accumulation": 2, "clipping": 0.02},
    {"tokens": 1, "labels": "all", "batch": 1, "wrapper": "fsdp2", "padding": True},
    {"tokens": 7, "order": "striped", "padding": True, "wrapper": "fsdp2", "checkpointing": "selective", "steps": 2},
    {"data": 2, "labels": "ranks", "checkpointing": "non-reentrant", "optimiser": "adamw", "steps": 3, "clipping": 0.1},
    {"data": 2, "arrangement": "strided", "wrapper": "hsdp2", "accumulation": 3, "labels": "some", "cuts": (0, 6)},
    {"tokens": 12, "cuts": (0, 0, 12), "packed": (12,), "exchange": "gather"},
    {"tokens": 6, "wrapper": "fsdp2", "optimiser": "adamw", "steps": 3, "resumed_after": 2, "batch": 2},
    {"tokens": 11, "order": "permuted", "dtype": "float32", "labels": "shards", "exchange": "ring"},
]


backend = shared(lambda: GlooBackend(30.0, preload=list_preload(f"{EXAMPLES}:build")), 2)


@pytest.fixture(scope="module")
def plain() -> Iterator[ModelExperiment]:
    run = ModelExperiment(f"{EXAMPLES}:build")
    with closing(run):
        yield run


@pytest.mark.ranks
@pytest.mark.parametrize("changes", CASES, ids=range(len(CASES)))
def test_a_sound_step_holds(backend: GlooBackend, plain: ModelExperiment, changes: dict[str, Any]) -> None:
    case = replace(SMALLEST, **{"world": 2, "tokens": 6} | changes)
    ratios = plain.check(backend, case)
    assert "dtype" in changes or max(ratios.values()) < 1e-3
    assert ("norm of the gradients" in ratios) == (case.clipping is not None)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_a_sound_step_has_no_first_module(backend: GlooBackend, plain: ModelExperiment, dtype: str) -> None:
    case = replace(SMALLEST, world=2, tokens=9, packed=(4, 5), order="zigzag", wrapper="fsdp2", accumulation=2)
    cause = plain.cause(backend, replace(case, checkpointing="non-reentrant", dtype=dtype))
    assert cause is not None and cause.endswith("their gradients agree, and the gradients of the parameters too")


def run(name: str, folder: Path, **changes: Any) -> Report:
    plan = RunPlan((2,), replace(PROFILE, budget=5.0), 100, 0, "gloo", folder)
    return run_model(name, replace(plan, **changes), Report(recording()))


@pytest.mark.ranks
@pytest.mark.parametrize("defect", [defect for defect in DEFECTS if defect.setup.__name__ in QUICK])
def test_defects_fail_with_their_place_named(backend: GlooBackend, defect: Defect) -> None:
    case = replace(SMALLEST, world=2)
    with closing((run := ModelExperiment(f"{model_defects.__name__}:{defect.setup.__name__}")).alone):
        with pytest.raises(WrongResult, match="times the allowed"):
            run.check(backend, case)
        cause = run.cause(backend, case)
    assert cause is not None and re.search(defect.named, cause)


@pytest.mark.ranks
@pytest.mark.parametrize(("wrapper", "packed"), [("none", None), ("ddp", (3, 3)), ("fsdp2", (2, 4))])
def test_buffers_of_all_tokens_hold(backend: GlooBackend, wrapper: str, packed: tuple[int, ...] | None) -> None:
    with closing((run := ModelExperiment(f"{EXAMPLES}:build_with_buffers")).alone):
        case = replace(SMALLEST, world=2, tokens=6, wrapper=wrapper, packed=packed, accumulation=2, steps=2)
        ratios = run.check(backend, case)
    assert ratios["buffers after the last step"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (model_defects.CountNotReduced, r"buffers: count on rank 0 \(data 0, context 0\) is \d"),
        (model_defects.CountNotUpdated, r"buffers: count on rank 0 .* did not change; in one process it did"),
        (
            model_defects.LogitsOfSomeTokens,
            "logits: no rank recorded the logits of token 2 of micro-batch 1 of data rank 0",
        ),
    ],
)
def test_wrong_results_are_named(backend: GlooBackend, setup: type[Setup], said: str) -> None:
    run = ModelExperiment(f"{setup.__module__}:{setup.__name__}")
    with closing(run.alone), pytest.raises(WrongResult, match=said) as caught:
        run.check(backend, replace(SMALLEST, world=2))
    assert "nan" not in str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("setup", "changes"),
    [
        ("WithinClosure", {"steps": 2, "clipping": 0.02}),
        ("PaddingOverwritten", {"tokens": 6, "batch": 2, "padding": True}),
    ],
)
def test_sound_variants_of_steps_hold(backend: GlooBackend, setup: str, changes: dict[str, Any]) -> None:
    with closing((run := ModelExperiment(f"{EXAMPLES}:{setup}")).alone):
        run.check(backend, replace(SMALLEST, **{"world": 2} | changes))


def test_the_norm_of_one_process_is_exact_in_fp32() -> None:
    x, grad = torch.nn.Parameter(torch.zeros(2**20)), torch.linspace(0.0, 1.0, 2**20)
    seen = ModelObservation()
    case = replace(SMALLEST, dtype="float32", clipping=1e6)
    train_in_one_process(case, {"x": x}, torch.optim.SGD([x]), lambda _: (x * grad).sum(), seen)
    assert float(seen.norms["step 1"]) == pytest.approx(float(grad.double().norm()), rel=1e-12)


def cause_of(backend: GlooBackend, setup: type[Setup], **changes: Any) -> str:
    with closing((run := ModelExperiment(f"{setup.__module__}:{setup.__name__}")).alone):
        cause = run.cause(backend, replace(SMALLEST, **{"world": 2} | changes))
    assert cause is not None
    return cause


@pytest.mark.ranks
@pytest.mark.parametrize(
    "data, numbers", [(1, "ranks, or of ranks that share a sequence"), (2, "ranks, or of data ranks")]
)
def test_a_factor_of_all_gradients_blames_no_module(backend: GlooBackend, data: int, numbers: str) -> None:
    """Gradients of positions are sums over the sequences, so that a rank has a part of them."""
    cause = cause_of(backend, model_defects.SumOfMicroBatches, data=data, accumulation=2)
    assert cause.endswith(
        f"the gradients of all parameters are 2 times the expected ones: no single module; 2 is the number of "
        f"micro-batches, or of {numbers}"
    )


@pytest.mark.ranks
@pytest.mark.parametrize("wrapper", ["none", "fsdp2"])
def test_gradients_that_are_not_zeroed_are_named(backend: GlooBackend, wrapper: str) -> None:
    cause = cause_of(backend, model_defects.ZeroedLate, steps=3, wrapper=wrapper)
    assert cause.endswith("; step two's gradients include step one's: are they zeroed?")
    assert cause_of(backend, model_defects.Plain, steps=3, wrapper=wrapper).endswith("gradients of the parameters too")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.setup.__name__)
def test_a_defect_is_found_and_its_place_named(defect: Defect, tmp_path: Path) -> None:
    report = run(f"{model_defects.__name__}:{defect.setup.__name__}", tmp_path, worlds=defect.worlds)
    (failure, *_) = report.failures
    assert failure.kind == "wrong result" and re.search(defect.named, failure.message), failure.message


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "llama"])
def test_sound_models_hold(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data = run(f"{EXAMPLES}:{name}", tmp_path, worlds=(1, 2, 3, 4), examples=6).to_dict()
    assert data["held"] and data["examples"] == 24
    assert max(row["worst_ratio"] for row in data["rows"] if row["dtype"] == "float64") < 1e-3


@pytest.mark.ranks
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sound_models_hold_and_defects_fail_on_gpus(tmp_path: Path) -> None:
    data = run(f"{EXAMPLES}:build", tmp_path, backend="nccl", examples=15).to_dict()
    assert data["held"] and max(row["worst_ratio"] for row in data["rows"] if row["dtype"] == "float64") < 1e-3
    (failure, *_) = run(f"{model_defects.__name__}:AveragedTwice", tmp_path, backend="nccl").failures
    assert failure.kind == "wrong result" and dict(failure.record)["case"]["device"] == "cuda"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_model_without_fp64_runs_in_fp32(tmp_path: Path) -> None:
    data = run(f"{EXAMPLES}:build_in_fp32", tmp_path, worlds=(2,), examples=8).to_dict()
    assert data["held"] and {row["dtype"] for row in data["rows"]} == {"float32"}
    assert 0 < max(row["worst_ratio"] for row in data["rows"]) < 1


@pytest.mark.ranks
@pytest.mark.slow
def test_the_function_for_tests(tmp_path: Path) -> None:
    check_model(model_examples.build, examples=5, worlds=(2,), failures=tmp_path)
    with pytest.raises(AssertionError, match=r"whose output differs is\s+layers\.0\.mixer\.pool"):
        check_model(model_defects.PooledOutput, examples=20, worlds=(2,), failures=tmp_path)


def example_of_the_page(name: str) -> str:
    """The program that verification/README.md shows under this name."""
    pytest.importorskip("transformers")
    page = (ROOT / "verification/README.md").read_text()
    (code,) = re.findall(rf"```python\n(# {name}\.py.*?)```", page, re.DOTALL)
    return code


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("model", ["my_model:Llama", "my_block:build", "my_step:Gathered"])
def test_the_examples_of_the_page(model: str, tmp_path: Path) -> None:
    name = model.partition(":")[0]
    (tmp_path / f"{name}.py").write_text(example_of_the_page(name))
    done = verification(tmp_path, "model", model, "--examples", "10", "--seed", "3", "--world", "2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_the_defect_that_the_page_shows(tmp_path: Path) -> None:
    """Without `grad_placements` a model is found, shrunk, its place named as there, and replayed."""
    wrong = example_of_the_page("my_step").replace("grad_placements=[Partial()]", "")
    (tmp_path / "wrong.py").write_text(wrong)
    where = ("--seed", "3", "--world", "2", "--failures", "kept", "--json", "report.json")
    done = verification(tmp_path, "model", "wrong:Gathered", "--only", "gradients at", *where)
    assert done.returncode == 1, done.stdout + done.stderr
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert failure["property"] == "gradients at the optimizer" and failure["case"]["model"] == "wrong:Gathered"
    assert failure["case"]["case"]["accumulation"] == failure["case"]["case"]["steps"] == 1, "it is shrunk"
    page = (ROOT / "verification/README.md").read_text()
    (said,) = re.findall(r"(in step one the outputs.*?)```", page, re.DOTALL)
    assert " ".join(said.split()) in failure["message"]
    again = verification(tmp_path, *shlex.split(failure["replay"])[3:])
    assert again.returncode == 1 and "whose output has another" in again.stdout, again.stdout + again.stderr


@settings(max_examples=60, deadline=None)
@given(model_cases(4))
def test_rows_of_one_process_hold_the_same_tokens(case: ModelCase) -> None:
    rows = Rows.of(case)
    alone = rows.alone(case, 0)
    for data_rank, batches in enumerate(whole_batches(case, 0)):
        for number, batch in enumerate(batches):
            sequences = rows.sequences(case, data_rank, number)
            for name in ("tokens", "labels"):
                assert (getattr(alone, name)[rows.row[sequences], rows.column] == getattr(batch, name)).all()
    assert int((alone.labels != -100).sum()) == global_batch(case, 0).labelled > 0
    assert ModelCase.from_dict(json.loads(json.dumps(case.to_dict()))) == case
