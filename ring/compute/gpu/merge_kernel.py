"""The kernel that merges partial results on GPUs, and its launch. Every number of the output is computed once, in fp32,
from all partial results that hold its row and head.

A program of the kernel has rows of one head, and asks each of the head's entries (`ring.compute.gpu.entries`) which of
these rows it holds. The rows lie as far apart as those of the widest grid, so that a dilated grid holds all of them or,
mostly, none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from ring.compute.gpu.entries import Field, entries_of
from ring.compute.gpu.parts import Part, is_aligned
from ring.plan.ranges import Ints

_APART = 32  # rows: a wider grid than this holds some of a program's
_ROWS, _WARPS = 32, 4  # rows, and warps, of a program
_KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_captured: list[torch.Tensor] = []  # host copies of entries that captured graphs read again at every replay


def _column(field: Field) -> tl.constexpr:
    """A column of the table as a constant that Triton takes from a module."""
    return tl.constexpr(int(field))


_OUT, _LSE = _column(Field.OUT), _column(Field.LSE)
_START, _END, _STEP, _LENGTH = map(_column, (Field.START, Field.END, Field.STEP, Field.LENGTH))
_FOLD_STEP, _FOLDS = _column(Field.FOLD_STEP), _column(Field.FOLDS)
_OUT_FOLD, _OUT_BATCH, _OUT_ROW = map(_column, (Field.OUT_FOLD, Field.OUT_BATCH, Field.OUT_ROW))
_LSE_FOLD, _LSE_BATCH, _LSE_ROW = map(_column, (Field.LSE_FOLD, Field.LSE_BATCH, Field.LSE_ROW))
_IS_FP32, _DIVISOR = _column(Field.IS_FP32), _column(Field.DIVISOR)
_FIELDS = tl.constexpr(len(Field))


@triton.jit
def _rows_of(entry, where, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a part, in fp32; 0 where it has none."""
    at = tl.load(entry + _OUT).to(tl.pointer_type(KIND)) + where
    if ALIGNED:
        at = tl.multiple_of(at, (16, 16))
    return tl.load(at, mask, other=0.0).to(tl.float32)


@triton.jit
def _may_hold(entry, begin, span):  # type: ignore[no-untyped-def]
    """Whether a part may hold some of a program's rows, which begin there and have that span."""
    start, end = tl.load(entry + _START).to(tl.int32), tl.load(entry + _END).to(tl.int32)
    divisor = tl.load(entry + _DIVISOR).to(tl.int32)
    return (begin < end) & (begin + span > start) & ((begin - start) % divisor == 0)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    entries, first, out, lse, out_batch, out_row, out_head, lse_batch, lse_head, lse_row, tokens, heads, apart,
    twin, twin_entries,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BASED: tl.constexpr,
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
            others += _may_hold(entries + number * _FIELDS, begin, ROWS * apart).to(tl.int32)
        changed &= others > 0
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for number in range(begins, ends):
        entry = entries + number * _FIELDS
        if _may_hold(entry, begin, ROWS * apart):
            start = tl.load(entry + _START).to(tl.int32)
            step, length = tl.load(entry + _STEP).to(tl.int32), tl.load(entry + _LENGTH).to(tl.int32)
            fold_step, folds = tl.load(entry + _FOLD_STEP).to(tl.int32), tl.load(entry + _FOLDS).to(tl.int32)
            within = row - start
            fold = tl.minimum(tl.maximum(within, 0) // fold_step, folds - 1)
            place = within - fold * fold_step
            index = place // step
            held = (within >= 0) & (place - index * step == 0) & (index < length) & (row < tokens)
            offset = (
                fold * tl.load(entry + _OUT_FOLD)
                + batch * tl.load(entry + _OUT_BATCH)
                + index * tl.load(entry + _OUT_ROW)
            )
            where = offset[:, None] + column[None, :]
            read = held & changed
            mask = read[:, None] & inside[None, :] if DIM < BLOCK else read[:, None]
            if WIDE == 2:  # some parts are fp32, some are not
                if tl.load(entry + _IS_FP32) != 0:
                    part = _rows_of(entry, where, mask, tl.float32, ALIGNED)
                else:
                    part = _rows_of(entry, where, mask, KIND, ALIGNED)
            else:
                part = _rows_of(entry, where, mask, tl.float32 if WIDE else KIND, ALIGNED)
            if WEIGHTED:
                at = (
                    fold * tl.load(entry + _LSE_FOLD)
                    + batch * tl.load(entry + _LSE_BATCH)
                    + index * tl.load(entry + _LSE_ROW)
                )
                new = tl.load(tl.load(entry + _LSE).to(tl.pointer_type(tl.float32)) + at, held, other=float("-inf"))
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


@dataclass(frozen=True, eq=False)
class Job:
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
        """Where the entries of each head begin, (H + 1,), then the entries by head, (entries, fields), in one array."""
        tables = [entries_of(part, self.apart) for part in self.parts]
        if not tables:
            return np.zeros(self.out.shape[2] + 1, np.int64)
        heads, table = (np.concatenate(column) for column in zip(*tables, strict=True))
        order = np.argsort(heads, kind="stable")
        first = np.searchsorted(heads[order], np.arange(self.out.shape[2] + 1))
        return np.concatenate([first, table[order].reshape(-1)])

    def launch(self, entries: torch.Tensor, twin: torch.Tensor | None) -> None:
        """twin: the output of another job of the same form, whose entries follow."""
        out, lse, apart = self.out, self.lse, self.apart
        batch, tokens, heads, dim = out.shape
        out_batch, out_row, out_head, _ = out.stride()
        lse_batch, lse_head, lse_row = (0, 0, 0) if lse is None else lse.stride()
        _combine[(triton.cdiv(tokens, _ROWS * apart) * apart * heads, batch, 1 if twin is None else 2)](
            entries=entries[heads + 1 :], first=entries, out=out, lse=out if lse is None else lse,
            out_batch=out_batch, out_row=out_row, out_head=out_head,
            lse_batch=lse_batch, lse_head=lse_head, lse_row=lse_row,
            tokens=tokens, heads=heads, apart=apart,
            twin=out if twin is None else twin, twin_entries=len(entries),
            DIM=dim, BLOCK=triton.next_power_of_2(dim), ROWS=_ROWS, KIND=_KINDS.get(self.kind, tl.bfloat16),
            ALIGNED=self.aligned, WEIGHTED=lse is not None, WIDE=self.wide, BASED=self.based, num_warps=_WARPS,
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


def run(jobs: Sequence[Job], since: torch.cuda.Event) -> None:
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
