"""Gradients of parameters, summed over chunks in an order that no split changes.

The gradient of a chunk is a leaf. The leaves of a sequence are summed over the binary tree of their numbers, the sums
of sequences over that of the step's sequences. A rank sums the nodes that it has whole. Then every rank gets the nodes
of one share of the parameters, from all ranks, and sums them further; at the end of the step all gather the sums.
Messages begin in the backward for parameters that had gradients in the backward before (`share_messages`).

Sequences are numbered through the micro-batches of a step, in each of them through its context groups, in each of these
through the batch. A parameter that a chunk does not reach has gradient 0 there; one that no chunk reaches has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ring.compute.tree_nodes import TreeNodes
from ring.nn.batch_group import BatchRanks
from ring.nn.same_weights.share_messages import Awaited, Bucket, Held, MicroBatch, messages_of
from ring.plan.tile import Node
from ring.precision import accumulator_dtype

BUCKET = 2**25  # bytes of gradients summed in one message, as in DDP


def sequences(held: Sequence[Held]) -> list[tuple[int, int]]:
    """Return the context group and the entry of each sequence of a micro-batch, in the order of their numbers."""
    batches = {one.group: one.batch for one in held}
    return [(group, entry) for group in sorted(batches) for entry in range(batches[group])]


def add(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum in the accumulator's dtype."""
    kind = accumulator_dtype(left.dtype)
    return left.to(kind) + right.to(kind)


