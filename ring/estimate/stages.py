"""The stages of an exchange on all ranks at once, and the time that they take.

A stage is one batch of messages and the pairs that can be computed once it has arrived, as in `ring.plan.schedule`,
whose chunks and rounds are counted here from whole messages. Slots and messages are counted to the last one. Where the
bucket cuts a message, its pairs are divided in proportion to the slots of its chunks.

The model: a rank computes stage i (0: its own keys) while the keys of stage i + 1 and, in backward, the gradients of
stage i - 1 are in flight, and goes on when both are done:

    forward   T =       sum_{i=0..S} max(C_i, K_{i+1})
    backward  T = G_S + sum_{i=0..S} max(C_i, K_{i+1} + G_{i-1})

    C_i = pairs of stage i * operations of a pair / rate of the kernels + seconds of a stage
    K_i, G_i = latency * messages + bytes / rate of the link, of the direction that has more; of the links within a
    host and between hosts, which work at the same time, the one that takes longer

An exchange by heads does so for its blocks of heads b = 1..B, each of which has such stages of keys and takes T_b
alone. In the meantime rows of the next block, Q, and results of the one before, R, are in flight. They share the link
with the block's own messages, which take M_b = sum_i K_i + G_i. T_b includes the packing of both, P_b:

    T = Q_1 + sum_b max(T_b, M_b + Q_{b+1} + R_{b-1}) + R_B

A timeline puts Q_{b+1} and R_{b-1} where the link is free first, and what is left after T_b. The time is that of the
rank that takes longest.

Ranks do not wait for each other, and links do not share a wire. The rates are either one for all calls, with which
merging and starting kernels take the seconds of a stage, and packing the rows of a block two such times; or those of
measured kernels, with which the pairs take the time of the plan's calls (`ring.estimate.rank_work`), and copies, merges
and starts of kernels are counted. They are added to the last stage. Rows of a block are packed at a rate of their own.
By default all of these are 0. The time of the host is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np

from reference.cost import blocks_of, rounds, row_bytes
from reference.head_groups import Groups, groups_of
from ring.estimate.counting import Counted, to_readers
from ring.estimate.rank_work import RankWork
from ring.estimate.rates import Rates
from ring.plan.exchange import parse
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.exchanges.relay_groups import RelayGroups
from ring.plan.ranges import Ints

_TENSORS = np.array([(1, 2), (2, 0), (4, 2), (1, 2)])  # messages that carry the bytes of `row_bytes`
_GIVEN, _WANTED = (3, 6), (2, 3)  # tensors that a block of heads gets, and returns; forward, backward
_MAX_STAGES = 2**16
Work = Callable[[Counted, KeyExchange], RankWork]  # of a problem whose keys travel by an exchange


class Messages(NamedTuple):
    """Slots or bytes, and messages, that each rank sends and receives at a time within its host, and between hosts:
    each (2, p).
    """

    sent: Ints
    received: Ints
    out: Ints
    into: Ints

    @classmethod
    def of(cls, slots: Ints, hosts: Ints) -> Messages:
        """Count messages given as slots of rank [s] to rank [d]. hosts: of the ranks, (p,)."""
        slots = slots * _kinds(hosts[:, None], hosts)
        return cls(slots.sum(2), slots.sum(1), (slots > 0).sum(2), (slots > 0).sum(1))

    def seconds(self, slot: int, rates: Rates) -> np.ndarray:
        """Time them on each rank, (p,), for slots of so many bytes."""
        most = np.maximum(self.sent, self.received), np.maximum(self.out, self.into)
        links = np.array(rates.links)[:, :, None]
        found: np.ndarray = (most[0] * (slot / links[:, 0]) + most[1] * links[:, 1]).max(0)
        return found

    @property
    def returned(self) -> Messages:
        """The same messages in the other direction."""
        return Messages(self.received, self.sent, self.into, self.out)


def _kinds(hosts: Ints, others: Ints) -> np.ndarray:
    """Return for each pair of hosts whether they are one, and whether they are two: (2, ...)."""
    return np.stack([hosts == others, hosts != others]).astype(np.int64)


class Stage(NamedTuple):
    """Messages of keys and of gradients, and the pairs (p,) that each rank computes in between."""

    keys: Messages
    gradients: Messages
    pairs: np.ndarray


class HeadStage(NamedTuple):
    """The block of heads of every rank; without an exchange by heads, all of them.

    own: pairs of own keys, (p,). stages: of the other keys. rows: bytes to the ranks of the heads and of the results
    back, forward, then backward. degree: ranks that divide the heads. work: of the GPU; None: only rates are known.
    one_sided: ranks write into each other's memory.
    """

    own: np.ndarray
    stages: list[Stage]
    rows: tuple[Messages, ...]
    degree: int = 1
    work: RankWork | None = None
    one_sided: bool = False

    def packed(self, backward: bool) -> np.ndarray:
        """Bytes of rows that each rank copies in a pass, (p,): its own before they are sent; results before they are
        sent, and once they have arrived. Those of the own heads are not sent, but copied. If one-sided, only results
        that have arrived are copied.
        """
        there, back = self.rows[2 * backward :][:2]
        copied = [back.received] if self.one_sided else [there.sent, back.sent, back.received]
        sent: np.ndarray = np.sum(copied, axis=(0, 1))
        return sent * self.degree / max(1, self.degree - 1)

    def copies(self, backward: bool) -> int:
        """Count the kernels that copy them: a tensor has one for each rank, results one more; if one-sided, a tensor
        has one that writes to all ranks.
        """
        if self.one_sided:
            return _GIVEN[backward] + 2 * _WANTED[backward]
        return _GIVEN[backward] * self.degree + _WANTED[backward] * (self.degree + 1)

    def row_seconds(self, backward: bool, rates: Rates) -> list[np.ndarray]:
        """Time the rows to the ranks of the heads, and the results back, (p,) each. One-sided they are one message."""
        rows = self.rows[2 * backward :][:2]
        if self.one_sided:
            rows = tuple(x._replace(out=np.minimum(x.out, 1), into=np.minimum(x.into, 1)) for x in rows)
        return [x.seconds(1, rates) for x in rows]

    def messages(self, backward: bool) -> list[Messages]:
        """List the messages of a pass."""
        keys = [x for stage in self.stages for x in (stage.keys, stage.gradients)[: 1 + backward]]
        return [*self.rows[2 * backward :][:2], *keys]


def stages_of(
    setting: Counted, exchange: str, bucket: int, on: Sequence[int], work: Work | None = None
) -> list[HeadStage]:
    """Return the stages of an exchange. on: host of each rank. work: finds that of a GPU. Raises ValueError if there
    are too many stages, or the exchange is unknown.
    """
    hosts = np.array(on)
    p, groups, keys = setting.world, groups_of(exchange, setting.world), parse(exchange, setting.world).keys
    if groups.degree == 1:
        none = Messages.of(np.zeros((p, p), np.int64), hosts)
        key_stages = _key_stages(setting, keys, bucket, hosts)
        known = None if work is None else work(setting, keys)
        return [HeadStage(setting.work[:, 0], key_stages, (none,) * 4, work=known)]
    shares, found = blocks_of(setting, groups, bucket), []
    sizes = row_bytes(setting, shares)
    for blocks in zip_longest(*shares, fillvalue=(range(0), 0)):
        own = np.zeros(p, np.int64)
        within, known = [], None
        for ranks, block in zip(map(list, groups.alike), blocks, strict=True):
            if block[1]:
                part = setting.of_heads(groups.dividing, *block)
                own[ranks] = part.work[:, 0]
                within.append([(ranks, stage) for stage in _key_stages(part, keys, bucket, hosts[ranks])])
                if work is not None and known is None:  # blocks of other heads are alike
                    known = work(part, keys)
        stages = [_together(p, [x for x in each if x is not None]) for each in zip_longest(*within)]
        rows = _of_rows(setting, groups, blocks, sizes, hosts)
        found.append(HeadStage(own, stages, rows, groups.degree, known, work is not None and len(set(on)) == 1))
    return found


def _together(p: int, stages: list[tuple[list[int], Stage]]) -> Stage:
    """Make one stage of all ranks from those of some ranks."""
    messages, computed = np.zeros((8, 2, p)), np.zeros(p)
    for ranks, (keys, gradients, pairs) in stages:
        messages[:, :, ranks], computed[ranks] = [*keys, *gradients], pairs
    return Stage(Messages(*messages[:4]), Messages(*messages[4:]), computed)


def _of_rows(
    setting: Counted, groups: Groups, blocks: Sequence[tuple[range, int]], sizes: Ints, hosts: Ints
) -> tuple[Messages, ...]:
    """Count the messages with rows of a block of each rank of a group, as `ring.comm.head_exchange` sends them."""
    members, heads = np.array(groups.dividing), np.array([(len(queries), keys) for queries, keys in blocks])
    rows = np.stack([setting.counts, setting.key_counts], axis=1)[members]  # (groups, members, queries and keys)
    found = []
    for size, tensors, back in zip(sizes, _TENSORS, (False, True) * 2, strict=True):
        columns = np.zeros((4, 2, setting.world), np.int64)
        for at, (some_rows, some_heads, each) in enumerate(((rows, heads, size), (rows > 0, heads > 0, tensors))):
            for column, own, others in ((0, some_rows, some_heads), (1, some_heads, some_rows)):
                columns[2 * at + column][:, members] = own * _of_others(others, hosts[members]) @ each
        messages = Messages(*columns)
        found.append(messages.returned if back else messages)
    return tuple(found)


def _of_others(x: Ints, hosts: Ints) -> Ints:
    """Sum over the other members of each group, on the same host and on others: (2, groups, members, 2).

    x: of each member, (groups, members, 2) or the same for all groups. hosts: of the members, (groups, members).
    """
    x = np.broadcast_to(x, (*hosts.shape, 2)).astype(np.int64)
    by_host = np.zeros((len(hosts), hosts.max() + 1, 2), np.int64)
    at = np.arange(len(hosts))[:, None], hosts
    np.add.at(by_host, at, x)
    return np.stack([by_host[at] - x, x.sum(1, keepdims=True) - by_host[at]])


def _key_stages(setting: Counted, exchange: KeyExchange, bucket: int, hosts: Ints) -> list[Stage]:
    """Return the stages of an exchange of keys, which pairs of own keys precede."""
    if setting.world == 1:
        return []
    most = bucket * setting.kv_heads
    if exchange.whole:
        return list(_gather(setting, most, hosts))
    # Slots of an owner for one reader fill so many chunks at least, each of which reaches it in a stage of its own.
    least = ((setting.needed.sum(0) - setting.widest).clip(0) // most).sum(1).max()
    groups = None if exchange.straight else RelayGroups(setting.world, exchange.group or setting.world)
    made = _direct(setting, most, hosts) if groups is None else _ring(setting, most, groups, hosts)
    stages = list(islice(made, _MAX_STAGES + 1)) if least <= _MAX_STAGES else []
    if max(least, len(stages)) > _MAX_STAGES:
        raise ValueError(f"bucket is {bucket}; it must be large enough for at most 2**16 stages of messages")
    return stages


def _gather(setting: Counted, most: int, hosts: Ints) -> Iterator[Stage]:
    slots = (setting.key_counts * setting.kv_heads)[:, None] * ~np.eye(setting.world, dtype=bool)
    keys, work = Messages.of(slots, hosts), to_readers(setting.work)
    yield Stage(keys, keys.returned, (work - np.diag(np.diag(work))).sum(0))


def _direct(setting: Counted, most: int, hosts: Ints) -> Iterator[Stage]:
    p, work = setting.world, to_readers(setting.work)
    ranks = np.arange(p)
    distance = (ranks - ranks[:, None]) % p  # from owner to reader
    spans = np.stack([to_readers(x) for x in setting.needed], axis=2).reshape(p * p, -1)
    for distances, cut in rounds(setting, most // setting.kv_heads):
        of_round = np.isin(distance, distances)
        for begin, end in _chunks(spans * of_round.reshape(-1, 1), setting.widths, most) if cut else [(0, None)]:
            whole = setting.slots * of_round
            slots = whole if end is None else (end - begin).reshape(p, p)
            keys = Messages.of(slots, hosts)
            yield Stage(keys, keys.returned, (work * slots / np.maximum(whole, 1)).sum(0))


def _ring(setting: Counted, most: int, groups: RelayGroups, hosts: Ints) -> Iterator[Stage]:
    p, ranks, work = setting.world, np.arange(setting.world), to_readers(setting.work)
    stopping = setting.stopping(groups.size)
    in_flight = np.append(np.flip(np.cumsum(np.flip(stopping.sum(0), 2), 2), 2), np.zeros((p, groups.count, 1), int), 2)
    for away in range(groups.count):
        # A message has the slots that travel farthest first, and of these the blocks in order.
        spans = stopping[:, :, away, :0:-1].transpose(1, 2, 0).reshape(p, -1)
        for begin, end in _chunks(spans, np.tile(setting.widths, groups.hops), most):
            # (owner, hop): prefix of the chunk
            chunk = np.maximum(np.minimum(in_flight[:, away], end[:, None]) - begin[:, None], 0)
            sender = ranks
            for t in range(1, groups.hops + 1):
                if not chunk[:, t].any():
                    break
                reader = groups.visited(ranks, away, t)
                share = chunk[:, t] / np.maximum(in_flight[:, away, t], 1)
                to = sender, reader, groups.neighbour(reader, 1)
                yield _hop(hosts, *to, chunk[:, t], chunk[:, t + 1], work[ranks, reader] * share)
                sender = reader


def _hop(
    hosts: Ints, sender: Ints, reader: Ints, after: Ints, arriving: Ints, onward: Ints, pairs: np.ndarray
) -> Stage:
    """Return a hop of the slots of every owner: arriving at `reader`, of which some go onward to the rank `after`. All
    (p,), by owner, but hosts, by rank.
    """
    keys, gradients = np.zeros((2, 4, 2, len(reader)), np.int64)
    way, on_way, way_back = (
        _kinds(hosts[a], b) for a, b in ((sender, hosts[reader]), (reader, hosts[after]), (reader, hosts))
    )
    stop = arriving - onward
    for row, slots in ((0, arriving), (2, arriving > 0)):
        keys[row][:, sender], keys[row + 1][:, reader] = slots * way, slots * way
    for row, on, back in ((0, onward, stop), (2, onward > 0, stop > 0)):
        gradients[row][:, reader] = on * on_way + back * way_back
        gradients[row + 1][:, after] += on * on_way
        gradients[row + 1] += back * way_back
    computed = np.zeros_like(pairs)
    computed[reader] = pairs
    return Stage(Messages(*keys), Messages(*gradients), computed)


def _chunks(spans: Ints, widths: Ints, most: int) -> Iterator[tuple[Ints, Ints]]:
    """Cut messages into chunks: the row that begins at slot x of a message belongs to chunk x // most.

    spans: (messages, spans) slots of rows of equal width, in order; widths: of their rows. Yields the first slot of
    each message's chunk, and its end.
    """
    ends = np.cumsum(spans, axis=1)
    starts, totals, messages = ends - spans, ends[:, -1], np.arange(len(ends))
    begin, chunk = np.zeros_like(totals), 0
    while (begin < totals).any():
        chunk += 1
        at = np.minimum((ends <= chunk * most).sum(1), spans.shape[1] - 1)
        start, width = starts[messages, at], widths[at]
        end = np.minimum(start - (start - chunk * most) // width * width, totals)
        yield begin, end
        begin = end


class Seconds(NamedTuple):
    """Kernels and messages of every stage on each rank, (stages, p). A stage ends when both have."""

    computing: np.ndarray
    messages: np.ndarray

    def slowest(self) -> dict[str, float]:
        """Return the times of the rank that takes longest, by their names in `Pass`."""
        computing, messaging = (x.sum(0) for x in self)
        exposed = np.maximum(self.messages - self.computing, 0).sum(0)
        total = computing + exposed
        times = {"seconds": total, "computing": computing, "messaging": messaging, "exposed": exposed}
        return {name: float(x[total.argmax()]) for name, x in times.items()}


def stage_seconds(
    blocks: list[HeadStage], backward: bool, operations: tuple[int, int], sizes: tuple[int, int], rates: Rates
) -> Seconds:
    """Time the stages of a pass, in order: rows of the first block, all blocks, results of the last one.

    operations: of a pair, forward and backward; sizes: bytes of a slot and of its gradient.
    """
    there, back = zip(*(x.row_seconds(backward, rates) for x in blocks), strict=True)
    none = np.zeros_like(there[0])
    within = [
        _block_seconds(block, onward + returning, backward, operations, sizes, rates)
        for block, onward, returning in zip(blocks, [*there[1:], none], [none, *back[:-1]], strict=True)
    ]
    first, last = (Seconds(none[None], rows[None]) for rows in (there[0], back[-1]))
    return Seconds(*(np.concatenate(x) for x in zip(first, *within, last, strict=True)))


def _block_seconds(
    block: HeadStage, rows: np.ndarray, backward: bool, operations: tuple[int, int], sizes: tuple[int, int],
    rates: Rates,
) -> Seconds:  # fmt: skip
    """Time the stages of a block of heads: own keys and those of the others, the last gradients, packing, and the rows
    of other blocks that are left.

    rows: seconds of rows of other blocks, (p,). They travel wherever the link is free.
    """
    own, others, besides = _pair_seconds(block, backward, operations, rates)
    none = np.zeros_like(rows)
    packed = block.packed(backward)
    starts = 2 * rates.stage if rates.kernels is None else block.copies(backward) * rates.kernels.launch
    packing = packed / (rates.packing or np.inf) + starts * (packed > 0)
    kernels = np.array([block.own * own, *(x.pairs * others for x in block.stages)]) + rates.stage
    kernels[-1] += besides
    computing = np.array([*kernels, none, packing, none])
    messages = np.zeros_like(computing)
    for i, stage in enumerate(block.stages):
        messages[i] += stage.keys.seconds(sizes[0], rates)
        if backward:
            messages[i + 2] += stage.gradients.seconds(sizes[1], rates)
    free = np.maximum(computing - messages, 0)
    free[-1] = rows
    sent = np.minimum(np.cumsum(free, axis=0), rows)
    return Seconds(computing, messages + np.diff(sent, axis=0, prepend=0))


def _pair_seconds(
    block: HeadStage, backward: bool, operations: tuple[int, int], rates: Rates
) -> tuple[float, float, float]:
    """Return the seconds of a pair of own keys, of one of the others' keys, and of what a GPU does besides."""
    if block.work is not None:
        own, others, besides = (seconds[backward] for seconds in block.work)
        return own, others, besides
    rate = rates.backward if backward else rates.forward
    seconds = 0.0 if rate is None else operations[backward] / rate  # None: no rank has this block
    return seconds, seconds, 0.0
