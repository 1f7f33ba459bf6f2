"""Ranks of one machine agree in its memory: each writes its answer into a page that all of them have, and reads the
others'.

On GPUs a question by NCCL is a kernel: it waits for its turn, and the host waits for it. In a question here
no GPU takes part: a rank waits for the other hosts alone. On CPUs gloo's threads and sockets take longer than all else
in a call of few tokens.

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
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ring.comm.transport import MissingRanks

FOLDER = "/dev/shm"  # of files in memory
_NO_FILE = "/no file"  # which nobody can open
PAYLOAD = 16  # bytes of an answer
_NUMBER, _CHECK = 8, 8  # bytes of a question's number, and of what tells a slot that is being written
_SLOT = _NUMBER + PAYLOAD + _CHECK
_GAVE_UP = b"gave up".ljust(PAYLOAD)
_SPINS = 300  # looks before the first pause: about 0.1 ms
_SOON, _PAUSE, _LATE_PAUSE = 0.002, 1e-5, 1e-3  # seconds: within the first, pauses are short
_LOOK = 0.2  # seconds after which a rank that waits looks whether the others are alive


def host_memory_of(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> HostMemory | None:
    """The page of a group's ranks; None, on every rank, where they run on several machines, or several in one process,
    or where one of them cannot have it. Collective.

    store: one that only this group has. timeout: of this, and of a question. Raises Absent if a rank does not come.
    """
    ranks = _StoreGather(store, rank, world_size, timeout)
    places = ranks.gather("machine", f"{machine()} {os.getpid()}")
    machines, processes = {place.rpartition(" ")[0] for place in places}, set(places)
    if len(machines) > 1 or len(processes) < world_size:
        return None
    size = 2 * world_size * _SLOT
    made = _new_file(size) if rank == 0 else _NO_FILE
    try:
        name = ranks.gather("file", made)[0]
        try:
            memory = HostMemory(name, size, rank, world_size, timeout)
        except OSError:  # there is no file, or this process has too many open
            memory = None
        everyone = ranks.gather("page", "no" if memory is None else "yes")
    finally:
        if made != _NO_FILE:
            os.unlink(made)  # the page is there as long as a process has it
    return None if "no" in everyone else memory


def _new_file(size: int) -> str:
    """Its name; _NO_FILE if there can be none."""
    name = _NO_FILE
    try:
        number, name = tempfile.mkstemp(prefix="ring-", dir=FOLDER)
        with os.fdopen(number, "wb") as file:
            file.write(bytes(size))  # memory for it is taken here, and not missed in a later write to the page
    except OSError:
        if name != _NO_FILE:
            os.unlink(name)
        return _NO_FILE
    return name


@dataclass(frozen=True)
class _StoreGather:
    """Ranks that tell each other something through a store."""

    store: dist.Store
    rank: int
    world_size: int
    timeout: timedelta

    def gather(self, what: str, mine: str) -> list[str]:
        """What every rank says of it. Raises Absent."""
        keys = [f"{what} of rank {rank}" for rank in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], mine)
            self.store.wait(keys, self.timeout)
            return [said.decode() for said in self.store.multi_get(keys)]
        except RuntimeError as error:
            raise MissingRanks(self._missing(keys), str(error).partition("\n")[0]) from error

    def _missing(self, keys: list[str]) -> list[int] | None:
        with suppress(RuntimeError):
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return None  # the store is gone, which one of the ranks may serve


class HostMemory:
    """The page of a group's ranks, which all run on one machine: see `host_memory_of`.

    file: the page's. size: in bytes. timeout: of a question. Raises OSError where the file cannot be had.
    """

    def __init__(self, file: str, size: int, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._file = open(file, "r+b", buffering=0)  # noqa: SIM115 - open as long as the page is there
        self._page = mmap.mmap(self._file.fileno(), size)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

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
            raise MissingRanks((), "another rank has given up")
        return found == answer

    def _is_there(self, rank: int, number: int) -> bool:
        begin = self._begin(rank, number)
        found = self._page[begin : begin + _SLOT]
        return found == _slot_of(number, found[_NUMBER : _NUMBER + PAYLOAD])

    def _give_up(self, number: int, why: str) -> None:
        """Raises Absent."""
        mine = self._begin(self._rank, number)
        self._page[mine : mine + _SLOT] = _slot_of(number, _GAVE_UP)
        raise MissingRanks([rank for rank in range(self._world_size) if not self._is_there(rank, number)], why)

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
