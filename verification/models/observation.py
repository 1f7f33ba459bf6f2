"""Results of a run, and ModuleTrace: inputs, outputs and gradients of the outputs of all modules of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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


@dataclass(eq=False)
class ModelObservation(Results):
    """Results of a run. On a rank, logits are those of its tokens, and `held` their indices in the sequence; `entries`
    are those of a ModuleTrace of step one; `evaluation` has the values of an evaluation, by name. `shapes` are those of
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
    """Results of the one process: ModuleTrace, gradients of step two, and shapes of buffers, as on a rank."""

    entries: list[Entry]
    second: Named
    shapes: dict[str, tuple[int, ...]]


class ModuleTrace:
    """Records every call within the first forwards of the whole model, in the order in which calls end: a module after
    those that it contains. Forwards that a backward recomputes are left out.

    forwards: how many; those of step one.
    """

    def __init__(self, model: nn.Module, forwards: int) -> None:
        self._entries: list[Entry] = []
        self._forwards = forwards
        self._number, self._running = -1, False
        self._calls: dict[str, int] = {}
        model.register_forward_pre_hook(self._begin)
        for name, module in model.named_modules():
            plain = without_wrappers(f"{name}.").removesuffix(".")
            module.register_forward_hook(partial(self._note, plain), with_kwargs=True)
        model.register_forward_hook(self._end)

    def entries(self) -> list[Entry]:
        return self._entries

    def _begin(self, *_: object) -> None:
        self._number, self._calls = self._number + 1, {}
        self._running = self._number < self._forwards

    def _end(self, *_: object) -> None:
        self._running = False

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not self._running:
            return
        call = self._calls[name] = self._calls.get(name, -1) + 1
        entry = Entry(name, self._number, call, _arguments(module, args, kwargs))
        self._entries.append(entry)
        first = next(tensors(getattr(output, "logits", output)), None)
        if first is None:
            return
        entry.output = _copy(first)
        if first.requires_grad:

            def note(grad: Tensor) -> None:
                entry.gradient = _copy(grad)

            first.register_hook(note)


def _arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Array]:
    """The tensors among the arguments of a module's call, each argument's first one, by its name."""
    named = signature(module.forward).bind(*args, **kwargs).arguments
    found = {name: next(tensors(value), None) for name, value in named.items()}
    return {name: _copy(x) for name, x in found.items() if x is not None}


def tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors(list(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def _copy(x: Tensor) -> Array:
    return to_numpy(x.to(torch.float64) if x.is_floating_point() else x).copy()
