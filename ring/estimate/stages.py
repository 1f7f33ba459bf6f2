"""The stages of an exchange on all ranks at once, and the time that they take.

A stage is one batch of messages and the pairs that can be computed once it has arrived, as in `ring.plan.schedule`,
whose chunks and rounds are counted here from whole messages. Slots and messages are counted to the last one. Where the
bucket cuts a message, its pairs are divided in proportion to the slots of its chunks.

The model: a rank computes stage i (0: its own keys) while the keys of stage i + 1 and, in backward, the gradients of
stage i - 1 are in flight, and goes on when both are done:

    forward   T =       sum_{i=0..S} max(C_i, K_{i+1})
    backward  T = G_S + sum_{i=0..S} max(C_i, K_{i+1} + G_{i-1})

    C_i = pairs of stage i * operations of a pair / rate of the kernels
    K_i, G_i = latency * messages + bytes / rate of the link, of the direction that has more

An exchange by heads does so for its blocks of heads b = 1..B, each of which has such stages of keys and takes T_b
alone. In the meantime rows of the next block, Q, and results of the one before, R, are in flight. They share the link
with the block's own messages, which take M_b = sum_i K_i + G_i:

    T = Q_1 + sum_b max(T_b, M_b + Q_{b+1} + R_{b-1}) + R_B

The time is that of the rank that takes longest.

Ranks do not wait for each other, links do not share a wire, and merging, packing and starting kernels take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from reference import validators
from reference.cost import blocks_of, rounds, row_bytes
from reference.head_groups import Groups, groups_of
from ring.estimate.counting import Counted, to_readers
from ring.plan.ranges import Ints
from ring.plan.relay_groups import RelayGroups, relay_groups

_TENSORS = np.array([(1, 2), (2, 0), (4, 2), (1, 2)])  # messages that carry the bytes of `row_bytes`
_MAX_STAGES = 2**16
_LEAST_RATE = 1e-9  # so that times are finite


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine, to predict times.

    Args:
        forward: FLOP/s of the kernels in forward, counted as 2 products: 2 * 2 * head dim for a pair.
        backward: FLOP/s of the kernels in backward, counted as 5 products.
        link: bytes/s that a rank sends, and receives at the same time.
        latency: seconds that a message takes beyond its bytes.

    Raises:
        ValueError: a rate is less than 1e-9, or the latency negative.
    """

    forward: float
    backward: float
    link: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "link"):
            validators.at_least(name, validators.positive(name, getattr(self, name)), _LEAST_RATE)
        validators.real("latency", self.latency)


class Messages(NamedTuple):
    """Slots or bytes, and messages, that each rank sends and receives at a time, each (p,)."""

    sent: Ints
    received: Ints
    out: Ints
    into: Ints

    @classmethod
    def of(cls, slots: Ints) -> Messages:
        """Count messages given as slots of rank [s] to rank [d]."""
        return cls(slots.sum(1), slots.sum(0), (slots > 0).sum(1), (slots > 0).sum(0))

    def seconds(self, slot: int, rates: Rates) -> np.ndarray:
        """Time them on each rank, (p,), for slots of so many bytes."""
        most = np.maximum(self.sent, self.received), np.maximum(self.out, self.into)
        return most[0] * (slot / rates.link) + most[1] * rates.latency

    @property
    def returned(self) -> Messages:
        """The same messages in the other direction."""
        return Messages(self.received, self.sent, self.into, self.out)


class Stage(NamedTuple):
    """Messages of keys and of gradients, and the pairs (p,) that each rank computes in between."""

    keys: Messages
    gradients: Messages
    pairs: np.ndarray


class HeadStage(NamedTuple):
    """The block of heads of every rank; without an exchange by heads, all of them.

    own: pairs of own keys, (p,). stages: of the other keys. rows: bytes to the ranks of the heads and of the results
    back, forward, then backward.
    """

    own: np.ndarray
    stages: list[Stage]
    rows: tuple[Messages, ...]

    def messages(self, backward: bool) -> list[Messages]:
        """List the messages of a pass."""
        keys = [x for stage in self.stages for x in (stage.keys, stage.gradients)[: 1 + backward]]
        return [*self.rows[2 * backward :][:2], *keys]


