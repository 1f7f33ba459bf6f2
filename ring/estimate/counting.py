"""The counts of a problem: the rows of every rank, the pairs of queries and keys, and the stages of some ranks.

Stages, messages and buffers are those of the schedules that ranks make for a call (`ring.plan.schedule`). All of it is
counted by ranges (`ring.plan.ranges`), not by tokens, so long sequences take no longer.

Many ranks are alike. So of more than 32 only some make their schedules: 8 at equal distances, and those with most pairs
and most tokens. Estimates are the most of these, which may be less than the most of all: bytes that `ring` sends in
contiguous order by up to a seventh, times across hosts by a tenth. Pairs are counted on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reference.pattern import Pattern
from reference.slices import Slice
from ring.layout import Layout
from ring.plan.blocks import Block
from ring.plan.exchange import ExchangeSpec
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.head_rows import block_layout
from ring.plan.head_shares import HeadBlock, head_shares
from ring.plan.pieces import DocumentTable
from ring.plan.range_pairs import RangePairs, Sight, group_of, pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, ragged_arange, ranges_of
from ring.plan.schedule import KeyRows, Sizes, Transfer
from ring.plan.slice_pairs import slice_pairs, subranges_within

MAX_TOKENS = 2**31
MAX_PAIRS = 2**27  # of ranges in one segment
MAX_CHUNKS = 2**18
_MOST_RANKS, _SOME_RANKS = 32, 8
_SAMPLES = 16  # queries of two ranges that see each other in part; up to so many all
_ENDS = ("sends", "receives", "return_sends", "return_receives")
_EXACT = 2**53  # up to here fp64 is exact
Heads = Sequence[Sequence[HeadBlock]]  # stages: the block of each rank that divides the heads


@dataclass(frozen=True, eq=False)
class Problem:
    """The sizes of a call, without its exchange.

    Args:
        pattern: the attention mask.
        layout, key_layout: of queries, and of keys.
        batch, heads, kv_heads, head_dim, value_dim: sizes of the tensors.
        itemsize: bytes of a number in the working dtype.
    """

    pattern: Pattern
    layout: Layout
    key_layout: Layout
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    _made: dict[Hashable, Problem] = field(default_factory=dict, init=False)  # of blocks of heads
    _stages: dict[Hashable, KeyStages] = field(default_factory=dict, init=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def wide(self) -> int:
        """Bytes of a number in the accumulator's dtype."""
        return max(4, self.itemsize)

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values."""
        return self.head_dim, self.value_dim

    def slot_bytes(self, narrow: bool) -> tuple[int, int]:
        """Return the bytes of a key with its value, and of their gradients: in the working dtype if narrow."""
        numbers = self.batch * (self.head_dim + self.value_dim)
        return numbers * self.itemsize, numbers * (self.itemsize if narrow else self.wide)

    @cached_property
    def rows(self) -> Ints:
        """Queries and keys of each rank, (ranks, 2)."""
        return np.array([self.layout.counts, self.key_layout.counts], np.int64).T

    @cached_property
    def ranges(self) -> Ranges:
        """The ranges of all ranks. Raises ValueError for too many."""
        ranges = ranges_of(self.pattern, self.layout, self.heads, self.kv_heads, self.key_layout)
        _, alike = np.unique(group_of(ranges)[ranges.keys], return_counts=True)
        if (pairs := int((alike**2).sum())) > MAX_PAIRS:
            raise ValueError(
                f"layout has too many runs of positions: {pairs} pairs of them would be counted, and 2**27 are the "
                "most. Give one of fewer runs, such as Layout.zigzag(n, p), or fewer ranks"
            )
        return ranges

    @cached_property
    def _seen(self) -> np.ndarray:
        """Pairs of the queries of each range, (ranges of queries,), in fp64."""
        ranges = self.ranges
        heads = _query_heads(ranges.blocks)[ranges.block[ranges.queries]]
        return _seen(ranges, self.pattern, self.layout.n, self.key_layout.n) * heads.astype(float)

    @cached_property
    def pairs(self) -> Ints:
        """(query head, query, key) triples of one batch entry that the queries of each rank see, (ranks,)."""
        if self._seen.sum() >= _EXACT:
            raise ValueError("tokens are too many: 2**53 or more pairs of a query and a key are not counted")
        return self._by_rank.astype(np.int64)

    @cached_property
    def _by_rank(self) -> np.ndarray:
        return np.bincount(self.ranges.rank[self.ranges.queries], self._seen, self.ranks)

    @cached_property
    def counted_ranks(self) -> list[int]:
        """The ranks that make their schedules."""
        if self.ranks <= _MOST_RANKS:
            return list(range(self.ranks))
        some = {i * (self.ranks - 1) // (_SOME_RANKS - 1) for i in range(_SOME_RANKS)}
        return sorted(some | {int(self._by_rank.argmax()), *self.rows.argmax(0).tolist()})

    def of_heads(self, exchange: ExchangeSpec, block: HeadBlock) -> Problem:
        """Return the problem of a block of heads among the ranks that have it: the same object for equal blocks."""
        if exchange.degree == 1:
            return self
        pattern = self.pattern.of_heads(block.queries)
        key = pattern, len(block.queries), len(block.keys), exchange.degree, exchange.neighbours
        if key not in self._made:
            groups = [exchange.dividing(rank) for rank in exchange.same_heads(0)]
            self._made[key] = replace(
                self, pattern=pattern, heads=len(block.queries), kv_heads=len(block.keys),
                layout=block_layout(self.layout, groups), key_layout=block_layout(self.key_layout, groups),
            )  # fmt: skip
        return self._made[key]

    def head_stages(self, exchange: ExchangeSpec, bucket: int) -> Heads:
        """Return the stages of an exchange by heads; of another, one block of all heads."""
        if exchange.degree == 1:
            return ((HeadBlock(range(self.heads), range(self.kv_heads)),),)
        longest = max(int(self.rows[list(exchange.dividing(rank)), 1].sum()) for rank in exchange.same_heads(0))
        most = max(1, bucket * self.kv_heads // max(1, longest))
        return head_shares(self.heads, self.kv_heads, exchange.degree, most)

    def computed(self, exchange: ExchangeSpec, stages: Heads) -> Ints:
        """Count the pairs that each rank computes, (ranks,)."""
        total = np.zeros(self.ranks, np.int64)
        for stage in stages:
            for rank, block in zip(exchange.dividing(0), stage, strict=True):
                if block.queries:
                    total[list(exchange.same_heads(rank))] += self.of_heads(exchange, block).pairs
        return total

    def stages(self, keys: KeyExchange, bucket: int, rank: int) -> KeyStages:
        """Return the stages of a rank by an exchange of keys. Raises ValueError if there may be too many."""
        if (keys, bucket, rank) not in self._stages:
            self._stages[keys, bucket, rank] = self._key_stages(keys, bucket, rank)
        return self._stages[keys, bucket, rank]

    def _key_stages(self, keys: KeyExchange, bucket: int, rank: int) -> KeyStages:
        if self.ranks > 1 and not keys.whole and self.key_layout.n * len(self.pattern.branches) // bucket > MAX_CHUNKS:
            raise ValueError(f"bucket is {bucket}; it must be large enough for at most 2**18 stages of messages")
        ranges, total = self.ranges, self._by_rank[rank]
        schedule = keys.schedule(KeyRows(ranges, self.key_layout, rank, self.kv_heads, bucket))
        own = Subranges.whole(ranges, ranges.keys[ranges.rank[ranges.keys] == rank])
        pairs = _areas(ranges, rank, [own, *(stage.received.subranges for stage in schedule.stages)])
        if schedule.whole and schedule.stages:
            pairs[1] = max(0.0, total - pairs[0])
        messages = [[getattr(stage, name) for stage in schedule.stages] for name in _ENDS]
        return KeyStages(messages, schedule.sizes, pairs * (total / pairs.sum() if pairs.any() else 0.0))


class KeyStages(NamedTuple):
    """Messages, buffers and pairs of a rank's schedule (`ring.plan.schedule`).

    messages: sends, receives, return_sends and return_receives, each of all stages. pairs: that the rank computes with
    its own keys, and in each stage, (stages + 1,).
    """

    messages: list[list[tuple[Transfer, ...]]]
    sizes: Sizes
    pairs: np.ndarray

    @property
    def received(self) -> int:
        """Slots that are received in all stages."""
        return sum(x.stop - x.start for stage in self.messages[1] for x in stage)


def _query_heads(blocks: Sequence[Block]) -> Ints:
    return np.array([sum(g.query.groups * g.query.per_group for g in block.head_sets) for block in blocks], np.int64)


def _seen(ranges: Ranges, pattern: Pattern, n: int, keys: int) -> Ints:
    """Count the keys that the queries of each range see together, (ranges of queries,).

    The keys of a query at place i of its segment's grid are the places from i + low to i + high, and from `first` to
    before `top`: min(max(i + high + 1, first), top) - min(max(i + low, first), top). n, keys: tokens of queries, and of
    keys.
    """
    queries, documents = ranges.queries, DocumentTable.of(pattern.documents, max(n, keys))
    total, far = np.zeros(len(queries), np.int64), max(n, keys)
    for number, block in enumerate(ranges.blocks):
        table = documents.cut(block.whole_segment if block.window is not None else block.segment_length)
        window = far if block.window is None else block.window
        cover = Slice(low=-window, high=0 if block.causal else window)
        for one in (*([cover] if block.covers else []), *block.slices):
            q0, q1, k0, k1, low, high = one.limits
            whole = Subranges.whole(ranges, queries)
            within = subranges_within(ranges, number, whole, np.array([q0]), np.array([min(q1, far)]))
            some, which = within.subranges, within.item
            first, step, count = ranges.position(some.range, some.first), ranges.step[some.range], some.count
            if ranges.listing is not None:  # each element by itself
                which, element = np.repeat(within.item, count), ragged_arange(count)
                at = np.repeat(np.arange(len(some)), count)
                first = ranges.position(some.range[at], some.first[at] + element)
                count, step = np.ones_like(first), np.full_like(first, block.dilation_rate)
            rate, segment = block.dilation_rate, table.holding(first)
            origin = table.begin[segment] + block.offset
            top = np.maximum(-((origin - np.minimum(table.end[segment], min(keys, k1))) // rate), 0)
            least = np.clip(-((origin - k0) // rate), 0, top)
            place, step = (first - origin) // rate - least, step // rate
            after, before = place + max(min(high, far) // rate + 1, -far), place + max(-(-low // rate), -far)
            seen = _sum_clipped(after, step, count, top - least) - _sum_clipped(before, step, count, top - least)
            np.add.at(total, which, seen)
    return total


def _sum_clipped(start: Ints, step: Ints, count: Ints, top: Ints) -> Ints:
    """Sum start + e * step for e = 0 .. count - 1, each clipped to 0 .. top."""
    low = np.clip(-(start // step), 0, count)
    high = np.clip(-((start - top) // step), low, count)
    between = high - low
    return between * start + step * (between * (low + high - 1) // 2) + (count - high) * top


def _areas(ranges: Ranges, rank: int, arrivals: Sequence[Subranges]) -> np.ndarray:
    """Count the pairs of a rank's queries with each of some arrivals of keys, (arrivals,), but for rounding."""
    keys = Subranges.join(arrivals)
    arrival = np.repeat(np.arange(len(arrivals)), [len(x) for x in arrivals])
    ascending = np.argsort(keys.range, kind="stable")
    keys, arrival = keys.take(ascending), arrival[ascending]
    queries = Subranges.whole(ranges, ranges.queries[ranges.rank[ranges.queries] == rank])
    heads, total = _query_heads(ranges.blocks), np.zeros(len(arrivals))
    for pairs in pair_up(ranges, queries, keys) + slice_pairs(ranges, queries, keys):
        weights = heads[ranges.block[pairs.query.range]] * _area(ranges, pairs)
        total += np.bincount(arrival[pairs.item], weights, len(arrivals))
    return total


def _area(ranges: Ranges, pairs: RangePairs) -> np.ndarray:
    """Count the visible pairs of each pair of ranges, from the keys that some of its queries see."""
    query, key = pairs.query, pairs.key
    if pairs.sight is Sight.ALL:
        return (query.count * key.count).astype(float)
    samples = np.minimum(query.count, _SAMPLES)
    which, number = np.repeat(np.arange(len(pairs)), samples), ragged_arange(samples)
    element = (2 * number + 1) * query.count[which] // (2 * samples[which])
    position = ranges.position(query.range[which], query.first[which] + element)
    at, first, count = key.range[which], key.first[which], key.count[which]
    if pairs.sight is Sight.FROM:
        seen = first + count - ranges.count_until(at, position + pairs.bound[which] - 1)
    else:
        seen = ranges.count_until(at, position + pairs.bound[which]) - first
    return np.bincount(which, np.clip(seen, 0, count), len(pairs)) * query.count / samples
