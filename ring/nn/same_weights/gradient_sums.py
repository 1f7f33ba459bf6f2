"""Gradients of parameters, summed over chunks in an order that no split changes.

The gradient of a chunk is a leaf. The leaves of a sequence are summed over the binary tree of their numbers, the sums
of sequences over that of the step's sequences. A rank sums the nodes that it has whole. After each backward every rank
gets the nodes of one share of the parameters, from all ranks, and sums them further; at the end of the step all gather
the sums.

Sequences are numbered through the micro-batches of a step, in each of them through its context groups, in each of these
through the batch. A parameter that a chunk does not reach has gradient 0 there; one that no chunk reaches has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring.compute.tree_nodes import TreeNodes
from ring.nn.batch_group import BatchRanks
from ring.plan.parts import whole_nodes
from ring.plan.tile import Node
from ring.precision import accumulator_dtype

BUCKET = 2**25  # bytes of gradients summed in one message, as in DDP


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

    def gathered(self, ranks: BatchRanks, device: torch.device) -> list[Held]:
        """Return what each rank holds. Collective."""
        own = torch.tensor([self.group, self.batch, self.count, len(self.numbers), *self.numbers], device=device)
        longest = int(ranks.gather(torch.tensor([len(own)], device=device)).max())
        rows = ranks.gather(torch.nn.functional.pad(own, (0, longest - len(own)))).tolist()
        return [Held(group, batch, count, tuple(rest[:some])) for group, batch, count, some, *rest in rows]


def sequences(held: Sequence[Held]) -> list[tuple[int, int]]:
    """Return the context group and the entry of each sequence of a micro-batch, in the order of their numbers."""
    batches = {one.group: one.batch for one in held}
    return [(group, entry) for group in sorted(batches) for entry in range(batches[group])]


def add(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum in the accumulator's dtype."""
    kind = accumulator_dtype(left.dtype)
    return left.to(kind) + right.to(kind)


class _Bucket:
    """Parameters of one dtype and device whose gradients travel together."""

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


