"""The merge on GPUs: all partial results of a row in one pass, where `ring.compute.accumulator` takes one after the
other.

A naive merge reads and writes the whole fp32 accumulator for every partial result: more bytes than all partial results
have together. Here they are kept as the kernels left them, in 16 bits and on their own grids; at the end every output
number is computed once, from the partial results that hold its row and head, in fp32. The same pass sums gradients.

What a partial result covers is written down as integers, one entry for each of its heads: addresses, and the grid of
its rows. A program of the kernel has tokens of one head, and asks each of the head's entries which of them it holds.
Its tokens lie as far apart as those of the widest grid, so that a dilated grid holds all of them or, mostly, none. A
partial result that covers everything, as a branch without dilation gives it, becomes the output: only what others hold
too is touched. The plain version, `ring.compute.accumulator`, is the reference; grids that are listed go there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from ring.compute.accumulator import Accumulator, Sum
from ring.compute.parts import FIELDS, Part, as_output, entries_of, is_aligned, is_grid, whole
from ring.plan.blocks import Heads
from ring.plan.ranges import Ints
from ring.plan.rows import Rows
from ring.strided_view import GradientSum

# Partial results are kept until they hold this many times the bytes of an fp32 accumulator; then they are merged.
MOST_KEPT = 2.0
_APART = 32  # tokens: a wider grid than this holds some of a program's
_ROWS, _WARPS = 32, 4  # tokens, and warps, of a program
_KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_captured: list[torch.Tensor] = []  # host copies of entries that captured graphs read again at every replay


@triton.jit
def _rows_of(entry, where, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a part, in fp32; 0 where it has none."""
    at = tl.load(entry).to(tl.pointer_type(KIND)) + where
    if ALIGNED:
        at = tl.multiple_of(at, (16, 16))
    return tl.load(at, mask, other=0.0).to(tl.float32)


