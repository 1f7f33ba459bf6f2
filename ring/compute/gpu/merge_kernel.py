"""The kernel that merges partial results on GPUs, and its launch. Every number of the output is computed once, in fp32,
from all partial results that hold its row and head.

A program of the kernel computes rows of one head. It tests each of the head's entries (`ring.compute.gpu.merge_table`)
for these rows. They are as far apart as the rows of the widest grid, so that a dilated grid holds all of them or, in
most cases, none. A lane is a head and the first of such rows. Lanes that only parts in place can hold have no program:
their rows are in the output already.

Rows, and the places of lse's numbers within a sequence, are counted in 32 bits. The plain version,
`ring.compute.accumulator`, takes tensors with more rows times heads (`ring.execute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep_alive
from ring.caching.graph_table import graph_table
from ring.caching.triton_launcher import Launcher
from ring.compute.gpu.merge_table import Field, list_lanes, list_places, make_entries
from ring.compute.gpu.partial_results import Part, is_aligned
from ring.plan.ranges import Ints

_MAX_ROW_STEP = 32  # most distance of a program's rows; a wider grid holds only some of them
_ROWS, _WARPS = 32, 4  # rows, and warps, of a program
_MOST_UNROLLED = 4  # parts of a head that are read without a branch
_KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_MERGES, _TABLES = 256, 64  # cached merges, and tables of each by address


def _column(field: Field) -> tl.constexpr:
    """Return a column of the table as a constant: Triton reads only these from a module."""
    return tl.constexpr(int(field))


_OUT, _LSE = _column(Field.OUT), _column(Field.LSE)
_START, _END, _STEP, _LENGTH = map(_column, (Field.START, Field.END, Field.STEP, Field.LENGTH))
_FOLD_STEP, _FOLDS = _column(Field.FOLD_STEP), _column(Field.FOLDS)
_OUT_FOLD, _OUT_BATCH, _OUT_ROW = map(_column, (Field.OUT_FOLD, Field.OUT_BATCH, Field.OUT_ROW))
_LSE_FOLD, _LSE_BATCH, _LSE_ROW = map(_column, (Field.LSE_FOLD, Field.LSE_BATCH, Field.LSE_ROW))
_IS_FP32, _DIVISOR, _PLACES = map(_column, (Field.IS_FP32, Field.DIVISOR, Field.PLACES))
_FIELDS = tl.constexpr(len(Field))


@triton.jit
def _load_rows(entry, where, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load numbers of a part in fp32; 0 where masked."""
    at = tl.load(entry + _OUT).to(tl.pointer_type(KIND)) + where
    if ALIGNED:
        at = tl.multiple_of(at, (16, 16))
    return tl.load(at, mask, other=0.0).to(tl.float32)


@triton.jit
def _may_hold(entry, begin, span):  # type: ignore[no-untyped-def]
    """Return True if a part may hold rows of a program: those from `begin` to `begin + span - 1`."""
    start, end = tl.load(entry + _START).to(tl.int32), tl.load(entry + _END).to(tl.int32)
    divisor = tl.load(entry + _DIVISOR).to(tl.int32)
    return (begin < end) & (begin + span > start) & ((begin - start) % divisor == 0)


