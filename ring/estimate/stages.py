"""The stages of an exchange on all ranks at once, and the time that they take.

A stage is one batch of messages and the pairs that can be computed once it has arrived, as in `ring.plan.schedule`,
whose chunks and rounds are counted here from whole messages. Slots and messages are counted to the last one. Where the
bucket cuts a message, its pairs are divided in proportion to the slots of its chunks.

The model: a rank computes stage i (0: its own keys) while the keys of stage i + 1 and, in backward, the gradients of
stage i - 1 are in flight, and goes on when both are done:

    forward   T = max over ranks of      sum_{i=0..S} max(C_i, K_{i+1})
    backward  T = max over ranks of  G_S + sum_{i=0..S} max(C_i, K_{i+1} + G_{i-1})

    C_i = pairs of stage i * operations of a pair / rate of the kernels
    K_i, G_i = latency * messages + bytes / rate of the link, of the direction that has more

Ranks do not wait for each other, links do not share a wire, and merging, packing and starting kernels take no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reference import validators
from reference.cost import rounds
from ring.estimate.counting import Counted, to_readers
from ring.plan.ranges import Ints

EXCHANGES = ("ring", "direct", "gather")  # those with stages here
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
    """Slots and messages that each rank sends and receives in one stage, each (p,)."""

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


def stages_of(setting: Counted, exchange: str, bucket: int) -> list[Stage]:
    """Return the stages of an exchange, which pairs of own keys precede. Raises ValueError if there are too many."""
    if setting.world == 1:
        return []
    stages: list[Stage] = []
    make = {"ring": _ring, "direct": _direct, "gather": _gather}[exchange]
    for stage in make(setting, bucket * setting.kv_heads):
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


def _ring(setting: Counted, most: int) -> Iterator[Stage]:
    p, blocks = setting.world, len(setting.widths)
    ranks, hops = np.arange(p), np.arange(1, p)[:, None]
    in_flight = np.append(setting.in_flight, np.zeros((p, 1), np.int64), axis=1)
    # A message has the slots that travel farthest first, and of these the blocks in order.
    spans = setting.stopping[:, :, :0:-1].transpose(1, 2, 0).reshape(p, -1)
    source = (ranks - hops) % p
    share = setting.work[source, hops] / np.maximum(in_flight[source, hops], 1)
    for begin, end in _chunks(spans, np.tile(setting.widths, spans.shape[1] // blocks), most):
        chunk = np.maximum(np.minimum(in_flight, end[:, None]) - begin[:, None], 0)  # (owner, t): prefix of the chunk
        arriving, onward = chunk[source, hops], chunk[source, hops + 1]
        stopping = chunk[ranks, hops] - chunk[ranks, hops + 1]  # own slots, returned by rank + t
        for t in range(p - 1):
            if not arriving[t].any():
                break
            sent, carried = np.roll(arriving[t], -1), np.roll(onward[t], 1)
            left = arriving[t] - onward[t]
            out, into = ((a > 0).astype(np.int64) + (b > 0) for a, b in ((onward[t], left), (carried, stopping[t])))
            yield Stage(
                Messages(sent, arriving[t], (sent > 0).astype(np.int64), (arriving[t] > 0).astype(np.int64)),
                Messages(arriving[t], carried + stopping[t], out, into),
                share[t] * arriving[t],
            )


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
    """Kernels and messages of each stage, (stages + 1, p), and messages after the last, (p,)."""

    computing: np.ndarray
    messages: np.ndarray
    last: np.ndarray

    def on_the_slowest(self) -> dict[str, float]:
        """Return the times of the rank that takes longest, by their names in `Pass`."""
        exposed = np.maximum(self.messages - self.computing, 0).sum(0) + self.last
        computing, messaging = self.computing.sum(0), self.messages.sum(0) + self.last
        total = computing + exposed
        found = {"seconds": total, "computing": computing, "messaging": messaging, "exposed": exposed}
        return {name: float(x[total.argmax()]) for name, x in found.items()}


def seconds(
    setting: Counted, stages: list[Stage], operations: tuple[int, int], sizes: tuple[int, int], rates: Rates
) -> tuple[Seconds, Seconds]:
    """Return the times of forward and of backward.

    operations: of a pair, forward and backward; sizes: bytes of a slot and of its gradient.
    """
    pairs = np.array([setting.work[:, 0], *(stage.pairs for stage in stages)], float)
    none = np.zeros((1, setting.world))
    keys, gradients = (
        np.concatenate([*(messages.seconds(size, rates)[None] for messages in each), none])
        for each, size in zip(([x.keys for x in stages], [x.gradients for x in stages]), sizes, strict=True)
    )
    before = np.concatenate([none, none, gradients[:-1]])[: len(pairs)]  # gradients of the stage before
    last = gradients[-2] if stages else none[0]
    return (
        Seconds(pairs * (operations[0] / rates.forward), keys, none[0]),
        Seconds(pairs * (operations[1] / rates.backward), keys + before, last),
    )
