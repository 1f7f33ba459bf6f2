"""ServingCase: requests that are served in a sequence of calls, with a cache that is sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from reference import validators
from verification.case import DEVICES, DTYPES
from verification.saved_fields import FLAG, SavedFields, checked_by, choice, integer, number

MAX_TOKENS = 4096  # of all calls


@dataclass(frozen=True)
class Call:
    """One call, as a rank is told it. Its tensors hold the new tokens of all slots, one slot after the other."""

    number: int  # of the call, from 0
    new: tuple[int, ...]  # tokens of each slot in this call
    before: tuple[int, ...]  # tokens of each slot's request that earlier calls brought
    starts: tuple[bool, ...]  # True for a slot in which a new request begins, perhaps in place of a finished one
    rank: int
    world: int
    block: int
    replicated: bool
    scale: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slot's request with the new ones: the last query is at the last of these positions."""
        return tuple(before + new for before, new in zip(self.before, self.new, strict=True))

    def owns(self, position: int, rank: int | None = None) -> bool:
        """Return True if a rank keeps the key at that position. rank: None for this one."""
        owner = position // self.block % self.world
        return self.replicated or owner == (self.rank if rank is None else rank)


def _calls(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Require calls of as many slots each, in which only slots that had a request get another one."""
    listed = value if isinstance(value, (tuple, list)) else ()
    rows = [tuple(row) if isinstance(row, (tuple, list)) else () for row in listed]
    if len({len(row) for row in rows}) != 1 or not all(map(validators.is_integer, sum(rows, ()))) or not rows[0]:
        raise ValueError(f"{name} is {value!r}; it must be a tuple of calls, each a tuple of an integer for each slot")
    if max(len(rows), len(rows[0])) > 64 or sum(map(abs, sum(rows, ()))) > MAX_TOKENS:
        raise ValueError(f"{name} is {value!r}; it must have up to 64 calls and slots, and {MAX_TOKENS} tokens in all")
    for at, row in enumerate(rows):
        empty = [slot for slot, new in enumerate(row) if new < 0 and not any(one[slot] for one in rows[:at])]
        if empty or not any(row):
            must = f"slot {empty[0]} must have had a request" if empty else "some slot must have new tokens"
            raise ValueError(f"call {at} of {name} is {row!r}; {must}")
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class ServingCase(SavedFields):
    """Requests in slots, served call after call: chunked prefills and decodes, in any mixture. Causal: the queries of a
    call are the last positions of their request. Raises ValueError, naming the field, its value and what is allowed."""

    world: int = field(metadata=integer(1, 8))  # every rank is given all queries, and keys and values of new tokens
    # Position p belongs to rank (p // block) % world.
    block: int = field(default=1, metadata=integer(1, MAX_TOKENS))
    # For each call, new tokens of each slot; -n: its request is finished, and a new one takes it over with n tokens.
    calls: tuple[tuple[int, ...], ...] = field(metadata=checked_by(_calls))
    heads: int = field(default=1, metadata=integer(1, 128))
    kv_heads: int = field(default=1, metadata=integer(1, 128))
    head_dim: int = field(default=4, metadata=integer(1, 576))
    value_dim: int = field(default=4, metadata=integer(1, 576))
    dtype: str = field(default="float32", metadata=choice(*DTYPES))
    scale: float = field(default=0.5, metadata=number(100.0))
    replicated: bool = field(default=False, metadata=FLAG)  # every rank keeps all keys, as for some layers of engines
    strided: bool = field(
        default=False, metadata=FLAG
    )  # inputs are views: of one tensor, or with heads first in memory
    seed: int = field(default=0, metadata=integer(0, 2**31))
    device: str = field(default="cpu", metadata=choice(*DEVICES))

    def __post_init__(self) -> None:
        super().__post_init__()
        validators.grouped_heads(self.heads, self.kv_heads)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group: all."""
        return tuple(range(self.world))

    @property
    def tokens(self) -> int:
        """Tokens of the longest request."""
        return max(max(call.lengths) for call in self.calls_of(0))

    def calls_of(self, rank: int) -> tuple[Call, ...]:
        """Return what the server is told of each call on that rank."""
        before, made = [0] * len(self.calls[0]), []
        for index, row in enumerate(self.calls):
            begins = [0 if new < 0 else length for new, length in zip(row, before, strict=True)]
            starts = tuple(bool(new) and not length for new, length in zip(row, begins, strict=True))
            told = rank, self.world, self.block, self.replicated, self.scale
            made.append(Call(index, tuple(map(abs, row)), tuple(begins), starts, *told))
            before = list(made[-1].lengths)
        return tuple(made)

    def tensors(self) -> list[list[Tensor]]:
        """Return q (T, H, D), k (T, Hk, D) and v (T, Hk, Dv) of the new tokens of each call, on the CPU."""
        counts = [sum(map(abs, row)) for row in self.calls]
        generator, wide = torch.Generator().manual_seed(self.seed), DTYPES[self.dtype]
        shapes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        numbers = [torch.randn(sum(counts), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
        calls = [list(parts) for parts in zip(*(x.to(wide).split(counts) for x in numbers), strict=True)]
        if self.strided and self.seed % 2:
            return [[x.transpose(0, 1).contiguous().transpose(0, 1) for x in parts] for parts in calls]
        if self.strided:
            packed = [torch.cat([x.flatten(1) for x in parts], 1) for parts in calls]
            views = [x.split([math.prod(shape) for shape in shapes], 1) for x in packed]
            return [[x.unflatten(1, shape) for x, shape in zip(xs, shapes, strict=True)] for xs in views]
        return calls

    def requests(self) -> Iterator[tuple[int, int, slice, list[int]]]:
        """Yield (call, slot, rows, tokens) wherever a slot has new tokens: their rows in the call's tensors, and the
        tokens of its request so far, numbered through all calls."""
        held: list[list[int]] = [[] for _ in self.calls[0]]
        start = 0
        for index, row in enumerate(self.calls):
            ends = [0, *accumulate(map(abs, row))]
            for slot, new in enumerate(row):
                rows = slice(ends[slot], ends[slot + 1])
                held[slot] = [*([] if new < 0 else held[slot]), *range(start + rows.start, start + rows.stop)]
                if new:
                    yield index, slot, rows, held[slot]
            start += ends[-1]
