"""Results of parts, merged and summed over the trees of a plan (`ring.plan.parts`), whatever the order in which they
come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ring.compute.accumulator import Accumulator, Sum, lse_view, merge
from ring.compute.tree_nodes import TreeNodes
from ring.plan.tile import Leaf, Node, SumTree
from ring.precision import accumulator_dtype
from ring.strided_view import StridedView

_Output = tuple[torch.Tensor, torch.Tensor]


class PartOutputs:
    """Output and lse of the own query rows. like: a tensor with the output's shape, dtype and device. disjoint: no two
    trees have rows of a head in common. Others are merged last, block by block.
    """

    def __init__(self, like: torch.Tensor, sinks: torch.Tensor | None, disjoint: bool) -> None:
        self._trees: dict[SumTree, TreeNodes[_Output]] = {}
        self._like, self._sinks, self._merge = like, sinks, _merge_of(like)
        self._in_place = disjoint and sinks is None
        batch, tokens, heads, _ = like.shape
        if self._in_place:
            self._out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            work = accumulator_dtype(like.dtype)
            self._lse = torch.full((batch, heads, tokens), -torch.inf, dtype=work, device=like.device)

    def merge(self, leaf: Leaf, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result of a part. out: (1, B, groups, per_group, L, D); lse the same without D."""
        tree = leaf.tree
        nodes = self._trees.setdefault(tree, TreeNodes(tree.parts, lambda a, b: self._merge(*a, *b)))
        nodes.insert(Node(0, leaf.number), (_filled(out, leaf, 0.0), _filled(lse, leaf, -torch.inf)))
        if self._in_place and nodes.root is not None:
            out, lse = nodes.root
            # 0 is added, as by a merge into an empty row: there is no -0.0.
            StridedView(self._out).put(tree.rows, tree.heads, out + 0.0)
            lse_view(self._lse).put(tree.rows, tree.heads, (lse + 0.0).unsqueeze(-1))
            del self._trees[tree]

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse): (B, N, H, D), and (B, H, N)."""
        if self._in_place:
            return self._out, self._lse
        accumulator = Accumulator(self._like, self._sinks)
        accumulator.begin()
        for tree, nodes in sorted(self._trees.items(), key=lambda entry: entry[0].block):
            assert nodes.root is not None
            accumulator.merge(tree.rows, tree.heads, *nodes.root)
        return accumulator.result(self._like.dtype)


def _merge_of(like: torch.Tensor) -> Callable[..., _Output]:
    """Return the merge of two results for an output of this kind, by its device and dtype alone."""
    if not like.is_cuda or like.dtype == torch.float64:
        return merge
    from ring.compute.gpu.pair_kernel import merge_pair  # not at the top: torch for CPUs has no Triton

    return merge_pair


class PartSum:
    """Gradients of tiles, summed over trees in the accumulator's dtype."""

    def __init__(self) -> None:
        self._trees: dict[SumTree, TreeNodes[torch.Tensor]] = {}

    def add(self, leaf: Leaf, tile: torch.Tensor) -> None:
        """Add the summand of a part, (1, B, groups, per_group, L, D), which may be overwritten."""
        self.insert(leaf.tree, Node(0, leaf.number), _filled(tile, leaf, 0.0))

    def insert(self, tree: SumTree, node: Node, value: torch.Tensor) -> None:
        """Add the sum of a node, which may be overwritten."""
        self._trees.setdefault(tree, TreeNodes(tree.parts, _add)).insert(node, value)

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


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.to(accumulator_dtype(left.dtype)).add_(right)


def _filled(x: torch.Tensor, leaf: Leaf, value: float) -> torch.Tensor:
    """Return x, (1, B, groups, per_group, L, ...), for all rows of the leaf's tree: `value` where a part lacks one."""
    length = leaf.tree.rows.length
    if x.shape[4] == length:
        return x
    whole = x.new_full((*x.shape[:4], length, *x.shape[5:]), value)
    whole.narrow(4, leaf.first, x.shape[4]).copy_(x)
    return whole
