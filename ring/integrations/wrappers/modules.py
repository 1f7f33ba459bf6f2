"""Modules of a model, selected by class, and what they take and return."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def find_modules(model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...]) -> list[nn.Module]:
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


def leaves(x: Any) -> list[Any]:
    """Return what nested containers hold; dataclasses are containers, too."""
    found = []
    for leaf in tree_leaves(x):
        is_container = is_dataclass(leaf) and not isinstance(leaf, type)
        found += leaves([getattr(leaf, field.name) for field in fields(leaf)]) if is_container else [leaf]
    return found


def differentiable(x: Any) -> list[Tensor]:
    """Return the tensors in nested containers that require a gradient."""
    return [leaf for leaf in leaves(x) if isinstance(leaf, Tensor) and leaf.requires_grad]
