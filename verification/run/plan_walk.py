"""The plans of all ranks, followed with numbers in place of keys, values and gradients.

Nothing here shares code with the plan: the pairs that the tiles compute are counted, every slot that travels says whose
row and head it is, and gradients are random numbers whose sums (mod 2^64) must come back to the owner.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from reference.limits import CallLimits
from reference.pattern import Pattern
from ring import Layout
from ring.plan.blocks import Heads
from ring.plan.plan import Plan, SlotMap, plan_of
from ring.plan.rows import Rows
from ring.plan.schedule import Transfer
from ring.plan.tile import Mask, Tile, is_everything

Array = np.ndarray
NOTHING = -1  # an address to which nothing was written


class WrongPlan(Exception):
    """What a plan does that no plan may."""


def _must(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise WrongPlan(otherwise)


@dataclass(frozen=True)
class PlanSetting:
    pattern: Pattern
    layout: Layout
    heads: int
    kv_heads: int
    exchange: str
    bucket: int
    varlen: int = 0

    @property
    def p(self) -> int:
        return self.layout.world_size

    @cached_property
    def order(self) -> Array:
        return torch.cat([self.layout.positions(rank) for rank in range(self.p)]).numpy()

    @cached_property
    def plans(self) -> list[Plan]:
        arguments = self.heads, self.kv_heads, self.exchange, self.bucket, None, self.varlen
        return [plan_of(self.pattern, self.layout, rank, *arguments) for rank in range(self.p)]


def addresses(slot_map: SlotMap) -> tuple[Array, Array, Array]:
    """Row, head and slot of everything in a pack, flat."""
    rows, heads = np.broadcast_arrays(slot_map.rows.listed()[:, :, None], listed_heads(slot_map.heads)[:, 0])
    slots = slot_map.slots.listed()[:, :, None] + listed_heads(slot_map.columns)[:, 0]
    _must(slots.shape == rows.shape, "as many slots as rows and heads are packed")
    return rows.ravel(), heads.ravel(), slots.ravel()


def listed_heads(heads: Heads) -> Array:
    return np.array(heads.listed())


def listed_rows(rows: Rows, groups: int) -> Array:
    """(folds, groups, length)"""
    return rows.listed()[:, None] + rows.head_step * np.arange(groups)[:, None]


def visible(tile: Tile) -> Array:
    """What the mask lets through: (folds, query rows, keys)."""
    folds, queries, keys = tile.query_rows.folds, tile.query_rows.length, tile.key_rows.length
    if tile.sequences is not None:
        return _of_sequences(tile)
    if tile.mask is Mask.FULL:
        return np.ones((folds, queries, keys), bool)
    if tile.mask is Mask.CAUSAL:
        _must(queries == keys, "a causal tile has as many rows as keys")
        return np.broadcast_to(np.tril(np.ones((queries, keys), bool)), (folds, queries, keys))
    assert tile.query_positions is not None and tile.key_positions is not None
    query, key = tile.query_positions.numpy(), tile.key_positions.numpy()
    _must(query.shape == (folds, queries) and key.shape == (folds, keys), "positions for the mask are (folds, rows)")
    return key[:, None, :] <= query[:, :, None]


def _of_sequences(tile: Tile) -> Array:
    """Likewise, (1, query rows, keys): every row is of one sequence, and sees keys of that one alone."""
    assert tile.sequences is not None
    rows, keys = tile.query_rows, tile.key_rows
    _must(rows.folds == keys.folds == 1 and tile.mask is not Mask.POSITION, "sequences in folds, or by position")
    edges = [edges.tolist() for edges in (tile.sequences.query, tile.sequences.key)]
    for found, length in zip(edges, (rows.length, keys.length), strict=True):
        _must(found[0] == 0 and found[-1] == length, "sequences are not all of a call")
        _must(all(a < b for a, b in pairwise(found)), "an empty sequence")
    _must(len(edges[0]) == len(edges[1]), "sequences of rows without keys, or the other way round")
    seen = np.zeros((1, rows.length, keys.length), bool)
    for (a, b), (c, d) in zip(*map(pairwise, edges), strict=True):
        _must(tile.mask is Mask.FULL or b - a == d - c, "a causal sequence has as many rows as keys")
        seen[0, a:b, c:d] = np.tril(np.ones((b - a, d - c), bool)) if tile.mask is Mask.CAUSAL else True
    return seen


def _follows(given: Array, positions: Array) -> bool:
    """Whether a mask is told positions as they are or, where there is a window, shifted or counted backwards."""
    return any(np.ptp(difference) == 0 for difference in (given - positions, given + positions))


def _within_limits(setting: PlanSetting, rows: Array, keys: Array) -> None:
    """Of one call: rows (F, G, Lq), keys (F, G, Lk)."""
    folds, limits = len(keys), CallLimits(setting.bucket, setting.bucket, setting.kv_heads)
    _must(keys[:, 0].size <= limits.keys(False, folds), "more keys in a call than the bucket")
    _must(keys.size <= limits.key_vectors(False, folds), "more keys and heads in a call than the bucket")
    _must(rows[:, 0].size <= limits.rows(False, folds), "more query rows in a call than the bucket")


class PlanWalk:
    """All ranks of a setting, step by step, in the order of `ring.comm.exchange`. What is wrong on the way raises
    WrongPlan; what is counted is for afterwards: `pairs`, `due` and `got`, `sent` and `returned`.

    Every slot that leaves its owner gets a number, its identity: it says whose row and head it is.
    """

    def __init__(self, setting: PlanSetting) -> None:
        self.setting, self.plans, p = setting, setting.plans, setting.p
        n, cuts = setting.layout.n, setting.layout.cuts
        self.cuts = cuts
        self.pairs = np.zeros((setting.heads, n, n), np.int64)
        self.random = np.random.default_rng(0)
        self.owner: list[int] = []
        self.position: list[int] = []
        self.head: list[int] = []
        self.received_on: dict[int, list[int]] = defaultdict(list)  # identity -> ranks, in the order of arrival
        self.read_by: dict[int, set[int]] = defaultdict(set)
        self.sent, self.returned = [0] * p, [0] * p  # slots
        # Gradients: what each (position, head) is due, and what it got.
        self.due = np.zeros((n, setting.kv_heads), np.uint64)
        self.got = np.zeros((n, setting.kv_heads), np.uint64)
        self.send_buffers = [np.full(plan.sizes.send, NOTHING) for plan in self.plans]
        self.receive_buffers = [
            [np.full(plan.sizes.receive, NOTHING) for _ in range(plan.sizes.receive_buffers)] for plan in self.plans
        ]
        self.grads = [
            [self._noise(plan.sizes.receive) for _ in range(plan.sizes.receive_buffers)] for plan in self.plans
        ]
        self.box = [self._noise(plan.sizes.returned) for plan in self.plans]

    def _noise(self, size: int) -> Array:
        return self.random.integers(0, 2**63, size, dtype=np.uint64)

    def go(self) -> PlanWalk:
        _must(len({len(plan.steps) for plan in self.plans}) == 1, "ranks walk unequally many steps")
        for rank, plan in enumerate(self.plans):
            _must(
                plan.rank == rank and plan.tokens == self.setting.layout.counts[rank],
                "a plan is of another rank or shard",
            )
            for tile in plan.local:
                self._compute(rank, tile, None, None)
        in_flight: dict[tuple[int, int], list[Array]] = {}
        for number in range(len(self.plans[0].steps)):
            self._forward(number)
            for rank in range(self.setting.p):
                grad = self._in_turn(self.grads, rank, number)
                step = self.plans[rank].steps[number]
                grad[:] = self._noise(len(grad)) if step.once else 0
                for tile in step.tiles:
                    self._compute(rank, tile, self._in_turn(self.receive_buffers, rank, number), grad, step.once)
            if number:
                self._collect(number - 1, in_flight)
            in_flight = self._send_back(number)
        if self.plans[0].steps:
            self._collect(len(self.plans[0].steps) - 1, in_flight)
            _must(all(plan.steps[-1].carried == 0 for plan in self.plans), "gradients carried past the end")
        return self

    def _in_turn(self, buffers: list[list[Array]], rank: int, number: int) -> Array:
        buffers_in_turn = buffers[rank]
        return buffers_in_turn[number % len(buffers_in_turn)]

    def _forward(self, number: int) -> None:
        messages: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            step, send_buffer = plan.steps[number], self.send_buffers[rank]
            if step.gathers:
                send_buffer[:] = NOTHING  # what was packed before was sent before
            for slot_map in step.gathers:
                self._pack(rank, slot_map, send_buffer)
            source = self._in_turn(self.receive_buffers, rank, number - 1) if step.relayed else send_buffer
            for transfer in step.sends:
                content = self._slice(rank, transfer, source)
                _must((content != NOTHING).all(), "sends what was never written")
                self.sent[rank] += len(content)
                messages[rank, transfer.peer].append(content.copy())
        for rank, plan in enumerate(self.plans):
            receive_buffer = self._in_turn(self.receive_buffers, rank, number)
            receive_buffer[:] = NOTHING
            for transfer in plan.steps[number].receives:
                content = self._match(messages, transfer.peer, rank, transfer)
                target = self._slice(rank, transfer, receive_buffer)
                _must((target == NOTHING).all(), "two messages to one place")
                target[:] = content
                for identity in content.tolist():
                    self.received_on[identity].append(rank)
        _must(not any(messages.values()), "a send without a receive")

    def _pack(self, rank: int, slot_map: SlotMap, send_buffer: Array) -> None:
        rows, heads, slots = addresses(slot_map)
        _must(len(set(slots.tolist())) == len(slots) and (send_buffer[slots] == NOTHING).all(), "a slot packed twice")
        _must(slots.min() >= 0 and slots.max() < len(send_buffer), "a slot outside of the send buffer")
        _must(rows.min() >= 0 and rows.max() < self.setting.layout.counts[rank], "a row outside of the shard")
        send_buffer[slots] = len(self.owner) + np.arange(len(slots))
        self.owner += [rank] * len(slots)
        self.position += self.setting.order[self.cuts[rank] + rows].tolist()
        self.head += heads.tolist()

    def _slice(self, rank: int, transfer: Transfer, buffer: Array) -> Array:
        _must(
            0 <= transfer.peer < self.setting.p and transfer.peer != rank,
            "a message to a rank that there is not, or to itself",
        )
        _must(0 <= transfer.start < transfer.stop <= len(buffer), "a message outside of its buffer")
        return buffer[transfer.start : transfer.stop]

    def _match(self, messages: dict[tuple[int, int], list[Array]], source: int, rank: int, transfer: Transfer) -> Array:
        _must(bool(messages[source, rank]), f"rank {rank} waits for rank {source}, which sends nothing")
        content = messages[source, rank].pop(0)
        _must(len(content) == transfer.stop - transfer.start, "a message of another size")
        return content

    def _compute(
        self, rank: int, tile: Tile, receive_buffer: Array | None, grad: Array | None, once: bool = False
    ) -> None:
        """Count the pairs of a tile; give each of its keys a gradient."""
        setting = self.setting
        query_heads, key_heads = listed_heads(tile.query_heads), listed_heads(tile.key_heads)  # (G, P), (G, 1)
        groups = len(query_heads)
        rows, keys = listed_rows(tile.query_rows, groups), listed_rows(tile.key_rows, groups)  # (F, G, Lq), (F, G, Lk)
        _must(
            rows.shape[0] == keys.shape[0] and key_heads.shape == (groups, 1), "folds or heads of rows and keys differ"
        )
        _must(len(set(rows[:, 0].ravel().tolist())) == rows[:, 0].size, "a fold writes a query row twice")
        _must(len(set(query_heads.ravel().tolist())) == query_heads.size, "a query head twice in a tile")
        _must(rows.min() >= 0 and rows.max() < setting.layout.counts[rank], "a query row outside of the shard")
        _within_limits(setting, rows, keys)
        in_order = np.array_equal(rows[:, 0].ravel(), np.arange(setting.layout.counts[rank])) and np.array_equal(
            query_heads.ravel(), np.arange(setting.heads)
        )
        everything = is_everything(tile.query_rows, tile.query_heads, setting.layout.counts[rank], setting.heads)
        _must(in_order or not everything, "a tile is taken for the whole shard in order, and is not")
        queries = setting.order[self.cuts[rank] + rows]  # positions
        if receive_buffer is None:
            _must(keys.min() >= 0 and keys.max() < setting.layout.counts[rank], "a key row outside of the shard")
            positions = setting.order[self.cuts[rank] + keys]
            heads = key_heads[None] + 0 * keys
            flat = keys * setting.kv_heads + heads
        else:
            flat = keys + key_heads[None]
            _must(flat.min() >= 0 and flat.max() < len(receive_buffer), "a slot outside of the receive buffer")
            identity = receive_buffer[flat]
            _must((identity != NOTHING).all(), "a tile reads what was not received")
            for one in set(identity.ravel().tolist()):
                self.read_by[one].add(rank)
                _must(self.owner[one] != rank, "a rank receives its own rows")
            positions, heads = np.array(self.position)[identity], np.array(self.head)[identity]
        _must(len(set(flat.ravel().tolist())) == flat.size, "a fold writes a key row twice")
        _must(
            (heads[:, :, None] == (query_heads // (setting.heads // setting.kv_heads))[None, :, :, None]).all(),
            "query heads meet another key/value head",
        )
        if tile.mask is Mask.POSITION:
            assert tile.query_positions is not None and tile.key_positions is not None
            for given, held in ((tile.query_positions, queries), (tile.key_positions, positions)):
                _must(_follows(given.numpy()[:, None], held), "positions of the mask are not those of the rows")
        seen = visible(tile)[:, None, None]  # (F, 1, 1, Lq, Lk)
        index = (
            query_heads[None, :, :, None, None],
            queries[:, :, None, :, None],
            positions[:, :, None, None, :],
        )
        shape = np.broadcast_shapes(*(part.shape for part in index), seen.shape)
        np.add.at(self.pairs, index, np.broadcast_to(seen, shape))
        weight = self._noise(positions.size).reshape(positions.shape)
        np.add.at(self.due, (positions, heads), weight)
        if grad is None:
            np.add.at(self.got, (positions, heads), weight)
        elif once:
            grad[flat] = weight
        else:
            grad[flat] += weight

    def _send_back(self, number: int) -> dict[tuple[int, int], list[Array]]:
        messages: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            for transfer in plan.steps[number].return_sends:
                content = self._slice(rank, transfer, self._in_turn(self.grads, rank, number))
                self.returned[rank] += len(content)
                messages[rank, transfer.peer].append(content.copy())
        return messages

    def _collect(self, number: int, messages: dict[tuple[int, int], list[Array]]) -> None:
        for rank, plan in enumerate(self.plans):
            step, box = plan.steps[number], self.box[rank]
            fresh = np.zeros(len(box), bool)
            for transfer in step.return_receives:
                content = self._match(messages, transfer.peer, rank, transfer)
                _must(not self._slice(rank, transfer, fresh).any(), "two messages to one place")
                self._slice(rank, transfer, fresh)[:] = True
                self._slice(rank, transfer, box)[:] = content
            used = np.zeros(len(box), bool)
            used[: step.carried] = True
            for slot_map in step.scatters:
                rows, heads, slots = addresses(slot_map)
                _must(len(set(zip(rows.tolist(), heads.tolist(), strict=True))) == len(rows), "a gradient added twice")
                _must(not used[slots].any(), "a gradient used twice")
                used[slots] = True
                positions = self.setting.order[self.cuts[rank] + rows]
                np.add.at(self.got, (positions, heads), box[slots])
            _must((used == fresh).all(), "gradients that come and those that are used differ")
            if step.carried:
                self._in_turn(self.grads, rank, number + 1)[: step.carried] += box[: step.carried]
        _must(not any(messages.values()), "a return without a receive")