@triton.jit
def _meets(entry, begin, span):  # type: ignore[no-untyped-def]
    """Whether a part may hold some of a program's rows, which begin there and have that span."""
    start, end = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    common = tl.load(entry + 15).to(tl.int32)  # divides the grid's steps, and `apart`
    return (begin < end) & (begin + span > start) & ((begin - start) % common == 0)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    entries, first, out, lse, out_batch, out_row, out_head, lse_batch, lse_head, lse_row, tokens, heads, apart,
    twin, twin_entries,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BASED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Every `apart`-th row of one head and batch. WEIGHTED: softmax averages, by lse; else plain sums. KIND: the 16-bit
    type. WIDE: the parts are fp32; 2: some of them are. BASED: `out` is the first part, so far. twin: another output
    like it, whose entries lie that much further.
    """
    if tl.program_id(2) == 1:
        out = twin
        first += twin_entries
        entries += twin_entries
    head = tl.program_id(0) % heads  # neighbours in memory are neighbours in time
    chunk = tl.program_id(0) // heads
    begin = chunk // apart * (ROWS * apart) + chunk % apart
    row = begin + apart * tl.arange(0, ROWS)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    begins, ends = tl.load(first + head), tl.load(first + head + 1)
    changed = row < tokens
    if BASED:
        others = 0
        for number in range(begins + 1, ends):
            others += _meets(entries + number * FIELDS, begin, ROWS * apart).to(tl.int32)
        changed &= others > 0
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for number in range(begins, ends):
        entry = entries + number * FIELDS
        if _meets(entry, begin, ROWS * apart):
            start = tl.load(entry + 2).to(tl.int32)
            step, length = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
            fold_step, folds = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)
            within = row - start
            fold = tl.minimum(tl.maximum(within, 0) // fold_step, folds - 1)
            place = within - fold * fold_step
            index = place // step
            held = (within >= 0) & (place - index * step == 0) & (index < length) & (row < tokens)
            offset = fold * tl.load(entry + 8) + batch * tl.load(entry + 9) + index * tl.load(entry + 10)
            where = offset[:, None] + column[None, :]
            read = held & changed
            mask = read[:, None] & inside[None, :] if DIM < BLOCK else read[:, None]
            if WIDE == 2:  # some parts are fp32, some are not
                if tl.load(entry + 14) != 0:
                    part = _rows_of(entry, where, mask, tl.float32, ALIGNED)
                else:
                    part = _rows_of(entry, where, mask, KIND, ALIGNED)
            else:
                part = _rows_of(entry, where, mask, tl.float32 if WIDE else KIND, ALIGNED)
            if WEIGHTED:
                at = fold * tl.load(entry + 11) + batch * tl.load(entry + 12) + index * tl.load(entry + 13)
                new = tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + at, held, other=float("-inf"))
                higher = tl.where((top != top) | (new != new), top + new, tl.maximum(top, new))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                old_share, share = tl.exp(top - base), tl.exp(new - base)
                total = total * old_share[:, None] + part * share[:, None]  # not held: 0 * exp(-inf)
                weight = weight * old_share + share
                top = higher
            else:
                total += part
    if WEIGHTED:
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * (1.0 / tl.where(weight == 0.0, 1.0, weight))[:, None]  # a division for each number takes longer
        tl.store(lse + batch * lse_batch + head * lse_head + row * lse_row, base + tl.log(weight), row < tokens)
    to = out + (batch * out_batch + head * out_head + row.to(tl.int64) * out_row)[:, None] + column[None, :]
    if ALIGNED:
        to = tl.multiple_of(to, (16, 16))
    mask = changed[:, None] & inside[None, :] if DIM < BLOCK else changed[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask)


class _Kept:
    """Partial results of a (B, N, H, D) tensor, kept until they are combined. `weighted`: by lse, else summed.

    A grid that is listed goes to `plain`, the reference, whose tensors are then one more partial result.
    """

    def __init__(self, like: torch.Tensor, weighted: bool) -> None:
        self._like, self._weighted = like, weighted
        self._parts: list[Part] = []
        self._kept = 0
        self._plain: Accumulator | Sum | None = None
        self.since = torch.cuda.Event()
        self.since.record()

    def keep(self, part: Part) -> None:
        self._parts.append(part)
        self._kept += part.out.nbytes
        if self._kept > MOST_KEPT * 4 * self._like.numel():
            self.settle()

    def settle(self) -> Accumulator | Sum:
        """Combine what there is into the plain accumulator."""
        if self._plain is None:
            self._plain = Accumulator(self._like) if self._weighted else Sum(self._like)
        if self._parts:
            lse = self._plain.lse if isinstance(self._plain, Accumulator) else None
            _run([self._job(self._plain.out, lse)], self.since)
        return self._plain

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        job = self.last(dtype)
        _run([job], self.since)
        return job.out, job.lse

    def last(self, dtype: torch.dtype) -> _Job:
        """What is left to do for the result, in that type."""
        like = self._like
        batch, tokens, heads, _ = like.shape
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=like.device) if self._weighted else None
        for number, part in enumerate(self._parts):
            out = as_output(part, like, dtype)
            if out is not None:
                self._parts.insert(0, self._parts.pop(number))
                return self._job(out, lse)
        return self._job(torch.empty(like.shape, dtype=dtype, device=like.device), lse)

    def _job(self, out: torch.Tensor, lse: torch.Tensor | None) -> _Job:
        """Write what all parts make together, the plain accumulator among them. It, or the first part, may be what is
        written to: a program reads its rows before it writes them. Forget the parts.
        """
        parts, plain = self._parts, self._plain
        self._parts, self._kept = [], 0
        return _Job(parts if plain is None else [*parts, whole(plain)], out, lse, self._like.dtype)


@dataclass(frozen=True, eq=False)
class _Job:
    """A pass over an output: its parts, out (B, N, H, D), lse (B, H, N) if it is weighted, and the 16-bit type."""

    parts: list[Part]
    out: torch.Tensor
    lse: torch.Tensor | None
    kind: torch.dtype

    @property
    def based(self) -> bool:
        """Whether `out` is the first part, so far."""
        return bool(self.parts) and self.parts[0].out.data_ptr() == self.out.data_ptr()

    @property
    def done(self) -> bool:
        return not self.out.numel() or (self.based and len(self.parts) == 1 and self.lse is None)

    @cached_property
    def apart(self) -> int:
        return min(_APART, max((part.rows.step for part in self.parts), default=1))

    @cached_property
    def aligned(self) -> bool:
        """Whether rows allow wide loads."""
        return self.out.shape[3] % 8 == 0 and all(is_aligned(x) for x in (self.out, *(x.out for x in self.parts)))

    @cached_property
    def wide(self) -> int:
        fp32 = sum(part.out.dtype == torch.float32 for part in self.parts)
        return 0 if not fp32 else 1 if fp32 == len(self.parts) else 2

    def entries(self) -> Ints:
        """Where each head's begin, (H + 1,), then the parts by head, (entries, fields): one after the other."""
        table = np.concatenate([np.empty((0, FIELDS + 1), np.int64), *(entries_of(x, self.apart) for x in self.parts)])
        table = table[np.argsort(table[:, 0], kind="stable")]
        first = np.searchsorted(table[:, 0], np.arange(self.out.shape[2] + 1))
        return np.concatenate([first, table[:, 1:].reshape(-1)])

    def launch(self, entries: torch.Tensor, twin: torch.Tensor | None) -> None:
        """twin: the output of another job of the same form, whose entries follow."""
        out, lse, apart = self.out, self.lse, self.apart
        batch, tokens, heads, dim = out.shape
        numbers = lse.stride() if lse is not None else (0, 0, 0)
        _combine[(triton.cdiv(tokens, _ROWS * apart) * apart * heads, batch, 1 if twin is None else 2)](
            entries[heads + 1 :], entries, out, out if lse is None else lse, out.stride(0), out.stride(1),
            out.stride(2), *numbers, tokens, heads, apart, out if twin is None else twin, len(entries), dim,
            triton.next_power_of_2(dim), _ROWS, _KINDS.get(self.kind, tl.bfloat16), self.aligned, lse is not None,
            self.wide, self.based, FIELDS, num_warps=_WARPS,
        )  # fmt: skip

    @property
    def form(self) -> tuple[object, ...]:
        """What a launch is made for, but for the addresses; a sum's."""
        assert self.lse is None
        out = self.out
        return out.shape, out.stride(), out.dtype, self.kind, self.apart, self.aligned, self.wide, self.based


