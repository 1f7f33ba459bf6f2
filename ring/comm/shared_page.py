"""Consensus through shared memory for ranks on one host: each writes its payload to a shared page and polls the others.

With NCCL a round of consensus is a kernel that queues behind others while the host waits. Here no GPU takes part. With
gloo, threads and sockets take longer than the rest of a call of few tokens.

A page has two sets of slots, one slot per rank in each, and rounds alternate between them. A rank that writes round
n + 2 has seen all payloads of round n + 1, so no rank still reads those of n. The first rank that gives up, or is
interrupted, leaves a note, after which no round begins. A rank whose process ends loses its lock on a byte of the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ring.comm.transport import MissingRanks

_NO_FILE = "/no file"  # cannot be opened
_NOTE_KEY = "note"  # in the store
FIRST = "machine"  # name of the first gather of `meet`
PAYLOAD = 16  # bytes
_NUMBER, _CHECK = 8, 8  # bytes of a round's number, and of the checksum that shows a half-written slot
_SLOT = _NUMBER + PAYLOAD + _CHECK
_NOTE = 512  # bytes of the note of a rank that has given up
_SPINS = 300  # reads before the first pause: about 0.1 ms
# Seconds. A rank only yields during the first: the kernel makes the shortest pause 0.06 ms, after which this rank would
# come late to the others, which would pause in turn, for every call.
_SOON, _PAUSE = 0.002, 1e-3
# Seconds between checks that the other processes are alive, or have not given up: first, and at most.
_LOOK, _MOST_LOOK = 0.2, 0.8
ENDED = "its process has ended"
_STORE_PAUSES, _STORE_SHARE = (2e-4, 0.25), 0.05  # seconds, first and longest; share of the time waited so far


class Meeting(NamedTuple):
    """Facts that the ranks of a group exchange once. page: None if the ranks are on several machines, if two share a
    process, or if one of them cannot open the page. hosts: number of each rank's host, by first appearance.
    """

    page: SharedPage | None
    hosts: tuple[int, ...]


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    has_ended: Callable[[int], bool] = lambda rank: False,
) -> Meeting:
    """Return the meeting of a group's ranks, the same on each. Collective.

    store: used by this group only. timeout: of this call, and of a round. has_ended: True for a rank that cannot come
    any more. Raises MissingRanks if a rank does not come.
    """
    ranks = _StoreGather(store, rank, world_size, timeout, has_ended)
    gathered = ranks.gather(FIRST, f"{host()}\n{machine()} {os.getpid()}")
    hosts, _, places = zip(*(entry.rpartition("\n") for entry in gathered), strict=True)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    together = len({place.rpartition(" ")[0] for place in places}) == 1 and len(set(places)) == world_size
    page = _shared_page(ranks, rank, world_size, timeout) if together else None
    return Meeting(page, tuple(numbers[name] for name in hosts))


def _shared_page(ranks: _StoreGather, rank: int, world_size: int, timeout: timedelta) -> SharedPage | None:
    """Return the page of ranks on one machine; None on every rank if one of them cannot open it."""
    size = page_size(world_size)
    file, page = _new_file(size) if rank == 0 else None, None
    try:
        name = ranks.gather("file", _NO_FILE if file is None else f"/proc/{os.getpid()}/fd/{file}")[0]
        with suppress(OSError):  # no such file, or too many open files in this process
            file = os.open(name, os.O_RDWR) if file is None else file  # a process that closes it twice loses its lock
            page = SharedPage(file, size, rank, world_size, timeout)
        answers = ranks.gather("page", "no" if page is None else "yes")
    finally:
        if page is None and file is not None:
            os.close(file)
    return None if "no" in answers else page


def page_size(world_size: int) -> int:
    """Bytes of a page: two sets of slots, the flag that a note is there, and the note."""
    return 2 * world_size * _SLOT + 1 + _NOTE + _CHECK


def gather_key(name: str, rank: int) -> str:
    """Return the key in the store of what a rank says in a gather."""
    return f"{name} of rank {rank}"


def _new_file(size: int) -> int | None:
    """Create a file of zeros in memory, without a name, so that nothing of it outlives its ranks however they end. None
    if that fails.
    """
    try:
        file = os.memfd_create("ring-page")
        os.write(file, bytes(size))  # allocate now, so that a lack of memory fails here and not as SIGBUS later
    except OSError:
        return None
    return file


@dataclass(frozen=True)
class StoreNote:
    """The note of the first rank that gives up, or is interrupted. A store that has ended is no error."""

    store: dist.Store
    rank: int

    def leave(self, missing: MissingRanks) -> None:
        """Tell the other ranks, unless one of them has left a note."""
        with suppress(RuntimeError):
            if not self.store.check([_NOTE_KEY]):
                self.store.set(_NOTE_KEY, missing.note.decode())

    def read(self) -> MissingRanks | None:
        with suppress(RuntimeError):
            if self.store.check([_NOTE_KEY]):
                return MissingRanks.from_note(self.store.get(_NOTE_KEY), self.rank)
        return None


@dataclass(frozen=True)
class _StoreGather:
    """Gathers strings of all ranks through a store. timeout: of one `gather`. A rank that comes when others have given
    up raises, too, and blames none of them. has_ended: see `meet`.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout: timedelta
    has_ended: Callable[[int], bool] = lambda rank: False

    def gather(self, name: str, value: str) -> list[str]:
        """Return the values of all ranks. Raises MissingRanks."""
        keys = [gather_key(name, rank) for rank in range(self.world_size)]
        note = StoreNote(self.store, self.rank)
        try:
            self.store.set(keys[self.rank], value)
            missing = self._wait(keys, note)
            values = [] if missing else self.store.multi_get(keys)
        except RuntimeError as error:
            raise MissingRanks(None, str(error).partition("\n")[0]) from error
        if missing:
            note.leave(missing)
            raise missing
        return [value.decode() for value in values]

    def _wait(self, keys: list[str], note: StoreNote) -> MissingRanks | None:
        """Return None once all keys are there, or else which ranks do not come. Polls: `store.wait` keeps Ctrl-C, and
        other threads' use of the store, out, and TCPStore's prints warnings. Raises RuntimeError without a store.
        """
        began, look = time.monotonic(), _LOOK
        while not self.store.check(keys):
            waited = time.monotonic() - began
            if waited > look:
                look = waited + min(_MOST_LOOK, max(_LOOK, _STORE_SHARE * waited))
                if said := note.read():
                    return said
                if ended := [rank for rank in self._missing(keys) if self.has_ended(rank)]:
                    return note.read() or MissingRanks(ended, ENDED)
            if waited > self.timeout.total_seconds():
                return MissingRanks(self._missing(keys), f"the group's timeout of {self.timeout} is over")
            time.sleep(min(_STORE_PAUSES[1], max(_STORE_PAUSES[0], _STORE_SHARE * waited)))
        return note.read()

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]


