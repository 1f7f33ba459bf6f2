"""The plan without a tensor of data: all ranks' plans are walked with labels in place of keys, values and gradients.

Nothing here shares code with the plan: the pairs that the tiles compute are counted against the pattern's own
multiplicity, what travels against a dense look at who needs whom, and gradients are random numbers whose sums
(mod 2^64) must come home.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern, multiplicity, selected
from ring.blocks import Heads, blocks_of
from ring.layout import Layout
from ring.meetings import Mask, Stretches, masked, meet, needs_of
from ring.pieces import Pieces, pieces_of
from ring.plan import EXCHANGES, Pack, Plan, Tile, plan_of
from ring.schedule import Move

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
def drawn_settings(draw: Any) -> Setting:
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3)))
    return Setting(
        draw(patterns(heads)),
        draw(layouts()),
        heads,
        kv_heads,
        draw(st.sampled_from(EXCHANGES)),
        draw(st.sampled_from((1, 2, 3, 5, 8, 1000))),
    )


# --- the walk ---


def addresses(pack: Pack) -> tuple[Array, Array, Array]:
    """Row, head and slot of everything in a pack, flat."""
    rows, heads = np.broadcast_arrays(pack.rows.listed()[:, :, None], listed_heads(pack.heads)[:, 0])
    slots = pack.slots.listed()[:, :, None] + listed_heads(pack.columns)[:, 0]
    assert slots.shape == rows.shape
    return rows.ravel(), heads.ravel(), slots.ravel()


def listed_heads(heads: Heads) -> Array:
    return np.array(heads.listed())


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
    """All ranks of a setting, step by step, in the order of `ring.exchange`. Asserts on the way, counts for afterwards.

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
        self.landed_on: dict[int, list[int]] = defaultdict(list)  # identity -> ranks, in the order of arrival
        self.read_by: dict[int, set[int]] = defaultdict(set)
        self.sent, self.returned = [0] * p, [0] * p  # slots
        # Gradients: what each (position, head) is due, and what it got.
        self.due = np.zeros((n, setting.kv_heads), np.uint64)
        self.got = np.zeros((n, setting.kv_heads), np.uint64)
        self.outbox = [np.full(plan.sizes.outbox, NOTHING) for plan in self.plans]
        self.landing = [[np.full(plan.sizes.landing, NOTHING) for _ in range(plan.sizes.turns)] for plan in self.plans]
        self.grads = [[self._noise(plan.sizes.landing) for _ in range(plan.sizes.turns)] for plan in self.plans]
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
                grad = self._turn(self.grads, rank, number)
                grad[:] = 0
                for tile in self.plans[rank].steps[number].tiles:
                    self._compute(rank, tile, self._turn(self.landing, rank, number), grad)
            if number:
                self._collect(number - 1, in_flight)
            in_flight = self._send_back(number)
        if self.plans[0].steps:
            self._collect(len(self.plans[0].steps) - 1, in_flight)
            assert all(plan.steps[-1].carried == 0 for plan in self.plans), "gradients carried past the end"
        return self

    def _turn(self, buffers: list[list[Array]], rank: int, number: int) -> Array:
        turns = buffers[rank]
        return turns[number % len(turns)]

    def _forward(self, number: int) -> None:
        messages: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            step, outbox = plan.steps[number], self.outbox[rank]
            if step.packs:
                outbox[:] = NOTHING  # what was packed before was sent before
            for pack in step.packs:
                self._pack(rank, pack, outbox)
            source = self._turn(self.landing, rank, number - 1) if step.relayed else outbox
            for move in step.sends:
                content = self._slice(rank, move, source)
                assert (content != NOTHING).all(), "sends what was never written"
                self.sent[rank] += len(content)
                messages[rank, move.peer].append(content.copy())
        for rank, plan in enumerate(self.plans):
            landing = self._turn(self.landing, rank, number)
            landing[:] = NOTHING
            for move in plan.steps[number].receives:
                content = self._match(messages, move.peer, rank, move)
                target = self._slice(rank, move, landing)
                assert (target == NOTHING).all(), "two messages to one place"
                target[:] = content
                for identity in content.tolist():
                    self.landed_on[identity].append(rank)
        assert not any(messages.values()), "a send without a receive"

    def _pack(self, rank: int, pack: Pack, outbox: Array) -> None:
        rows, heads, slots = addresses(pack)
        assert len(set(slots.tolist())) == len(slots) and (outbox[slots] == NOTHING).all(), "a slot packed twice"
        assert slots.min() >= 0 and slots.max() < len(outbox)
        assert rows.min() >= 0 and rows.max() < self.setting.layout.counts[rank]
        outbox[slots] = len(self.owner) + np.arange(len(slots))
        self.owner += [rank] * len(slots)
        self.position += self.setting.order[self.cuts[rank] + rows].tolist()
        self.head += heads.tolist()

    def _slice(self, rank: int, move: Move, buffer: Array) -> Array:
        assert 0 <= move.peer < self.setting.p and move.peer != rank
        assert 0 <= move.start < move.stop <= len(buffer), "a message outside of its buffer"
        return buffer[move.start : move.stop]

    def _match(self, messages: dict[tuple[int, int], list[Array]], source: int, rank: int, move: Move) -> Array:
        assert messages[source, rank], f"rank {rank} waits for rank {source}, which sends nothing"
        content = messages[source, rank].pop(0)
        assert len(content) == move.stop - move.start, "a message of another size"
        return content

    def _compute(self, rank: int, tile: Tile, landing: Array | None, grad: Array | None) -> None:
        """Count the pairs of a tile; give each of its keys a gradient."""
        setting = self.setting
        query_heads, key_heads = listed_heads(tile.query_heads), listed_heads(tile.key_heads)  # (G, P), (G, 1)
        rows, addresses_ = tile.query_rows.listed(), tile.key_rows.listed()  # (F, Lq), (F, Lk)
        assert rows.shape[0] == addresses_.shape[0] and key_heads.shape == (len(query_heads), 1)
        assert len(set(rows.ravel().tolist())) == rows.size, "a fold writes a query row twice"
        assert len(set(query_heads.ravel().tolist())) == query_heads.size
        assert rows.min() >= 0 and rows.max() < setting.layout.counts[rank]
        assert addresses_.size <= setting.bucket, "more keys than the bucket"
        keys = addresses_[:, None, :] + 0 * key_heads[None]  # (F, G, Lk)
        queries = setting.order[self.cuts[rank] + rows]  # positions
        if landing is None:
            assert keys.min() >= 0 and keys.max() < setting.layout.counts[rank]
            positions = setting.order[self.cuts[rank] + keys]
            heads = key_heads[None] + 0 * keys
            flat = keys * setting.kv_heads + heads
        else:
            flat = keys + key_heads[None]
            assert flat.min() >= 0 and flat.max() < len(landing)
            identity = landing[flat]
            assert (identity != NOTHING).all(), "a tile reads what has not landed"
            for one in set(identity.ravel().tolist()):
                self.read_by[one].add(rank)
                assert self.owner[one] != rank
            positions, heads = np.array(self.position)[identity], np.array(self.head)[identity]
        assert len(set(flat.ravel().tolist())) == flat.size, "a fold writes a key row twice"
        assert (heads[:, :, None] == (query_heads // (setting.heads // setting.kv_heads))[None, :, :, None]).all()
        assert (positions == positions[:, :1]).all(), "heads of a tile read different rows"
        if tile.mask is Mask.POSITION:
            assert tile.query_positions is not None and tile.key_positions is not None
            assert (tile.query_positions.numpy() == queries).all()
            assert (tile.key_positions.numpy() == positions[:, 0]).all()
        seen = visible(tile)[:, None, None]  # (F, 1, 1, Lq, Lk)
        index = (
            query_heads[None, :, :, None, None],
            queries[:, None, None, :, None],
            positions[:, :, None, None, :],
        )
        shape = np.broadcast_shapes(*(part.shape for part in index), seen.shape)
        np.add.at(self.pairs, index, np.broadcast_to(seen, shape))
        weight = self._noise(positions.size).reshape(positions.shape)
        np.add.at(self.due, (positions, heads), weight)
        if grad is None:
            np.add.at(self.got, (positions, heads), weight)
        else:
            grad[flat] += weight

    def _send_back(self, number: int) -> dict[tuple[int, int], list[Array]]:
        messages: dict[tuple[int, int], list[Array]] = defaultdict(list)
        for rank, plan in enumerate(self.plans):
            for move in plan.steps[number].return_sends:
                content = self._slice(rank, move, self._turn(self.grads, rank, number))
                self.returned[rank] += len(content)
                messages[rank, move.peer].append(content.copy())
        return messages

    def _collect(self, number: int, messages: dict[tuple[int, int], list[Array]]) -> None:
        for rank, plan in enumerate(self.plans):
            step, box = plan.steps[number], self.box[rank]
            fresh = np.zeros(len(box), bool)
            for move in step.return_receives:
                content = self._match(messages, move.peer, rank, move)
                assert not self._slice(rank, move, fresh).any(), "two messages to one place"
                self._slice(rank, move, fresh)[:] = True
                self._slice(rank, move, box)[:] = content
            used = np.zeros(len(box), bool)
            used[: step.carried] = True
            for pack in step.homes:
                rows, heads, slots = addresses(pack)
                assert len(set(zip(rows.tolist(), heads.tolist(), strict=True))) == len(rows), "a home added to twice"
                assert not used[slots].any(), "a gradient used twice"
                used[slots] = True
                positions = self.setting.order[self.cuts[rank] + rows]
                np.add.at(self.got, (positions, heads), box[slots])
            assert (used == fresh).all(), "gradients that come and those that are used differ"
            if step.carried:
                self._turn(self.grads, rank, number + 1)[: step.carried] += box[: step.carried]
        assert not any(messages.values()), "a return without a receive"


# --- a dense look at the same ---


def dense_multiplicity(setting: Setting) -> Array:
    at = torch.arange(setting.layout.n)
    return multiplicity(setting.pattern, at, at, setting.heads).numpy()


def needs_by_block(setting: Setting) -> list[tuple[int, Array]]:
    """(width, needed): needed[dst, key position], for every branch and offset. The own keys count too."""
    n, p = setting.layout.n, setting.p
    at, rank_of = torch.arange(n), rank_of_position(setting.layout)
    found = []
    for branch in setting.pattern.branches:
        offsets = branch.offsets(setting.heads)
        for offset in {o for o in offsets if o is not None}:
            kv = {h // (setting.heads // setting.kv_heads) for h, o in enumerate(offsets) if o == offset}
            alone = Pattern((Branch(branch.segment_length, branch.dilation_rate, offset),), setting.pattern.causal)
            seen = multiplicity(alone, at, at, 1)[0].numpy() > 0  # (query, key)
            needed = np.stack([seen[rank_of == dst].any(0) for dst in range(p)])
            found.append((len(kv), needed))
    return found


def rank_of_position(layout: Layout) -> Array:
    ranks = np.zeros(layout.n, np.int64)
    for rank in range(layout.world_size):
        ranks[layout.positions(rank).numpy()] = rank
    return ranks


def expected_sent(setting: Setting) -> list[int]:
    """Slots that each rank has to send forward: the least that the exchange can do with."""
    p, sent, owner = setting.p, [0] * setting.p, rank_of_position(setting.layout)
    if setting.exchange == "gather":
        return [count * setting.kv_heads * (p - 1) for count in setting.layout.counts]
    for width, needed in needs_by_block(setting):
        for key in range(setting.layout.n):
            source = int(owner[key])
            distances = [(int(dst) - source) % p for dst in np.flatnonzero(needed[:, key]) if dst != source]
            if setting.exchange == "direct":
                sent[source] += width * len(distances)
            else:
                for hop in range(max(distances, default=0)):
                    sent[(source + hop) % p] += width
    return sent


# --- what holds for every plan ---


def check(setting: Setting) -> None:
    walk = Walk(setting).go()
    assert (walk.pairs == dense_multiplicity(setting)).all(), "pairs differ from the pattern's multiplicity"
    assert (walk.got == walk.due).all(), "a gradient is lost, doubled or sent to another row"
    assert walk.sent == expected_sent(setting)
    check_nothing_in_vain(setting, walk)
    check_sizes(setting)


def check_nothing_in_vain(setting: Setting, walk: Walk) -> None:
    landed = [0] * setting.p
    for identity, ranks in walk.landed_on.items():
        assert len(set(ranks)) == len(ranks) and walk.owner[identity] not in ranks, "a slot lands where it already was"
        for rank in ranks:
            landed[rank] += 1
        if setting.exchange == "direct":
            assert walk.read_by[identity] == set(ranks), "a slot is sent to a rank that does not read it"
        if setting.exchange == "ring":
            assert ranks[-1] in walk.read_by[identity], "a slot travels beyond the last rank that reads it"
            hops = [(rank - walk.owner[identity]) % setting.p for rank in ranks]
            assert hops == list(range(1, len(ranks) + 1)), "a slot leaves the ring's order"
    assert set(walk.landed_on) == set(range(len(walk.owner))), "packed, but not sent"
    assert walk.returned == landed, "every landed slot sends its gradient on once"


def check_sizes(setting: Setting) -> None:
    if setting.exchange == "gather":
        return
    widths = [block.width for block in blocks_of(setting.pattern, setting.layout.n, setting.heads, setting.kv_heads)]
    most = setting.bucket * setting.kv_heads + max(widths) - 1
    for plan in setting.plans:
        assert plan.sizes.landing <= most and plan.sizes.outbox <= most
        assert plan.sizes.returned <= 2 * most


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_settings())
@example(Setting(Pattern.dense(), Layout.contiguous(0, 3), 2, 1, "ring", 4))
@example(Setting(Pattern.dense(True), Layout.zigzag(12, 3), 2, 1, "ring", 2))
@example(Setting(Pattern.longnet((4, 8), (1, 2), 4, True), Layout.striped(24, 4), 4, 2, "direct", 3))
def test_a_plan_computes_moves_and_returns_exactly_what_the_pattern_says(setting: Setting) -> None:
    check(setting)


@pytest.mark.parametrize("bucket", (2, 1000))
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("pattern", (Pattern.dense(True), Pattern.longnet((6, None), (1, 2), 2, True)))
@pytest.mark.parametrize(
    "runs",
    (
        (range(0, 20, 2), range(1, 20, 2)),  # a rank with two runs that see prefixes of one piece, of unequal length
        (range(1, 20, 2), range(0, 20, 2)),
        (range(0, 8), range(8, 20, 3), range(9, 20, 3), range(10, 20, 3)),  # steps 1 and 3
        (range(12, 20), range(0, 12, 3), range(1, 12, 3), range(2, 12, 3)),
        (range(0, 20, 4), range(1, 20, 2), range(2, 20, 4)),  # steps 4 and 2, interleaved
        (range(1, 20, 2), range(0, 20, 4), range(2, 20, 4)),
        (range(0, 12, 3), range(12, 20, 2), range(1, 12, 3), range(13, 20, 2), range(2, 12, 3)),
    ),
)
def test_interleaved_runs(runs: tuple[range, ...], pattern: Pattern, exchange: str, bucket: int) -> None:
    order = [position for run in runs for position in run]
    for cuts in ((0, 7, 12, 20), (0, 3, 3, 20), (0, 10, 16, 20)):
        layout = Layout.from_cuts(order, cuts)
        assert layout.runs is not None
        check(Setting(pattern, layout, 2, 1, exchange, bucket))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
def test_segments_that_look_alike_but_for_the_step_of_their_keys(causal: bool, exchange: str) -> None:
    """Two segments with equally many queries and keys; keys are two rows apart in the one, one row in the other."""
    order = [0, 1, 2, 3, 8, 10, 4, 5, 6, 7, 12, 13, 14, 15, 9, 11]
    layout = Layout.from_cuts(order, (0, 6, 16, 16))
    assert layout.runs is not None
    check(Setting(Pattern((Branch(8, 2),), causal), layout, 2, 1, exchange, 1000))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped", "hilbert"))
def test_sixteen_ranks(order: str, causal: bool, exchange: str) -> None:
    layout = getattr(Layout, order)(50, 16)
    pattern = Pattern((Branch(24, 2, (0, 1, 1, 0)), Branch(7, 3, 2, range(1, 3)), Branch(None, 4)), causal)
    check(Setting(pattern, layout, 4, 2, exchange, 2))


@settings(max_examples=60, deadline=None)
@given(drawn_settings())
def test_runs_and_listing_plan_the_same_pairs(setting: Setting) -> None:
    if setting.layout.n:
        same = Setting(
            setting.pattern, listed(setting.layout), setting.heads, setting.kv_heads, setting.exchange, setting.bucket
        )
        check(same)
        if setting.layout.runs is not None:
            assert Walk(same).go().sent == Walk(setting).go().sent


def test_every_kind_of_mask_and_address_occurs() -> None:
    """The settings above reach the cases that the plan tells apart: none of the branches in the code is untested."""
    masks, listed_rows, folded, relayed, carried = set(), False, False, False, False
    for layout in (Layout.contiguous(24, 2), Layout.zigzag(24, 3), Layout.striped(24, 3), Layout.hilbert(24, 3)):
        setting = Setting(Pattern.longnet((8, 24), (1, 3), 2, True), layout, 2, 1, "ring", 8)
        for plan in setting.plans:
            tiles = [*plan.local, *(tile for step in plan.steps for tile in step.tiles)]
            masks |= {tile.mask for tile in tiles}
            listed_rows |= any(tile.query_rows.index is not None for tile in tiles)
            folded |= any(tile.query_rows.folds > 1 for tile in tiles)
            relayed |= any(step.relayed and step.sends for step in plan.steps)
            carried |= any(step.carried for step in plan.steps)
    assert masks == set(Mask) and listed_rows and folded and relayed and carried


def test_more_bucket_means_fewer_steps_and_one_is_enough_without_a_cap() -> None:
    for exchange in ("ring", "direct"):
        steps = [
            len(Setting(Pattern.dense(), Layout.contiguous(64, 4), 2, 2, exchange, bucket).plans[0].steps)
            for bucket in (1, 4, 16, 64)
        ]
        assert steps == sorted(steps, reverse=True) and steps[0] == 16 * 3
        assert steps[-1] == (3 if exchange == "ring" else 1)


def test_a_segment_within_a_rank_sends_nothing() -> None:
    for exchange in ("ring", "direct"):
        setting = Setting(Pattern.longnet((4, 8), (1, 2), 2), Layout.contiguous(64, 4), 2, 2, exchange, 4)
        assert all(plan.steps == () and plan.sizes.landing == plan.sizes.outbox == 0 for plan in setting.plans)


# --- pieces, meetings and needs, by themselves ---


def elements(pieces: Pieces, piece: int) -> tuple[list[int], list[int]]:
    """Rows and positions of a piece."""
    element = np.arange(pieces.count[piece])
    which = np.full_like(element, piece)
    if pieces.listed_rows is not None:
        rows = pieces.listed_rows[pieces.row[piece] + element]
    else:
        rows = pieces.row[piece] + element * pieces.row_step[piece]
    return rows.tolist(), pieces.position(which, element).tolist()


@st.composite
def tables(draw: Any) -> tuple[Pattern, Layout, Pieces]:
    pattern, layout = draw(patterns(2)), draw(layouts())
    if layout.n and draw(st.booleans()):
        layout = listed(layout)
    return pattern, layout, pieces_of(pattern, layout, 2, 1)


@settings(max_examples=100, deadline=None)
@given(tables())
def test_pieces_are_the_selected_rows(table: tuple[Pattern, Layout, Pieces]) -> None:
    _, layout, pieces = table
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in range(len(pieces.count)):
        of_block, segment, rank = (int(column[piece]) for column in (pieces.block, pieces.segment, pieces.rank))
        rows, positions = elements(pieces, piece)
        assert rows and positions == sorted(set(positions)) and (np.diff(rows) > 0).all() or pieces.listed
        assert layout.positions(rank)[rows].tolist() == positions
        assert all(position // pieces.blocks[of_block].segment_length == segment for position in positions)
        found[of_block, rank] += positions
        at = np.arange(-1, layout.n + 1)
        until = pieces.count_until(np.full_like(at, piece), at)
        assert until.tolist() == [sum(position <= x for position in positions) for x in at.tolist()]
    for number, block in enumerate(pieces.blocks):
        branch = Branch(block.segment_length, block.dilation_rate, 0)
        for rank in range(layout.world_size):
            held = layout.positions(rank)
            assert sorted(found[number, rank]) == sorted(held[selected(branch, held, block.offset)].tolist())
    key = [pieces.block, pieces.segment, pieces.rank]
    order = list(zip(*(column.tolist() for column in key), strict=True))
    assert order == sorted(order)


@settings(max_examples=100, deadline=None)
@given(tables(), st.data())
def test_meetings_are_the_visible_pairs_and_nothing_blind(table: tuple[Pattern, Layout, Pieces], data: Any) -> None:
    pattern, layout, pieces = table
    every = np.arange(len(pieces.count))
    # Any stretch of every piece: plans cut keys at buckets.
    first = np.array([data.draw(st.integers(0, int(c) - 1)) for c in pieces.count], np.int64)
    keys = Stretches(every, first, pieces.count - first)
    queries = Stretches.whole(pieces, every)
    found = meet(pieces, queries, keys, pattern.causal)
    assert (found.key.piece == keys.piece[found.item]).all()
    pairs = np.zeros((len(pieces.blocks), layout.n, layout.n), np.int64)
    for mask, part in masked(pieces, found, pattern.causal):
        for i in range(len(part.item)):
            seen, q, k, of_block = dense_meeting(pieces, mask, part, i)
            assert seen.any(0).all() and seen.any(1).all(), "a row or key of a meeting that sees nothing"
            pairs[of_block][np.ix_(q, k)] += seen
    for number, block in enumerate(pieces.blocks):
        at = torch.arange(layout.n)
        branch = Branch(block.segment_length, block.dilation_rate, block.offset)
        seen = multiplicity(Pattern((branch,), pattern.causal), at, at, 1)[0].numpy().astype(bool)
        kept = [elements(pieces, piece)[1][first[piece] :] for piece in every.tolist() if pieces.block[piece] == number]
        seen[:, sorted(set(range(layout.n)) - {position for part in kept for position in part})] = False
        assert (pairs[number] == seen).all()


def dense_meeting(pieces: Pieces, mask: Mask, part: Any, i: int) -> tuple[Array, Array, Array, int]:
    """What a meeting sees (query rows, keys), the positions of both, and its block."""

    def positions(stretches: Stretches) -> Array:
        element = stretches.first[i] + np.arange(stretches.count[i])
        return pieces.position(np.full_like(element, stretches.piece[i]), element)

    q, k = positions(part.query), positions(part.key)
    if mask is Mask.CAUSAL:
        assert len(q) == len(k)
        seen = np.tril(np.ones((len(q), len(k)), bool))
    else:
        seen = np.ones((len(q), len(k)), bool) if mask is Mask.FULL else k[None] <= q[:, None]
    return seen, q, k, int(pieces.block[part.query.piece[i]])


@settings(max_examples=100, deadline=None)
@given(tables())
def test_needs_are_what_some_row_sees(table: tuple[Pattern, Layout, Pieces]) -> None:
    pattern, layout, pieces = table
    needs = needs_of(pieces, pattern.causal)
    found = np.zeros((len(pieces.blocks), layout.world_size, layout.n), bool)
    for rank, piece, count in zip(needs.rank.tolist(), needs.piece.tolist(), needs.count.tolist(), strict=True):
        assert pieces.rank[piece] != rank and 0 < count <= pieces.count[piece]
        positions = elements(pieces, piece)[1][:count]
        assert not found[pieces.block[piece], rank, positions].any(), "one need said twice"
        found[pieces.block[piece], rank, positions] = True
    owner, at = rank_of_position(layout), torch.arange(layout.n)
    for number, block in enumerate(pieces.blocks):
        branch = Branch(block.segment_length, block.dilation_rate, block.offset)
        seen = multiplicity(Pattern((branch,), pattern.causal), at, at, 1)[0].numpy() > 0
        for rank in range(layout.world_size):
            wanted = seen[owner == rank].any(0) & (owner != rank)
            assert (found[number, rank] == wanted).all()


# --- blocks ---


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_blocks_serve_every_head_once_with_its_offset(data: Any) -> None:
    kv_heads = data.draw(st.integers(1, 4))
    heads = kv_heads * data.draw(st.integers(1, 4))
    pattern = data.draw(patterns(heads))
    served: dict[tuple[int | None, int, int, int], int] = defaultdict(int)
    for block in blocks_of(pattern, 10, heads, kv_heads):
        kv = listed_heads(block.key)[:, 0].tolist()
        assert kv == sorted(set(kv)) and block.width == len(kv)
        reading = set()
        for group in block.head_groups:
            query, key, column = (listed_heads(x) for x in (group.query, group.key, group.column))
            assert (query // (heads // kv_heads) == key).all() and (np.array(kv)[column] == key).all()
            reading |= set(key.ravel().tolist())
            for head in query.ravel().tolist():
                served[block.segment_length, block.dilation_rate, block.offset, head] += 1
        assert reading == set(kv)
    wanted: dict[tuple[int | None, int, int, int], int] = defaultdict(int)
    for branch in pattern.branches:
        for head, offset in enumerate(branch.offsets(heads)):
            if offset is not None:
                wanted[min(branch.segment_length or 10, 10), branch.dilation_rate, offset, head] += 1
    assert served == wanted


# --- how plans grow ---

# LongNet's published setting: arXiv 2307.02486, section 4.1.
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)


def tile_count(n: int, order: str, causal: bool, exchange: str) -> tuple[int, int, int]:
    """Tiles of the busiest rank, of its own keys and in all, and packs."""
    pattern = Pattern.longnet(LENGTHS, RATES, 12, causal)
    plans = [plan_of(pattern, getattr(Layout, order)(n, 8), rank, 12, 12, exchange, n) for rank in (0, 3, 7)]
    return (
        max(len(plan.local) for plan in plans),
        max(len(plan.local) + sum(len(step.tiles) for step in plan.steps) for plan in plans),
        max(sum(len(step.packs) + len(step.homes) for step in plan.steps) for plan in plans),
    )


@pytest.mark.parametrize("causal", (False, True))
def test_segments_of_a_rank_are_one_tile_however_many(causal: bool) -> None:
    blocks = sum(RATES)  # 12 heads use every offset of every rate
    for n in (2**19, 2**20):
        assert tile_count(n, "contiguous", causal, "ring") == (blocks, blocks, 0)


@pytest.mark.parametrize("exchange", ("ring", "direct"))
@pytest.mark.parametrize("order", ("zigzag", "striped"))
@pytest.mark.parametrize("causal", (False, True))
def test_tiles_do_not_grow_with_the_sequence(order: str, causal: bool, exchange: str) -> None:
    small, large = tile_count(2**19, order, causal, exchange), tile_count(2**20, order, causal, exchange)
    assert large == small
    # A tile for each of the segments would be 1984 of them, and 1984 * 8 with the ranks that share them.
    assert large[1] < 1000