def stages_of(setting: Counted, exchange: str, bucket: int) -> list[HeadStage]:
    """Return the stages of an exchange. Raises ValueError if there are too many, or the exchange is unknown."""
    p, groups = setting.world, groups_of(exchange, setting.world)
    if groups.degree == 1:
        none = Messages.of(np.zeros((p, p)))
        return [HeadStage(setting.work[:, 0], _key_stages(setting, exchange, bucket), (none,) * 4)]
    shares, found = blocks_of(setting, groups, bucket), []
    sizes = row_bytes(setting, shares)
    for blocks in zip_longest(*shares, fillvalue=(range(0), 0)):
        own = np.zeros(p, np.int64)
        within = []
        for ranks, block in zip(map(list, groups.alike), blocks, strict=True):
            if block[1]:
                part = setting.of_heads(groups.dividing, *block)
                own[ranks] = part.work[:, 0]
                within.append([(ranks, stage) for stage in _key_stages(part, groups.exchange, bucket)])
        stages = [_together(p, [x for x in each if x is not None]) for each in zip_longest(*within)]
        found.append(HeadStage(own, stages, _of_rows(setting, groups, blocks, sizes)))
    return found


def _together(p: int, stages: list[tuple[list[int], Stage]]) -> Stage:
    """Make one stage of all ranks from those of some ranks."""
    columns = np.zeros((9, p))
    for ranks, (keys, gradients, pairs) in stages:
        columns[:, ranks] = [*keys, *gradients, pairs]
    return Stage(Messages(*columns[:4]), Messages(*columns[4:8]), columns[8])


def _of_rows(
    setting: Counted, groups: Groups, blocks: Sequence[tuple[range, int]], sizes: Ints
) -> tuple[Messages, ...]:
    """Count the messages with rows of a block of each rank of a group, as `ring.comm.head_exchange` sends them."""
    members, heads = np.array(groups.dividing), np.array([(len(queries), keys) for queries, keys in blocks])
    rows = np.stack([setting.counts, setting.key_counts], axis=1)[members]  # (groups, members, queries and keys)
    found = []
    for size, tensors, back in zip(sizes, _TENSORS, (False, True) * 2, strict=True):
        columns = np.zeros((4, setting.world), np.int64)
        for at, (some_rows, some_heads, each) in enumerate(((rows, heads, size), (rows > 0, heads > 0, tensors))):
            there, here = (
                some_rows * (some_heads.sum(0) - some_heads),
                some_heads * (some_rows.sum(1, keepdims=True) - some_rows),
            )
            columns[2 * at : 2 * at + 2, members] = there @ each, here @ each
        messages = Messages(*columns)
        found.append(messages.returned if back else messages)
    return tuple(found)


def _key_stages(setting: Counted, exchange: str, bucket: int) -> list[Stage]:
    """Return the stages of an exchange of keys, which pairs of own keys precede."""
    if setting.world == 1:
        return []
    stages: list[Stage] = []
    most = bucket * setting.kv_heads
    if exchange in ("direct", "gather"):
        made = (_direct if exchange == "direct" else _gather)(setting, most)
    else:
        made = _ring(setting, most, relay_groups(exchange, setting.world))
    for stage in made:
        if len(stages) == _MAX_STAGES:
            raise ValueError(f"bucket is {bucket}; it must be large enough for at most 2**16 stages of messages")
        stages.append(stage)
    return stages


def _gather(setting: Counted, most: int) -> Iterator[Stage]:
    slots = (setting.key_counts * setting.kv_heads)[:, None] * ~np.eye(setting.world, dtype=bool)
    keys, work = Messages.of(slots), to_readers(setting.work)
    yield Stage(keys, keys.returned, (work - np.diag(np.diag(work))).sum(0))


