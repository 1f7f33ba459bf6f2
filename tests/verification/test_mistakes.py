"""Mistakes in kernels and positions, planted, and the commands that find them: the table of verification/README.md."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest

from reference.pattern import Pattern
from tests.support.plain_case import PLAIN, plain
from tests.support.training_cases import small_model, small_step
from verification.experiments import EXAMPLES
from verification.failures import VerificationFailure
from verification.models.model_run import STEP_PRELOAD, ModelExperiment
from verification.models.probing import SMALLEST
from verification.mutants.catalogue import by_name
from verification.mutants.defect import Defect, Edit
from verification.mutants.plant import plant
from verification.peers.peer_experiment import experiment
from verification.run.backends import GlooBackend, SimBackend
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

pytestmark = pytest.mark.ranks

CAUSAL = Pattern.dense(causal=True)


def _kernel(direction: str, results: str, changed: str) -> Edit:
    end = "def portions("  # the next function of the file
    lines = f"def {direction}(*x, real={direction}):\n    {results} = real(*x)\n    return {changed}\n"
    return Edit("ring/compute/kernel_calls.py", end, f"{lines}\n\n{end}")


KERNELS = {
    "zeros": _kernel("forward", "out, lse", "out * 0, lse * 0"),
    "twice": _kernel("forward", "out, lse", "out * 2, lse"),
    "later key": by_name("causal-diagonal-one-too-many").edits[0],
    "dk of another head": _kernel("backward", "dq, dk, dv", "dq, dk.roll(1, 2), dv"),
}
OTHERS = {
    "rotary": Edit("ring/nn/rotary.py", "positions[...", "(positions - 1).clamp(min=0)[...", "_angles"),
    "positions": Edit(
        "ring/nn/context.py", "layout.positions(rank)", "torch.arange(layout.counts[rank])", "_positions"
    ),
    "mean": Edit("ring/nn/sequence.py", "context.layout.n)", "context.tokens)", "sequence_mean"),
    "loss": Edit("ring/nn/loss.py", "ignored).view_as", "ignored).mul(2).view_as", "_losses"),
}
SOURCES = {name: Defect(name, "", (edit,)).sources() for name, edit in (KERNELS | OTHERS).items()}
FOUND = {  # by each command
    "run": (*KERNELS,), "peers": (*KERNELS,), "training": (*KERNELS, "rotary", "positions", "loss"),
    "model ring_nn": (*KERNELS, *OTHERS), "model llama_unchecked": (*KERNELS, "positions"),
    "model llama": ("zeros", "twice", "later key", "positions"),  # by prepare
}  # fmt: skip


def begin_alone(sources: dict[str, str], model: str) -> None:
    """Prepare the one process of a model, whose `ring` has the mistake too."""
    plant("mistake", sources)
    import_module("verification.models.model_run").begin_alone(model)


def check(command: str, sources: dict[str, str]) -> None:
    """Check an example of a command. sources: of the mistake."""
    prepare = partial(plant, "mistake", sources) if sources else None
    preload = TRAINING_PRELOAD if command == "training" else STEP_PRELOAD
    with closing((SimBackend if command == "run" else GlooBackend)(30.0, prepare, preload)) as ranks:
        ranks.start(1 if command == "peers" else 2)
        if command == "run":
            EXAMPLES.check(ranks, plain(2, pattern=CAUSAL, dtype="float64"))
        elif command == "peers":
            experiment("tests.support.peer_examples:of_ring").check(ranks, PLAIN)
        elif command == "training":
            model = small_model(dim=8, heads=2, kv_heads=2, head_dim=4, positions="rotary")
            TRAINING.check(ranks, small_step(2, model=model))
        else:
            run = ModelExperiment(name := f"tests.support.model_examples:{command.removeprefix('model ')}")
            run.alone.prepare = partial(begin_alone, sources, name) if sources else run.alone.prepare
            with closing(run):
                run.check(ranks, replace(SMALLEST, world=2, tokens=9, order="zigzag"))


QUICK = ("run", "peers")  # the others take seconds each
CELLS = [
    pytest.param(command, mistake, marks=() if command in QUICK else pytest.mark.slow)
    for command, mistakes in FOUND.items()
    for mistake in (None, *mistakes)
]


@pytest.mark.parametrize("command, mistake", CELLS)
def test_a_command_finds_the_mistakes_of_its_row(command: str, mistake: str | None) -> None:
    if "llama" in command:
        pytest.importorskip("transformers")
    if mistake is None:
        return check(command, {})
    with pytest.raises(VerificationFailure) as caught:
        check(command, SOURCES[mistake])
    assert ("the same sharded as in one process" in str(caught.value)) == (command == "model llama")
