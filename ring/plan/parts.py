"""The plan of calls with `same_bits`: parts of attention, and the trees in which their results are summed.

A part is a range of queries with a range of keys of its block, in one kernel call. Ranges lie within chunks, which lie
whole on a rank; so a part, its mask and its sizes depend on neither ranks nor layout nor exchange. The parts of a range
of queries are numbered in ascending order of their keys, those of a range of keys in that of their queries. Results are
merged, and gradients summed, over the binary tree of these numbers: node (level, i) holds the parts i 2^level up to
(i + 1) 2^level - 1, as many as there are.

The gradient of a range of keys is summed by its owner. A rank with some of its parts sums the nodes that it has whole
and returns these sums, whatever the exchange that brought the keys.

Parts 0 to 4 of a range of keys, of which another rank computes 2, 3 and 4:

    level  nodes          returned
    2      0     4 (= 0)  4 as node (2, 1)
    1      0  2  4        2 and 3 as node (1, 1)
    0      0 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.blocks import Heads
from ring.plan.range_pairs import RangePairs, Sight, pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated, group_starts, ragged_arange
from ring.plan.rows import Fold, Rows
from ring.plan.schedule import Schedule, Transfer, transfers
from ring.plan.slice_pairs import slice_pairs
from ring.plan.tile import Leaf, Mask, Node, Part, SumTree, Tile
from ring.plan.tiling import Addresses, Keys, key_positions, own_keys, query_positions, received_keys


class ReturnedSum(NamedTuple):
    """The sum of a node of a range of keys, and the slots of a buffer that hold it."""

    tree: SumTree
    node: Node
    slots: Rows
    columns: Heads


class Returns(NamedTuple):
    """Gradients that return after a stage: sums of a rank, or those that its own keys get, and their messages."""

    sums: tuple[ReturnedSum, ...]
    transfers: tuple[Transfer, ...]
    slots: int


@dataclass(frozen=True, eq=False)
class PartTable:
    """The parts of all ranks. Numbers are those of a part among the parts of its queries, and of its keys; counts are
    those of the parts of each range.
    """

    tables: tuple[RangePairs, ...]
    query_number: Ints
    key_number: Ints
    query_count: Ints
    key_count: Ints
    computed: dict[tuple[int, int], list[int]]  # numbers of the parts of a range of keys, by range and rank

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        return 16 * self.query_number.nbytes


_part_tables: BoundedCache[Hashable, PartTable] = BoundedCache(16, most_bytes=2**27)


def part_table(ranges: Ranges) -> PartTable:
    """Return the parts of a table of ranges, which are chunked."""
    return _part_tables.get_or_make(ranges, lambda: _part_table(ranges), lambda table: table.nbytes)


def _part_table(ranges: Ranges) -> PartTable:
    every = [Subranges.whole(ranges, which) for which in (ranges.queries, ranges.keys)]
    tables = pair_up(ranges, *every) + slice_pairs(ranges, *every)
    queries, keys = (concatenated([getattr(x, side).range for x in tables]) for side in ("query", "key"))
    first = ranges.position(np.arange(len(ranges.count)), np.zeros_like(ranges.count))
    key_number, reader = _numbered(keys, first[queries]), ranges.rank[queries]
    computed: dict[tuple[int, int], list[int]] = {}
    order = np.lexsort((key_number, reader, keys))
    for key, rank, number in zip(keys[order].tolist(), reader[order].tolist(), key_number[order].tolist(), strict=True):
        computed.setdefault((key, rank), []).append(number)
    query_count, key_count = (np.bincount(x, minlength=len(first)) for x in (queries, keys))
    return PartTable(tuple(tables), _numbered(queries, first[keys]), key_number, query_count, key_count, computed)


def _numbered(of: Ints, position: Ints) -> Ints:
    """Number the parts of each range in ascending order of a position, equal ones in their own order."""
    order, number = np.lexsort((position, of)), np.empty_like(of)
    begins = np.flatnonzero(group_starts(of[order]))
    number[order] = ragged_arange(np.diff(np.append(begins, len(of))))
    return number


def whole_nodes(numbers: Sequence[int], count: int) -> list[Node]:
    """Return the largest nodes of a tree of `count` parts whose parts are all among some ascending numbers."""
    nodes: list[Node] = []
    for number in numbers:
        node = Node(0, number)
        while not node.is_root(count):
            if node.is_alone(count):
                node = node.parent
            elif nodes and nodes[-1] == node.sibling:
                node = nodes.pop().parent
            else:
                break
        nodes.append(node)
    return nodes


# --- tiles ---


class Trees:
    """The trees of the queries, and of the keys, of one rank, by range and set of heads."""

    def __init__(self, ranges: Ranges, rank: int) -> None:
        self._ranges, self._rank, self._table = ranges, rank, part_table(ranges)
        self._made: dict[tuple[int, int, bool], SumTree] = {}
        self._shared = [_readers(ranges, side) for side in ("query", "key")]

    def of(self, index: int, heads: int, keys: bool) -> SumTree:
        """Return the tree of a range and a set of heads of its block. keys: of gradients of keys, else of queries."""
        key = index, heads, keys
        if key not in self._made:
            ranges = self._ranges
            group = ranges.blocks[ranges.block[index]].head_sets[heads]
            rows = Rows(int(ranges.row[index]), int(ranges.row_step[index]), int(ranges.count[index]))
            count = (self._table.key_count if keys else self._table.query_count)[index]
            some = group.key if keys else group.query
            alone = all(self._shared[keys][head] == 1 for several in some.listed() for head in several)
            self._made[key] = SumTree(rows, some, int(count), int(ranges.block[index]), alone)
        return self._made[key]


def _readers(ranges: Ranges, side: str) -> dict[int, int]:
    """Return the number of blocks that have each query head, or key/value head."""
    count: dict[int, int] = {}
    for block in ranges.blocks:
        for group in block.head_sets:
            for head in (head for several in getattr(group, side).listed() for head in several):
                count[head] = count.get(head, 0) + 1
    return count


def part_tiles(
    ranges: Ranges, layout: Layout, route: Schedule, trees: Trees, rank: int, kv_heads: int
) -> list[list[Tile]]:
    """Return the tiles that a rank computes with its own keys, then those of every stage: a part each."""
    keys = Keys.joined(own_keys(ranges, rank), received_keys(ranges, layout, route, rank, kv_heads))
    tiles: list[list[tuple[tuple[int, ...], Tile]]] = [[] for _ in range(len(route.stages) + 1)]
    table, begin = part_table(ranges), 0
    for pairs in table.tables:
        own = np.flatnonzero(ranges.rank[pairs.query.range] == rank)
        numbers = table.query_number[begin + own], table.key_number[begin + own]
        begin += len(pairs)
        some = pairs.take(own)
        some = replace(some, item=np.searchsorted(keys.subranges.range, some.key.range))
        for place, stage, tile in _tiles(ranges, keys, some, trees, numbers):
            tiles[stage].append((place, tile))
    return [[tile for _, tile in sorted(some, key=lambda entry: entry[0])] for some in tiles]


def _tiles(
    ranges: Ranges, keys: Keys, pairs: RangePairs, trees: Trees, numbers: tuple[Ints, Ints]
) -> Iterator[tuple[tuple[int, ...], int, Tile]]:
    """Yield (place in the order of a stage, stage, tile) of each pair and set of heads."""
    if not len(pairs):
        return
    addresses, masks = Addresses.of(ranges, keys, pairs), _masks(ranges, pairs)
    for i, mask in enumerate(masks):
        one = np.array([i])
        rows, slots = addresses.rows(Fold(one))
        query, key, item = int(pairs.query.range[i]), int(pairs.key.range[i]), int(pairs.item[i])
        by_position = mask is Mask.POSITION
        for number, group in enumerate(ranges.blocks[ranges.block[query]].head_sets):
            tile = Tile(
                rows, slots, group.query, group.column if keys.packed[item] else group.key, mask,
                torch.from_numpy(query_positions(ranges, pairs.take(one))) if by_position else None,
                torch.from_numpy(key_positions(ranges, pairs.take(one))) if by_position else None,
                part=Part(
                    Leaf(trees.of(query, number, False), int(numbers[0][i]), int(pairs.query.first[i])),
                    Leaf(trees.of(key, number, True), int(numbers[1][i]), int(pairs.key.first[i])),
                ),
            )  # fmt: skip
            yield (key, int(numbers[1][i]), number), int(keys.stage[item]), tile


def _masks(ranges: Ranges, pairs: RangePairs) -> list[Mask]:
    """Return the mask of each pair: causal where query i sees the keys up to i, by position where it is neither that
    nor full.
    """
    q, k = pairs.query, pairs.key
    first, last = (ranges.position(k.range, k.first + x) for x in (0, k.count - 1))
    if pairs.sight is Sight.FROM:
        full = first >= ranges.position(q.range, q.first + q.count - 1) + pairs.bound
    else:
        full = last <= ranges.position(q.range, q.first) + pairs.bound
    alike = (ranges.step[q.range] == ranges.step[k.range]) & (q.count == k.count)
    square = alike & (ranges.position(q.range, q.first) + pairs.bound == first)
    if pairs.sight is Sight.ALL:
        return [Mask.FULL] * len(pairs)
    some = Mask.CAUSAL if pairs.sight is Sight.UP_TO else Mask.POSITION
    kinds = np.where(full, Mask.FULL, np.where(square, some, Mask.POSITION))
    return [Mask(kind) for kind in kinds.tolist()]


# --- gradients of keys that return ---


def returns_of(
    ranges: Ranges, routes: Callable[[int], Schedule], trees: Trees, rank: int, ranks: int
) -> list[tuple[Returns, Returns]]:
    """Return, for every stage, what this rank returns and what its own keys get. routes: schedule of each rank."""
    gets: list[list[tuple[int, list[int]]]] = [[] for _ in routes(rank).stages]
    for reader in (reader for reader in range(ranks) if reader != rank):
        for stage, keys in enumerate(_received(ranges, routes(reader), reader)):
            gets[stage].append((reader, [key for key in keys if ranges.rank[key] == rank]))
    results = []
    for stage, keys in enumerate(_received(ranges, routes(rank), rank)):
        owners = sorted({int(ranges.rank[key]) for key in keys})
        sends = [(owner, [key for key in keys if ranges.rank[key] == owner]) for owner in owners]
        own = _laid_out(ranges, trees, [(owner, rank, some) for owner, some in sends])
        others = _laid_out(ranges, trees, [(reader, reader, some) for reader, some in gets[stage]])
        results.append((own, others))
    return results


def _received(ranges: Ranges, route: Schedule, reader: int) -> list[list[int]]:
    """Return the ranges of keys that a rank receives in each stage."""
    if route.whole:
        return [ranges.keys[ranges.rank[ranges.keys] != reader].tolist() for _ in route.stages]
    return [stage.received.subranges.range.tolist() for stage in route.stages]


def _laid_out(ranges: Ranges, trees: Trees, messages: Sequence[tuple[int, int, list[int]]]) -> Returns:
    """Lay out sums in a buffer, message after message: (peer, rank that computes, ranges of keys)."""
    sums, sent, at, table = [], [], 0, part_table(ranges)
    for peer, reader, keys in messages:
        begin = at
        for key in keys:
            count, width = int(ranges.count[key]), int(ranges.width[key])
            for node in whole_nodes(table.computed.get((key, reader), ()), int(table.key_count[key])):
                slots = Rows(at, width, count)
                for number, group in enumerate(ranges.blocks[ranges.block[key]].head_sets):
                    sums.append(ReturnedSum(trees.of(key, number, True), node, slots, group.column))
                at += count * width
        sent.append((peer, begin, at))
    return Returns(tuple(sums), transfers(*sent), at)
