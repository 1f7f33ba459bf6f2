"""Settings to draw for plans, and the walk: a plan of all ranks, followed with numbers in place of data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from reference.documents import documents_from_cu_seqlens
from reference.pattern import Branch, Pattern
from ring.layout import Layout
from ring.plan.blocks import Heads
from ring.plan.plan import EXCHANGES, Plan, SlotMap, plan_of
from ring.plan.rows import Rows
from ring.plan.schedule import Transfer
from ring.plan.tile import Mask, Tile

Array = np.ndarray
NOTHING = -1  # an address to which nothing was written


# --- what is drawn ---


@dataclass(frozen=True)
class Setting:
    pattern: Pattern
    layout: Layout
    heads: int
    kv_heads: int
    exchange: str
    bucket: int

    @property
    def p(self) -> int:
        return self.layout.world_size

    @cached_property
    def order(self) -> Array:
        return torch.cat([self.layout.positions(rank) for rank in range(self.p)]).numpy()

    @cached_property
    def plans(self) -> list[Plan]:
        arguments = self.heads, self.kv_heads, self.exchange, self.bucket
        return [plan_of(self.pattern, self.layout, rank, *arguments) for rank in range(self.p)]


def listed(layout: Layout) -> Layout:
    """The same layout as a listing, whatever it is kept as."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return Layout(layout.n, layout.cuts, None, order.numpy())


def rank_of_position(layout: Layout) -> Array:
    ranks = np.zeros(layout.n, np.int64)
    for rank in range(layout.world_size):
        ranks[layout.positions(rank).numpy()] = rank
    return ranks


@st.composite
def layouts(draw: Any, most_tokens: int = 28, worlds: tuple[int, ...] = (2, 3, 1, 4, 5, 6, 2, 3, 4, 16)) -> Layout:
    p, n = draw(st.sampled_from(worlds)), draw(st.integers(0, most_tokens))
    kinds = ("contiguous", "zigzag", "striped", "hilbert", "uneven", "runs", "shuffled", "runs", "runs")
    kind = draw(st.sampled_from(kinds))
    if kind in ("contiguous", "zigzag", "striped", "hilbert"):
        return getattr(Layout, kind)(n, p)
    order = list(range(n))
    if kind == "runs":  # of one step or of two, next to one another and interleaved
        middle, steps = draw(st.integers(0, n)), (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        runs = [range(r, middle, steps[0]) for r in range(steps[0])]
        runs += [range(middle + r, n, steps[1]) for r in range(steps[1])]
        if draw(st.booleans()):
            runs = [runs[0][::2], runs[0][1::2], *runs[1:]]
        order = [position for run in draw(st.permutations(runs)) for position in run]
    if kind == "shuffled":
        order = draw(st.permutations(order))
    return Layout.from_cuts(order, (0, *sorted(draw(st.integers(0, n)) for _ in range(p - 1)), n))


@st.composite
def patterns(draw: Any, heads: int, most_branches: int = 3) -> Pattern:
    branches = []
    for _ in range(draw(st.integers(1, most_branches))):
        rate = draw(st.sampled_from((1, 2, 3, 4, 5, 1, 2)))
        length = draw(st.sampled_from((None, 1, 2, 3, 4, 5, 7, 8, 12, 16, 64)))
        served, count = None, heads
        if draw(st.integers(0, 3)) == 3:
            first = draw(st.integers(0, heads - 1))
            served = range(first, draw(st.integers(first + 1, heads)))
            count = len(served)
        offset = st.integers(0, rate - 1)
        per_head = draw(st.booleans())
        branches.append(
            Branch(length, rate, tuple(draw(offset) for _ in range(count)) if per_head else draw(offset), served)
        )
    return Pattern(tuple(branches), draw(st.booleans()))


@st.composite
def documents(draw: Any, tokens: int) -> tuple[int, ...] | None:
    """In half of the draws none; some are empty, or hold one token."""
    if draw(st.booleans()):
        return None
    edges = draw(st.lists(st.integers(0, tokens), max_size=6))
    edges += [min(edge + 1, tokens) for edge in edges[::2]]
    return documents_from_cu_seqlens([0, *sorted(edges), tokens], tokens)


@st.composite
def drawn_settings(draw: Any) -> Setting:
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3)))
    pattern, layout = draw(patterns(heads)), draw(layouts())
    return Setting(
        replace(pattern, documents=draw(documents(layout.n))),
        layout,
        heads,
        kv_heads,
        draw(st.sampled_from(EXCHANGES)),
        draw(st.sampled_from((1, 2, 3, 5, 8, 1000))),
    )