@triton.jit
def _add_part(  # type: ignore[no-untyped-def]
    entry, batch, fold, index, held, changed, column, inside, total, top, weight,
    DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Return (total, top, weight) with a part, whose numbers lie at (fold, index) of each row held."""
    offset = batch * tl.load(entry + _OUT_BATCH) + index * tl.load(entry + _OUT_ROW)
    if FOLDED:
        offset += fold * tl.load(entry + _OUT_FOLD)
    where = offset[:, None] + column[None, :]
    read = held & changed
    mask = read[:, None] & inside[None, :] if DIM < BLOCK else read[:, None]
    if WIDE == 2:  # some parts are fp32, some are not
        if tl.load(entry + _IS_FP32) != 0:
            part = _load_rows(entry, where, mask, tl.float32, ALIGNED)
        else:
            part = _load_rows(entry, where, mask, KIND, ALIGNED)
    else:
        part = _load_rows(entry, where, mask, tl.float32 if WIDE else KIND, ALIGNED)
    if WEIGHTED:
        at = batch * tl.load(entry + _LSE_BATCH) + index * tl.load(entry + _LSE_ROW)
        if FOLDED:
            at += fold * tl.load(entry + _LSE_FOLD)
        new = tl.load(tl.load(entry + _LSE).to(tl.pointer_type(tl.float32)) + at, held, other=float("-inf"))
        higher = tl.where((top != top) | (new != new), top + new, tl.maximum(top, new))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old_share, share = tl.exp(top - base), tl.exp(new - base)
        total = total * old_share[:, None] + part * share[:, None]  # not held: 0 * exp(-inf)
        weight = weight * old_share + share
        top = higher
    else:
        total += part
    return total, top, weight


@triton.jit
def _within(entry, row):  # type: ignore[no-untyped-def]
    """Return (index, held): the place of each row in a part of consecutive rows, and whether it has one."""
    index = row - tl.load(entry + _START).to(tl.int32)
    return index, (index >= 0) & (index < tl.load(entry + _LENGTH).to(tl.int32))


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    entries, first, out, lse, twin, sinks,
    out_batch, out_row, out_head, lse_batch, lse_head, lse_row, tokens, heads, apart, lanes, twin_entries,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BASES: tl.constexpr, LANES: tl.constexpr, LISTED: tl.constexpr,
    SINKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge every `apart`-th row of one head and batch. WEIGHTED: average by lse; else sum. KIND: the 16-bit type.
    WIDE: 0: no part is fp32; 1: all are; 2: some are. BASES: rows that only a head's first parts hold, so many, are in
    `out` already. twin: a second output like `out`, with entries `twin_entries` further on. LANES: the lanes are listed
    after `first`. LISTED: some parts list their rows. SINKS: every row begins with output 0 and the head's number of
    `sinks` as lse. PARTS: every head has so many parts, all of consecutive rows, which are read without a branch, so
    that no part waits for the one before; 0: parts are tested one by one.
    """
    if tl.program_id(2) == 1:
        out = twin
        first += twin_entries
        entries += twin_entries
    lane = tl.program_id(0) % lanes  # programs on neighbouring memory run together
    if LANES:
        lane = tl.load(first + heads + 1 + lane).to(tl.int32)
    head = lane % heads
    begin = tl.program_id(0) // lanes * (ROWS * apart) + lane // heads
    row = begin + apart * tl.arange(0, ROWS)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    changed = row < tokens
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        top = weight + tl.load(sinks + head)
        weight = tl.where(top == float("-inf"), 0.0, 1.0)
    if PARTS:
        if BASES:
            others = row < 0
            for number in tl.static_range(BASES, PARTS):
                _, held = _within(entries + (head * PARTS + number) * _FIELDS, row)
                others |= held
            changed &= others
        for number in tl.static_range(PARTS):
            entry = entries + (head * PARTS + number) * _FIELDS
            index, held = _within(entry, row)
            held &= row < tokens
            total, top, weight = _add_part(
                entry, batch, index, index, held, changed, column, inside, total, top, weight,
                DIM, BLOCK, KIND, ALIGNED, WEIGHTED, WIDE, False,
            )  # fmt: skip
    else:
        begins, ends = tl.load(first + head), tl.load(first + head + 1)
        if BASES:
            others = 0
            for number in range(begins + BASES, ends):
                others += _may_hold(entries + number * _FIELDS, begin, ROWS * apart).to(tl.int32)
            changed &= others > 0
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
                if LISTED:
                    places = tl.load(entry + _PLACES)
                    there = (places != 0) & (within >= 0) & (row < tl.load(entry + _END).to(tl.int32)) & (row < tokens)
                    listed = tl.load(places.to(tl.pointer_type(tl.int32)) + within, there, other=-1)
                    fold = tl.where(places != 0, tl.maximum(listed, 0) // length, fold)
                    index = tl.where(places != 0, tl.maximum(listed, 0) - fold * length, index)
                    held = tl.where(places != 0, listed >= 0, held)
                total, top, weight = _add_part(
                    entry, batch, fold, index, held, changed, column, inside, total, top, weight,
                    DIM, BLOCK, KIND, ALIGNED, WEIGHTED, WIDE, True,
                )  # fmt: skip
    if WEIGHTED:
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * (1.0 / tl.where(weight == 0.0, 1.0, weight))[:, None]  # faster than a division for each number
        tl.store(lse + batch * lse_batch + head * lse_head + row * lse_row, base + tl.log(weight), row < tokens)
    to = out + (batch * out_batch + head * out_head + row.to(tl.int64) * out_row)[:, None] + column[None, :]
    if ALIGNED:
        to = tl.multiple_of(to, (16, 16))
    mask = changed[:, None] & inside[None, :] if DIM < BLOCK else changed[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask)


@dataclass(frozen=True, eq=False)
class Job:
    """A pass over an output: its parts, out (B, N, H, D), lse (B, H, N) if weighted, the 16-bit type, and lse of one
    more part, of output 0, for each head: fp32 (H,), or None. in_place: number of parts, the first, that `out` holds
    before the pass. They cover it once, with as many parts for every head (`ring.plan.cover`).
    """

    parts: list[Part]
    out: torch.Tensor
    lse: torch.Tensor | None
    kind: torch.dtype
    sinks: torch.Tensor | None = None
    in_place: int = 0

    @property
    def bases(self) -> int:
        """Number of a head's parts in place."""
        return (
            sum(part.heads.groups * part.heads.per_group for part in self.parts[: self.in_place]) // self.out.shape[2]
        )

    @property
    def done(self) -> bool:
        return not self.out.numel() or (0 < self.in_place == len(self.parts) and self.lse is None)

    def copy_lse(self) -> None:
        """Copy lse of the parts in place."""
        assert self.lse is not None
        for part in self.parts[: self.in_place]:
            rows, heads = part.rows, part.heads
            assert part.lse is not None
            own = self.lse.narrow(1, heads.start, heads.groups * heads.per_group)
            own = own.narrow(2, rows.start, rows.folds * rows.length)
            own = own.unflatten(2, (rows.folds, rows.length)).unflatten(1, (heads.groups, heads.per_group))
            own.copy_(part.lse.permute(1, 2, 3, 0, 4))

    def geometry(self) -> tuple[object, ...]:
        """Return a key that is equal for jobs that differ only in addresses and values of their tensors."""
        out, lse = self.out, self.lse
        parts = tuple(
            (
                x.rows,
                x.heads,
                x.out.stride(),
                x.out.dtype,
                x.out.data_ptr() % 16,
                None if x.lse is None else x.lse.stride(),
            )
            for x in self.parts
        )
        where = out.device, out.shape, out.stride(), out.dtype, out.data_ptr() % 16
        sinks = None if self.sinks is None else self.sinks.data_ptr() % 16
        return where, None if lse is None else lse.stride(), self.kind, self.in_place, sinks, parts

    def addresses(self) -> list[int]:
        """Return the address of each part, followed by that of its lse if the job is weighted."""
        if self.lse is None:
            return [part.out.data_ptr() for part in self.parts]
        return [x.data_ptr() for part in self.parts for x in (part.out, part.lse) if x is not None]


class _Table(NamedTuple):
    """The table of one job on the GPU: the index of each head's first entry, and the entries."""

    first: torch.Tensor
    entries: torch.Tensor


class _Launch:
    """Launch arguments of a job except addresses, for all jobs of equal geometry."""

    def __init__(self, job: Job) -> None:
        out, lse, parts = job.out, job.lse, job.parts
        batch, tokens, heads, dim = out.shape
        row_step = min(_MAX_ROW_STEP, max((part.rows.step for part in parts if part.rows.index is None), default=1))
        self.places = [list_places(part.rows, out.device) for part in parts if part.rows.index is not None]
        fp32 = sum(part.out.dtype == torch.float32 for part in parts)
        out_batch, out_row, out_head, _ = out.stride()
        lse_batch, lse_head, lse_row = (0, 0, 0) if lse is None else lse.stride()
        self.weighted = 1 if lse is None else 2  # addresses of each part
        in_place = job.in_place if job.sinks is None else 0
        self.table, self.at, self.which, listed = self._entries(parts, row_step, heads, in_place)
        self.begin = heads + 1 if listed is None else heads + 1 + len(listed)  # index of the first entry in the table
        self.copies_lse = listed is not None and lse is not None
        self.lanes = row_step * heads if listed is None else len(listed)
        self.numbers = (
            out_batch, out_row, out_head, lse_batch, lse_head, lse_row, tokens, heads, row_step, self.lanes,
            len(self.table),
        )  # fmt: skip
        self.constants: dict[str, Any] = {
            "DIM": dim, "BLOCK": triton.next_power_of_2(dim), "ROWS": _ROWS,
            "KIND": _KINDS.get(job.kind, tl.bfloat16),
            "ALIGNED": dim % 8 == 0 and all(is_aligned(x) for x in (out, *(part.out for part in parts))),
            "WEIGHTED": lse is not None, "WIDE": 0 if not fp32 else 1 if fp32 == len(parts) else 2,
            "BASES": job.bases if in_place else 0, "LANES": listed is not None, "LISTED": bool(self.places),
            "SINKS": job.sinks is not None, "PARTS": _unrolled(parts, np.diff(self.table[: heads + 1])),
        }  # fmt: skip
        # One launch can write two outputs of equal form.
        self.form = (
            out.shape,
            out.stride(),
            out.dtype,
            self.numbers,
            self.constants,
            None if listed is None else listed.tobytes(),
        )
        programs = triton.cdiv(tokens, _ROWS * row_step) * self.lanes
        self._alone, self._with_twin = (
            Launcher(_combine, (programs, batch, outputs), _WARPS, self.numbers, self.constants) for outputs in (1, 2)
        )

    def _entries(
        self, parts: list[Part], row_step: int, heads: int, in_place: int
    ) -> tuple[Ints, Ints, Ints, Ints | None]:
        """Return (table, at, which, lanes). table: the first entry of each head, (H + 1,), the lanes, then the entries
        by head, (entries, fields), with relative addresses. Add address number `which[i]` of the job to the table at
        `at[i]`. lanes: those that parts beyond the first `in_place` may hold; None: all.
        """
        if not parts:
            empty = np.zeros(0, np.int64)
            return np.zeros(heads + 1, np.int64), empty, empty, None
        tables = [make_entries(part, row_step) for part in parts]
        which = np.repeat(np.arange(len(parts)), [len(table) for _, table in tables])
        head, table = (np.concatenate(column) for column in zip(*tables, strict=True))
        lanes = list_lanes(head[which >= in_place], table[which >= in_place], row_step, heads) if in_place else None
        if lanes is not None and len(lanes) == row_step * heads:
            lanes = None
        order = np.argsort(head, kind="stable")
        begins = [np.searchsorted(head[order], np.arange(heads + 1)), *([] if lanes is None else [lanes])]
        row = sum(map(len, begins)) + len(Field) * np.arange(len(order))
        fields = (Field.OUT, Field.LSE)[: self.weighted]
        at = np.concatenate([row + field for field in fields])
        which = np.concatenate([self.weighted * which[order] + i for i in range(self.weighted)])
        return np.concatenate([*begins, table[order].reshape(-1)]), at, which, lanes

    def __call__(self, job: Job, table: _Table, twin: torch.Tensor | None) -> None:
        """Launch the job. twin: the output of another job of equal form, whose entries follow."""
        if self.copies_lse:
            job.copy_lse()
        if not self.lanes:
            return
        out, lse, sinks = job.out, job.out if job.lse is None else job.lse, job.out if job.sinks is None else job.sinks
        if twin is None:
            self._alone(table.entries, table.first, out, lse, out, sinks)
        else:
            self._with_twin(table.entries, table.first, out, lse, twin, sinks)


def _unrolled(parts: Sequence[Part], counts: Ints) -> int:
    """Return the parts of each head, whose numbers are `counts`, if the kernel reads them without a branch, else 0."""
    straight = all(part.rows.index is None and part.rows.folds == part.rows.step == 1 for part in parts)
    few = counts.min() == counts.max() <= _MOST_UNROLLED
    return int(counts[0]) if straight and few else 0


class _Merge:
    """A sequence of jobs, prepared for all jobs of equal geometry. They share one table. Two jobs of equal form, such
    as those of keys and values mostly are, share one launch.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._launches = [_Launch(job) for job in jobs]
        sizes = [len(launch.table) for launch in self._launches]
        begins = np.cumsum([0, *sizes])
        counts = np.cumsum([0, *(len(job.addresses()) for job in jobs)])
        self._template = np.concatenate([x.table for x in self._launches])
        self._at = np.concatenate([x.at + begin for x, begin in zip(self._launches, begins, strict=False)])
        self._which = np.concatenate([x.which + count for x, count in zip(self._launches, counts, strict=False)])
        first, second = self._launches[0], self._launches[-1]
        self._twins = len(jobs) == 2 and first.form == second.form
        self._tables: BoundedCache[tuple[int, ...], list[_Table]] = BoundedCache(_TABLES)

    def run(self, jobs: Sequence[Job]) -> None:
        tables = self._find_tables(jobs)
        if self._twins:
            self._launches[0](jobs[0], tables[0], jobs[1].out)
            return
        for launch, job, table in zip(self._launches, jobs, tables, strict=True):
            launch(job, table, None)

    def _find_tables(self, jobs: Sequence[Job]) -> list[_Table]:
        """Return the jobs' tables on the GPU. Allocators give tensors the addresses of the step before, so tables are
        cached by the addresses in them and by the stream of their copy.
        """
        addresses = [address for job in jobs for address in job.addresses()]
        device = jobs[0].out.device
        if torch.cuda.is_current_stream_capturing():
            keep_alive([launch.places for launch in self._launches])
            return self._split_tables(graph_table(self._with_addresses(addresses), device))
        key = torch._C._cuda_getCurrentRawStream(device.index), *addresses
        tables = self._tables.get(key)
        if tables is None:
            host = torch.from_numpy(self._with_addresses(addresses)).pin_memory()
            tables = self._tables.put(key, self._split_tables(host.to(device, non_blocking=True)))
        return tables

    def _split_tables(self, whole: torch.Tensor) -> list[_Table]:
        parts = whole.split([len(launch.table) for launch in self._launches])
        return [_Table(part, part[launch.begin :]) for launch, part in zip(self._launches, parts, strict=True)]

    def _with_addresses(self, addresses: list[int]) -> Ints:
        table = self._template.copy()
        table[self._at] += np.array(addresses, np.int64)[self._which]
        return table


_merges: BoundedCache[tuple[object, ...], _Merge] = BoundedCache(_MERGES)


def run(jobs: Sequence[Job]) -> None:
    """Run jobs."""
    jobs = [job for job in jobs if not job.done]
    if not jobs:
        return
    key = tuple(job.geometry() for job in jobs)
    merge = _merges.get(key)
    if merge is None:
        merge = _merges.put(key, _Merge(jobs))
    merge.run(jobs)
