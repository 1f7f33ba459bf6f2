"""Settings of torch that an implementation must leave as they were: later examples would run under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from verification.failures import Malformed

# By name: reads the setting, and sets it.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on CPUs": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on GPUs": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}


@contextmanager
def left_as_they_were(function: str) -> Iterator[None]:
    """Restore the settings that the block changes, then raise Malformed, which names them and the function."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    changed = {}
    try:
        yield
    finally:
        for name, (read, write) in SETTINGS.items():
            if (after := read()) != before[name]:
                changed[name] = after
                write(before[name])
    if changed:
        left = ", ".join(f"{name} {before[name]} -> {after}" for name, after in changed.items())
        raise Malformed(f"{function} changed settings of torch: {left}; it must leave them as they were")
