"""Sizes, heads and patterns of a benchmark, with costs by `reference`; a method to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from reference import cost, validators
from reference.head_groups import groups_of
from reference.pattern import Pattern
from ring import Layout
from ring.estimate.__main__ import UNITS

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Results = tuple[Tensor, ...]
PASSES = ("forward", "forward+backward")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
SEGMENTS, RATES = (2 * 2**10, 8 * 2**10, 32 * 2**10, 128 * 2**10, 2**20), (1, 4, 16, 32, 256)  # LongNet's
PATTERNS = {"cuda": (SEGMENTS, RATES), "cpu": ((8, 32, 128), (1, 4, 8))}  # by device; a tiny one for trials on the CPU


class Unsupported(Exception):
    """A method cannot take a workload; the message says why."""


def named(tokens: int) -> str:
    """Format tokens in the largest unit that divides them, as 2Ki."""
    unit = next(unit for unit in ("Mi", "Ki", "") if tokens % UNITS[unit] == 0)
    return f"{tokens // UNITS[unit]}{unit}"


def document_lengths(total: int, mean: int, multiple: int = 1) -> tuple[int, ...]:
    """Draw lengths that add up to `total`, from an exponential distribution with a fixed seed, multiples of `multiple`.
    The last one may be cut. Raises ValueError if total or mean is no multiple."""
    if total % multiple or mean % multiple:
        raise ValueError(f"multiple is {multiple}; it must divide the tokens, {total}, and the mean length, {mean}")
    random = np.random.default_rng(1)
    ends = [0]
    while ends[-1] < total // multiple:
        ends.append(min(total // multiple, ends[-1] + 1 + int(random.exponential(mean // multiple - 1))))
    return tuple((multiple * np.diff(ends)).tolist())


@dataclass(frozen=True)
class AttentionShape:
    """Heads, batch and dtype. query, kv: numbers of heads; dim: of each head; value_dim: of a head's values, None: dim.
    The constructor raises ValueError."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for field in ("query", "kv", "dim", "batch"):
            validators.at_least(field, getattr(self, field), 1)
        if self.query % self.kv:
            raise ValueError(f"query heads are {self.query}; they must be a multiple of the key/value heads, {self.kv}")
        if self.value_dim is not None:
            validators.at_least("value_dim", self.value_dim, 1)
        validators.choice("dtype", self.dtype, DTYPES)

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values."""
        return self.dim, self.dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class Workload:
    """Attention over one sequence on all ranks. tokens: of each rank, on average; order: "zigzag", "contiguous", or
    "balanced", whose shards differ in length."""

    pattern: Pattern
    order: str
    tokens: int
    world: int
    shape: AttentionShape

    @classmethod
    def dense(cls, tokens: int, world: int, shape: AttentionShape) -> Workload:
        """Make dense causal attention in zigzag order, which balances the work."""
        return cls(Pattern.dense(causal=True), "zigzag", tokens, world, shape)

    @classmethod
    def longnet(
        cls, tokens: int, world: int, shape: AttentionShape,
        segments: tuple[int, ...] = SEGMENTS, rates: tuple[int, ...] = RATES,
    ) -> Workload:  # fmt: skip
        """Make LongNet's causal pattern, with offsets h mod r."""
        return cls(Pattern.longnet(segments, rates, shape.query, causal=True), "contiguous", tokens, world, shape)

    @classmethod
    def packed(cls, tokens: int, world: int, shape: AttentionShape, mean: int, multiple: int = 1) -> Workload:
        """Make causal attention within documents of drawn lengths, in balanced order. multiple: divides every length.
        Raises ValueError as `document_lengths` does."""
        documents = document_lengths(tokens * world, mean, multiple)
        return cls(Pattern.dense(True, documents), "balanced", tokens, world, shape)

    @classmethod
    def windowed(cls, tokens: int, world: int, shape: AttentionShape, window: int) -> Workload:
        """Make causal attention in a window, contiguous: nearly all ranks have the same work."""
        return cls(Pattern.dense(True, window=window), "contiguous", tokens, world, shape)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.shape.dtype]

    @property
    def scale(self) -> float:
        return float(self.shape.dim**-0.5)

    @property
    def total(self) -> int:
        return self.tokens * self.world

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the documents; without any, one of all tokens."""
        return tuple(self.pattern.documents or (self.total,))

    @property
    def window(self) -> int | None:
        return self.pattern.branches[0].window

    @cached_property
    def layout(self) -> Layout:
        if self.order == "balanced":
            return Layout.balanced(self.pattern, self.total, self.world, self.shape.query)
        make = Layout.zigzag if self.order == "zigzag" else Layout.contiguous
        return make(self.total, self.world)

    @cached_property
    def setting(self) -> cost.Setting:
        """Argument of `reference.cost`, whose counts take O(tokens) time: seconds for a million tokens."""
        positions = [self.layout.positions(rank).numpy() for rank in range(self.world)]
        shape, itemsize = self.shape, self.dtype.itemsize
        return cost.Setting(
            self.pattern, positions, shape.batch, shape.query, shape.kv, shape.dim, itemsize, shape.value_dim
        )

    @cached_property
    def flops(self) -> tuple[int, int]:
        """Floating-point operations of all ranks: (forward, forward and backward)."""
        flops = cost.flops(self.setting)
        return sum(flops.forward), flops.total

    def sent(self, exchange: str, on_gpus: bool) -> tuple[int, int]:
        """Return the bytes that the busiest rank sends: (forward, forward and backward)."""
        traffic = cost.sent(self.setting, exchange, on_gpus and groups_of(exchange, self.world).straight)
        both = traffic.forward + traffic.backward
        return int(traffic.forward.sum(1).max()), int(both.sum(1).max())

    def memory(self, exchange: str, bucket: int, on_gpus: bool) -> tuple[int, int]:
        """Return the closed-form bytes of the fullest rank: (forward, forward and backward). They count accumulators,
        communication buffers and the saved lse, not inputs and outputs."""
        narrow = on_gpus and groups_of(exchange, self.world).straight
        buffers = cost.buffers(self.setting, exchange, bucket, narrow, one_sided=on_gpus)
        resident = cost.resident(self.setting)
        lse = self.shape.batch * self.shape.query * self.setting.counts * self.setting.accumulator_itemsize
        forward = resident.accumulator + buffers.forward
        backward = resident.gradients + buffers.backward + lse
        return int(forward.max()), int(max(forward.max(), backward.max()))

    def draw(self, device: torch.device, seed: int, tokens: int | None = None) -> Inputs:
        """Draw q, k, v, dout, (B, tokens, H or Hk, D or Dv), by default of one rank; q, k, v require gradients."""
        generator = torch.Generator(device).manual_seed(seed)
        shape, (dim, value_dim) = self.shape, self.shape.dims

        def normal(heads: int, dim: int) -> Tensor:
            size = (shape.batch, tokens or self.tokens, heads, dim)
            return torch.randn(size, generator=generator, device=device, dtype=self.dtype)

        q, k, v = normal(shape.query, dim), normal(shape.kv, dim), normal(shape.kv, value_dim)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), normal(shape.query, value_dim)


@dataclass(frozen=True)
class Contender:
    """A method to be timed. forward: a forward pass; training: a forward and backward pass. Both return their results,
    so that a caller can subtract these from peak memory.

    local: no rank waits for another. capturable: in a CUDA graph. note: a caveat for comparisons.
    """

    forward: Callable[[], Results]
    training: Callable[[], Results]
    local: bool = False
    capturable: bool = False
    note: str = ""

    @classmethod
    def of(
        cls, attend: Attend, inputs: Inputs, local: bool = False, capturable: bool = False, note: str = ""
    ) -> Contender:
        """Make the passes of a differentiable attend(q, k, v). inputs: (q, k, v, dout); q, k, v require grad."""
        q, k, v, dout = inputs

        def forward() -> Results:
            with torch.no_grad():
                return (attend(q, k, v),)

        def training() -> Results:
            out = attend(q, k, v)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

        return cls(forward, training, local, capturable, note)

    @property
    def passes(self) -> tuple[tuple[str, Callable[[], Results]], ...]:
        return (PASSES[0], self.forward), (PASSES[1], self.training)
