"""Calls of a model's modules in one forward, with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring.nn.double import in_double


@dataclass(frozen=True, eq=False)
class Call:
    """A module's call. Inputs and outputs are its tensors by name."""

    name: str
    kind: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluate a model, eagerly and without a cache, and leave it as it was."""
    training = {module: module.training for module in model.modules()}
    buffers = [(m, name, x, x.clone()) for m in model.modules() for name, x in m._buffers.items() if x is not None]
    devices = [x.device for x in [*model.parameters()][:1] if x.device.type == "cuda"]
    try:
        with (
            torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"),
            torch.autocast(model.device.type, enabled=False),
            settings(model, use_cache=False, _experts_implementation_internal="eager"),
        ):  # fmt: skip
            torch.default_generator.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, name, x, before in buffers:
            x.copy_(before)
            module._buffers[name] = x
        for module, mode in training.items():
            module.training = mode


def configs_of(model: Any) -> list[Any]:
    """Return the configurations of a model and of the models in it.

    Args:
        model: of transformers.
    """
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextmanager
def settings(model: Any, **values: object) -> Iterator[None]:
    """Set attributes of the configurations of a model and of the models in it within a block, where they have a value.

    Args:
        model: of transformers.
        values: of the attributes.
    """
    before = [(c, name, getattr(c, name, None)) for c in configs_of(model) for name in values]
    before = [(config, name, value) for config, name, value in before if value is not None]
    for config, name, _ in before:
        setattr(config, name, values[name])
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def record(model: nn.Module, instead: dict[int, Tensor], arguments: dict[str, Any]) -> list[Call]:
    """Call a model in fp64, without gradients, and leave it as it was.

    Args:
        model: of transformers.
        instead: values of parameters, by id.
        arguments: of the call.

    Returns:
        The calls of its modules in the order in which they end, its own the last. An error gets a note of its module.
    """
    calls: list[Call] = []
    entered: list[tuple[str, dict[str, Tensor]]] = []
    hooks = []

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append((f" in {name or 'model'} ({type(module).__name__})", dict(_tensors({"": args} | kwargs))))

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(Call(name, type(module).__name__, entered.pop()[1], dict(_tensors(output))))

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
    try:
        with _undisturbed(model), in_double(instead):
            model(**arguments)
    except Exception as error:
        if entered:
            error.add_note(entered[-1][0])
        raise
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _tensors(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the tensors in a structure, by their path."""
    if isinstance(x, Tensor):
        yield name or "output", x.detach().clone()
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, f"{name}.{key}".lstrip("."))