class SharedPage:
    """The page of a group whose ranks run on one machine: see `meet`.

    file: open for reading and writing; the page closes it. size: in bytes. timeout: of a round.
    """

    def __init__(self, file: int, size: int, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._page, self._file, self._flag = mmap.mmap(file, size), file, 2 * world_size * _SLOT
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.close = weakref.finalize(self, os.close, file)

    def all_equal(self, payload: bytes, number: int) -> bool:
        """Return True if all ranks passed the same PAYLOAD bytes. Collective.

        number: of the round, the same on every rank, one more than in the last round. Raises MissingRanks if a rank
        does not come within the timeout, or its process has ended.
        """
        if said := self.read():
            raise said
        slot = _pack_slot(number, payload)
        begin = self._begin(self._rank, number)
        self._page[begin : begin + _SLOT] = slot
        equal = True
        for rank in range(self._world_size):
            if rank != self._rank:
                equal &= self._slot_equals(rank, number, slot)  # read all: later rounds rely on it
        return equal

    def _begin(self, rank: int, number: int) -> int:
        return _SLOT * (number % 2 * self._world_size + rank)

    def _slot_equals(self, rank: int, number: int, slot: bytes) -> bool:
        """Wait until a rank has answered, and compare its slot."""
        begin = self._begin(rank, number)
        for _ in range(_SPINS):
            if self._page[begin : begin + _SLOT] == slot:
                return True
        began = time.monotonic()
        last_look = began
        while not self.has_come(rank, number):
            now = time.monotonic()
            if said := self.read():
                raise said
            if now - began > self._timeout.total_seconds():
                self._give_up(self._missing(number), f"the group's timeout of {self._timeout} is over")
            if now - last_look > _LOOK:
                last_look = now
                if self.has_ended(rank):
                    # Others may just be late, and this one may have come before it ended.
                    ended = [other for other in self._missing(number) if self.has_ended(other)]
                    if ended:
                        self._give_up(ended, ENDED)
            if now - began < _SOON:
                os.sched_yield()
            else:
                time.sleep(_PAUSE)
        return self._page[begin : begin + _SLOT] == slot

    def has_come(self, rank: int, number: int) -> bool:
        """Return True if a rank has come to a round. Does not wait."""
        begin = self._begin(rank, number)
        slot = self._page[begin : begin + _SLOT]
        return slot == _pack_slot(number, slot[_NUMBER : _NUMBER + PAYLOAD])

    def _missing(self, number: int) -> list[int]:
        return [rank for rank in range(self._world_size) if not self.has_come(rank, number)]

    def _give_up(self, missing: list[int], reason: str) -> None:
        """Tell the other ranks, and raise MissingRanks, or what another one has told before."""
        said = self.read() or MissingRanks(missing, reason)
        self.leave(said)
        raise said

    def leave(self, missing: MissingRanks) -> None:
        """Tell the other ranks, unless one of them has left a note."""
        if not self._page[self._flag]:
            self._page[self._flag + 1 :] = _checked(missing.note[:_NOTE].ljust(_NOTE))
            self._page[self._flag] = 1

    def read(self) -> MissingRanks | None:
        """Return the note of another rank, if there is one."""
        if not self._page[self._flag]:
            return None
        note = self._page[self._flag + 1 :]
        whole = note == _checked(note[:_NOTE])  # not so if two ranks wrote at once
        return MissingRanks.from_note(note[:_NOTE].rstrip() if whole else b" another rank has given up", self._rank)

    def has_ended(self, rank: int) -> bool:
        """Return True if the process of another rank has ended."""
        if rank == self._rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:  # the process still holds its lock
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _pack_slot(number: int, payload: bytes) -> bytes:
    return _checked(number.to_bytes(_NUMBER, "little") + payload)


def _checked(content: bytes) -> bytes:
    """Return the content with its checksum."""
    return content + hashlib.blake2b(content, digest_size=_CHECK).digest()


def host() -> str:
    """Return an id that processes on one host share: NCCL_HOSTID, by which NCCL tells hosts apart too, or the boot."""
    return os.environ.get("NCCL_HOSTID", _boot())


def machine() -> str:
    """Return an id that processes share if they have the same boot and the same numbers of processes. Host names are no
    such id: many machines are called localhost.
    """
    return f"{_boot()} {os.readlink('/proc/self/ns/pid')}"


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
