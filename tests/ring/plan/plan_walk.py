"""An interpreter of plans that shares no code with them: numbers travel in place of keys, values and gradients.

Every slot that leaves its owner has a number, its identity, which says whose row and head it is. Gradients are random
numbers, whose sums (mod 2^64) must come back to the owner. A plan of up to 2^40 tokens is followed as a short one,
whose pattern and layout are stretched by a factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from reference import cost
from reference.call_limits import CallLimits
from reference.fast_oracle import multiplicity
from reference.pattern import Branch, Pattern
from ring import Layout
from ring.plan.blocks import Heads
from ring.plan.exchange import key_exchange
from ring.plan.plan import Plan, SlotMap, plan_of
from ring.plan.rows import Rows
from ring.plan.schedule import Transfer
from ring.plan.tile import Mask, Tile, is_everything

Array = np.ndarray
Messages = dict[tuple[int, int], list[Array]]
NOTHING = -1  # the identity of a slot to which nothing was written
SLOT = 8  # bytes that `reference.cost` counts for a slot of one number in fp32, of keys and of gradients alike


@dataclass(frozen=True)
class PlanSetting:
    """Inputs of plans; of the layout `stretched` and the pattern times `by`, where these are given."""

    pattern: Pattern
    layout: Layout
    heads: int
    kv_heads: int
    exchange: str
    bucket: int
    varlen: int = 0
    window: int = 0
    own: int | None = None
    by: int = 1
    stretched: Layout | None = None

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank, as plans have them."""
        return (self.stretched or self.layout).counts

    @cached_property
    def _held(self) -> list[Array]:
        return [self.layout.positions(rank).numpy() for rank in range(self.layout.world_size)]

    def positions(self, rank: int, rows: Array) -> Array:
        """Positions of rows of a shard, without the factor."""
        if self.stretched is None:
            return self._held[rank][rows]
        start, step, length = np.array(self.stretched.shard_runs(rank)).T
        end = np.cumsum(length)
        run = np.searchsorted(end, rows, side="right")
        position, rest = np.divmod(start[run] + step[run] * (rows - (end - length)[run]), self.by)
        assert not rest.any(), "a position that no branch selects"
        return position

    @cached_property
    def plans(self) -> list[Plan]:
        pattern, layout = stretched(self.pattern, self.by), self.stretched or self.layout
        arguments = self.heads, self.kv_heads, key_exchange(self.exchange), self.bucket, self.own
        return [
            plan_of(pattern, layout, rank, *arguments, varlen=self.varlen, window=self.window)
            for rank in range(self.layout.world_size)
        ]

    def tiles(self) -> Iterator[tuple[bool, Tile]]:
        """Every tile of all ranks, and whether it is of own keys."""
        for plan in self.plans:
            yield from ((True, tile) for tile in plan.local)
            yield from ((False, tile) for step in plan.steps for tile in step.tiles)


def stretched(pattern: Pattern, by: int) -> Pattern:
    """The pattern with all lengths, rates, offsets and windows times `by`."""

    def times(x: Any) -> Any:
        return tuple(map(times, x)) if isinstance(x, tuple) else None if x is None else by * x

    branches = (
        Branch(
            times(x.segment_length), by * x.dilation_rate, times(x.offset), x.heads, times(x.window), times(x.slices)
        )
        for x in pattern.branches
    )
    return replace(pattern, branches=tuple(branches), documents=times(pattern.documents))


def check(setting: PlanSetting) -> PlanWalk:
    """Pairs, messages, buffers and kernel calls are exactly those that the oracle counts, and no gradient is lost."""
    check_calls(setting)
    walk = PlanWalk(setting).go()
    expected = multiplicity(setting.pattern, setting.heads, setting.layout.n)
    assert (walk.pairs == expected).all(), "pairs differ from the pattern's multiplicity"
    assert (walk.got == walk.due).all(), "a gradient is lost, doubled or added to another row"
    counted = cost.Setting(setting.pattern, setting._held, 1, setting.heads, setting.kv_heads, 1)
    messages = cost.sent(counted, setting.exchange)
    assert (walk.sent * SLOT == messages.forward).all(), "slots sent are not the fewest that the exchange allows"
    assert (walk.returned * SLOT == messages.backward_gradients).all(), "returned slots are not those that were sent"
    if setting.by == 1:
        buffers, copies = cost.buffers(counted, setting.exchange, setting.bucket), 1 + (setting.exchange != "gather")
        for rank, plan in enumerate(setting.plans):
            found = SLOT * np.array([copies * plan.sizes.receive, plan.sizes.send, plan.sizes.returned])
            assert found.tolist() == [buffers.receive[rank], buffers.send[rank], buffers.returned[rank]]
    return walk


