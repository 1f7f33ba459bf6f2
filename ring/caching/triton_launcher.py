"""Launches a Triton kernel repeatedly for one kind of arguments.

At every launch Triton looks up the compiled kernel that fits the arguments, and checks every constant of the module for
changes. In a short call the GPU waits for that. A launcher does it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Launcher:
    """A kernel on a grid. Its parameters are tensors, then numbers, then constants. A call passes the tensors; between
    calls only their addresses may change, by multiples of 16 bytes.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        num_warps: int,
        numbers: Sequence[int],
        constants: Mapping[str, Any],
    ) -> None:
        self._kernel, self._grid, self._num_warps = kernel, grid, num_warps
        self._numbers, self._constants = tuple(numbers), dict(constants)
        self._run: Any = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self._run is None:
            compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants, num_warps=self._num_warps)
            self._run = compiled[self._grid]
            self._rest = (*self._numbers, *self._constants.values())
        else:
            self._run(*tensors, *self._rest)
