"""The transport over a torch process group, by gloo or NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

# This module captures the current default group as a default argument, for ever. Import it before any group exists, so
# that a destroyed group is freed and its threads end: otherwise `torch.library` imports it in the first call.
import torch.distributed.nn.functional

from ring.comm.call_order import Calls
from ring.comm.missing_ranks import Marks, done_by_event, done_by_work, read_timeout, wait_for_all
from ring.comm.shared_page import ENDED, FIRST, Meeting, SharedPage, StoreNote, gather_key, meet
from ring.comm.transport import LocalBuffers, Message, MissingRanks, Pending

T = TypeVar("T")
Works = Sequence[dist.Work]
Explain = Callable[[Callable[[Message], str], Message, Callable[[], Any]], Any]
_ALLREDUCE_MAX = dist.AllreduceOptions()
_ALLREDUCE_MAX.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
_group_infos: WeakKeyDictionary[dist.ProcessGroup, _GroupInfo] = WeakKeyDictionary()
_meetings: WeakKeyDictionary[dist.ProcessGroup, Meeting] = WeakKeyDictionary()
_notes: WeakKeyDictionary[dist.ProcessGroup, StoreNote | SharedPage] = WeakKeyDictionary()  # since the meeting began
_PROBE = 2**30  # tag of messages that nobody sends


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Backends of a group by device type, as {"cuda": "nccl"}; None: of the default group.

    `dist.get_backend` does not tell: it is "undefined" for a group created without a backend's name.
    """
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


class _PendingWorks:
    """The handles and tensors of one batch, kept until it is done: a dropped handle may lose its message. Wait for each
    once, since gloo hangs in a second wait.
    """

    def __init__(self, explain: Explain, sends: Works, receives: Works, messages: Sequence[Message]) -> None:
        """messages: received ones first."""
        self._explain, self._sends, self._receives, self._messages = explain, sends, receives, messages

    def arrive(self) -> None:
        # NCCL may return one work for a whole batch.
        for work, message in zip(self._receives, self._messages, strict=False):
            self._explain(_receive_failure, message, work.wait)
        self._receives = ()

    def wait(self) -> None:
        received = len(self._messages) - len(self._sends)
        self.arrive()
        for work, message in zip(self._sends, self._messages[received:], strict=True):
            self._explain(_send_failure, message, work.wait)
        self._sends, self._messages = (), ()


def _receive_failure(message: Message) -> str:
    return f"the message {message.label!r} from rank {message.peer} did not come"


def _send_failure(message: Message) -> str:
    return f"rank {message.peer} did not take the message {message.label!r}"


class _GroupInfo(NamedTuple):
    """Facts about a group, looked up once. calls: shared by all transports over the group."""

    world_size: int
    calls: Calls
    on_gpu: bool


def _find_info(group: dist.ProcessGroup) -> _GroupInfo:
    info = _group_infos.get(group)
    if info is None:
        info = _GroupInfo(dist.get_world_size(group), Calls(), "cpu" not in backends_of(group))
        info = _group_infos.setdefault(group, info)
        info.calls.tell = partial(_tell, ref(group))
    return info


def _tell(of: ref[dist.ProcessGroup], text: str, error: BaseException) -> None:
    """Tell the other ranks how a call ended, and end gloo's connections, so that they do not wait for its messages."""
    group, cause = of(), error.__cause__
    if group is None:
        return
    missing = MissingRanks([dist.get_rank(group)], f"there {text}")
    if isinstance(cause, MissingRanks):  # of several groups of a mesh, whose numbers are others, not this one
        missing = cause if not isinstance(cause.__cause__, MissingRanks) else MissingRanks((), str(error))
    with suppress(RuntimeError):
        find_note(group).leave(missing)
    for rank in {*range(dist.get_world_size(group))} - {dist.get_rank(group)}:
        _has_ended(group, rank, end=True)


