"""Sums over the tokens of all ranks, as of losses, in the order of the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ring.compute.tree_nodes import TreeNodes
from ring.nn.batch_group import BatchRanks
from ring.nn.same_weights.chunked_calls import Forward, by_chunks
from ring.nn.same_weights.gradient_sums import sequences
from ring.nn.same_weights.share_messages import Held
from ring.plan.tile import Node


class TokenSums:
    """Functions and sums of this rank's tokens of the latest forward, chunk by chunk.

    meet: what this rank holds of a micro-batch -> what each rank holds; collective.
    of_sequences: sums of each sequence of the latest total, in the order of their numbers.
    """

    of_sequences: list[Tensor]

    def __init__(self, ranks: BatchRanks, meet: Callable[[Held], Sequence[Held]]) -> None:
        self._ranks, self._meet = ranks, meet
        self._latest: tuple[Forward, Held] | None = None

    def begin(self, forward: Forward) -> None:
        """Go on with another forward."""
        self._latest = (
            forward,
            Held(forward.context.first_rank, forward.batch, forward.chunks.count, forward.chunks.numbers),
        )

    @property
    def held(self) -> Held:
        """Sequences and chunks of this rank in the latest forward."""
        assert self._latest is not None
        return self._latest[1]

    def _forward_of(self, name: str, x: Tensor) -> Forward:
        if self._latest is None:
            raise ValueError(f"{name} must come from the model with SameWeights, which was not called yet")
        forward = self._latest[0]
        if x.shape[:2] != (forward.batch, forward.chunks.tokens):
            raise ValueError(
                f"{name} must have the ({forward.batch}, {forward.chunks.tokens}) tokens of the model's last call, got "
                f"{tuple(x.shape)}"
            )
        return forward

    def by_chunks(self, name: str, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return call(*tensors), (B, N, ...), computed chunk by chunk."""
        forward = self._forward_of(name, tensors[0])
        return by_chunks(forward, name, lambda _, *pieces: call(*pieces), tensors, {})

    def of_chunks(self, name: str, x: Tensor) -> Tensor:
        """Return the sums of x (B, N, ...) over the rows of each chunk, (B chunks, ...), in fp64."""
        forward = self._forward_of(name, x)
        pieces = (x[b, begin:end] for b in range(forward.batch) for begin, end in forward.chunks.rows)
        return torch.stack([piece.contiguous().sum(0, dtype=torch.float64) for piece in pieces])

    def total(self, sums: Tensor) -> Tensor:
        """Return the total of the sums `of_chunks` of all ranks. Collective."""
        held = self._meet(self.held)
        most = max(one.batch * len(one.numbers) for one in held)
        filled = torch.cat([sums, sums.new_zeros(most - len(sums), *sums.shape[1:])])
        trees: dict[tuple[int, int], TreeNodes[Tensor]] = {}
        for one, values in zip(held, self._ranks.gather(filled), strict=True):
            places = ((entry, number) for entry in range(one.batch) for number in one.numbers)
            for (entry, number), value in zip(places, values, strict=False):
                trees.setdefault((one.group, entry), TreeNodes(one.count, torch.add)).insert(Node(0, number), value)
        whole: TreeNodes[Tensor] = TreeNodes(None, torch.add)
        self.of_sequences = []
        for number, sequence in enumerate(sequences(held)):
            root = trees[sequence].root
            assert root is not None
            whole.insert(Node(0, number), root)
            self.of_sequences.append(root)
        return whole.close(len(trees))
