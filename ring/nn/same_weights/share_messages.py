"""Messages that carry shares of gradients to the ranks that sum them. Some begin within a backward.

A rank starts the message of a bucket when its gradients are complete, in an order that all ranks know, and finishes all
at the end of the backward. They have a process group of their own: between two of them one rank may make calls that
another one makes later.

A backward that an error ends leaves messages that some ranks have started and others have not. When the ranks meet
again, for the next step, these start them too, and all drop what arrives.

Models over the same ranks share the group. Of two models whose backwards are awaited at a time none begins a message
within its own: autograd could come to them in another order on another rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ring.caching.weak_cache import cached_on
from ring.comm.missing_ranks import read_timeout
from ring.nn.batch_group import BatchRanks
from ring.plan.parts import whole_nodes
from ring.plan.tile import Node
from ring.precision import accumulator_dtype


@dataclass(frozen=True)
class Held:
    """Sequences of a micro-batch in a rank's context group, `group`, and the numbers of its chunks of each."""

    group: int
    batch: int
    count: int
    numbers: tuple[int, ...]

    @property
    def nodes(self) -> list[Node]:
        """Nodes of each sequence that it has whole."""
        return whole_nodes(sorted(self.numbers), self.count)


class Bucket:
    """Parameters of one dtype and device whose gradients travel together. members: their numbers."""

    def __init__(self, members: list[int], parameters: Sequence[Tensor]) -> None:
        like = parameters[members[0]]
        self.members, self._shapes = members, [parameters[i].shape for i in members]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.size, self._dtype, self._device = sum(self._sizes), accumulator_dtype(like.dtype), like.device

    def empty(self, ranks: int) -> Tensor:
        """Return new memory for the numbers of all members, a multiple of the ranks."""
        return torch.empty(self.size + -self.size % ranks, dtype=self._dtype, device=self._device)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the memory of each member."""
        parts = flat[: self.size].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class MicroBatch:
    """A micro-batch of a model. held: by each rank."""

    def __init__(self, own: Held, held: Sequence[Held]) -> None:
        self.own, self.held = own, held
        self.places = [[(entry, node) for entry in range(one.batch) for node in one.nodes] for one in held]


class Awaited:
    """A backward of a model, from its forward on."""


class ShareMessages:
    """The messages of some ranks, one micro-batch after another. group: of their own; None for a rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._awaited: WeakSet[Awaited] = WeakSet()
        self._current: MicroBatch | None = None  # the latest, whose messages begin
        self._order: Sequence[Bucket] = ()  # of its messages
        self.begun = 0  # number of these
        self._started = 0  # number of all since the group was made
        self._under_way: deque[list[Callable[[], Tensor]]] = deque()  # of each message what waits for its turns

    def meet(self, ranks: BatchRanks, own: Held, device: torch.device, order: Sequence[Bucket]) -> MicroBatch:
        """Return a micro-batch, with what each rank holds of it. Collective.

        Args:
            ranks: of the group.
            own: held by this rank.
            device: for messages.
            order: buckets whose messages may begin in the backward, the same on all ranks.
        """
        row = torch.tensor([self._started, own.group, own.batch, own.count, len(own.numbers), *own.numbers])
        longest = int(ranks.gather(torch.tensor([len(row)], device=device)).max())
        rows = ranks.gather(torch.nn.functional.pad(row, (0, longest - len(row))).to(device)).tolist()
        self._catch_up(ranks, max(started for started, *_ in rows))
        held = [Held(group, batch, count, tuple(rest[:some])) for _, group, batch, count, some, *rest in rows]
        self._current, self._order, self.begun = MicroBatch(own, held), order, 0
        return self._current

    def await_backward(self) -> Awaited:
        """Return a backward that is awaited until `close`, or as long as there is another reference to it."""
        awaited = Awaited()
        self._awaited.add(awaited)
        return awaited

    def close(self, awaited: Awaited) -> None:
        """End the wait for a backward."""
        self._awaited.discard(awaited)

    def may_begin(self, micro_batch: MicroBatch) -> bool:
        """Return True if messages of a micro-batch may begin in its backward."""
        return self._current is micro_batch and len(self._awaited) == 1

    def plan(self, micro_batch: MicroBatch, order: Sequence[Bucket]) -> None:
        """Say which messages a micro-batch has: first those that began in the backward, the same on all ranks."""
        if self._current is not micro_batch:
            self._current, self.begun = micro_batch, 0
        self._order = order

    def start(self, ranks: BatchRanks, flat_of: Callable[[int, Node], Tensor] | None) -> None:
        """Start the next message of the order: a share of each node to each rank.

        Args:
            ranks: of the group.
            flat_of: entry of the batch and node -> its numbers, a multiple of the ranks; None: no values.
        """
        assert self._current is not None
        bucket, places, waits = self._order[self.begun], self._current.places, []
        mine = places[ranks.rank]
        for turn in range(max(map(len, places))):
            flat = bucket.empty(ranks.world_size) if flat_of is None or turn >= len(mine) else flat_of(*mine[turn])
            held = [turn < len(some) for some in places]
            waits.append(ranks.start_all_to_all(flat.view(ranks.world_size, -1), held, self._group))
        self._under_way.append(waits)
        self.begun += 1
        self._started += 1

    def finish(self) -> Iterator[tuple[int, int, Node, Tensor]]:
        """Iterate over what the oldest message brings: rank, entry, node, and this rank's share."""
        assert self._current is not None
        for turn, wait in enumerate(self._under_way.popleft()):
            senders = [(rank, some[turn]) for rank, some in enumerate(self._current.places) if turn < len(some)]
            for (rank, place), share in zip(senders, wait(), strict=True):
                yield rank, *place, share

    def _catch_up(self, ranks: BatchRanks, started: int) -> None:
        """Start the messages that other ranks have started before an error, without values, and drop all."""
        while self._started < started:
            self.start(ranks, None)
        while self._under_way:
            for _ in self.finish():
                pass


_made = 0  # groups for messages that ranks of this process have agreed on


@cached_on
def _of_group(group: dist.ProcessGroup) -> ShareMessages:
    global _made  # noqa: PLW0603 - one count for all groups of the process
    ranks = dist.get_process_group_ranks(group)
    number = int(BatchRanks(group).gather(torch.tensor([_made])).max())
    _made = number + 1
    backend, timeout = dist.get_backend_config(group), read_timeout(group)
    with _named(f"messages {number} of ranks {ranks}"):
        return ShareMessages(dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Give this name to a group that its ranks make. torch's has the number of groups of a process: where ranks are in
    different numbers of other groups, they would wait for each other under different names.
    """
    before = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


def messages_of(ranks: BatchRanks) -> ShareMessages:
    """Return the messages of ranks that are one process group, or a rank alone. The first call is collective."""
    group = ranks.group
    return ShareMessages(None) if group is None else _of_group(group)