class GradientSums:
    """Sums of the gradients of one step.

    parameters: the same on every rank. A use is a call that a parameter's gradient comes through: a parameter may be
    used twice in a chunk. Each use has a tree of its own.
    """

    def __init__(self, parameters: Sequence[Tensor], ranks: BatchRanks) -> None:
        self._parameters, self._ranks = parameters, ranks
        self._buckets = [_Bucket(members, parameters) for members in _grouped(parameters)]
        self._own: dict[tuple[int, int, int], TreeNodes[Tensor]] = {}  # by parameter, use and entry of the batch
        self._arrived: dict[tuple[int, int, int], int] = {}  # uses so far, by parameter, entry and chunk
        self._single = [_Bucket([index], parameters) for index in range(len(parameters))]
        self._totals: dict[tuple[_Bucket, int], TreeNodes[Tensor]] = {}  # of this rank's share, by bucket and use
        self._uses = [0] * len(parameters)  # of each parameter in the step, on any rank
        self._sequences = 0  # of the step, in the micro-batches so far

    def insert(self, index: int, entry: int, chunk: int, count: int, gradient: Tensor) -> None:
        """Add the gradient of a parameter in a chunk of an entry; count: chunks of the sequence."""
        leaf = index, entry, chunk
        use = self._arrived[leaf] = self._arrived.get(leaf, -1) + 1
        self._tree(index, use, entry, count).insert(Node(0, chunk), gradient)

    def _tree(self, index: int, use: int, entry: int, count: int) -> TreeNodes[Tensor]:
        return self._own.setdefault((index, use, entry), TreeNodes(count, add))

    def exchange(self, own: Held) -> None:
        """Sum the gradients of a micro-batch further, and make room for those of the next. Collective."""
        device = self._parameters[0].device
        held = own.gathered(self._ranks, device)
        uses = self._most_uses(device)
        self._fill(own, uses)
        for bucket, use in self._travelling(uses):
            self._sum_shares(bucket, use, own, held)
            for index, entry in ((i, b) for i in bucket.members for b in range(own.batch)):
                self._own.pop((index, use, entry), None)  # gives its memory to the next bucket
        self._sequences += len(sequences(held))
        self._arrived.clear()

    def _travelling(self, uses: Sequence[int]) -> Iterator[tuple[_Bucket, int]]:
        """Iterate over the buckets and uses with gradients. Few parameters have several uses, each its own bucket."""
        yield from ((bucket, 0) for bucket in self._buckets if any(uses[i] for i in bucket.members))
        yield from ((self._single[i], use) for i, count in enumerate(uses) for use in range(1, count))

    def _most_uses(self, device: torch.device) -> list[int]:
        """Return the uses of each parameter in this micro-batch, on the rank that has most."""
        own = [0] * len(self._parameters)
        for index, use, _ in self._own:
            own[index] = max(own[index], use + 1)
        uses: list[int] = self._ranks.gather(torch.tensor(own, device=device)).amax(0).tolist()
        self._uses = [max(pair) for pair in zip(self._uses, uses, strict=True)]
        return uses

    def _fill(self, own: Held, uses: Sequence[int]) -> None:
        """Add 0 for chunks that a parameter's gradient does not come through."""
        for index, count in enumerate(uses):
            for use, entry, chunk in ((u, b, c) for u in range(count) for b in range(own.batch) for c in own.numbers):
                if self._arrived.get((index, entry, chunk), -1) < use:
                    zero = torch.zeros_like(self._parameters[index], memory_format=torch.contiguous_format)
                    self._tree(index, use, entry, own.count).insert(Node(0, chunk), zero)

    def _sum_shares(self, bucket: _Bucket, use: int, own: Held, held: Sequence[Held]) -> None:
        """Send the nodes of a bucket, a share to each rank, and sum those of this rank's share."""
        world = self._ranks.world_size
        places = [[(entry, node) for entry in range(one.batch) for node in one.nodes] for one in held]
        mine = places[self._ranks.rank]
        trees: dict[tuple[int, int], TreeNodes[Tensor]] = {}
        for turn in range(max(map(len, places))):
            flat = bucket.empty(world) if turn >= len(mine) else self._flat(bucket, use, *mine[turn])
            senders = [rank for rank, some in enumerate(places) if turn < len(some)]
            shares = self._ranks.all_to_all(flat.view(world, -1), [turn < len(some) for some in places])
            for rank, share in zip(senders, shares, strict=True):
                one, (entry, node) = held[rank], places[rank][turn]
                trees.setdefault((one.group, entry), TreeNodes(one.count, add)).insert(node, share)
        total = self._totals.setdefault((bucket, use), TreeNodes(None, add))
        for place, sequence in enumerate(sequences(held)):
            root = trees[sequence].root
            assert root is not None
            total.insert(Node(0, self._sequences + place), root)

    def _flat(self, bucket: _Bucket, use: int, entry: int, node: Node) -> Tensor:
        """Return the sum of a node, (numbers,), filled up to a multiple of the ranks."""
        sums = [None if tree is None else tree.take(node) for tree in self._trees(bucket, use, entry)]
        if len(sums) == 1 and sums[0] is not None and self._is_flat(bucket, sums[0], node):
            return sums[0].reshape(-1)
        flat = bucket.empty(self._ranks.world_size)
        for some, part in zip(sums, bucket.parts(flat), strict=True):
            part.zero_() if some is None else part.copy_(some)
        flat[bucket.size :].zero_()
        return flat

    def _trees(self, bucket: _Bucket, use: int, entry: int) -> list[TreeNodes[Tensor] | None]:
        return [self._own.get((index, use, entry)) for index in bucket.members]

    def _is_flat(self, bucket: _Bucket, some: Tensor, node: Node) -> bool:
        """True if a sum can be sent as it is. On a rank alone a leaf, a tensor of autograd's, would remain."""
        ranks = self._ranks.world_size
        return (
            bucket.size % ranks == 0 and some.dtype == accumulator_dtype(some.dtype) and (ranks > 1 or node.level > 0)
        )

    def results(self) -> dict[int, Tensor]:
        """Return the gradient of each parameter that has one, by number, and begin a new step. Collective."""
        gradients: dict[int, Tensor] = {}
        for bucket, use in self._travelling(self._uses):
            total = self._totals.pop((bucket, use))
            for place in set(range(self._sequences)) - _leaves(total):
                some = next(iter(total.waiting.values()))
                total.insert(Node(0, place), torch.zeros_like(some))
            flat = self._ranks.gather(total.close(self._sequences)).flatten()
            for index, part in zip(bucket.members, bucket.parts(flat), strict=True):
                if use:
                    gradients[index] += part
                elif self._uses[index]:
                    gradients[index] = part
        self._uses, self._sequences = [0] * len(self._parameters), 0
        return {index: x.to(self._parameters[index].dtype) for index, x in gradients.items()}


def _leaves(tree: TreeNodes[Tensor]) -> set[int]:
    """Return the numbers of the parts in a tree that is not closed."""
    return {leaf for level, number in tree.waiting for leaf in range(number << level, (number + 1) << level)}


def _grouped(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Group the numbers of parameters of one dtype and device, in their order, up to BUCKET bytes."""
    filled: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    for index, x in enumerate(parameters):
        lists = filled.setdefault((x.dtype, x.device), [[]])
        if lists[-1] and sum(parameters[i].nbytes for i in lists[-1]) + x.nbytes > BUCKET:
            lists.append([])
        lists[-1].append(index)
    return [members for lists in filled.values() for members in lists]
