"""The stages of a rank, and the time that they take.

A stage is one batch of messages and the pairs that can be computed once it has arrived, as in `ring.plan.schedule`.

The model: a rank computes stage i (0: its own keys) while the keys of stage i + 1 and, in backward, the gradients of
stage i - 1 are in flight, and goes on when both are done:

    forward   T =       sum_{i=0..S} max(C_i, K_{i+1})
    backward  T = G_S + sum_{i=0..S} max(C_i, K_{i+1} + G_{i-1})
    kept      T =       sum_{i=1..S} max(C_i, G_{i-1}) + max(C_0, G_S), with G_0 = 0

    C_i = pairs of stage i * operations of a pair / rate of the kernels + seconds of a stage
    K_i, G_i = latency * messages + bytes / rate of the link, of the direction that has more; of the links within a
    host and between hosts, which work at the same time, the one that takes longer

An exchange by heads does so for its blocks of heads b = 1..B, each of which has such stages of keys and takes T_b
alone. In the meantime rows of the next block, Q, and results of the one before, R, are in flight. They share the link
with the block's own messages, which take M_b = sum_i K_i + G_i. T_b includes the packing of both, P_b:

    T = Q_1 + sum_b max(T_b, M_b + Q_{b+1} + R_{b-1}) + R_B

In a timeline Q_{b+1} and R_{b-1} fill the idle time of the link first; the rest follows T_b. The time is that of the
slowest rank.

Ranks do not wait for each other, and links do not share a wire. The rates are either one for all calls, with which
merging and starting kernels take the seconds of a stage, and packing the rows of a block two such times; or those of
measured kernels, with which the pairs take the time of the plan's calls (`ring.estimate.rank_work`), and copies, merges
and starts of kernels are counted. They are added to the last stage. Rows of a block are packed at a rate of their own.
By default all of these are 0. The time of the host is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ring.estimate.counting import Heads, Problem
from ring.estimate.rank_work import RankWork
from ring.estimate.rates import Rates
from ring.plan.exchange import ExchangeSpec
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.head_shares import HeadBlock, shares_keys
from ring.plan.ranges import Ints

_GIVEN, _GIVEN_KEPT, _WANTED = (3, 6), (3, 1), (2, 3)  # tensors that a block of heads gets, and returns, in each pass
_TENSORS = ((1, 2), (2, 0), (4, 2), (1, 2))  # messages of these, of queries and of keys: forward, then backward
_TENSORS_KEPT = (*_TENSORS[:2], (1, 0), _TENSORS[3])  # the same if heads are kept
Work = Callable[[Problem, KeyExchange], RankWork]  # of a problem whose keys travel by an exchange
Batch = Iterable[tuple[int, int, int]]  # peer, slots or bytes, and messages


class Messages(NamedTuple):
    """Slots or bytes, and messages, that a rank sends and receives in each batch within its host, and between hosts:
    each (batches, 2).
    """

    sent: Ints
    received: Ints
    out: Ints
    into: Ints

    @classmethod
    def of(cls, sends: Sequence[Batch], receives: Sequence[Batch], far: Sequence[bool]) -> Messages:
        """Count batches of messages. far: for each peer True if it is on another host."""
        sent, received, out, into = np.zeros((4, len(sends), 2), np.int64)
        for batches, slots, messages in ((sends, sent, out), (receives, received, into)):
            for number, batch in enumerate(batches):
                for peer, amount, several in batch:
                    if amount:
                        slots[number, int(far[peer])] += amount
                        messages[number, int(far[peer])] += several
        return cls(sent, received, out, into)

    def seconds(self, slot: int, rates: Rates) -> np.ndarray:
        """Time each batch, (batches,), for slots of so many bytes."""
        rate, latency = np.array(rates.links).T
        most = np.maximum(self.sent, self.received), np.maximum(self.out, self.into)
        seconds: np.ndarray = (most[0] * (slot / rate) + most[1] * latency).max(1)
        return seconds


class HeadStage(NamedTuple):
    """The block of heads of a rank; without an exchange by heads, all of them.

    pairs: of own keys, and of the keys of each stage. keys, gradients: messages of the stages. rows: bytes to the ranks
    of the heads and of the results back, forward, then backward. degree: ranks that divide the heads. work: of the GPU;
    None: only rates are known. one_sided: ranks write into each other's memory. kept: backward has the keys that
    forward received, and computes with own keys last. keeps_heads: backward has the rows that forward received, and
    their results.
    """

    pairs: np.ndarray
    keys: Messages
    gradients: Messages
    rows: tuple[Messages, ...]
    degree: int
    work: RankWork | None
    one_sided: bool
    kept: bool
    keeps_heads: bool

    def packed(self, backward: bool) -> int:
        """Count the bytes of rows that are copied in a pass: own ones before they are sent; results before they are
        sent, and once they have arrived; rows that are kept. Those of the own heads are not sent, but copied. If
        one-sided, only results that have arrived, and rows that are kept, are copied.
        """
        there, back = self.rows[2 * backward :][:2]
        copied = [back.received] if self.one_sided else [there.sent, back.sent, back.received]
        copied += [there.received] if self.keeps_heads and not backward else []
        return int(np.sum(copied)) * self.degree // max(1, self.degree - 1)

    def copies(self, backward: bool) -> int:
        """Count the kernels that copy them: a tensor has one for each rank, results one more; if one-sided, a tensor
        has one that writes to all ranks.
        """
        given = (_GIVEN_KEPT if self.keeps_heads else _GIVEN)[backward]
        kept = given if self.keeps_heads and not backward else 0
        if self.one_sided:
            return given + 2 * _WANTED[backward] + kept
        return given * self.degree + _WANTED[backward] * (self.degree + 1) + kept

    def row_seconds(self, backward: bool, rates: Rates) -> list[float]:
        """Time the rows to the ranks of the heads, and the results back. One-sided they are one message."""
        rows = self.rows[2 * backward :][:2]
        if self.one_sided:
            rows = tuple(x._replace(out=np.minimum(x.out, 1), into=np.minimum(x.into, 1)) for x in rows)
        return [float(x.seconds(1, rates).sum()) for x in rows]

    def sends_keys(self, backward: bool) -> bool:
        """Return True if keys are sent in a pass."""
        return not (self.kept and backward)

    def count(self, backward: bool) -> int:
        """Count the messages that are sent in a pass."""
        keys = self.keys.out.sum() if self.sends_keys(backward) else 0
        keys += self.gradients.out.sum() if backward else 0
        return int(keys + sum(x.out.sum() for x in self.rows[2 * backward :][:2]))

    def sent(self, backward: bool, slots: tuple[int, int]) -> int:
        """Count the bytes that are sent in a pass. slots: bytes of a slot, and of its gradient."""
        keys = self.keys.sent.sum() * slots[0] if self.sends_keys(backward) else 0
        keys += self.gradients.sent.sum() * slots[1] if backward else 0
        return int(keys + sum(x.sent.sum() for x in self.rows[2 * backward :][:2]))


def row_bytes(problem: Problem, stages: Heads, kept: bool = False) -> Ints:
    """Return the bytes of a row that goes to the rank of a head and comes back, forward and then backward: of a query
    head and of a key/value head, (4, 2). kept: only the gradient of the output goes there in the backward.
    """
    b, (dim, value_dim), item, wide = problem.batch, problem.dims, problem.itemsize, problem.wide
    keys, summed = b * (dim + value_dim), wide if shares_keys(stages) else item
    again = b * ((dim + 2 * value_dim) * item + wide), keys * item  # q, k, v, out, dout, lse
    return np.array([
        (b * dim * item, keys * item), (b * (value_dim * item + wide), 0),  # q, k, v; out, lse
        (b * value_dim * item, 0) if kept else again,
        (b * dim * item, keys * summed),
    ])  # fmt: skip


def stages_of(
    problem: Problem, exchange: ExchangeSpec, bucket: int, rank: int, hosts: Sequence[int], work: Work | None = None
) -> list[HeadStage]:
    """Return the blocks of heads of a rank. hosts: of the ranks. work: finds that of a GPU."""
    shares, dividing, alike = problem.head_stages(exchange, bucket), exchange.dividing(rank), exchange.same_heads(rank)
    own, far = dividing.index(rank), [hosts[peer] != hosts[rank] for peer in range(problem.ranks)]
    one_sided = work is not None and exchange.degree > 1 and len(set(hosts)) == 1
    sizes, none = row_bytes(problem, shares, exchange.keeps_heads), Messages.of([], [], far)
    known, blocks = None, []
    if work is not None:  # blocks of other heads are alike
        first = next(block for block in shares[0] if block.queries)
        known = work(problem.of_heads(exchange, first), exchange.keys)
    for stage in shares:
        pairs, keys, gradients = np.zeros(1), none, none
        if stage[own].queries:
            part = problem.of_heads(exchange, stage[own])
            ends, _, pairs = part.stages(exchange.keys, bucket, alike.index(rank))
            sends, receives, return_sends, return_receives = (
                [[(alike[x.peer], x.stop - x.start, 1) for x in batch] for batch in end] for end in ends
            )
            keys, gradients = Messages.of(sends, receives, far), Messages.of(return_sends, return_receives, far)
        rows: tuple[Messages, ...] = (none,) * 4
        if exchange.degree > 1:
            tensors = _TENSORS_KEPT if exchange.keeps_heads else _TENSORS
            rows = _rows(problem, dividing, own, stage, sizes, tensors, far)
        kept = exchange.keys.kept, exchange.keeps_heads
        blocks.append(HeadStage(pairs, keys, gradients, rows, exchange.degree, known, one_sided, *kept))
    return blocks


def _rows(
    problem: Problem, dividing: Sequence[int], own: int, stage: Sequence[HeadBlock], sizes: Ints,
    counts: Sequence[tuple[int, int]], far: Sequence[bool],
) -> tuple[Messages, ...]:  # fmt: skip
    """Count the messages with rows of a stage, as `ring.comm.head_exchange` sends them."""
    rows, heads = problem.rows[list(dividing)], np.array([(len(block.queries), len(block.keys)) for block in stage])
    found = []
    for size, tensors, back in zip(sizes, counts, (False, True) * 2, strict=True):
        of_owner, of_head = rows[own] * heads, rows * heads[own]  # own rows of the others' heads; the reverse
        ends = [
            [
                (rank, int(x @ size), int((x > 0) @ np.array(tensors)))
                for place, (rank, x) in enumerate(zip(dividing, slots, strict=True))
                if place != own
            ]
            for slots in (of_owner, of_head)
        ]
        sends, receives = reversed(ends) if back else ends
        found.append(Messages.of([sends], [receives], far))
    return tuple(found)


class Seconds(NamedTuple):
    """Kernels and messages of every stage of a rank, (stages,). A stage ends when both have."""

    computing: np.ndarray
    messages: np.ndarray

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return float(np.maximum(self.computing, self.messages).sum())

    def times(self) -> dict[str, float]:
        """Return the times by their names in `Pass`."""
        computing, exposed = self.computing.sum(), np.maximum(self.messages - self.computing, 0).sum()
        times = {"computing": computing, "messaging": self.messages.sum(), "exposed": exposed}
        return {"seconds": float(computing + exposed), **{name: float(x) for name, x in times.items()}}


def stage_seconds(
    blocks: Sequence[HeadStage], backward: bool, operations: tuple[int, int], slots: tuple[int, int], rates: Rates
) -> Seconds:
    """Time the stages of a pass, in order: rows of the first block, all blocks, results of the last one.

    operations: of a pair, forward and backward; slots: bytes of a slot and of its gradient.
    """
    there, back = zip(*(block.row_seconds(backward, rates) for block in blocks), strict=True)
    within = [
        _block_seconds(block, onward + returning, backward, operations, slots, rates)
        for block, onward, returning in zip(blocks, [*there[1:], 0.0], [0.0, *back[:-1]], strict=True)
    ]
    first, last = (Seconds(np.zeros(1), np.array([rows])) for rows in (there[0], back[-1]))
    return Seconds(*(np.concatenate(x) for x in zip(first, *within, last, strict=True)))


def _block_seconds(
    block: HeadStage, rows: float, backward: bool, operations: tuple[int, int], slots: tuple[int, int], rates: Rates
) -> Seconds:
    """Time the stages of a block of heads: own keys and those of the others, the last gradients, packing, and the rows
    of other blocks that are left.

    rows: seconds of rows of other blocks. They travel wherever the link is free.
    """
    own, others, besides = _pair_seconds(block, backward, operations, rates)
    packed = block.packed(backward)
    starts = 2 * rates.stage if rates.kernels is None else block.copies(backward) * rates.kernels.launch
    packing = packed / (rates.packing or np.inf) + starts * (packed > 0)
    kernels = block.pairs * np.array([own] + [others] * (len(block.pairs) - 1)) + rates.stage
    if not block.sends_keys(backward):
        kernels = np.roll(kernels, -1)
    kernels[-1] += besides
    computing = np.array([*kernels, 0.0, packing, 0.0])
    messages, several = np.zeros_like(computing), len(block.pairs) - 1
    if block.sends_keys(backward):
        messages[:several] = block.keys.seconds(slots[0], rates)
    if backward:
        first = 2 if block.sends_keys(backward) else 1  # the stage during which the first gradients return
        messages[first : several + first] += block.gradients.seconds(slots[1], rates)
    free = np.maximum(computing - messages, 0)
    free[-1] = rows
    sent = np.minimum(np.cumsum(free), rows)
    return Seconds(computing, messages + np.diff(sent, prepend=0))


def _pair_seconds(
    block: HeadStage, backward: bool, operations: tuple[int, int], rates: Rates
) -> tuple[float, float, float]:
    """Return the seconds of a pair of own keys, of one of the others' keys, and of what a GPU does besides."""
    if block.work is not None:
        own, others, besides = (seconds[backward] for seconds in block.work)
        return own, others, besides
    rate = rates.backward if backward else rates.forward
    seconds = 0.0 if rate is None else operations[backward] / rate
    return seconds, seconds, 0.0