def _direct(setting: Counted, most: int) -> Iterator[Stage]:
    p, work = setting.world, to_readers(setting.work)
    ranks = np.arange(p)
    distance = (ranks - ranks[:, None]) % p  # from owner to reader
    spans = np.stack([to_readers(x) for x in setting.needed], axis=2).reshape(p * p, -1)
    for distances, cut in rounds(setting, most // setting.kv_heads):
        of_round = np.isin(distance, distances)
        for begin, end in _chunks(spans * of_round.reshape(-1, 1), setting.widths, most) if cut else [(0, None)]:
            whole = setting.slots * of_round
            slots = whole if end is None else (end - begin).reshape(p, p)
            keys = Messages.of(slots)
            yield Stage(keys, keys.returned, (work * slots / np.maximum(whole, 1)).sum(0))


def _ring(setting: Counted, most: int, groups: RelayGroups) -> Iterator[Stage]:
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
                yield _hop(groups, sender, reader, chunk[:, t], chunk[:, t + 1], work[ranks, reader] * share)
                sender = reader


def _hop(groups: RelayGroups, sender: Ints, reader: Ints, arriving: Ints, onward: Ints, pairs: np.ndarray) -> Stage:
    """Return a hop of the slots of every owner: arriving at `reader`, of which some go onward. All (p,), by owner."""
    keys, gradients = np.zeros((2, 4, len(reader)), np.int64)
    stop, after = arriving - onward, groups.neighbour(reader, 1)
    for row, slots in ((0, arriving), (2, arriving > 0)):
        keys[row, sender], keys[row + 1, reader] = slots, slots
    for row, on, back in ((0, onward, stop), (2, onward > 0, stop > 0)):
        gradients[row, reader] = on.astype(np.int64) + back
        gradients[row + 1, after] += on
        gradients[row + 1] += back
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


def times(
    stages: list[HeadStage], operations: tuple[int, int], sizes: tuple[int, int], rates: Rates
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the times of forward and of backward, on the rank that takes longest, by their names in `Pass`.

    operations: of a pair, forward and backward; sizes: bytes of a slot and of its gradient.
    """
    pair = operations[0] / rates.forward, operations[1] / rates.backward
    return _times(stages, False, pair[0], sizes, rates), _times(stages, True, pair[1], sizes, rates)


def _times(
    stages: list[HeadStage], backward: bool, pair: float, sizes: tuple[int, int], rates: Rates
) -> dict[str, float]:
    """Time a pass. pair: seconds of a pair."""
    there, back = ([x.rows[2 * backward + i].seconds(1, rates) for x in stages] for i in (0, 1))
    none = np.zeros_like(there[0])
    computing, messaging, exposed = none, there[0] + back[-1], there[0] + back[-1]
    for stage, onward, returning in zip(stages, [*there[1:], none], [none, *back[:-1]], strict=True):
        spent = key_seconds(stage, backward, pair, sizes, rates)
        of_pairs, of_messages = spent.computing.sum(0), spent.messages.sum(0) + spent.last + onward + returning
        computing, messaging = computing + of_pairs, messaging + of_messages
        exposed = exposed + np.maximum(spent.exposed, of_messages - of_pairs)
    total = computing + exposed
    found = {"seconds": total, "computing": computing, "messaging": messaging, "exposed": exposed}
    return {name: float(x[total.argmax()]) for name, x in found.items()}


class Seconds(NamedTuple):
    """Kernels and messages of keys and gradients, by stage, (stages + 1, p), and messages after the last, (p,)."""

    computing: np.ndarray
    messages: np.ndarray
    last: np.ndarray

    @property
    def exposed(self) -> np.ndarray:
        """Messages that kernels do not hide, (p,)."""
        found: np.ndarray = np.maximum(self.messages - self.computing, 0).sum(0) + self.last
        return found


def key_seconds(stage: HeadStage, backward: bool, pair: float, sizes: tuple[int, int], rates: Rates) -> Seconds:
    """Return the times of a block on each rank. pair: seconds of a pair; sizes: bytes of a slot and of its gradient."""
    none = np.zeros_like(stage.own, float)
    computing = np.array([stage.own, *(x.pairs for x in stage.stages)]) * pair
    messages = np.array([*(x.keys.seconds(sizes[0], rates) for x in stage.stages), none])
    last = none
    if backward and stage.stages:
        *gradients, last = (x.gradients.seconds(sizes[1], rates) for x in stage.stages)
        messages = messages + np.array([none, none, *gradients])
    return Seconds(computing, messages, last)
