"""Launches a Triton kernel again for arguments of one kind.

At every launch Triton looks up which of its compiled kernels fits the arguments, and whether a constant of the module
has changed, at every constant. In a short call the GPU waits for that. A launcher looks once.
"""

from __future__ import annotations

from typing import Any


class Launcher:
    """A kernel on a grid. Of what it is given in its calls only addresses may differ, by multiples of 16 bytes."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], num_warps: int) -> None:
        self._kernel, self._grid, self._num_warps = kernel, grid, num_warps
        self._compiled: Any = None

    def __call__(self, **arguments: Any) -> None:
        """By the names of the kernel's parameters, all of them."""
        if self._compiled is None:
            self._compiled = self._kernel[self._grid](**arguments, num_warps=self._num_warps)
        else:
            self._compiled[self._grid](*[arguments[name] for name in self._kernel.arg_names])
