"""Messages that carry shares of gradients to the ranks that sum them. Some begin within a backward.

A rank starts the message of a bucket when its gradients are complete, in an order that all ranks know, and finishes all
at the end of the backward. They have a process group of their own: between two of them one rank may make calls that
another one makes later.

A backward that an error ends leaves messages that some ranks have started and others have not. When the ranks meet
again, for the next step, these start them too, and all drop what arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ring.caching.weak_cache import cached_on
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
        self.members, self.like = members, [parameters[i] for i in members]
        self.size = sum(like.numel() for like in self.like)

    def empty(self, ranks: int) -> Tensor:
        """Return new memory for the numbers of all members, a multiple of the ranks."""
        like = self.like[0]
        numbers = self.size + -self.size % ranks
        return torch.empty(numbers, dtype=accumulator_dtype(like.dtype), device=like.device)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the memory of each member."""
        parts = flat[: self.size].split([like.numel() for like in self.like])
        return [part.view(like.shape) for part, like in zip(parts, self.like, strict=True)]


class ShareMessages:
    """The messages of some ranks, one micro-batch after another. group: of their own; None for a rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._places: list[list[tuple[int, Node]]] = []  # of the nodes that each rank has
        self._order: Sequence[Bucket] = ()  # of the messages of this micro-batch
        self.begun = 0  # number of these
        self._started = 0  # number of all since the group was made
        self._under_way: deque[list[Callable[[], Tensor]]] = deque()  # of each message what waits for its turns

    def meet(self, ranks: BatchRanks, own: Held, device: torch.device, order: Sequence[Bucket]) -> list[Held]:
        """Return what each rank holds of a micro-batch, before its messages. Collective.

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
        self._places = [[(entry, node) for entry in range(one.batch) for node in one.nodes] for one in held]
        self._order, self.begun = order, 0
        return held

    def plan(self, order: Sequence[Bucket]) -> None:
        """Say which messages a micro-batch has: first those that began in the backward, the same on all ranks."""
        self._order = order

    def start(self, ranks: BatchRanks, flat_of: Callable[[int, Node], Tensor]) -> None:
        """Start the next message of the order: a share of each node to each rank.

        Args:
            ranks: of the group.
            flat_of: entry of the batch and node -> its numbers, a multiple of the ranks.
        """
        bucket, mine, waits = self._order[self.begun], self._places[ranks.rank], []
        for turn in range(max(map(len, self._places))):
            flat = flat_of(*mine[turn]) if turn < len(mine) else bucket.empty(ranks.world_size)
            held = [turn < len(some) for some in self._places]
            waits.append(ranks.start_all_to_all(flat.view(ranks.world_size, -1), held, self._group))
        self._under_way.append(waits)
        self.begun += 1
        self._started += 1

    def finish(self) -> Iterator[tuple[int, int, Node, Tensor]]:
        """Iterate over what the oldest message brings: rank, entry, node, and this rank's share."""
        for turn, wait in enumerate(self._under_way.popleft()):
            senders = [rank for rank, some in enumerate(self._places) if turn < len(some)]
            for rank, share in zip(senders, wait(), strict=True):
                yield rank, *self._places[rank][turn], share

    def _catch_up(self, ranks: BatchRanks, started: int) -> None:
        """Start the messages that other ranks have started before an error, without values, and drop all."""
        while self._started < started:
            empty = self._order[self.begun].empty(ranks.world_size)
            self.start(ranks, lambda entry, node, empty=empty: empty)  # type: ignore[misc]
        while self._under_way:
            for _ in self.finish():
                pass


@cached_on
def _of_group(group: dist.ProcessGroup) -> ShareMessages:
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    return ShareMessages(dist.new_group(ranks, backend=backend, use_local_synchronization=True))


def messages_of(ranks: BatchRanks) -> ShareMessages:
    """Return the messages of ranks that are one process group, or a rank alone. The first call is collective."""
    group = ranks.group
    return ShareMessages(None) if group is None else _of_group(group)