@lru_cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """For copies that no kernel has to be done for."""
    return torch.cuda.Stream(device)


def _run(jobs: Sequence[_Job], since: torch.cuda.Event) -> None:
    """With one copy to the GPU for all, which waits for what was there at `since` and for no kernel: in a short call
    each copy keeps the kernels behind it waiting.
    """
    jobs = [job for job in jobs if not job.done]
    if not jobs:
        return
    entries = [job.entries() for job in jobs]
    host = torch.from_numpy(np.concatenate(entries)).pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured.append(host)
    current, other = torch.cuda.current_stream(), _beside(jobs[0].out.device)
    other.wait_event(since)
    with torch.cuda.stream(other):
        device = host.to(jobs[0].out.device, non_blocking=True)
    current.wait_stream(other)
    device.record_stream(current)
    parts = device.split([len(x) for x in entries])
    if len(jobs) == 2 and jobs[0].form == jobs[1].form and len(parts[0]) == len(parts[1]):  # keys' and values', mostly
        jobs[0].launch(parts[0], jobs[1].out)
        return
    for job, part in zip(jobs, parts, strict=True):
        job.launch(part, None)


class CombinedAccumulator:
    """As `Accumulator`: output and lse of the own query rows, from partial results in 16 bits or fp32."""

    def __init__(self, query: torch.Tensor) -> None:
        self._kept = _Kept(query, weighted=True)

    def merge(self, rows: Rows, heads: Heads, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result. out: (F, B, groups, per_group, L, D); lse the same without D."""
        if is_grid(rows, heads, out):
            self._kept.keep(Part(rows, heads, out, lse))
        else:
            plain = self._kept.settle()
            assert isinstance(plain, Accumulator)
            plain.merge(rows, heads, out, lse)

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), out in that type."""
        out, lse = self._kept.result(dtype)
        assert lse is not None
        return out, lse


class CombinedSum:
    """As `Sum`: gradients, from summands in 16 bits or fp32."""

    def __init__(self, like: torch.Tensor) -> None:
        self._kept = _Kept(like, weighted=False)

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        if is_grid(rows, heads, tile):
            self._kept.keep(Part(rows, heads, tile, None))
        else:
            plain = self._kept.settle()
            assert isinstance(plain, Sum)
            plain.add(rows, heads, tile)

    def settle(self) -> None:
        """Add what was kept: a tile lies in a buffer that is about to change."""
        self._kept.settle()

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum in that type."""
        return self._kept.result(dtype)[0]

    def last(self, dtype: torch.dtype) -> _Job:
        return self._kept.last(dtype)

    @property
    def since(self) -> torch.cuda.Event:
        return self._kept.since


def results(sums: Sequence[GradientSum], dtype: torch.dtype) -> list[torch.Tensor]:
    """The result of each in that type, all at once."""
    combined = [one for one in sums if isinstance(one, CombinedSum)]
    assert len(combined) == len(sums)
    jobs = [one.last(dtype) for one in combined]
    _run(jobs, combined[0].since)
    return [job.out for job in jobs]