def check_calls(setting: PlanSetting) -> None:
    """No kernel call takes more keys, key vectors or query rows than `reference.call_limits` allows."""
    limits = CallLimits(setting.bucket, setting.own or setting.bucket, setting.kv_heads)
    for own, tile in setting.tiles():
        folds, groups = tile.key_rows.folds, tile.query_heads.groups
        keys, rows = folds * tile.key_rows.length, folds * tile.query_rows.length
        assert tile.query_rows.folds == folds
        assert keys <= limits.keys(own, folds) and keys * groups <= limits.key_vectors(own, folds)
        assert rows <= limits.rows(own, folds)


def listed_heads(heads: Heads) -> Array:
    return np.array(heads.listed())


def listed_rows(rows: Rows, groups: int) -> Array:
    """(folds, groups, length)"""
    return rows.listed()[:, None] + rows.head_step * np.arange(groups)[:, None]


def addresses(slot_map: SlotMap) -> tuple[Array, Array, Array]:
    """Row, head and slot of everything in a pack, flat."""
    rows, heads = np.broadcast_arrays(slot_map.rows.listed()[:, :, None], listed_heads(slot_map.heads)[:, 0])
    slots = slot_map.slots.listed()[:, :, None] + listed_heads(slot_map.columns)[:, 0]
    assert slots.shape == rows.shape, "as many slots as rows and heads are packed"
    return rows.ravel(), heads.ravel(), slots.ravel()


def visible(tile: Tile) -> Array:
    """Pairs that the mask lets through: (folds, query rows, keys)."""
    folds, queries, keys = tile.query_rows.folds, tile.query_rows.length, tile.key_rows.length
    if tile.mask is Mask.POSITION:
        assert tile.query_positions is not None and tile.key_positions is not None and tile.sequences is None
        query, key = tile.query_positions.numpy(), tile.key_positions.numpy()
        assert query.shape == (folds, queries) and key.shape == (folds, keys)
        return np.asarray(key[:, None, :] <= query[:, :, None])
    edges = [[0, queries], [0, keys]]
    if tile.sequences is not None:  # every row is of one sequence, and sees keys of that one alone
        edges = [edges.tolist() for edges in (tile.sequences.query, tile.sequences.key)]
        assert folds == 1 and len(edges[0]) == len(edges[1])
    seen = np.zeros((queries, keys), bool)
    for found, length in zip(edges, (queries, keys), strict=True):
        assert found[0] == 0 and found[-1] == length and all(a < b for a, b in pairwise(found))
    for (a, b), (c, d) in zip(*map(pairwise, edges), strict=True):
        square = tile.is_triangle or tile.window is not None
        assert not square or b - a == d - c, "a triangle, or a window, has as many rows as keys"
        reach = max(b - a, d - c) if tile.window is None else tile.window
        after = np.arange(d - c) - np.arange(b - a)[:, None]
        least, most = (0 if tile.mask is Mask.ANTICAUSAL else -reach), (0 if tile.mask is Mask.CAUSAL else reach)
        seen[a:b, c:d] = (after >= least) & (after <= most)
    return np.broadcast_to(seen, (folds, queries, keys))


def _distinct(*columns: Array) -> bool:
    return len(set(zip(*(column.ravel().tolist() for column in columns), strict=True))) == columns[0].size


