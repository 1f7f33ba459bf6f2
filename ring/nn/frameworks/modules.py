"""The modules of a model that are meant by their class."""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """All modules within the model that are of these classes. ValueError where there is none, or for no class."""
    kinds = layers if isinstance(layers, tuple) else (layers,)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        given = ", ".join(kind.__name__ if isinstance(kind, type) else f"a {type(kind).__name__}" for kind in kinds)
        raise ValueError(f"layers must be classes of modules, got {given or 'none'}")
    found = [module for module in model.modules() if isinstance(module, kinds) and module is not model]
    if not found:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"layers must name classes of which the model has modules, got {names}, of which it has none")
    return found
