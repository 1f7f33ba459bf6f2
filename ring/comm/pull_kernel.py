"""Reads short messages from the memory of other GPUs, in one kernel that also sets the flags and waits for them.

A copy engine and flags on streams take 10 us before the first byte arrives and 7 after the last one, in which a short
call computes nothing. The kernel needs multiprocessors, but a short message leaves them soon.

A program reads the same share of every message of one rank. It has flags of its own, so programs do not wait for each
other: it sets "ready" at a rank that reads here, waits for "ready" of the rank that it reads, reads, and adds one to
"done" there. All programs of a batch must fit on a GPU at once: one that waits for room would set no flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from ring.caching.triton_launcher import Launcher
from ring.comm.copy_batch import SHARE_WARPS, SHARES, Lane

_BLOCK = 2**14  # bytes that a program reads at a time
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _pull(  # type: ignore[no-untyped-def]
    table, shared, buffer, LANES: tl.constexpr, ALIGN: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table: (LANES, 5) int64 of flags and of the first and last copy, then (copies, 3) of words."""
    share, lane = tl.program_id(0), table + tl.program_id(1) * 5
    flag = tl.pointer_type(tl.int32)
    there = tl.load(lane)
    if there != 0:
        tl.atomic_xchg((there + 4 * share).to(flag), 1, sem="release", scope="sys")
    here = tl.load(lane + 1)
    if here != 0:
        while tl.atomic_cas((here + 4 * share).to(flag), 1, 0, sem="acquire", scope="sys") != 1:
            pass
        for number in range(tl.load(lane + 3), tl.load(lane + 4)):
            copy = table + LANES * 5 + number * 3
            source, to = tl.multiple_of(tl.load(copy), ALIGN), tl.multiple_of(tl.load(copy + 1), ALIGN)
            size = tl.multiple_of(tl.load(copy + 2), ALIGN)
            for start in range(share * BLOCK, size, SHARES * BLOCK):
                at = start + tl.arange(0, BLOCK)
                words = tl.load(shared + source + at, at < size, cache_modifier=".cg")
                tl.store(buffer + to + at, words, at < size)
        tl.debug_barrier()  # the whole share is read
        tl.atomic_add(tl.load(lane + 2).to(flag), 1, sem="release", scope="sys")


@triton.jit
def _wait(table, COUNT: tl.constexpr, SHARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """table: (COUNT,) int64 of addresses."""
    for number in range(COUNT):
        flag = tl.load(table + number).to(tl.pointer_type(tl.int32))
        while tl.atomic_cas(flag, SHARES, 0, sem="acquire", scope="sys") != SHARES:
            pass


class Waiter:
    """The kernel that waits until all programs of other ranks have read. done: addresses of their counts."""

    def __init__(self, done: Sequence[int], device: torch.device) -> None:
        self._table = torch.tensor(done, dtype=torch.int64, device=device)
        self._launch = Launcher(_wait, (1, 1, 1), 1, (), {"COUNT": len(done), "SHARES": SHARES}) if done else None

    def __call__(self) -> None:
        """Wait, on the current stream."""
        if self._launch is not None:
            self._launch(self._table)


class Puller:
    """The kernel for one batch of a kind of call. shared: this rank's shared memory, bytes."""

    def __init__(self, lanes: Sequence[Lane], shared: torch.Tensor) -> None:
        copies = [copy for lane in lanes for copy in lane.copies]
        self._divisor = gcd(16, *(number for copy in copies for number in copy))
        word = min(8, self._divisor)
        rows, end = [], 0
        for lane in lanes:
            rows += [lane.ready_there, lane.ready_here, lane.done_there, end, end + len(lane.copies)]
            end += len(lane.copies)
        rows += [number // word for copy in copies for number in copy]
        self._lanes, self._word = len(lanes), word
        self._table = torch.tensor(rows, dtype=torch.int64, device=shared.device)
        self._shared = _as_words(shared, word)

    def __call__(self, buffer: torch.Tensor | None) -> None:
        """Read the messages into a buffer, on the current stream. None: there are none, but others read here."""
        buffer = self._shared if buffer is None else buffer
        words = _as_words(buffer.view(-1).view(torch.uint8), self._word)
        launch = _launcher(self._lanes, buffer.device, self._word, self._divisor // self._word, words.data_ptr() % 16)
        launch(self._table, self._shared, words)


def _as_words(memory: torch.Tensor, word: int) -> torch.Tensor:
    """View bytes as words, without those at the end that are none: no copy ends there."""
    return memory[: memory.numel() // word * word].view(_WORDS[word])


@lru_cache(maxsize=1024)
def _launcher(lanes: int, device: torch.device, word: int, align: int, begin: int) -> Launcher:
    """Return the launcher for so many lanes. begin: address of the buffer modulo 16."""
    constants = {"LANES": lanes, "ALIGN": align, "SHARES": SHARES, "BLOCK": _BLOCK // word}
    return Launcher(_pull, (SHARES, lanes, 1), SHARE_WARPS, (), constants)
