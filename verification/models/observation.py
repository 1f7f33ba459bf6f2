"""Results of a run, and the inputs, outputs and gradients of the outputs of all modules of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ring.nn.module_calls import ModuleCall, ModuleCalls
from verification.models.recording import without_wrappers
from verification.models.results import Array, Expectation, Named, Results
from verification.models.tolerance import THRESHOLD
from verification.run.observation import to_numpy

# Allowed deviation of a traced run, as a fraction of the largest entry: only gross ones can be told from fp32 rounding.
TRACED = {"float64": THRESHOLD, "float32": 1e-4}


@dataclass(eq=False)
class Entry:
    """One call of a module. number: of the micro-batch; call: of the module in it. gradient: of the output."""

    name: str
    number: int
    call: int
    inputs: dict[str, Array] = field(default_factory=dict)  # by argument
    output: Array | None = None
    gradient: Array | None = None

    @classmethod
    def of(cls, call: ModuleCall) -> Entry:
        """Return the first tensor of each argument, and the logits, or else the first tensor, of the output."""
        entry = cls(call.name, call.forward, call.number)
        for path, x in call.inputs.items():
            entry.inputs.setdefault(path.partition(".")[0], _copy(x))
        output = "logits" if "logits" in call.outputs else next(iter(call.outputs), "")
        entry.output, entry.gradient = (
            _copy(named[output]) if output in named else None for named in (call.outputs, call.gradients)
        )
        return entry


@dataclass(eq=False)
class ModelObservation(Results):
    """Results of a run. On a rank, logits are those of its tokens, and `held` their indices in the sequence; `entries`
    are the calls of modules in step one; `evaluation` has the values of an evaluation, by name. `shapes` are those of
    buffers that had the same shape at the start, and `buffers` those of them that changed, after the last step. `rings`
    is the number of kernel calls of `ring_attention`."""

    held: list[Array] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    evaluation: Named = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    rings: int = 0

    def quantities(self) -> dict[str, Named]:
        return super().quantities() | {"buffers": self.buffers, "evaluation": self.evaluation}

    def note_buffers(self, before: Named, after: Named) -> None:
        kept = {name: x for name, x in after.items() if name in before and x.shape == before[name].shape}
        self.shapes = {name: x.shape for name, x in kept.items()}
        self.buffers = {name: x for name, x in kept.items() if not np.array_equal(x, before[name], equal_nan=True)}


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelExpectation(Expectation):
    """Results of the one process: the calls of modules, gradients of step two, and shapes of buffers, as on a rank."""

    entries: list[Entry]
    second: Named
    shapes: dict[str, tuple[int, ...]]


def trace(model: nn.Module, forwards: int) -> ModuleCalls:
    """Record the calls of the model's modules, under the names that they have without wrappers.

    forwards: how many; those of step one.
    """
    return ModuleCalls(model, forwards, lambda name: without_wrappers(f"{name}.").removesuffix("."))


def read_entries(recorded: ModuleCalls | None) -> list[Entry]:
    return [Entry.of(call) for call in (recorded.calls if recorded is not None else ())]


def _copy(x: Tensor) -> Array:
    return to_numpy(x.to(torch.float64) if x.is_floating_point() else x).copy()
