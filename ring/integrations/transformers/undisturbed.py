"""Calls of a model in fp64 that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ring.integrations.transformers.double import in_double
from ring.nn.module_calls import ModuleCall, ModuleCalls


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluate a model, eagerly and without a cache, and leave it as it was."""
    training = {module: module.training for module in model.modules()}
    buffers = [(m, name, x, x.clone()) for m in model.modules() for name, x in m._buffers.items() if x is not None]
    devices = [x.device for x in [*model.parameters()][:1] if x.device.type == "cuda"]
    try:
        with (
            torch.random.fork_rng(devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            torch.autocast(model.device.type, enabled=False),
            settings(model, use_cache=False, _experts_implementation_internal="eager"),
        ):
            torch.default_generator.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, name, x, before in buffers:
            x.copy_(before)
            module._buffers[name] = x
        for module, mode in training.items():
            module.training = mode


@contextmanager
def settings(model: Any, **values: object) -> Iterator[None]:
    """Set attributes of the configurations of a model and of the models in it within a block, where they have a value.

    Args:
        model: of transformers.
        values: of the attributes.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(c, name, getattr(c, name, None)) for c in configs for name in values]
    before = [(config, name, value) for config, name, value in before if value is not None]
    for config, name, _ in before:
        setattr(config, name, values[name])
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def record(model: nn.Module, instead: dict[int, Tensor], arguments: dict[str, Any]) -> list[ModuleCall]:
    """Call a model in fp64, without gradients, and leave it as it was. Return the calls of its modules.

    Args:
        model: of transformers.
        instead: values of parameters, by id.
        arguments: of the call.
    """
    with ModuleCalls(model) as recorded, _undisturbed(model), in_double(instead):
        model(**arguments)
    return recorded.calls
