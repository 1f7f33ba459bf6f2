"""Lowers a plan to a program: the kernel calls of each arrival. A setting has one program for forward and one or more
for backward, which `ring.execute` runs in every call.

    Plan -> Program

A plan says which query rows see which keys, independent of kernels. A program assigns each tile a kernel and splits it
into calls; it does not depend on the values or addresses of tensors. `print(program)` shows it:

    own keys
      math   CAUSAL    rows 2 x 2, keys 2 x 2, heads 2 x 1
    step 1
      math   FULL      rows 1 x 2, keys 1 x 2, heads 2 x 1

These are the calls of the example (see `ring.plan`) on rank 0: two folds of two rows, then one fold; two groups of one
head. The math kernel computes so few keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ring.compute import kernel_calls, kernel_choice
from ring.compute.kernels.kernel import Kernel, KernelSetting
from ring.plan.cover import cover
from ring.plan.plan import Plan
from ring.plan.tile import Tile


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A tile and its kernel. queries_in_place, keys_in_place: it writes gradients of its queries, or keys, in place: by
    `ring.plan.cover`, or those of received keys into the buffer in which they return.
    """

    kernel: Kernel
    tile: Tile
    queries_in_place: bool = False
    keys_in_place: bool = False

    def __str__(self) -> str:
        rows, keys, heads = self.tile.query_rows, self.tile.key_rows, self.tile.query_heads
        return (
            f"{self.kernel.name:5}  {self.tile.mask.name:8}  rows {rows.folds} x {rows.length}, "
            f"keys {keys.folds} x {keys.length}, heads {heads.groups} x {heads.per_group}"
        )


@dataclass(frozen=True, eq=False)
class Program:
    """The kernel calls by arrival: those on local keys, then those of each step."""

    arrivals: tuple[tuple[KernelCall, ...], ...]

    @cached_property
    def batched(self) -> bool:
        """True if every call uses a fused GPU kernel."""
        return all(call.kernel.batched for calls in self.arrivals for call in calls)

    def __str__(self) -> str:
        lines = []
        for number, calls in enumerate(self.arrivals):
            lines += [f"step {number}" if number else "own keys", *(f"  {call}" for call in calls)]
        return "\n".join(lines)


class BlockPrograms:
    """The plan of a block of heads and its programs. q: (B, N, H, D), like the queries of the setting."""

    def __init__(self, plan: Plan, q: torch.Tensor, setting: KernelSetting) -> None:
        self.plan, self.scoring, self._setting = plan, setting.scoring, setting
        self.forward = self._lower(q, False)

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        return self.plan.nbytes

    def backward(self, q: torch.Tensor, dlse: bool, repeatable: bool) -> Program:
        """Make the program of a backward. dlse, repeatable: see `ring.compute.kernel_choice.choose`."""
        program = self._lower(q, True, dlse, repeatable)
        return program if self.plan.chunked else self._in_place(program, q)

    def _in_place(self, program: Program, q: torch.Tensor) -> Program:
        """Mark the calls that write gradients in place. For an exchange by heads none writes those of queries and own
        keys, since a block has other rows and heads than q.
        """
        calls = [call for calls in program.arrivals for call in calls]
        tiles = [call.tile if call.kernel.writes_in_place(call.tile) else None for call in calls]
        if not any(tiles):
            return program
        own = tiles[: len(program.arrivals[0])]
        onces = (
            step.once for step, of_step in zip(self.plan.steps, program.arrivals[1:], strict=True) for _ in of_step
        )
        received = {i for i, once in enumerate(onces, start=len(own)) if once and tiles[i] is not None}
        queries = [None if tile is None else (tile.query_rows, tile.query_heads) for tile in tiles]
        keys = [None if tile is None else (tile.key_rows, tile.key_heads) for tile in own]
        of_queries = cover(queries, q.shape[1], q.shape[2])
        of_keys = cover(keys, self.plan.tokens, q.shape[2] // self._setting.share) | received
        marked = (
            replace(call, queries_in_place=i in of_queries, keys_in_place=i in of_keys) for i, call in enumerate(calls)
        )
        return Program(tuple(tuple(next(marked) for _ in arrival) for arrival in program.arrivals))

    def _lower(self, q: torch.Tensor, backward: bool, *how: bool) -> Program:
        def calls(tile: Tile) -> list[KernelCall]:
            if tile.part is not None:
                return [KernelCall(kernel_choice.choose_fixed(self._setting, tile, backward, *how), tile)]
            kernel = kernel_choice.choose(self._setting, tile, backward, *how)
            portions = kernel_calls.portions(kernel, tile, q, self._setting.dims[1]) if backward else [tile]
            return [KernelCall(kernel, portion) for portion in portions]

        stages = (self.plan.local, *(step.tiles for step in self.plan.steps))
        return Program(tuple(tuple(call for tile in tiles for call in calls(tile)) for tiles in stages))
