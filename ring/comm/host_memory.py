"""Ranks of one machine agree in its memory: each writes its answer into a page that all of them have, and reads the
others'.

On GPUs a question by NCCL is a kernel: it waits for its turn, and the host waits for it. In a question here
no GPU takes part: a rank waits for the other hosts alone.

A page has a slot for every rank, twice, and questions take turns: a rank that writes the answer to question n + 2 has
seen all answers to n + 1, so no rank still reads those to n. A rank that gives up says so in its slot, and a rank whose
process ends loses its lock on a byte of the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import tempfile
import time
from datetime import timedelta

import torch.distributed as dist

from ring.comm.transport import Absent

FOLDER = "/dev/shm"  # of files in memory
PAYLOAD = 16  # bytes of an answer
_NUMBER, _CHECK = 8, 8  # bytes of a question's number, and of what tells a slot that is being written
_SLOT = _NUMBER + PAYLOAD + _CHECK
_GAVE_UP = b"gave up".ljust(PAYLOAD)
_SPINS = 300  # looks before the first pause: about 0.1 ms
_SOON, _PAUSE, _LATE_PAUSE = 0.002, 1e-5, 1e-3  # seconds: within the first, pauses are short
_LOOK = 0.2  # seconds after which a rank that waits looks whether the others are alive


class HostMemory:
    """The page of a group's ranks, which all run on one machine. Made collectively.

    store: one that only this group has. timeout: of a question.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        if rank == 0:
            number, name = tempfile.mkstemp(prefix="ring-", dir=FOLDER)
            self._file = os.fdopen(number, "r+b", buffering=0)
            self._file.truncate(2 * world_size * _SLOT)
            store.set("file", name)
        else:
            name = store.get("file").decode()
            self._file = open(name, "r+b", buffering=0)  # noqa: SIM115 - open as long as the page is there
        self._page = mmap.mmap(self._file.fileno(), 2 * world_size * _SLOT)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        store.set(f"there {rank}", "")
        store.wait([f"there {other}" for other in range(world_size)])
        if rank == 0:
            os.unlink(name)  # the page is there as long as a process has it

    def all_equal(self, payload: bytes, number: int) -> bool:
        """Whether all ranks gave the same PAYLOAD bytes. Collective. number: of the question, the same on every rank,
        and one more than at the last question.

        Raises Absent if a rank does not come within the timeout, or its process has ended.
        """
        answer = _slot_of(number, payload)
        mine = self._begin(self._rank, number)
        self._page[mine : mine + _SLOT] = answer
        equal = True
        for rank in range(self._world_size):
            if rank != self._rank:
                equal &= self._equal(rank, number, answer)  # look at all: they may then go on
        return equal

    def _begin(self, rank: int, number: int) -> int:
        return _SLOT * (number % 2 * self._world_size + rank)

    def _equal(self, rank: int, number: int, answer: bytes) -> bool:
        """Whether this rank's answer is that one, once it is there."""
        begin = self._begin(rank, number)
        for _ in range(_SPINS):
            if self._page[begin : begin + _SLOT] == answer:
                return True
        began = time.monotonic()
        looked = began
        while not self._is_there(rank, number):
            now = time.monotonic()
            if now - began > self._timeout.total_seconds():
                self._give_up(number, f"the group's timeout of {self._timeout} is over")
            if now - looked > _LOOK:
                looked = now
                if self._has_ended(rank):
                    self._give_up(number, "its process has ended")
            time.sleep(_PAUSE if now - began < _SOON else _LATE_PAUSE)
        found = self._page[begin : begin + _SLOT]
        if found[_NUMBER : _NUMBER + PAYLOAD] == _GAVE_UP:
            raise Absent((), "another rank has given up")
        return found == answer

    def _is_there(self, rank: int, number: int) -> bool:
        begin = self._begin(rank, number)
        found = self._page[begin : begin + _SLOT]
        return found == _slot_of(number, found[_NUMBER : _NUMBER + PAYLOAD])

    def _give_up(self, number: int, why: str) -> None:
        """Raises Absent."""
        mine = self._begin(self._rank, number)
        self._page[mine : mine + _SLOT] = _slot_of(number, _GAVE_UP)
        raise Absent([rank for rank in range(self._world_size) if not self._is_there(rank, number)], why)

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:  # it has the lock
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _slot_of(number: int, payload: bytes) -> bytes:
    what = number.to_bytes(_NUMBER, "little") + payload
    return what + hashlib.blake2b(what, digest_size=_CHECK).digest()


def machine(folder: str = FOLDER) -> str:
    """Equal for processes of one machine that share its memory: of one boot and one file system for it. Its name would
    not do, since many machines are called localhost. Where a process cannot write there: equal to no other's.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    if not os.access(folder, os.W_OK):
        return f"{boot} alone {os.getpid()}"
    return f"{boot} {os.stat(folder).st_dev}"