# --- the walk ---


def addresses(slot_map: SlotMap) -> tuple[Array, Array, Array]:
    """Row, head and slot of everything in a pack, flat."""
    rows, heads = np.broadcast_arrays(slot_map.rows.listed()[:, :, None], listed_heads(slot_map.heads)[:, 0])
    slots = slot_map.slots.listed()[:, :, None] + listed_heads(slot_map.columns)[:, 0]
    assert slots.shape == rows.shape
    return rows.ravel(), heads.ravel(), slots.ravel()


def listed_heads(heads: Heads) -> Array:
    return np.array(heads.listed())


def listed_rows(rows: Rows, groups: int) -> Array:
    """(folds, groups, length)"""
    return rows.listed()[:, None] + rows.head_step * np.arange(groups)[:, None]


def visible(tile: Tile) -> Array:
    """What the mask lets through: (folds, query rows, keys)."""
    folds, queries, keys = tile.query_rows.folds, tile.query_rows.length, tile.key_rows.length
    if tile.mask is Mask.FULL:
        return np.ones((folds, queries, keys), bool)
    if tile.mask is Mask.CAUSAL:
        assert queries == keys
        return np.broadcast_to(np.tril(np.ones((queries, keys), bool)), (folds, queries, keys))
    assert tile.query_positions is not None and tile.key_positions is not None
    query, key = tile.query_positions.numpy(), tile.key_positions.numpy()
    assert query.shape == (folds, queries) and key.shape == (folds, keys)
    return key[:, None, :] <= query[:, :, None]


