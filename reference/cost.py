"""Costs of pattern x layout x exchange x bucket, per rank: exact counts, written without any ring code.

Vocabulary
    block   (branch, offset) with the key/value heads that have at least one query head of that offset in that
            branch. Its width is the number of those heads.
    slot    one (row, key/value head) of one block: a key and a value vector, B*(D + Dv) elements. A row that is
            needed through two branches travels once for each, so costs add up over branches.
    need    rank d needs row j of a block if a query row i of d lies in the same segment (of the same document),
            both are selected by the block, and a slice of the branch sees the pair; causality and windows are slices.
            A row that several slices need is needed once.
    hops    of a slot in a group of ranks that pass keys round: it visits them in turn, up to the last that needs it.
            "ring" has one group of all ranks; in "ring:N+direct" N neighbours are one. In the group of its owner s the
            first hop is to the rank after s; in others to the rank at the place that s has in its own.

A layout is the list of the global positions of each rank; their local order does not change costs. In cross-attention
keys have a list of their own, of another length perhaps.
Sinks are one number for each query head on every rank: they are not sent, and not counted. A softcap costs no bytes.
Counts are exact: int64 arrays (far below 2**53) or Python integers. Bytes, unless a name says slots or pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reference import validators
from reference.head_groups import (
    ALL_TO_ALL,
    ALL_TO_ALL_KEPT,
    DIRECT_KEPT,
    KEY_EXCHANGES,
    Groups,
    groups_of,
    head_blocks,
    ways,
)
from reference.pattern import Pattern
from reference.remote_rows import Need, branch_need
from reference.returned_sums import returned_sums

Ints = NDArray[np.int64]
EXCHANGES = (*KEY_EXCHANGES, DIRECT_KEPT, ALL_TO_ALL, ALL_TO_ALL_KEPT)
_UNBOUNDED = 1 << 60  # slots


@dataclass(frozen=True, eq=False)
class Setting:
    """One problem: a pattern over a sharded sequence. Sums are accumulated in fp64 for fp64 and in fp32 otherwise.

    Args:
        pattern: the attention mask.
        positions: int64 global positions of each rank, together a permutation of range(n).
        batch, heads, kv_heads, head_dim: sizes of the tensors; heads is a multiple of kv_heads.
        itemsize: bytes of the working type: 8, 4 or 2.
        value_dim: head dim of the values, Dv; None: head_dim.
        key_positions: of the keys and values, like positions; None: positions.
        lse_gradient: True if lse is an output, so that "all-to-all" sends its gradient.
        chunk: tokens of a chunk, for attention with the same bits on any ranks (`reference.same_bits`). Ranges of keys
            then travel whole, and sums of their gradients return to the owner at once, in the accumulator's type.
            None: none.

    Raises:
        ValueError: positions, heads, itemsize or sizes are invalid or inconsistent.
    """

    pattern: Pattern
    positions: Sequence[Ints]
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 4
    value_dim: int | None = None
    key_positions: Sequence[Ints] | None = None
    lse_gradient: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(np.asarray(x, np.int64) for x in self.positions))
        if self.key_positions is not None:
            object.__setattr__(self, "key_positions", tuple(np.asarray(x, np.int64) for x in self.key_positions))
        for name in ("batch", "heads", "kv_heads", "head_dim"):
            validators.at_least(name, getattr(self, name), 1)
        if self.value_dim is not None:
            validators.at_least("value_dim", self.value_dim, 1)
        validators.grouped_heads(self.heads, self.kv_heads)
        if self.itemsize not in (2, 4, 8):
            raise ValueError(f"itemsize is {self.itemsize}; it must be 2, 4 or 8 bytes")
        for name, positions in (("positions", self.positions), ("key_positions", self.keys)):
            if len(positions) != max(self.world, 1) or any(x.ndim != 1 for x in positions):
                raise ValueError(f"{name} must be one one-dimensional array per rank, for at least one rank")
            rows = np.concatenate(positions)
            n = rows.size
            if n and (rows.min() < 0 or rows.max() >= n or np.bincount(rows).max() > 1):
                raise ValueError(f"{name} must hold every number of range({n}) exactly once")
        self.pattern.validate_tokens(self.query_rows.size, self.rows.size)
        self.pattern.validate(self.heads)

    @property
    def world(self) -> int:
        """Number of ranks, p."""
        return len(self.positions)

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of the accumulator's type."""
        return 8 if self.itemsize == 8 else 4

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values, (D, Dv)."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    def slot_bytes(self, narrow: bool = False) -> tuple[int, int]:
        """Return the bytes of a key and a value vector, working type, and of their gradients, accumulator's type.

        Args:
            narrow: True for gradients in the working type too.
        """
        elements = self.batch * sum(self.dims)
        return elements * self.itemsize, elements * (self.itemsize if narrow else self.accumulator_itemsize)

    @property
    def keys(self) -> Sequence[Ints]:
        """Global positions of the keys of each rank."""
        return self.positions if self.key_positions is None else self.key_positions

    @cached_property
    def counts(self) -> Ints:
        """Number of queries of each rank, (p,)."""
        return np.array([x.size for x in self.positions], np.int64)

    @cached_property
    def key_counts(self) -> Ints:
        """Number of keys of each rank, (p,)."""
        return np.array([x.size for x in self.keys], np.int64)

    @cached_property
    def query_rows(self) -> Ints:
        """Global positions of the queries, shard after shard, (n_q,)."""
        return np.concatenate(self.positions)

    @cached_property
    def query_owner(self) -> Ints:
        """Rank of each of `query_rows`, (n_q,)."""
        return np.repeat(np.arange(self.world), self.counts)

    @cached_property
    def rows(self) -> Ints:
        """Global positions of the keys, shard after shard, (n,)."""
        return np.concatenate(self.keys)

    @cached_property
    def owner(self) -> Ints:
        """Rank of each of `rows`, (n,)."""
        return np.repeat(np.arange(self.world), self.key_counts)

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Remote rows of each branch."""
        needs = tuple(branch_need(self, i, branch) for i, branch in enumerate(self.pattern.branches))
        if self.chunk is None:
            return needs
        return tuple(replace(x, needed=sums > 0) for x, (sums, _) in zip(needs, self._returned, strict=True))

    @cached_property
    def _returned(self) -> list[tuple[Ints, Ints]]:
        """`returned_sums` of each branch."""
        assert self.chunk is not None
        return [returned_sums(self, i, self.chunk) for i in range(len(self.pattern.branches))]

    @cached_property
    def returned_slots(self) -> Ints:
        """(p, p): slots of sums of gradients that rank [d] returns to rank [s], over all blocks, in chunks."""
        total = np.zeros((self.world, self.world), np.int64)
        for need, (sums, _) in zip(self.needs, self._returned, strict=True):
            np.add.at(total.T, self.owner, (sums * need.width).T)
        return total

    @cached_property
    def slots(self) -> Ints:
        """(p, p): slots of rank [s] that rank [d] needs, over all blocks; the diagonal is 0."""
        p, total = self.world, np.zeros(self.world**2, np.int64)
        for need in self.needs:
            dst, row = np.nonzero(need.needed)
            total += np.bincount(self.owner[row] * p + dst, need.width[row], p * p).astype(np.int64)
        return total.reshape(p, p)

    def ending(self, size: int) -> Ints:
        """Return (p, groups, hops + 1): slots of a rank whose last hop in the group so far away is that one.

        Args:
            size: ranks of a group.
        """
        p, count = self.world, self.world // size
        shape = p, count, size + (count > 1)
        readers = np.arange(p)[:, None]
        away = (readers // size - self.owner // size) % count  # (p, n)
        hop = (readers - self.owner) % size + (away > 0)
        total = np.zeros(np.prod(shape), np.int64)
        for need in self.needs:
            for group in range(count):
                last = hop.max(axis=0, where=need.needed & (away == group), initial=0)
                place = np.ravel_multi_index((self.owner, np.full_like(last, group), last), shape)
                total += np.bincount(place, need.width, total.size).astype(np.int64)
        return total.reshape(shape)

    @cached_property
    def widest(self) -> int:
        """W, the greatest width of a block of which some rank needs a remote row, in chunks times the rows of its
        range; 0 if there is none.
        """
        widths = [need.width for need in self.needs]
        if self.chunk is not None:
            widths = [width * rows for width, (_, rows) in zip(widths, self._returned, strict=True)]
        needed = zip(widths, (x.needed.any(axis=0) for x in self.needs), strict=True)
        return max((int(slots.max(where=some, initial=0)) for slots, some in needed), default=0)

    @cached_property
    def pairs(self) -> Ints:
        """(p,): (query head, query, key) triples that the queries of each rank see, with multiplicity."""
        before = np.zeros(self.query_rows.size + 1, np.int64)  # cumulative: those of a shard are a difference
        for need in self.needs:
            before[1:] += np.cumsum(need.pairs)
        ends = np.cumsum(self.counts)
        return before[ends] - before[ends - self.counts]

    def of_heads(self, dividing: Sequence[Sequence[int]], queries: range, keys: int) -> Setting:
        """Return the problem of a block of heads: a rank for each group, which has the rows of all ranks of the group.

        Args:
            dividing: ranks that divide the heads of their rows, group by group.
            queries, keys: query heads of the block, and the number of its key/value heads.
        """
        rows = [np.concatenate([self.positions[r] for r in group]) for group in dividing]
        of_keys = None
        if self.key_positions is not None:
            of_keys = [np.concatenate([self.keys[r] for r in group]) for group in dividing]
        return replace(
            self, pattern=self.pattern.of_heads(queries), positions=rows, heads=len(queries), kv_heads=keys,
            key_positions=of_keys,
        )  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """Bytes sent from rank [i] to rank [j], each (p, p) with a zero diagonal.

    Args:
        forward: keys and values; "all-to-all": queries, keys, values, outputs and lse.
        backward_kv: keys and values once more; "direct-kept": none; "all-to-all": all these once more, and the
            gradients of outputs; "all-to-all-kept": these gradients alone.
        backward_gradients: gradients of keys and values, in the accumulator's type unless they are narrow;
            "all-to-all": of queries, too.
    """

    forward: Ints
    backward_kv: Ints
    backward_gradients: Ints

    @property
    def backward(self) -> Ints:
        """Bytes of the whole backward, (p, p)."""
        return self.backward_kv + self.backward_gradients


def sent(setting: Setting, exchange: str, narrow: bool = False) -> Traffic:
    """Return the bytes sent from rank to rank, for any bucket.

    direct  d receives from s the slots that it needs; their gradients go the same way back. "direct-kept" does so, too,
            but sends no keys in the backward.
    ring    a slot goes from rank to rank of a group for so many hops. Its gradient starts at the first rank visited,
            follows it for one hop less, and the last rank returns it to its owner: as many messages.
    gather  every shard, all rows and heads, to every other rank; its gradients back from every other rank.
            In chunks each rank returns sums of gradients to the owner, whatever brought the keys.
    all-to-all  d receives from s its rows of the heads of d (`head_blocks`); their results go the same way back. Keys
            of these heads travel by the exchange beside it, as in "all-to-all:2+ring", among the ranks that have them.
            "all-to-all-kept" sends only gradients in the backward.

    Args:
        setting: the problem.
        exchange: one of EXCHANGES, or two, as `groups_of`.
        narrow: True if gradients return in the working type, as those of `direct` do between GPUs.

    Raises:
        ValueError: the exchange is unknown.
    """
    p, ranks = setting.world, np.arange(setting.world)
    groups = groups_of(exchange, p)
    if groups.degree > 1:
        return _sent_by_head(setting, groups, narrow)
    if groups.round:
        keys, gradients = np.zeros((2, p, p), np.int64)
        ending = setting.ending(groups.round)
        for away, hop, sender, receiver in ways(p, groups.round):
            in_flight = ending[:, away, hop:].sum(axis=1)
            keys[sender, receiver] += in_flight
            if hop > 1:
                gradients[sender, receiver] += in_flight
            gradients[receiver, ranks] += ending[:, away, hop]
    elif groups.straight:
        keys, gradients = setting.slots, setting.slots.T
    else:
        keys = (setting.key_counts * setting.kv_heads)[:, None] * (ranks[:, None] != ranks)
        gradients = keys.T
    if setting.chunk is not None:
        gradients, narrow = setting.returned_slots, False
    size, gradient_size = setting.slot_bytes(narrow)
    return Traffic(keys * size, keys * size * (not groups.kept), gradients * gradient_size)


@dataclass(frozen=True)
class Buffers:
    """Bytes of communication buffers per rank, each (p,).

    Args:
        receive: keys and values received, working type.
        send: own keys and values that are sent, working type.
        gradients: gradients of the received keys and values, in the type in which they are sent; backward only.
        returned: gradients that are returned to their owner, in the same type.
        kept: True if `receive` stays until the backward, which sends no keys.
    """

    receive: Ints
    send: Ints
    gradients: Ints
    returned: Ints
    kept: bool = False

    @property
    def forward(self) -> Ints:
        """Bytes of all buffers of the forward, (p,)."""
        return self.receive + self.send

    @property
    def backward(self) -> Ints:
        """Bytes of all buffers of the backward, (p,)."""
        keys = self.receive if self.kept else self.forward
        return keys + self.gradients + self.returned


def buffers(setting: Setting, exchange: str, bucket: int, narrow: bool = False, one_sided: bool = False) -> Buffers:
    """Return the bytes of every communication buffer that an exchange allocates. All are 0 for one rank.

    With cap = bucket * Hk slots, most = cap + W - 1, v(s, t) = slots of s of t hops or more, e(s, t) = those of
    t hops, n_r = keys of rank r; in slots of rank d, s(t) being the owner whose slots reach d at hop t:

                 receive                       send                        returned
        ring     max_t min(v(s(t), t), most)   max min(v(d, 1), most)      receive + max_t min(e(d, t), most)
        direct   max over rounds, sum over     the same, over what         as send
                 distances of the slots        rank d serves in
                 taken (<= most if cut)        the round
        gather   Hk * (n - n_d)                Hk * n_d                    (p - 1) * Hk * n_d

    With several groups that pass keys round, maxima are over these as well. For exchanges by heads see
    `_buffers_by_head`. In chunks W is the most slots of a range, and a buffer of gradients has sums, as `returned` has:
    see `_sums_slots`.

    Forward: the receive buffers (two, so that one fills while the other is used; one for gather) and the send buffer,
    in the working type. Backward: the same again, plus as many gradient buffers as receive buffers and `returned`, in
    the type in which gradients are sent. With "direct-kept" a buffer of all received slots takes the place of the
    receive buffers, forward and backward, and backward has no send buffer.

    Args:
        setting: the problem.
        exchange: one of EXCHANGES, or two, as `groups_of`.
        bucket: in tokens, at least 1.
        narrow: True if gradients return in the working type, as those of `direct` do between GPUs.
        one_sided: True if ranks that exchange heads write into each other's memory, as GPUs of one host do.

    Raises:
        ValueError: the exchange is unknown, or the bucket less than 1.
    """
    groups = groups_of(exchange, setting.world)
    if groups.degree > 1:
        return _buffers_by_head(setting, groups, bucket, narrow, one_sided)
    receive, send, returned = _buffer_slots(setting, groups, bucket)
    gradients = receive
    if setting.chunk is not None:
        (gradients, returned), narrow = _sums_slots(setting, groups, bucket), False
    copies = 1 if groups.exchange == "gather" else 2
    size, gradient_size = setting.slot_bytes(narrow)
    received = setting.slots.sum(axis=0) if groups.kept else copies * receive
    return Buffers(
        received * size, send * size, copies * gradients * gradient_size, returned * gradient_size, groups.kept
    )


def _sums_slots(setting: Setting, groups: Groups, bucket: int) -> tuple[Ints, Ints]:
    """Slots (p,) of a buffer of sums that a rank returns, and of those that its own keys get, in chunks: of the stage
    with most. Where a message is cut, these are the most that they can be.
    """
    p, ranks, sums = setting.world, np.arange(setting.world), setting.returned_slots
    if groups.exchange == "gather":
        return sums.sum(axis=1), sums.sum(axis=0)
    sent, back = np.zeros((2, p), np.int64)
    if groups.round:
        for *_, reader in ways(p, groups.round):
            sent[reader] = np.maximum(sent[reader], sums[reader, ranks])
            back = np.maximum(back, sums[reader, ranks])
        return sent, back
    for distances, _ in rounds(setting, bucket):
        readers = (ranks + np.array(distances)[:, None]) % p  # (t, s)
        back = np.maximum(back, sums[readers, ranks].sum(axis=0))
        sent = np.maximum(sent, sums[ranks, (ranks - np.array(distances)[:, None]) % p].sum(axis=0))
    return sent, back


def _buffer_slots(setting: Setting, groups: Groups, bucket: int) -> tuple[Ints, Ints, Ints]:
    """Slots (p,) of a receive buffer, of the send buffer and of `returned`, by the table of `buffers`."""
    p, ranks = setting.world, np.arange(setting.world)
    most = _cap(setting, bucket) + setting.widest - 1
    own = setting.key_counts * setting.kv_heads
    receive, send, returned = np.zeros((3, p), np.int64)
    if groups.exchange == "gather":
        return own.sum() - own, own if p > 1 else 0 * own, (p - 1) * own
    if groups.round:
        ending = setting.ending(groups.round)
        for away, hop, _, receiver in ways(p, groups.round):
            in_flight = np.minimum(ending[:, away, hop:].sum(axis=1), most)
            receive[receiver] = np.maximum(receive[receiver], in_flight)
            returned = np.maximum(returned, np.minimum(ending[:, away, hop], most))
            send = np.maximum(send, in_flight * (hop == 1))
        return receive, send, receive + returned
    taken = _by_distance(setting)  # (t, d)
    served = setting.slots[ranks, (ranks + ranks[:, None]) % p]  # (t, s)
    for distances, _ in rounds(setting, bucket):  # only a distance that is cut can exceed `most`
        receive = np.maximum(receive, np.minimum(taken[distances], most).sum(axis=0))
        send = np.maximum(send, np.minimum(served[distances], most).sum(axis=0))
    return receive, send, send


def _cap(setting: Setting, bucket: int) -> int:
    """Slots of a bucket. A row is not split, so a buffer must have room for up to W - 1 more."""
    if bucket < 1:
        raise ValueError(f"bucket is {bucket}; it must be at least 1 token")
    return bucket * setting.kv_heads


def _by_distance(setting: Setting) -> Ints:
    """(p, p): slots that rank [d], second index, takes from rank (d - t) mod p at distance [t], first index."""
    ranks = np.arange(setting.world)
    return setting.slots[(ranks - ranks[:, None]) % setting.world, ranks]


def rounds(setting: Setting, bucket: int) -> list[tuple[list[int], bool]]:
    """Return the rounds of `direct`, the same on every rank: (distances served, True if the round is cut in chunks).

    At distance t rank d takes from rank (d - t) mod p. Distances at which no rank needs a slot are skipped; others
    are grouped in order while the sum of their largest messages fits the bucket. A distance that exceeds the
    bucket alone is cut: the row that starts at slot x of a message belongs to chunk x // cap.

    Args:
        setting: the problem.
        bucket: in tokens, at least 1.

    Raises:
        ValueError: the bucket is less than 1.
    """
    groups: list[tuple[list[int], bool]] = []
    cap, filled = _cap(setting, bucket), _UNBOUNDED  # filled: slots of the last group; unbounded before the first
    for t, greatest in enumerate(_by_distance(setting).max(axis=1).tolist()):
        if greatest and filled + greatest <= cap:
            groups[-1][0].append(t)
            filled += greatest
        elif greatest:
            groups.append(([t], greatest > cap))
            filled = greatest
    return groups


def blocks_of(setting: Setting, groups: Groups, bucket: int) -> list[list[tuple[range, int]]]:
    """Return the blocks of heads of each rank of a group that divides them, as `head_blocks`: at most as many key/value
    heads as a bucket holds rows of the longest group.

    Args:
        setting: the problem.
        groups: those of the exchange.
        bucket: in tokens, at least 1.

    Raises:
        ValueError: the bucket is less than 1.
    """
    rows = max(sum(int(setting.key_counts[r]) for r in group) for group in groups.dividing)
    return head_blocks(setting.heads, setting.kv_heads, groups.degree, max(1, _cap(setting, bucket) // max(1, rows)))


def _problems(
    setting: Setting, groups: Groups, blocks: list[list[tuple[range, int]]]
) -> Iterator[tuple[list[int], Setting]]:
    """The ranks that have each block of heads, and the problem of the block."""
    for ranks, own in zip(groups.alike, blocks, strict=True):
        for block in own:
            yield list(ranks), setting.of_heads(groups.dividing, *block)


def row_bytes(setting: Setting, blocks: list[list[tuple[range, int]]], kept: bool = False) -> Ints:
    """Return the bytes of one row that go to the rank of a head and come back, forward and then backward, (4, 2): of a
    query head and of a key/value head.

    Args:
        setting: the problem.
        blocks: those of `blocks_of`.
        kept: True if backward has what forward received and computed.
    """
    b, (dim, value_dim), item, wide = setting.batch, setting.dims, setting.itemsize, setting.accumulator_itemsize
    summed = sum(keys for block in blocks for _, keys in block) > setting.kv_heads
    lse, keys = b * wide, b * (dim + value_dim)
    again = b * value_dim * item + setting.lse_gradient * lse, 0
    if not kept:
        again = again[0] + b * (dim + value_dim) * item + lse, keys * item
    return np.array([
        (b * dim * item, keys * item), (b * value_dim * item + lse, 0),
        again, (b * dim * item, keys * (wide if summed else item)),
    ])  # fmt: skip


def _sent_by_head(setting: Setting, groups: Groups, narrow: bool) -> Traffic:
    """Bytes of an exchange by heads, and of the exchange of keys in it, block by block.

    Gradients of keys are summed by their owner, and sent in the accumulator's type, if a key/value head is in blocks of
    several ranks.
    """
    p, blocks = setting.world, blocks_of(setting, groups, 1)  # bytes do not depend on the bucket
    heads = np.array([(sum(len(queries) for queries, _ in x), sum(keys for _, keys in x)) for x in blocks])
    total = np.zeros((3, p, p), np.int64)
    there, back, again, gradients = row_bytes(setting, blocks, groups.kept)
    for group in map(list, groups.dividing):
        rows = np.stack([setting.counts[group], setting.key_counts[group]], axis=1)
        slots = rows[:, None] * heads * ~np.eye(len(group), dtype=bool)[:, :, None]  # (owner, rank of the heads, 2)
        at = np.ix_(group, group)
        total[0][at] += slots @ there + (slots @ back).T
        total[1][at] += slots @ again
        total[2][at] += (slots @ gradients).T
    for ranks, block in _problems(setting, groups, blocks):
        traffic = sent(block, groups.exchange, narrow)
        total[:, np.array(ranks)[:, None], ranks] += [
            traffic.forward, traffic.backward_kv, traffic.backward_gradients,
        ]  # fmt: skip
    return Traffic(*total)


def _buffers_by_head(setting: Setting, groups: Groups, bucket: int, narrow: bool, one_sided: bool) -> Buffers:
    """Buffers of an exchange by heads. A stage is the next block of every rank that has one.

    A tensor has a buffer by head, of all rows of the widest own block, and one by owner, of the own rows of the other
    ranks' blocks in the widest stage. What goes to the heads has two of each if there are several stages, so that one
    fills while the other is used; what comes back has one. If one-sided, a tensor has only the buffer in which it
    arrives; by owner that has the own block, too. Here `receive` is by head, `send` by owner, `gradients` and
    `returned` are what backward needs beside the buffers of forward. The exchange of keys adds the buffers of the block
    that needs most. What is kept of all own blocks is in `receive`.
    """
    blocks = blocks_of(setting, groups, bucket)
    stages = max(map(len, blocks))
    widths = np.array([[*[(len(queries), keys) for queries, keys in x], *[(0, 0)] * (stages - len(x))] for x in blocks])
    in_stage = widths.sum(0) + np.zeros_like(widths)
    others = (in_stage if one_sided else in_stage - widths).max(1)  # (ranks of a group, queries and keys)
    there, back, again, gradients = row_bytes(setting, blocks, groups.kept)
    sides = min(2, stages)
    to_heads, to_owners = np.array([sides * there, sides * again]), np.array([back, gradients])  # forward, backward
    at_head, at_owner = (to_heads, to_owners) if one_sided else (to_heads + to_owners,) * 2
    found = np.zeros((4, setting.world), np.int64)
    for group in groups.dividing:
        counts = np.array([[setting.counts[r], setting.key_counts[r]] for r in group])
        by_head, by_owner = widths.max(1) * counts.sum(0) @ at_head.T, others * counts @ at_owner.T
        found[:, list(group)] = [by_head[:, 0], by_owner[:, 0], by_head[:, 1], by_owner[:, 1]]
    found[2:] -= found[:2]
    if groups.kept:
        for group in groups.dividing:
            counts = np.array([[setting.counts[r], setting.key_counts[r]] for r in group])
            found[0, list(group)] += widths.sum(1) * counts.sum(0) @ (there + back)
    within = np.zeros((2, setting.world), np.int64)
    for ranks, block in _problems(setting, groups, blocks):
        held = buffers(block, groups.exchange, bucket, narrow)
        within[:, ranks] = np.maximum(within[:, ranks], [held.forward, held.backward])
    found[::2] += [within[0], within[1] - within[0]]
    return Buffers(*found)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products per rank, two for a multiplication and addition.

    Args:
        pairs: (query head, query, key) triples that the rank computes, with multiplicity.
        forward: 2 products: S, O; 2*B*(D + Dv) per pair.
        backward: 5 products: S again, dQ, dK of the keys' head dim, dP, dV of the values'; 2*B*(3*D + 2*Dv).
    """

    pairs: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def total(self) -> int:
        """Operations of all ranks, forward and backward."""
        return sum(self.forward) + sum(self.backward)

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank / mean; 1.0 where all ranks are equal or idle."""
        mean = sum(self.pairs) / len(self.pairs)
        return max(self.pairs) / mean if mean else 1.0


def flops(setting: Setting, exchange: str = "ring") -> Flops:
    """Return the operations of forward and backward on each rank: of its own rows or, by heads, of its blocks of heads.

    Args:
        setting: the problem.
        exchange: one of EXCHANGES, or two, as `groups_of`.

    Raises:
        ValueError: the exchange is unknown.
    """
    groups, computed = groups_of(exchange, setting.world), np.zeros(setting.world, np.int64)
    if groups.degree == 1:
        computed = setting.pairs
    else:
        for ranks, block in _problems(setting, groups, blocks_of(setting, groups, 1)):  # as many for any bucket
            computed[ranks] += block.pairs
    pairs = tuple(computed.tolist())
    of_keys, of_values = (2 * setting.batch * dim for dim in setting.dims)  # one product
    forward, backward = of_keys + of_values, 3 * of_keys + 2 * of_values
    return Flops(pairs, tuple(forward * x for x in pairs), tuple(backward * x for x in pairs))


@dataclass(frozen=True)
class Resident:
    """Bytes of memory per rank without communication buffers, each (p,).

    Args:
        shards: q, k, v, out in the working type; lse in the accumulator's.
        accumulator: out and lse, accumulator's type; forward. By heads: of the block that takes most.
        gradients: dq, dk, dv summed in the accumulator's type; backward. By heads: of the block that takes most, and of
            the own rows, in the types in which they are sent.
    """

    shards: Ints
    accumulator: Ints
    gradients: Ints


def resident(setting: Setting, exchange: str = "ring", bucket: int = 1) -> Resident:
    """Return the bytes of memory on each rank without communication buffers.

    Args:
        setting: the problem.
        exchange: one of EXCHANGES, or two, as `groups_of`.
        bucket: in tokens, at least 1; it matters by heads alone.

    Raises:
        ValueError: the exchange is unknown, or the bucket less than 1.
    """
    wide = setting.accumulator_itemsize
    lse, kv_heads = (
        setting.batch * setting.counts * setting.heads,
        setting.batch * setting.key_counts * setting.kv_heads,
    )
    (q, out), (k, v) = ([x * dim for dim in setting.dims] for x in (lse, kv_heads))
    found = Resident((q + k + v + out) * setting.itemsize + lse * wide, (out + lse) * wide, (q + k + v) * wide)
    groups = groups_of(exchange, setting.world)
    if groups.degree == 1:
        return found
    blocks, of_blocks = blocks_of(setting, groups, bucket), np.zeros((2, setting.world), np.int64)
    for ranks, block in _problems(setting, groups, blocks):
        held = resident(block)
        of_blocks[:, ranks] = np.maximum(of_blocks[:, ranks], [held.accumulator, held.gradients])
    rows = np.stack([setting.counts * setting.heads, setting.key_counts * setting.kv_heads], axis=1)
    return Resident(found.shards, of_blocks[0], of_blocks[1] + rows @ row_bytes(setting, blocks)[3])
