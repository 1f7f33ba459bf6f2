"""Setups that cannot be run are refused in a sentence; what fails on ranks is reported with the user's frames only."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.backends import shared
from verification.failures import RankFailure, Refused
from verification.models.loading import import_name, load
from verification.models.model_run import ModelExperiment, list_preload
from verification.models.probing import SMALLEST, probe
from verification.run.backends import GlooBackend
from verification.search.experiment import ToolError

pytestmark = pytest.mark.ranks
MISUSE = "tests.support.model_misuse"
TWO = replace(SMALLEST, world=2)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that cannot be imported."""
    without = "raise ModuleNotFoundError(name='transformers')"
    needs = {"needs": "import no_such_package", "without": without}
    for name, code in {"raises": "1 / 0", "exits": "import os; os._exit(3)", **needs}.items():
        (tmp_path / f"model_{name}.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonsense", "'nonsense' is no model; it must be package.module:attribute"),
        ("no_such_module:build", "no_such_module:build cannot be imported: there is no module no_such_module"),
        ("model_needs:build", "it imports no_such_package, not installed"),
        (
            "model_without:build",
            'it imports transformers, not installed: pip install "ring-dilated-attention[tra',
        ),
        ("model_raises:build", "model_raises raised ZeroDivisionError: division by zero (model_raises.py, line 1)"),
        (f"{MISUSE}:absent", "tests.support.model_misuse has no 'absent'; it must be a function build(context), or a"),
        (f"{MISUSE}:number", "number is 7; it must be a function build(context), or a verification.models.Setup"),
        (f"{MISUSE}:without_argument", "takes no single argument"),
    ],
)
def test_malformed_setups_are_refused(modules: None, name: str, said: str) -> None:
    with pytest.raises(Refused) as caught:
        load(name)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "build(None) raised LookupError: no weights here"),
        ("gives_none", "build(None) returned None; it must return a torch.nn.Module"),
        ("has_no_parameters", "build(context) returned a model without parameters to train; it must have some"),
        ("gives_none_on_ranks", "build(context) returned None; it must return a torch.nn.Module"),
        ("raises_on_ranks", "build(context) raised LookupError: no weights here (model_misuse.py, line "),
        ("exits", "rank 0 ended with exit code 3"),
        ("hangs", "no answer within 4 s from rank 0"),
        ("pools", "a tensor of shape (32, 8) for tokens of shape (32, 4); it must return logits (B, N, vocabulary)"),
        ("drops", "the model draws random numbers; set dropout to 0, or call eval() in build"),
        ("has_dropout", "random numbers (module dropouts.1 is a Dropout with p=0.01); set dropout to 0"),
        ("reseeds", "build(None) draws other initial parameters each time"),
        (
            "without_context",
            "in forward). In one process context is None: there a model of ring.nn's modules makes its",
        ),
        ("LogitsRaise", ", in logits)"),
        ("LogitsOfOneToken", "logits (model_misuse.py, line "),
        (
            "LogitsOfOneToken",
            "returned a tensor of shape (32, 1, 13) for tokens of shape (32, 4); it must return logits",
        ),
        ("of_few_tokens", "the model's first Embedding has 5 entries; it must have at least 11"),
    ],
)
def test_unbuildable_models_are_refused(name: str, said: str) -> None:
    with pytest.raises(Refused) as caught:
        probe(f"{MISUSE}:{name}", timeout=4.0)
    assert said in str(caught.value) and f"{MISUSE}:{name}" in str(caught.value)
    assert "\n" not in str(caught.value) and "verification." not in str(caught.value).replace(
        "verification.models.Setup", ""
    )


def test_imports_that_exit_are_refused(modules: None) -> None:
    with pytest.raises(Refused, match="model_exits:build: rank 0 ended with exit code 3"):
        probe("model_exits:build")


backend = shared(lambda: GlooBackend(3.0, preload=list_preload(f"{MISUSE}:build")), 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WithoutResult", "step returned None; it must return (loss, norm)"),
        ("WithoutLogits", "step recorded logits 0 times with 1 micro-batches; it must call run.see(logits, held) once"),
        ("StepTooFew", "train returned results of 0 steps; it must return (loss, norm) of each of 1"),
        ("WithoutResults", "train returned None; it must return (loss, norm) of each step"),
        ("WithoutLoss", "train returned None; it must return (loss, norm)"),
        ("VectorLoss", "loss returned a tensor of shape (3,); it must be a scalar"),
        ("VectorLossAlone", "loss, in one process, returned a tensor of shape (3,); it must be a scalar"),
        ("NoOptimizer", "it must return a torch.optim.Optimizer"),
        ("NoModuleWrapped", "wrap returned None; it must return a torch.nn.Module"),
    ],
)
def test_results_of_another_kind_are_no_counter_examples(backend: GlooBackend, name: str, said: str) -> None:
    with closing((run := ModelExperiment(f"{MISUSE}:{name}")).alone), pytest.raises(ToolError) as caught:
        run.check(backend, TWO)
    assert said in str(caught.value) and f"{MISUSE}:{name}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("StepRaises", "rank error", "ranks 0, 1 raised: step raised LookupError: no step"),
        ("StepExits", "rank crash", " ended with exit code 3"),  # both do, and either may be seen first
        ("StepHangs", "rank hang", "no answer within 3 s from rank"),
    ],
)
def test_failures_of_ranks_show_user_frames_alone(backend: GlooBackend, name: str, kind: str, said: str) -> None:
    with closing((run := ModelExperiment(f"{MISUSE}:{name}")).alone), pytest.raises(RankFailure) as caught:
        run.check(backend, TWO)
    assert caught.value.kind == kind and said in str(caught.value)
    assert "/verification/models/" not in str(caught.value)
    assert kind == "rank crash" or "model_misuse.py" in str(caught.value)


def test_a_setup_that_claims_nothing_is_refused() -> None:
    run = ModelExperiment(f"{MISUSE}:ClaimsNothing")
    with pytest.raises(ValueError, match="does not support"):
        run.validate(TWO)


def test_a_setup_must_have_a_name_for_other_processes() -> None:
    assert import_name(load(f"{MISUSE}:StepHangs").__class__) == f"{MISUSE}:StepHangs"
    with pytest.raises(Refused, match="must be an attribute of a module"):
        import_name(lambda context: None)