class Walk:
    """All ranks of a setting, step by step, in the order of `ring.comm.exchange`. Asserts on the way, counts for
    afterwards.

    Every slot that leaves its owner gets a number, its identity: it says whose row and head it is.
    """

    def __init__(self, setting: Setting) -> None:
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

    def go(self) -> Walk:
        assert len({len(plan.steps) for plan in self.plans}) == 1, "ranks walk unequally many steps"
        for rank, plan in enumerate(self.plans):
            assert plan.rank == rank and plan.tokens == self.setting.layout.counts[rank]
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
            assert all(plan.steps[-1].carried == 0 for plan in self.plans), "gradients carried past the end"
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
                assert (content != NOTHING).all(), "sends what was never written"
                self.sent[rank] += len(content)
                messages[rank, transfer.peer].append(content.copy())
        for rank, plan in enumerate(self.plans):
            receive_buffer = self._in_turn(self.receive_buffers, rank, number)
            receive_buffer[:] = NOTHING
            for transfer in plan.steps[number].receives:
                content = self._match(messages, transfer.peer, rank, transfer)
                target = self._slice(rank, transfer, receive_buffer)
                assert (target == NOTHING).all(), "two messages to one place"
                target[:] = content
                for identity in content.tolist():
                    self.received_on[identity].append(rank)
        assert not any(messages.values()), "a send without a receive"

    def _pack(self, rank: int, slot_map: SlotMap, send_buffer: Array) -> None:
        rows, heads, slots = addresses(slot_map)
        assert len(set(slots.tolist())) == len(slots) and (send_buffer[slots] == NOTHING).all(), "a slot packed twice"
        assert slots.min() >= 0 and slots.max() < len(send_buffer)
        assert rows.min() >= 0 and rows.max() < self.setting.layout.counts[rank]
        send_buffer[slots] = len(self.owner) + np.arange(len(slots))
        self.owner += [rank] * len(slots)
        self.position += self.setting.order[self.cuts[rank] + rows].tolist()
        self.head += heads.tolist()

    def _slice(self, rank: int, transfer: Transfer, buffer: Array) -> Array:
        assert 0 <= transfer.peer < self.setting.p and transfer.peer != rank
        assert 0 <= transfer.start < transfer.stop <= len(buffer), "a message outside of its buffer"
        return buffer[transfer.start : transfer.stop]

    def _match(self, messages: dict[tuple[int, int], list[Array]], source: int, rank: int, transfer: Transfer) -> Array:
        assert messages[source, rank], f"rank {rank} waits for rank {source}, which sends nothing"
        content = messages[source, rank].pop(0)
        assert len(content) == transfer.stop - transfer.start, "a message of another size"
        return content

    def _compute(
        self, rank: int, tile: Tile, receive_buffer: Array | None, grad: Array | None, once: bool = False
    ) -> None:
        """Count the pairs of a tile; give each of its keys a gradient."""
        setting = self.setting
        query_heads, key_heads = listed_heads(tile.query_heads), listed_heads(tile.key_heads)  # (G, P), (G, 1)
        groups = len(query_heads)
        rows, keys = listed_rows(tile.query_rows, groups), listed_rows(tile.key_rows, groups)  # (F, G, Lq), (F, G, Lk)
        assert rows.shape[0] == keys.shape[0] and key_heads.shape == (groups, 1)
        assert len(set(rows[:, 0].ravel().tolist())) == rows[:, 0].size, "a fold writes a query row twice"
        assert len(set(query_heads.ravel().tolist())) == query_heads.size
        assert rows.min() >= 0 and rows.max() < setting.layout.counts[rank]
        assert keys[:, 0].size <= setting.bucket, "more keys than the bucket"
        assert keys.size <= setting.bucket * setting.kv_heads, "more keys and heads than the bucket"
        queries = setting.order[self.cuts[rank] + rows]  # positions
        if receive_buffer is None:
            assert keys.min() >= 0 and keys.max() < setting.layout.counts[rank]
            positions = setting.order[self.cuts[rank] + keys]
            heads = key_heads[None] + 0 * keys
            flat = keys * setting.kv_heads + heads
        else:
            flat = keys + key_heads[None]
            assert flat.min() >= 0 and flat.max() < len(receive_buffer)
            identity = receive_buffer[flat]
            assert (identity != NOTHING).all(), "a tile reads what was not received"
            for one in set(identity.ravel().tolist()):
                self.read_by[one].add(rank)
                assert self.owner[one] != rank
            positions, heads = np.array(self.position)[identity], np.array(self.head)[identity]
        assert len(set(flat.ravel().tolist())) == flat.size, "a fold writes a key row twice"
        assert (heads[:, :, None] == (query_heads // (setting.heads // setting.kv_heads))[None, :, :, None]).all()
        if tile.mask is Mask.POSITION:
            assert tile.query_positions is not None and tile.key_positions is not None
            assert (tile.query_positions.numpy()[:, None] == queries).all()
            assert (tile.key_positions.numpy()[:, None] == positions).all(), "heads of a tile read different rows"
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
                assert not self._slice(rank, transfer, fresh).any(), "two messages to one place"
                self._slice(rank, transfer, fresh)[:] = True
                self._slice(rank, transfer, box)[:] = content
            used = np.zeros(len(box), bool)
            used[: step.carried] = True
            for slot_map in step.scatters:
                rows, heads, slots = addresses(slot_map)
                assert len(set(zip(rows.tolist(), heads.tolist(), strict=True))) == len(rows), "a gradient added twice"
                assert not used[slots].any(), "a gradient used twice"
                used[slots] = True
                positions = self.setting.order[self.cuts[rank] + rows]
                np.add.at(self.got, (positions, heads), box[slots])
            assert (used == fresh).all(), "gradients that come and those that are used differ"
            if step.carried:
                self._in_turn(self.grads, rank, number + 1)[: step.carried] += box[: step.carried]
        assert not any(messages.values()), "a return without a receive"
