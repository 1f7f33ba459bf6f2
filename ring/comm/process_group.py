"""The transport over a torch process group, by gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Its defaults keep the default group of the moment of its import for ever. `torch.library` imports it in the first
# call, when there is one: imported here, before, it keeps none, and a destroyed group ends its threads.
import torch.distributed.nn.functional

from ring.comm.call_order import Calls
from ring.comm.missing_ranks import done_by_event, done_by_work, timeout_of, wait_for_all
from ring.comm.shared_page import HostMemory, host_memory_of
from ring.comm.transport import LocalBuffers, Message, Pending

T = TypeVar("T")
_GREATEST = dist.AllreduceOptions()
_GREATEST.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
_facts: WeakKeyDictionary[dist.ProcessGroup, _Facts] = WeakKeyDictionary()
# Where the ranks of a group agree from their second question on; None: by the group's own backend.
_memories: WeakKeyDictionary[dist.ProcessGroup, HostMemory | None] = WeakKeyDictionary()


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """A group's backends by type of device, as {"cuda": "nccl"}; None: the default group's.

    The name of the group's backend does not say this: for a group made without a name, torch says "undefined".
    """
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


class _Works:
    """The handles of one batch, kept with the tensors until it is done, since a dropped handle may lose its message.
    Each is waited for once: gloo hangs in a second wait.
    """

    def __init__(self, sends: Sequence[dist.Work], receives: Sequence[dist.Work], messages: Sequence[Message]) -> None:
        """messages: those of the receives first."""
        self._sends, self._receives, self._messages = sends, receives, messages

    def arrive(self) -> None:
        # NCCL may have one work for a whole batch.
        for work, message in zip(self._receives, self._messages, strict=False):
            _named(_not_come(message), work.wait)
        self._receives = ()

    def wait(self) -> None:
        received = len(self._messages) - len(self._sends)
        self.arrive()
        for work, message in zip(self._sends, self._messages[received:], strict=True):
            _named(_not_taken(message), work.wait)
        self._sends, self._messages = (), ()


def _not_come(message: Message) -> str:
    return f"the message {message.label!r} from rank {message.peer} did not come"


def _not_taken(message: Message) -> str:
    return f"rank {message.peer} did not take the message {message.label!r}"


def _named(failed: str, act: Callable[[], T]) -> T:
    """What `act` returns. Its RuntimeError says what failed: torch names a connection, not a rank of the group."""
    try:
        return act()
    except RuntimeError as error:
        raise RuntimeError(f"{failed}: {error}".partition("\n")[0]) from error


class _Facts(NamedTuple):
    """What a group is asked once. calls: they have one numbering in all transports over the group."""

    world_size: int
    calls: Calls
    on_gpu: bool


class ProcessGroupTransport(LocalBuffers):
    """A torch process group (gloo or NCCL), the whole world or part of it; peers are ranks of the group.

    Raises ValueError on a process that is not a member.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None
        self.group = found
        self.rank = dist.get_rank(self.group)  # at every call, since it refuses a group that was destroyed
        if self.rank < 0:
            raise ValueError(f"group must contain the calling process; world rank {dist.get_rank()} is not a member")
        facts = _facts.get(found)
        if facts is None:
            facts = _Facts(dist.get_world_size(found), Calls(), "cpu" not in backends_of(found))
            facts = _facts.setdefault(found, facts)
        self.world_size = facts.world_size
        self.calls, self._on_gpu = facts.calls, facts.on_gpu

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in (*sends, *receives):
            _check(message, self.rank, self.world_size)
        # GPU tensors go in one batch: NCCL would run sends and receives one after the other, and may deadlock. The
        # tensors decide, because a group may have a backend for each type of device.
        if any(message.tensor.is_cuda for message in (*sends, *receives)):
            operations = [dist.P2POp(dist.isend, m.tensor, group=self.group, group_peer=m.peer) for m in sends]
            operations += [dist.P2POp(dist.irecv, m.tensor, group=self.group, group_peer=m.peer) for m in receives]
            return _Works((), dist.batch_isend_irecv(operations), (*receives, *sends))
        found = [self._receive(m) for m in receives]
        found += [self._send(m) for m in sends]
        works = [work for work in found if work is not None]
        assert len(works) == len(sends) + len(receives)
        return _Works(works[len(receives) :], works[: len(receives)], (*receives, *sends))

    def _receive(self, m: Message) -> dist.Work | None:
        """A connection that is broken by then fails here, and not in the wait."""
        return _named(_not_come(m), lambda: dist.irecv(m.tensor, group=self.group, group_src=m.peer))

    def _send(self, m: Message) -> dist.Work | None:
        """Likewise."""
        return _named(_not_taken(m), lambda: dist.isend(m.tensor, group=self.group, group_dst=m.peer))

    def all_equal(self, payload: bytes) -> bool:
        if self.world_size == 1:
            return True
        number = self.calls.next_question()
        memory = _memories.get(self.group)
        if memory is not None:
            return memory.all_equal(payload, number)
        equal = self.all_equal_by_group(payload, number)
        self._find_memory()
        return equal

    def all_equal_by_group(self, payload: bytes, number: int) -> bool:
        """The same by the group's own backend, as between several machines. number: of the question."""
        mine = torch.frombuffer(bytearray(payload), dtype=torch.int64)
        both = torch.cat((mine, ~mine))
        if self._on_gpu:
            return self._all_equal_on_gpus(both, number)
        greatest = both.clone()  # of the complements: that of the least value
        wait_for_all(done_by_work(self.group.allreduce([greatest], _GREATEST)), self.group, number)
        return torch.equal(greatest, both)

    def _find_memory(self) -> None:
        """That of the machine, if all ranks run on one. Collective: every rank calls it, and is known to come."""
        if self.group in _memories:
            return
        store = self.group.get_group_store()
        # A group that is destroyed and made anew may find what the first one left in the store.
        generation = store.add(f"ring/machines/rank {self.rank}", 1)
        fresh = dist.PrefixStore(f"ring/machines/{generation}", store)
        _memories[self.group] = host_memory_of(fresh, self.rank, self.world_size, timeout_of(self.group))

    def _all_equal_on_gpus(self, both: torch.Tensor, number: int) -> bool:
        """On a stream of its own, so that a question between ranks waits for no kernel of theirs."""
        device = torch.cuda.current_device()
        with torch.cuda.stream(_stream(device)):
            greatest = both.to(torch.device("cuda", device))
            self.group.allreduce([greatest], _GREATEST).wait()  # the stream waits, not the host
            done = done_by_event(torch.cuda.current_stream().record_event(), timeout_of(self.group))
            wait_for_all(done, self.group, number)
            return torch.equal(greatest.cpu(), both)

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
