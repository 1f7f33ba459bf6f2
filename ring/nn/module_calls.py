"""Calls of a model's modules, with their tensors, and the search for the module that makes them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A module's call. Inputs, outputs and gradients of outputs are copies of its tensors, by name.

    kind: the module's class. forward: number of the model's forward. number: of the module's call within it.
    """

    name: str
    kind: str
    forward: int
    number: int
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


class ModuleCalls:
    """Records every call within the first forwards of a model. Calls that a backward recomputes are left out.

    calls: in the order in which they end, a module after those that it contains, the model's own the last.

    An error that leaves the block, if there is one, gets a note of the module in which it was raised.

    Args:
        model: gets hooks, which the end of the block removes.
        forwards: number of forwards to record.
        plain_name: of a module's name, as to leave wrappers out.
    """

    def __init__(self, model: nn.Module, forwards: int = 1, plain_name: Callable[[str], str] = str) -> None:
        self.calls: list[ModuleCall] = []
        self._model, self._forwards, self._forward = model, forwards, -1
        self._running: list[tuple[nn.Module, str, dict[str, Tensor]]] = []  # from the outside in
        self._numbers: dict[str, int] = {}
        self._hooks = []
        for name, module in model.named_modules():
            begin = partial(self._begin, plain_name(name))
            self._hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._end))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._running:
            module, name, _ = self._running[-1]
            error.add_note(f" in {name or 'model'} ({type(module).__name__})")
        for hook in self._hooks:
            hook.remove()

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module is self._model:
            self._forward, self._running, self._numbers = self._forward + 1, [], {}
        elif not self._running:
            return
        if self._forward < self._forwards:
            self._running.append((module, name, _copies(_arguments(module, args, kwargs))))

    def _end(self, module: nn.Module, _: object, output: object) -> None:
        if all(running is not module for running, *_ in self._running):
            return
        running, name, inputs = self._running.pop()
        while running is not module:  # a call in it ended in an error that it caught
            running, name, inputs = self._running.pop()
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        named = output if isinstance(output, Tensor | dict | list | tuple) else getattr(output, "__dict__", None)
        call = ModuleCall(name, type(module).__name__, self._forward, number, inputs, _copies(named))
        self.calls.append(call)
        for at, x in _tensors(named):
            if x.requires_grad:
                x.register_hook(partial(_note, call.gradients, at))


def _note(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    gradients[name] = gradient.detach().clone()


def _arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module's call by name, by number where its signature cannot be read."""
    try:
        return dict(signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {str(number): x for number, x in enumerate(args)} | kwargs


def _copies(x: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(x)}


def _tensors(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a structure, by their path."""
    if isinstance(x, Tensor):
        yield name or "output", x
    x = x._asdict() if hasattr(x, "_asdict") else x
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, f"{name}.{key}".lstrip("."))


class Named(Protocol):
    """A call of the module of that name."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


def calls_around(call: C, calls: Sequence[C]) -> Iterator[C]:
    """Yield the calls that contain a call, from the inside out.

    Args:
        call: one of the calls.
        calls: of one forward, in the order in which they end.
    """
    for outer in calls[calls.index(call) + 1 :]:
        if call.name and (not outer.name or call.name.startswith(f"{outer.name}.")):
            yield outer
            call = outer


def first_difference(
    calls: Sequence[C], output_differs: Callable[[C], object], inputs_differ: Callable[[C], object]
) -> list[C]:
    """Return the first call whose output differs, and those around it up to the first whose inputs agree: the cause.

    Args:
        calls: of one forward, in the order in which they end.
        output_differs: compares the output of a call with what it should be.
        inputs_differ: compares its inputs. If those of the last call differ, the model is called with others.

    Returns:
        From the inside out; empty if all outputs agree.
    """
    first = next((call for call in calls if output_differs(call)), None)
    if first is None:
        return []
    path = [first]
    for outer in calls_around(first, calls):
        if not inputs_differ(path[-1]):
            break
        path.append(outer)
    return path
