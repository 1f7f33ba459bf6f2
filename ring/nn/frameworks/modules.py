"""Modules of a model, selected by class."""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Return all modules of these classes within the model. ValueError if there are none, or for other arguments."""
    classes = layers if isinstance(layers, tuple) else (layers,)
    if not classes or not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        got = ", ".join(cls.__name__ if isinstance(cls, type) else f"a {type(cls).__name__}" for cls in classes)
        raise ValueError(f"layers must be classes of modules, got {got or 'none'}")
    modules = [module for module in model.modules() if isinstance(module, classes) and module is not model]
    if not modules:
        names = ", ".join(cls.__name__ for cls in classes)
        raise ValueError(f"layers must be classes of modules in the model, got {names}, of which it has none")
    return modules