class PlanWalk:
    """All ranks of a setting, step by step, in the order of `ring.comm.exchange`.

    Afterwards `pairs` has how often a query head's query met a key, `due` and `got` the gradients of every (position,
    head), `sent` and `returned` slots from rank to rank.
    """

    def __init__(self, setting: PlanSetting) -> None:
        self.setting, self.plans, p, n = setting, setting.plans, setting.layout.world_size, setting.layout.n
        self.pairs = np.zeros((setting.heads, n, n), np.int64)
        self.sent, self.returned = np.zeros((2, p, p), np.int64)
        self.due, self.got = np.zeros((2, n, setting.kv_heads), np.uint64)
        self.random = np.random.default_rng(0)
        self.owner, self.position, self.head = np.zeros((3, 0), np.int64)  # by identity
        sizes = [plan.sizes for plan in self.plans]
        self.send_buffers = [np.full(size.send, NOTHING) for size in sizes]
        self.receive_buffers = [[np.full(size.receive, NOTHING) for _ in range(size.receive_buffers)] for size in sizes]
        self.grads = [[self._noise(size.receive) for _ in range(size.receive_buffers)] for size in sizes]
        self.box = [self._noise(size.returned) for size in sizes]

    def _noise(self, size: int) -> Array:
        return self.random.integers(0, 2**63, size, dtype=np.uint64)

    def go(self) -> PlanWalk:
        steps = len(self.plans[0].steps)
        for rank, plan in enumerate(self.plans):
            assert (plan.rank, plan.tokens, len(plan.steps)) == (rank, self.setting.counts[rank], steps)
            for tile in plan.local:
                self._compute(rank, tile)
        in_flight: Messages = {}
        for number in range(steps):
            self._forward(number)
            for rank, plan in enumerate(self.plans):
                step, grad = plan.steps[number], _in_turn(self.grads[rank], number)
                grad[:] = self._noise(len(grad)) if step.once else 0
                for tile in step.tiles:
                    self._compute(rank, tile, _in_turn(self.receive_buffers[rank], number), grad, step.once)
            if number:
                self._collect(number - 1, in_flight)
            in_flight = self._send_back(number)
        if steps:
            self._collect(steps - 1, in_flight)
            assert all(plan.steps[-1].carried == 0 for plan in self.plans), "gradients carried past the end"
        return self

    def _forward(self, number: int) -> None:
        messages: Messages = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            step, send_buffer = plan.steps[number], self.send_buffers[rank]
            if step.gathers:
                send_buffer[:] = NOTHING  # what was packed before was sent before
            for slot_map in step.gathers:
                self._pack(rank, slot_map, send_buffer)
            source = _in_turn(self.receive_buffers[rank], number - 1) if step.relayed else send_buffer
            for transfer in step.sends:
                content = self._slice(rank, transfer, source)
                assert (content != NOTHING).all(), "sends what was never written"
                self.sent[rank, transfer.peer] += len(content)
                messages[rank, transfer.peer].append(content.copy())
        for rank, plan in enumerate(self.plans):
            receive_buffer = _in_turn(self.receive_buffers[rank], number)
            receive_buffer[:] = NOTHING
            for transfer in plan.steps[number].receives:
                target = self._slice(rank, transfer, receive_buffer)
                assert (target == NOTHING).all(), "two messages to one place"
                target[:] = _matching(messages, rank, transfer)
        assert not any(messages.values()), "a send without a receive"

    def _pack(self, rank: int, slot_map: SlotMap, send_buffer: Array) -> None:
        rows, heads, slots = addresses(slot_map)
        assert _distinct(slots) and slots.min() >= 0 and slots.max() < len(send_buffer)
        assert (send_buffer[slots] == NOTHING).all(), "a slot packed twice"
        assert rows.min() >= 0 and rows.max() < self.setting.counts[rank], "a row outside of the shard"
        send_buffer[slots] = len(self.owner) + np.arange(len(slots))
        self.owner = np.append(self.owner, np.full(len(slots), rank))
        self.position = np.append(self.position, self.setting.positions(rank, rows))
        self.head = np.append(self.head, heads)

    def _slice(self, rank: int, transfer: Transfer, buffer: Array) -> Array:
        assert transfer.peer in range(len(self.plans)) and transfer.peer != rank
        assert 0 <= transfer.start < transfer.stop <= len(buffer), "a message outside of its buffer"
        return buffer[transfer.start : transfer.stop]

    def _compute(
        self, rank: int, tile: Tile, receive_buffer: Array | None = None, grad: Array | None = None, once: bool = False
    ) -> None:
        """Count the pairs of a tile; give each of its keys a gradient."""
        setting, tokens = self.setting, self.setting.counts[rank]
        query_heads, key_heads = listed_heads(tile.query_heads), listed_heads(tile.key_heads)  # (G, P), (G, 1)
        groups = len(query_heads)
        rows, keys = listed_rows(tile.query_rows, groups), listed_rows(tile.key_rows, groups)  # (F, G, Lq), (F, G, Lk)
        assert rows.shape[0] == keys.shape[0] and key_heads.shape == (groups, 1)
        assert _distinct(rows[:, 0]) and _distinct(query_heads), "a fold writes a query row twice"
        assert rows.min() >= 0 and rows.max() < tokens, "a query row outside of the shard"
        in_order = _counts_up(rows[:, 0], tokens) and _counts_up(query_heads, setting.heads)
        everything = is_everything(tile.query_rows, tile.query_heads, tokens, setting.heads)
        assert in_order or not everything, "a tile is taken for the whole shard in order, and is not"
        queries = setting.positions(rank, rows)
        if receive_buffer is None:
            assert keys.min() >= 0 and keys.max() < tokens, "a key row outside of the shard"
            positions, heads = setting.positions(rank, keys), key_heads[None] + 0 * keys
            flat = keys * setting.kv_heads + heads
        else:
            flat = keys + key_heads[None]
            assert flat.min() >= 0 and flat.max() < len(receive_buffer), "a slot outside of the receive buffer"
            identity = receive_buffer[flat]
            assert (identity != NOTHING).all(), "a tile reads what was not received"
            assert (self.owner[identity] != rank).all(), "a rank receives its own rows"
            positions, heads = self.position[identity], self.head[identity]
        assert _distinct(flat), "a fold writes a key row twice"
        read = query_heads // (setting.heads // setting.kv_heads)  # key/value heads
        assert (heads[:, :, None] == read[None, :, :, None]).all(), "query heads meet another key/value head"
        if tile.mask is Mask.POSITION:
            self._check_mask(tile.query_positions, queries)
            if not setting.pattern.has_slices:  # keys of several slices are shifted by the bound of each
                self._check_mask(tile.key_positions, positions)
        index = query_heads[None, :, :, None, None], queries[:, :, None, :, None], positions[:, :, None, None, :]
        seen = visible(tile)[:, None, None]
        np.add.at(self.pairs, index, np.broadcast_to(seen, np.broadcast_shapes(*(x.shape for x in (*index, seen)))))
        weight = self._noise(positions.size).reshape(positions.shape)
        np.add.at(self.due, (positions, heads), weight)
        if grad is None:
            np.add.at(self.got, (positions, heads), weight)
        elif once:
            grad[flat] = weight
        else:
            grad[flat] += weight

    def _check_mask(self, told: torch.Tensor | None, positions: Array) -> None:
        """A mask is told positions as they are or, where there is a window, shifted or counted backwards."""
        assert told is not None
        given, held = told.numpy()[:, None], self.setting.by * positions
        assert 0 in (np.ptp(given - held), np.ptp(given + held)), "positions of the mask are not those of the rows"

    def _send_back(self, number: int) -> Messages:
        messages: Messages = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            for transfer in plan.steps[number].return_sends:
                content = self._slice(rank, transfer, _in_turn(self.grads[rank], number))
                self.returned[rank, transfer.peer] += len(content)
                messages[rank, transfer.peer].append(content.copy())
        return messages

    def _collect(self, number: int, messages: Messages) -> None:
        for rank, plan in enumerate(self.plans):
            step, box = plan.steps[number], self.box[rank]
            fresh, used = np.zeros((2, len(box)), bool)
            for transfer in step.return_receives:
                assert not self._slice(rank, transfer, fresh).any(), "two messages to one place"
                self._slice(rank, transfer, fresh)[:] = True
                self._slice(rank, transfer, box)[:] = _matching(messages, rank, transfer)
            used[: step.carried] = True
            for slot_map in step.scatters:
                rows, heads, slots = addresses(slot_map)
                assert _distinct(rows, heads) and not used[slots].any(), "a gradient added twice"
                used[slots] = True
                np.add.at(self.got, (self.setting.positions(rank, rows), heads), box[slots])
            assert (used == fresh).all(), "gradients that come and those that are used differ"
            if step.carried:
                _in_turn(self.grads[rank], number + 1)[: step.carried] += box[: step.carried]
        assert not any(messages.values()), "a return without a receive"


def _in_turn(buffers: list[Array], number: int) -> Array:
    return buffers[number % len(buffers)]


def _matching(messages: Messages, rank: int, transfer: Transfer) -> Array:
    assert messages[transfer.peer, rank], f"rank {rank} waits for rank {transfer.peer}, which sends nothing"
    content = messages[transfer.peer, rank].pop(0)
    assert len(content) == transfer.stop - transfer.start, "a message of another size"
    return content


def _counts_up(listed: Array, count: int) -> bool:
    return listed.size == count and np.array_equal(listed.ravel(), np.arange(count))
