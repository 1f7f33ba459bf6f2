"""Results of parts, merged and summed over the trees of a plan (`ring.plan.parts`), whatever the order in which they
come. A node waits for its sibling; so a tree holds few nodes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ring.compute.accumulator import Accumulator, Sum, merge
from ring.plan.tile import Leaf, Node, SumTree
from ring.precision import accumulator_dtype

T = TypeVar("T")


@dataclass(eq=False)
class _Nodes(Generic[T]):
    """The nodes of a tree that are complete, and wait for their siblings. combine: of the left node and the right."""

    parts: int
    combine: Callable[[T, T], T]
    waiting: dict[Node, T] = field(default_factory=dict)
    root: T | None = None

    def insert(self, node: Node, value: T) -> None:
        """Add a complete node: combine it with its sibling, and so on upwards, as far as siblings are complete."""
        while not node.is_root(self.parts):
            if not node.is_alone(self.parts):
                if node.sibling not in self.waiting:
                    self.waiting[node] = value
                    return
                other = self.waiting.pop(node.sibling)
                value = self.combine(other, value) if node.number % 2 else self.combine(value, other)
            node = node.parent
        self.root = value

    def take(self, node: Node) -> T:
        """Return a node that waits, or the root."""
        if node.is_root(self.parts):
            assert self.root is not None
            return self.root
        return self.waiting[node]


class PartOutputs:
    """Output and lse of the own query rows. like: a tensor with the output's shape. Trees of several blocks that have
    rows in common are merged last, block by block.
    """

    def __init__(self, like: torch.Tensor, sinks: torch.Tensor | None) -> None:
        self._accumulator = Accumulator(like, sinks)
        self._accumulator.begin()
        self._trees: dict[SumTree, _Nodes[tuple[torch.Tensor, torch.Tensor]]] = {}

    def merge(self, leaf: Leaf, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result of a part. out: (1, B, groups, per_group, L, D); lse the same without D."""
        tree = leaf.tree
        nodes = self._trees.setdefault(tree, _Nodes(tree.parts, lambda a, b: merge(*a, *b)))
        filled = _filled(out, leaf, 4, 0.0), _filled(lse, leaf, 4, -torch.inf)
        nodes.insert(Node(0, leaf.number), filled)
        if tree.alone and nodes.root is not None:
            self._accumulator.merge(tree.rows, tree.heads, *nodes.root)
            del self._trees[tree]

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse): (B, N, H, D) in `dtype`, and (B, H, N)."""
        for tree, nodes in sorted(self._trees.items(), key=lambda entry: entry[0].block):
            assert nodes.root is not None
            self._accumulator.merge(tree.rows, tree.heads, *nodes.root)
        return self._accumulator.result(dtype)


class PartSum:
    """Gradients of tiles, summed over trees."""

    def __init__(self) -> None:
        self._trees: dict[SumTree, _Nodes[torch.Tensor]] = {}

    def add(self, leaf: Leaf, tile: torch.Tensor) -> None:
        """Add the summand of a part, (1, B, groups, per_group, L, D)."""
        self.insert(leaf.tree, Node(0, leaf.number), _filled(tile.to(accumulator_dtype(tile.dtype)), leaf, 4, 0.0))

    def insert(self, tree: SumTree, node: Node, value: torch.Tensor) -> None:
        """Add the sum of a node."""
        self._trees.setdefault(tree, _Nodes(tree.parts, torch.add)).insert(node, value)

    def take(self, tree: SumTree, node: Node) -> torch.Tensor:
        """Return the sum of a node whose parts were all added."""
        return self._trees[tree].take(node)

    def result(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sums of all trees, block by block, shaped like a (B, N, H, D) tensor, in `dtype`."""
        total = Sum(like)
        total.begin()
        for tree, nodes in sorted(self._trees.items(), key=lambda entry: entry[0].block):
            assert nodes.root is not None
            total.add(tree.rows, tree.heads, nodes.root)
        return total.result(dtype)


def _filled(x: torch.Tensor, leaf: Leaf, dim: int, value: float) -> torch.Tensor:
    """Return x for all rows of the leaf's tree: `value` for those that the part lacks."""
    length = leaf.tree.rows.length
    if x.shape[dim] == length:
        return x
    whole = x.new_full((*x.shape[:dim], length, *x.shape[dim + 1 :]), value)
    whole.narrow(dim, leaf.first, x.shape[dim]).copy_(x)
    return whole
