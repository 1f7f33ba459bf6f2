"""Finds where the rows of a put go, as integers for the kernel that writes them (`ring.comm.put_kernel`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

from ring.comm.transport import Target


class Entry(NamedTuple):
    """A target in memory. row, row_step, rows: of the tensor; columns: numbers of a row, (heads, B, D); to: the number
    at which it begins, from the start of the rank's shared memory, or of its own buffer if `own`; step: numbers from
    one row to the next.
    """

    row: int
    row_step: int
    rows: int
    head: int
    columns: int
    to: int
    step: int
    own: int


def entries(targets: Sequence[Target], rank: int, begin: Callable[[int], int], slot: int) -> list[Entry]:
    """List the targets. begin: the number at which the buffer of a peer begins; slot: numbers of a slot."""
    return [
        Entry(
            target.rows.start, target.rows.step, len(target.rows), target.heads.start, len(target.heads) * slot,
            (0 if target.peer == rank else begin(target.peer)) + target.first * slot, target.row_slots * slot,
            target.peer == rank,
        )
        for target in targets
    ]  # fmt: skip


def alignment(found: Sequence[Entry], most: int) -> int:
    """Return the largest divisor of `most` that divides all places: so many numbers can be written at once."""
    return gcd(most, *(number for entry in found for number in (entry.columns, entry.to, entry.step)))