class GradientSums:
    """Sums of the gradients of one step.

    parameters: the same on every rank. early: numbers of the buckets whose messages may begin in a backward, in their
    order. A use is a call that a parameter's gradient comes through: a parameter may be used twice in a chunk. Each use
    has a tree of its own.
    """

    def __init__(self, parameters: Sequence[Tensor], ranks: BatchRanks, early: tuple[int, ...] = ()) -> None:
        self._parameters, self._ranks, self.early = parameters, ranks, early
        self._messages = messages_of(ranks)
        self._buckets = [Bucket(members, parameters) for members in _grouped(parameters)]
        self._own: dict[tuple[int, int, int], TreeNodes[Tensor]] = {}  # by parameter, use and entry of the batch
        self._arrived: dict[tuple[int, int, int], int] = {}  # latest use, by parameter, entry and chunk
        self._single = [Bucket([index], parameters) for index in range(len(parameters))]
        self._totals: dict[tuple[Bucket, int], TreeNodes[Tensor]] = {}  # of this rank's share, by bucket and use
        self._uses = [0] * len(parameters)  # of each parameter in the step, on any rank
        self._sequences = 0  # of the step, in the micro-batches so far
        self._number = {index: i for i, bucket in enumerate(self._buckets) for index in bucket.members}
        self._awaited: Awaited | None = None
        self._met: MicroBatch | None = None
        self._sent: set[tuple[Bucket, int]] = set()  # buckets and uses of the micro-batch whose messages began
        self._missing: dict[int, int] = {}  # leaves by early bucket

    def begin(self, awaited: bool) -> None:
        """Begin a micro-batch. awaited: its forward records gradients."""
        self.forget()
        if awaited:
            self._awaited = self._messages.await_backward()

    def forget(self) -> None:
        """End the micro-batch: what ranks hold of the next is not known."""
        if self._awaited is not None:
            self._messages.close(self._awaited)
        self._awaited, self._met, self._missing = None, None, {}
        self._sent.clear()

    def meet(self, own: Held) -> MicroBatch:
        """Return a micro-batch. Then messages may begin in its backward. Collective."""
        early = [self._buckets[i] for i in self.early]
        self._met = self._messages.meet(self._ranks, own, self._parameters[0].device, early)
        leaves = own.batch * len(own.numbers)
        self._missing = {i: leaves * len(bucket.members) for i, bucket in zip(self.early, early, strict=True)}
        return self._met

    def insert(self, index: int, entry: int, chunk: int, count: int, gradient: Tensor) -> None:
        """Add the gradient of a parameter in a chunk of an entry; count: chunks of the sequence."""
        leaf = index, entry, chunk
        use = self._arrived[leaf] = self._arrived.get(leaf, -1) + 1
        self._tree(index, use, entry, count).insert(Node(0, chunk), gradient)
        if use == 0 and self._number[index] in self._missing:
            self._missing[self._number[index]] -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        """Start messages of complete buckets, as far as all before them in the order are."""
        assert self._met is not None
        if not self._messages.may_begin(self._met):
            return
        begun = self._messages.begun
        for number in itertools.takewhile(lambda number: not self._missing[number], self.early[begun:]):
            self._start(self._buckets[number], 0, self._met.own)

    def _start(self, bucket: Bucket, use: int, own: Held) -> None:
        assert (bucket, use) not in self._sent, "a message that began in the backward was dropped"
        self._sent.add((bucket, use))
        self._messages.start(self._ranks, lambda entry, node: self._flat(bucket, use, entry, node))
        for index, entry in ((i, b) for i in bucket.members for b in range(own.batch)):
            self._own.pop((index, use, entry), None)  # gives its memory to the next bucket

    def _tree(self, index: int, use: int, entry: int, count: int) -> TreeNodes[Tensor]:
        return self._own.setdefault((index, use, entry), TreeNodes(count, add))

    def exchange(self, own: Held) -> None:
        """Sum the gradients of a micro-batch further, and make room for those of the next. Collective."""
        micro_batch = self.meet(own) if self._met is None else self._met
        uses = self._most_uses(self._parameters[0].device)
        self._fill(own, uses)
        travelling = self._travelling(uses)
        self._messages.plan(micro_batch, [bucket for bucket, _ in travelling])
        for number, (bucket, use) in enumerate(travelling):
            for ahead in travelling[self._messages.begun : number + 2]:  # the next travels while these are summed
                self._start(*ahead, own)
            self._sum_shares(bucket, use, micro_batch.held)
        self._sequences += len(sequences(micro_batch.held))
        self._arrived.clear()
        self.forget()
        complete = [i for i, bucket in enumerate(self._buckets) if all(uses[index] for index in bucket.members)]
        self.early = tuple(reversed(complete))

    def _travelling(self, uses: Sequence[int]) -> list[tuple[Bucket, int]]:
        """List the buckets and uses with gradients, the early ones first. Few parameters have several uses, each its
        own bucket."""
        order = dict.fromkeys((*self.early, *range(len(self._buckets))))
        firsts = [(self._buckets[i], 0) for i in order if any(uses[index] for index in self._buckets[i].members)]
        return firsts + [(self._single[i], use) for i, count in enumerate(uses) for use in range(1, count)]

    def _most_uses(self, device: torch.device) -> list[int]:
        """Return the uses of each parameter in this micro-batch, on the rank that has most."""
        own = [0] * len(self._parameters)
        for (index, _, _), use in self._arrived.items():
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

    def _sum_shares(self, bucket: Bucket, use: int, held: Sequence[Held]) -> None:
        """Sum the nodes of this rank's share of a bucket, whose message is the oldest."""
        trees: dict[tuple[int, int], TreeNodes[Tensor]] = {}
        for rank, entry, node, share in self._messages.finish():
            trees.setdefault((held[rank].group, entry), TreeNodes(held[rank].count, add)).insert(node, share)
        total = self._totals.setdefault((bucket, use), TreeNodes(None, add))
        for place, sequence in enumerate(sequences(held)):
            root = trees[sequence].root
            assert root is not None
            total.insert(Node(0, self._sequences + place), root)

    def _flat(self, bucket: Bucket, use: int, entry: int, node: Node) -> Tensor:
        """Return the sum of a node, (numbers,), filled up to a multiple of the ranks."""
        sums = [None if tree is None else tree.take(node) for tree in self._trees(bucket, use, entry)]
        if len(sums) == 1 and sums[0] is not None and self._is_flat(bucket, sums[0], node):
            return sums[0].reshape(-1)
        flat = bucket.empty(self._ranks.world_size)
        for some, part in zip(sums, bucket.parts(flat), strict=True):
            part.zero_() if some is None else part.copy_(some)
        flat[bucket.size :].zero_()
        return flat

    def _trees(self, bucket: Bucket, use: int, entry: int) -> list[TreeNodes[Tensor] | None]:
        return [self._own.get((index, use, entry)) for index in bucket.members]

    def _is_flat(self, bucket: Bucket, some: Tensor, node: Node) -> bool:
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