def find_note(group: dist.ProcessGroup) -> StoreNote | SharedPage:
    """Return the place where a rank tells the others that no call on the group can be completed."""
    if group not in _notes:
        try:
            _notes[group] = StoreNote(_new_meeting(group), dist.get_rank(group))
        except RuntimeError:  # a store that has ended holds no notes
            return StoreNote(group.get_group_store(), dist.get_rank(group))
    return _notes[group]


def _has_ended(group: dist.ProcessGroup, rank: int, end: bool = False) -> bool:
    """Return True if gloo's connection to a rank has ended. end: end all of the group, as gloo does after a timeout."""
    if backends_of(group).get("cpu") != "gloo" or "TORCH_GLOO_LAZY_INIT" in os.environ:
        return False
    try:
        work = dist.irecv(torch.empty(1), group=group, group_src=rank, tag=_PROBE)
        if end and work is not None:
            work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return True
    return False


def _meeting_count(rank: int) -> str:
    """Key in a group's store of the number of this rank's meetings."""
    return f"ring/machines/rank {rank}"


def _new_meeting(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a new meeting. A destroyed group of the same name may have left keys in the group's store."""
    return _meeting(group, group.get_group_store().add(_meeting_count(dist.get_rank(group)), 1))


def _meeting(group: dist.ProcessGroup, number: int) -> dist.Store:
    return dist.PrefixStore(f"ring/machines/{number}", group.get_group_store())


def _forbid_inherited_groups() -> None:
    """Refuse calls on the groups that a forked process has from its parent."""
    for group in list(dist.distributed_c10d._world.pg_map):
        _find_info(group).calls.forbid(
            f"process {os.getpid()} was forked from process {os.getppid()}, which created the group: create one here"
        )


os.register_at_fork(after_in_child=_forbid_inherited_groups)


class ProcessGroupTransport(LocalBuffers):
    """A torch process group (gloo or NCCL), the whole world or part of it; peers are ranks of the group.

    Raises ValueError on a process that is not a member.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        assert group is not None
        self.group = group
        self.rank = dist.get_rank(self.group)  # not cached: it raises for a destroyed group
        if self.rank < 0:
            raise ValueError(f"group must contain the calling process; world rank {dist.get_rank()} is not a member")
        info = _find_info(group)
        self.world_size = info.world_size
        self.calls, self._on_gpu = info.calls, info.on_gpu

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in (*sends, *receives):
            _check(message, self.rank, self.world_size)
        # Post GPU tensors as one batch: separately, NCCL would serialise sends and receives, and may deadlock. The
        # tensors decide, because a group may have a backend for each device type.
        if any(message.tensor.is_cuda for message in (*sends, *receives)):
            operations = [dist.P2POp(dist.isend, m.tensor, group=self.group, group_peer=m.peer) for m in sends]
            operations += [dist.P2POp(dist.irecv, m.tensor, group=self.group, group_peer=m.peer) for m in receives]
            return _PendingWorks(self._explained, (), dist.batch_isend_irecv(operations), (*receives, *sends))
        posted = [self._receive(m) for m in receives]
        posted += [self._send(m) for m in sends]
        works = [work for work in posted if work is not None]
        assert len(works) == len(sends) + len(receives)
        return _PendingWorks(self._explained, works[len(receives) :], works[: len(receives)], (*receives, *sends))

    def _receive(self, m: Message) -> dist.Work | None:
        """Post a receive. A broken connection may fail here, not in the wait."""
        return self._explained(_receive_failure, m, lambda: dist.irecv(m.tensor, group=self.group, group_src=m.peer))

    def _send(self, m: Message) -> dist.Work | None:
        """Post a send; see `_receive`."""
        return self._explained(_send_failure, m, lambda: dist.isend(m.tensor, group=self.group, group_dst=m.peer))

    def _explained(self, failure: Callable[[Message], str], message: Message, act: Callable[[], T]) -> T:
        """Return act(). Its RuntimeError names a connection: name the rank that ended first, or else the message."""
        try:
            return act()
        except RuntimeError as error:
            text, note = f"{failure(message)}: {error}".partition("\n")[0], find_note(self.group)
            missing = note.read()  # ranks that end their connections leave a note before
            if missing is None and isinstance(note, SharedPage):
                ended = [rank for rank in (message.peer, *range(self.world_size)) if note.has_ended(rank)]
                missing = note.read() or (MissingRanks(ended[:1], ENDED) if ended else None)
            if missing is not None:
                raise RuntimeError(missing.message(f"the end of {self.calls.under_way}")) from missing
            late = "timeout" in text or "Timed out" in text  # the peer may itself wait for another
            raise RuntimeError(text) from MissingRanks(() if late else (message.peer,), text)

    def all_equal(self, payload: bytes) -> bool:
        if self.world_size == 1:
            return True
        number = self.calls.next_round()
        page = self.meet().page
        # NCCL connects all ranks in their first collective: later ones may send messages to some of them only.
        if page is None or (number == 1 and self._on_gpu):
            return self.all_equal_by_group(payload, number)
        return page.all_equal(payload, number)

    def all_equal_by_group(self, payload: bytes, number: int) -> bool:
        """`all_equal` by the group's own backend, as needed across machines. number: of the round."""
        mine = torch.frombuffer(bytearray(payload), dtype=torch.int64)
        both = torch.cat((mine, ~mine))
        if self._on_gpu:
            return self._all_equal_on_gpus(both, number)
        maximum = both.clone()  # the second half is the complement of the minimum
        done = done_by_work(self.group.allreduce([maximum], _ALLREDUCE_MAX))
        wait_for_all(done, self.group, number, find_note(self.group).read)
        return torch.equal(maximum, both)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        return self.meet().hosts

    def meet(self) -> Meeting:
        """Return the meeting of the ranks. Collective in the first call on a group.

        That one goes through the group's store. A rank that is in a collective of the caller's own is missed there; by
        the group's backend the two would match, and exchange their numbers.
        """
        if self.group not in _meetings:
            fresh, has_ended = _new_meeting(self.group), partial(_has_ended, self.group)
            _notes[self.group] = StoreNote(fresh, self.rank)
            met = meet(fresh, self.rank, self.world_size, read_timeout(self.group), has_ended)
            if met.page is not None:
                _notes[self.group] = met.page
            _meetings[self.group] = met
        return _meetings[self.group]

    def waiting(self) -> list[int]:
        """Return the ranks that have come to the next round of consensus, where they wait for this one. Does not wait.

        Where ranks are on several machines, those that have come a second ago.
        """
        number = self.calls.rounds + 1
        if self.group not in _meetings:
            met = self.group.get_group_store().add(_meeting_count(self.rank), 0)
            meeting = _meeting(self.group, met + 1)
            return [rank for rank in range(self.world_size) if meeting.check([gather_key(FIRST, rank)])]
        page = _meetings[self.group].page
        came = Marks(self.group, number).has if page is None else partial(page.has_come, number=number)
        return [rank for rank in range(self.world_size) if came(rank)]

    def _all_equal_on_gpus(self, both: torch.Tensor, number: int) -> bool:
        """Compare on a stream of its own, so that consensus waits for no other kernel."""
        device = torch.cuda.current_device()
        with torch.cuda.stream(_stream(device)):
            maximum = both.to(torch.device("cuda", device))
            self.group.allreduce([maximum], _ALLREDUCE_MAX).wait()  # the stream waits, not the host
            done = done_by_event(torch.cuda.current_stream().record_event(), read_timeout(self.group))
            wait_for_all(done, self.group, number, find_note(self.group).read)
            return torch.equal(maximum.cpu(), both)

    def all_gather(self, payload: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device())
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        return [theirs.cpu().numpy().tobytes() for theirs in everyone]

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _check(message: Message, rank: int, world_size: int) -> None:
    if not 0 <= message.peer < world_size or message.peer == rank:
        raise ValueError(f"peer must be another rank of the {world_size}, got {message.peer} on rank {rank}")
    if not message.tensor.is_contiguous() or not message.tensor.numel():
        raise ValueError(f"message {message.label!r} must be contiguous and not empty")
