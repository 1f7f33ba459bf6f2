"""`ring.estimate` against `reference.cost`, the plans, and times worked out by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference import cost
from reference.closed_forms import dense_slots, segment_pairs
from reference.head_groups import KEY_EXCHANGES, groups_of
from reference.pattern import Branch, Pattern, multiplicity
from ring import execute, validation
from ring.default_bucket import default_bucket
from ring.estimate import Estimate, Rates, choose, counting, estimate, stages, timeline
from ring.estimate.__main__ import main
from ring.estimate.estimates import DEVICES, ORDERS, EstimatedCall, layout_of, longest
from ring.estimate.memory import memory_of
from ring.layout import Layout
from ring.plan.exchange import parse
from ring.precision import accumulator_dtype
from ring.programs import Programs, make_programs
from ring.settings import Settings
from tests.support import drawn_patterns
from tests.support.plan_settings import with_slices

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SIZES: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
HAND = Rates(forward=1.0, backward=1.0, link=1.0)
HOSTS = (0, 1, 1, 0, 2, 2)  # of ranks
budget = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def layouts(draw: st.DrawFn, pattern: Pattern, n: int, p: int) -> Layout:
    """Orders of the command, cuts of a permutation, and runs of several steps."""
    order = draw(st.sampled_from((*ORDERS, "shuffled", "steps")))
    if order in ORDERS:
        return layout_of(pattern, n, p, order)
    step = draw(st.integers(1, 4))
    listed = (
        [x for r in range(step) for x in range(r, n, step)] if order == "steps" else draw(st.permutations(range(n)))
    )
    return Layout.from_cuts(listed, (0, *sorted(draw(st.integers(0, n)) for _ in range(p - 1)), n))


def by_heads(p: int) -> tuple[str, ...]:
    """Exchanges by heads of p ranks; those of one rank by heads have keys alone."""
    parts = [(f"all-to-all:{d}", keys) for d in range(1, p + 1) if p % d == 0 for keys in KEY_EXCHANGES]
    return ("all-to-all", "all-to-all-kept", *("+".join(order) for part in parts for order in (part, part[::-1])))


def of_keys(p: int) -> tuple[str, ...]:
    """Exchanges of keys of p ranks."""
    return (*KEY_EXCHANGES, "direct-kept", *(f"ring:{n}+direct" for n in range(1, p + 1) if p % n == 0))


@st.composite
def calls(draw: st.DrawFn, heads_alone: bool | None = None) -> tuple[EstimatedCall, Layout, Layout]:
    """Exchanges by heads, of keys, or (None) both. With documents, windows, slices, grouped heads, other value dims,
    and keys of another sequence.
    """
    documents, kv_heads = draw(st.none() | drawn_patterns.documents()), draw(st.integers(1, 3))
    tokens, p, heads = (
        st.integers(8, 40) | st.integers(0, 8),
        draw(st.sampled_from((2, 3, 4, 5, 6, 1))),
        kv_heads * draw(st.integers(1, 3)),
    )
    n = draw(tokens) if documents is None else sum(documents)
    pattern = replace(draw(drawn_patterns.patterns(heads)), documents=documents)
    layout = keys = draw(layouts(pattern, n, p))
    if draw(st.booleans()):
        keys = draw(layouts(pattern, draw(tokens) if documents is None else n, p))
    if draw(st.booleans()):
        pattern = draw(with_slices(pattern, n, keys.n))
    sizes = heads, kv_heads, draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    exchanges = (of_keys(p) if heads_alone is not True else ()) + (by_heads(p) if heads_alone is not False else ())
    exchange, bucket = draw(st.sampled_from(exchanges)), draw(st.none() | st.integers(1, 12))
    dtype, device = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DEVICES))
    call = EstimatedCall(pattern, *sizes, dtype, exchange, bucket, device)
    return call, layout, keys


def row_of(call: EstimatedCall, layout: Layout, keys: Layout, **rest: Any) -> Estimate:
    (row,) = estimate(layout=layout, key_layout=keys, **vars(call), **rest)
    return row


def listed(call: EstimatedCall, layout: Layout, keys: Layout) -> cost.Setting:
    """The problem for `reference.cost`, position by position."""
    held = [[x.positions(rank).numpy() for rank in range(x.world_size)] for x in (layout, keys)]
    sizes = call.batch, call.heads, call.kv_heads, call.head_dim, call.dtype.itemsize, call.value_dim
    return cost.Setting(call.pattern, held[0], *sizes, held[1])


@budget
@given(calls())
def test_bytes_buffers_and_operations_are_those_of_the_reference(drawn: tuple[EstimatedCall, Layout, Layout]) -> None:
    call, layout, keys = drawn
    exact, counted, p = listed(*drawn), call.problem(layout, keys), layout.world_size
    incoming = call.batch * exact.counts * call.heads * call.value_dim * call.dtype.itemsize
    for exchange, device in product({call.exchange, *of_keys(p)}, DEVICES):
        changed, spec = replace(call, exchange=exchange, device=device), parse(exchange, p)
        # Gradients travel in the working dtype.
        narrow = groups_of(exchange, p).exchange == "direct" and device == "cuda"
        bucket = call.bucket or default_bucket(layout, call.heads, call.kv_heads, call.dtype, device, keys)
        one_sided = device == "cuda"
        sent, buffers, held, flops = (
            cost.sent(exact, exchange, narrow), cost.buffers(exact, exchange, bucket, narrow, one_sided),
            cost.resident(exact, exchange, bucket), cost.flops(exact, exchange),
        )  # fmt: skip
        kept = 0 * buffers.receive
        if groups_of(exchange, p).kept:  # beside the buffers that the same exchange has without
            plainly = cost.buffers(exact, exchange.removesuffix("-kept"), bucket, narrow, one_sided).receive
            kept = buffers.receive - (plainly if spec.degree > 1 else 0)
        expected = {
            "shards": held.shards, "accumulator": held.accumulator, "gradients": held.gradients,
            "incoming": incoming, "kept": kept,
            "forward_buffers": buffers.forward, "backward_buffers": buffers.backward,
            "forward_memory": held.shards + held.accumulator + buffers.forward,
            "backward_memory": held.shards + incoming + held.gradients + buffers.backward,
        }  # fmt: skip
        for rank in range(p):  # every entry, not the largest alone
            found = memory_of(counted, spec, bucket, rank, narrow, one_sided)
            assert found == {name: int(x[rank]) for name, x in expected.items()}
            blocks, slots = stages.stages_of(counted, spec, bucket, rank, HOSTS), counted.slot_bytes(narrow)
            totals = [sum(block.sent(backward, slots) for block in blocks) for backward in (False, True)]
            assert totals == [x[rank].sum() for x in (sent.forward, sent.backward)]
        assert counted.computed(spec, counted.head_stages(spec, bucket)).tolist() == list(flops.pairs)
        expected |= {
            "bucket": np.array([bucket]), "forward_sent": sent.forward.sum(1), "backward_sent": sent.backward.sum(1),
            "pairs": np.array(flops.pairs), "forward_flops": np.array(flops.forward),
            "backward_flops": np.array(flops.backward),
        }  # fmt: skip
        row = row_of(changed, layout, keys)
        assert {name: row.flat()[name] for name in expected} == {name: x.max() for name, x in expected.items()}
        assert (row.imbalance, row.counted) == (flops.imbalance, p)


class Announced(Exception):
    """The messages that a call announces, in place of the call."""


class Announcing:
    """A transport of one rank that only lists messages."""

    calls = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self, key: object, outgoing: Any) -> None:
        raise Announced(outgoing())


def programs_of(call: EstimatedCall, layout: Layout, keys: Layout, rank: int) -> tuple[Programs, list[Any]]:
    """The programs of `ring_attention` on a rank, and its q, k, v, out, lse and dout. On a CPU."""

    def rows(of: Layout, *sizes: int) -> torch.Tensor:
        return torch.zeros(call.batch, of.counts[rank], *sizes, dtype=call.dtype)

    (h, kv), (d, dv) = (call.heads, call.kv_heads), (call.head_dim, call.value_dim)
    q, k, v, out = rows(layout, h, d), rows(keys, kv, d), rows(keys, kv, dv), rows(layout, h, dv)
    lse = torch.zeros(call.batch, h, layout.counts[rank], dtype=accumulator_dtype(call.dtype))
    arguments = validation.Call(
        q, k, v, call.pattern, layout, keys, None, Settings(call.exchange, call.bucket, "math"), True, False
    )
    return make_programs(arguments, parse(call.exchange, layout.world_size), rank), [q, k, v, out, lse, out]


def announced(call: EstimatedCall, layout: Layout, keys: Layout, rank: int) -> list[list[Any]]:
    """Messages that `ring_attention` sends on a rank, forward and backward."""
    programs, tensors = programs_of(call, layout, keys, rank)
    transport: Any = Announcing(rank)
    found: list[list[Any]] = []
    q, k, v, *_ = tensors
    for run in (
        lambda: execute._forward(programs, transport, False, q, k, v),
        lambda: execute._backward(transport, programs.backward(q, False), False, 0, *tensors),
    ):
        try:
            run()
            found.append([])  # a call without messages
        except Announced as messages:
            found.append(messages.args[0])
    return found


@budget
@given(calls())
def test_messages_are_those_that_ranks_announce(drawn: tuple[EstimatedCall, Layout, Layout]) -> None:
    check_messages(*drawn)


@pytest.mark.parametrize("exchange", ["direct-kept", "all-to-all-kept"])
def test_kept_tensors_are_no_messages(exchange: str) -> None:
    call = EstimatedCall(Pattern.dense(causal=True), 6, 6, 4, 4, 1, torch.float32, exchange, 8, "cpu")
    check_messages(call, Layout.zigzag(24, 3), Layout.zigzag(24, 3))


def test_kept_heads_of_several_stages() -> None:
    layout = Layout.zigzag(24, 3)
    call = EstimatedCall(Pattern.dense(True), 12, 12, 4, 4, 1, torch.float32, "all-to-all-kept", 4, "cpu")
    wanted, row = cost.buffers(listed(call, layout, layout), call.exchange, 4), row_of(call, layout, layout)
    assert (row.forward.buffers, row.backward.buffers) == (wanted.forward.max(), wanted.backward.max())
    assert row.kept == row.shards, "ranks divide the heads evenly"


def check_messages(call: EstimatedCall, layout: Layout, keys: Layout) -> None:
    """Hold an estimate to the bytes and messages of both ends, to ranks of the own host and to others."""
    call = replace(call, device="cpu")
    p, spec = layout.world_size, parse(call.exchange, layout.world_size)
    problem, bucket = call.problem(layout, keys), call.bucket_of(layout, keys)
    ends, slots = np.zeros((2, p, 2, 4), np.int64), problem.slot_bytes(False)  # passes, ranks, hosts, columns
    for rank in range(p):
        for backward, messages in enumerate(announced(call, layout, keys, rank)):
            for x in messages:
                far, size = int(HOSTS[rank] != HOSTS[x.peer]), x.stop - x.start
                ends[backward, rank, far] += (size, 0, 1, 0)
                ends[backward, x.peer, far] += (0, size, 0, 1)
    for backward, rank in product((0, 1), range(p)):
        found = np.zeros((2, 4), np.int64)
        for block in stages.stages_of(problem, spec, bucket, rank, HOSTS):
            batches = [(block.keys, slots[0])] * block.sends_keys(bool(backward))
            batches += [(block.gradients, slots[1])] * backward
            for x, size in (*batches, *((rows, 1) for rows in block.rows[2 * backward :][:2])):
                found += np.stack([x.sent * size, x.received * size, x.out, x.into], axis=-1).sum(0)
        assert np.array_equal(found, ends[backward, rank])
    row = row_of(call, layout, keys)
    assert [row.forward.messages, row.backward.messages] == ends[..., 2].sum(2).max(1).tolist()


@budget
@given(calls())
def test_pairs_are_those_of_the_mask(drawn: tuple[EstimatedCall, Layout, Layout]) -> None:
    """Count them on each rank; where it divides no heads, also those of its own keys and of keys that arrive."""
    call, layout, keys = drawn
    p, spec = layout.world_size, parse(call.exchange, layout.world_size)
    problem, bucket = call.problem(layout, keys), call.bucket_of(layout, keys)
    mask = multiplicity(call.pattern, torch.arange(layout.n), torch.arange(keys.n), call.heads).sum(0).numpy()
    held = [[x.positions(rank).numpy() for rank in range(p)] for x in (layout, keys)]
    seen = np.array([[mask[np.ix_(query, key)].sum() for key in held[1]] for query in held[0]])
    assert problem.pairs.tolist() == seen.sum(1).tolist()
    if spec.degree > 1:
        return
    with patch.object(counting, "_SAMPLES", 64):  # more than tokens
        for rank in range(p):
            (_, receives, *_), _, (own, *others) = problem.stages(spec.keys, bucket, rank)
            assert own == pytest.approx(seen[rank, rank]) and own + sum(others) == pytest.approx(seen[rank].sum())
            if call.exchange == "direct" and len(others) == 1:
                assert others[0] == pytest.approx(sum(seen[rank, x.peer] for x in receives[0]))


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("exchange", ["ring", "direct"])
def test_a_million_tokens_have_the_closed_form(order: str, exchange: str) -> None:
    n, p = 2**20, 32
    layout = getattr(Layout, order)(n, p)
    call = EstimatedCall(Pattern.dense(True), 2, 1, 1, 1, 1, torch.float64, exchange, 999, "cpu")
    problem, spec = call.problem(layout, layout), parse(exchange, p)
    blocks = [block for rank in range(p) for block in stages.stages_of(problem, spec, 999, rank, [0] * p)]
    assert sum(x.sent(False, (16, 16)) for x in blocks) == dense_slots(n, p, 1, True, order, exchange) * 16
    assert problem.pairs.sum() == segment_pairs(n, n, 1, 2, True)
    assert sum(x.pairs.sum() for x in blocks) == pytest.approx(segment_pairs(n, n, 1, 2, True), rel=1e-6)


@pytest.mark.parametrize("exchange", ["ring", "direct", "all-to-all:2+ring"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_some_ranks_stand_for_many(order: str, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"tokens": 2**14, "ranks": 64, "order": order, "exchange": exchange, "rates": HAND, **SIZES}
    (some,) = estimate(Pattern.dense(True), **given)
    monkeypatch.setattr(counting, "_MOST_RANKS", 64)
    (every,) = estimate(Pattern.dense(True), **given)
    assert 8 <= some.counted <= 11 and every.counted == 64
    for name, value in every.flat().items():
        expected = pytest.approx(value, rel=0.15) if isinstance(value, int | float) else value
        assert name == "counted" or some.flat()[name] == expected


def test_times_by_hand() -> None:
    """Two shards of 4 tokens, all of which see each other: 16 pairs with own keys, 16 with the others'.

    A pair takes 4 operations in forward and 10 in backward; a shard of keys and values 8 numbers of 8 bytes.
    """
    call = EstimatedCall(Pattern.dense(), 1, 1, 1, 1, 1, torch.float64, "direct", 4, "cpu")
    layout = Layout.contiguous(8, 2)
    for link, latency in ((1.0, 0.0), (1.0, 5.0), (0.5, 0.0)):
        row = row_of(call, layout, layout, rates=replace(HAND, link=link, latency=latency))
        message = 64 / link + latency
        assert (row.forward.computing, row.forward.messaging) == (128, message)
        assert (row.forward.exposed, row.forward.seconds) == (message - 64, max(64, message) + 64)
        assert (row.backward.computing, row.backward.messaging) == (320, 2 * message)
        assert (row.backward.exposed, row.backward.seconds) == (message, 320 + message)  # the keys are hidden
    alone = row_of(call, Layout.contiguous(8, 1), Layout.contiguous(8, 1), rates=HAND)
    assert (alone.forward.seconds, alone.backward.seconds, alone.forward.messaging) == (256, 640, 0)
    stages_alone = row_of(call, layout, layout, rates=replace(HAND, stage=3.0, packing=1.0)).forward
    assert (stages_alone.computing, stages_alone.seconds) == (128 + 2 * 3, 67 + 67)  # no rows are packed
    halves = row_of(replace(call, bucket=2), layout, layout, rates=HAND)  # 64, then max(32, 32), then 32
    assert (halves.forward.seconds, halves.forward.messages) == (128, 2)
    assert halves.backward.seconds == 160 + 80 + 80 + 32  # one return is hidden
    kept = replace(call, exchange="direct-kept", bucket=3)  # 3 keys, then 1; own keys last
    slow = row_of(kept, layout, layout, rates=replace(HAND, link=0.25))
    assert (slow.backward.seconds, slow.backward.messaging) == (120 + max(40, 192) + max(160, 64), 192 + 64)
    assert (slow.kept, row_of(call, layout, layout).kept) == (4 * 16, 0)


def test_times_by_heads_by_hand() -> None:
    """Two ranks with 4 rows of each of 4 heads, which they compute one at a time: 64 pairs.

    A row goes as 24 bytes of q, k, v and comes back as 16 of out and lse; backward as 48 (out, lse, dout too) and 24.
    """
    call = EstimatedCall(Pattern.dense(), 4, 4, 1, 1, 1, torch.float64, "all-to-all", 1, "cpu")
    layout = Layout.contiguous(8, 2)
    for link, latency, seconds, back in (
        (1.0, 0.0, 96 + 256 + 256 + 64, 192 + 640 + 640 + 96),
        (1.0, 10.0, 126 + 256 + 256 + 84, 252 + 640 + 640 + 126),  # 3 messages and 2; 6 and 3
        (0.25, 0.0, 384 + 384 + 256 + 256, 768 + 768 + 640 + 384),  # rows of the next block take longer
    ):
        row = row_of(call, layout, layout, rates=replace(HAND, link=link, latency=latency))
        assert (row.forward.seconds, row.backward.seconds) == (seconds, back)
        assert (row.forward.computing, row.forward.exposed) == (512, seconds - 512)
        assert row.forward.messaging == 2 * (160 / link + 5 * latency)
    # A block of keys and two of rows. Own rows of all heads are copied once, results twice: 2 heads of 96 and 64 bytes.
    packed = row_of(call, layout, layout, rates=replace(HAND, stage=2.0, packing=0.5)).forward
    assert packed.seconds == 96 + 2 * (256 + 3 * 2 + 2 * (96 + 2 * 64) / 0.5) + 64
    # What arrives is copied once more to keep it. Backward a row of the gradient goes as 8 bytes.
    kept = row_of(
        replace(call, exchange="all-to-all-kept"), layout, layout, rates=replace(HAND, stage=2.0, packing=0.5)
    )
    assert kept.forward.seconds == 96 + 2 * (256 + 3 * 2 + 2 * (2 * 96 + 2 * 64) / 0.5) + 64
    assert kept.backward.seconds == 32 + 2 * (640 + 3 * 2 + 2 * (32 + 2 * 96) / 0.5) + 96
    # Two such groups: the others' keys come in chunks of 3, 3 and 2 rows of 16 bytes, with 8 pairs each.
    slow, four = replace(HAND, link=0.25), Layout.contiguous(16, 4)
    row = row_of(replace(call, exchange="all-to-all:2+direct", bucket=3), four, four, rates=slow)
    alone, messages = 256 + 192 + 128 + 64, 192 + 192 + 128
    assert row.forward.seconds == 384 + max(alone, messages + 384) + max(alone, messages + 256) + 256


def test_times_between_hosts_by_hand() -> None:
    """Four ranks, two a host. A shard of keys and values is 4 tokens of 16 bytes; within a host it takes 64 seconds."""
    call = EstimatedCall(Pattern.dense(), 1, 1, 1, 1, 1, torch.float64, "gather", 4, "cpu")
    layout = Layout.contiguous(16, 4)
    far = replace(HAND, latency=1.0, ranks_per_host=2)
    for rates, message in (
        (replace(HAND, latency=1.0), 3 * 65),  # to all three others
        (far, max(65, 2 * 65)),  # two links at once
        (replace(far, link_between=0.5), 2 * 129),
        (replace(far, link_between=100.0, latency_between=0.0), 65),
        (replace(far, latency_between=50.0), 2 * 114),
        (replace(far, ranks_per_host=1, link_between=0.5), 3 * 129),
        (replace(far, ranks_per_host=8, link_between=0.5), 3 * 65),
    ):
        row = row_of(call, layout, layout, rates=rates)
        assert (row.forward.messaging, row.backward.messaging) == (message, 2 * message)
    # Rows of 4 heads: 4 tokens x 1 head to each of the others, 24 bytes there; and 16 back.
    rows = row_of(replace(call, exchange="all-to-all", heads=4, kv_heads=4, bucket=64), layout, layout, rates=far)
    assert rows.forward.messaging == 2 * (4 * (24 + 16) + 5)
    # A ring of neighbours and its last hop between hosts, where a message takes 129 seconds.
    row = row_of(replace(call, exchange="ring"), layout, layout, rates=replace(far, link_between=0.5))
    assert row.forward.messaging == 3 * 129


def test_exchanges_by_hosts_are_estimated_as_their_number() -> None:
    far = replace(HAND, ranks_per_host=2, link_between=0.5)
    same: dict[str, Any] = {"tokens": 64, "ranks": [2, 4, 8], "rates": far, **SIZES}
    for name, numbers in (
        ("all-to-all+ring", ["all-to-all", "all-to-all:2+ring", "all-to-all:2+ring"]),
        ("ring+all-to-all", ["ring", "ring+all-to-all:2", "ring+all-to-all:4"]),
        ("ring+direct", ["ring", "ring:2+direct", "ring:2+direct"]),
    ):
        rows = estimate(Pattern.dense(True), exchange=name, **same)
        assert [row.exchange for row in rows] == numbers
        for row in rows:
            alike = estimate(Pattern.dense(True), exchange=row.exchange, **{**same, "ranks": row.ranks})
            assert alike == (row,)


@pytest.mark.parametrize(
    "exchange", [*KEY_EXCHANGES, "direct-kept", "all-to-all", "all-to-all-kept", "ring+all-to-all:2"]
)
def test_the_longest_sequence_fits_and_the_next_does_not(exchange: str) -> None:
    call = EstimatedCall(Pattern.dense(True, window=1000), 4, 2, 64, 64, 1, torch.bfloat16, exchange, None, "cuda")
    found = longest(call, 4, "zigzag", 2**28, True)
    least, more = (call.peak(Layout.zigzag(n, 4), True) for n in (found, found + 512))
    assert least <= 2**28 < more and longest(call, 4, "zigzag", 1000, True) == 0
    given = {name: value for name, value in vars(call).items() if name != "pattern"}
    (row,) = estimate(call.pattern, tokens=512, ranks=4, memory=2**28, **given)
    assert row.longest == found


def test_a_row_for_each_size_in_every_form() -> None:
    rows = estimate(Pattern.dense(True), tokens=[1024, 2048], ranks=[2, 4], **SIZES)
    assert [(row.tokens, row.ranks) for row in rows] == [(1024, 2), (1024, 4), (2048, 2), (2048, 4)]
    assert json.loads(rows.to_json()) == [row.flat() for row in rows]
    unknown = [name for name, x in rows[0].flat().items() if x is None]  # times, the longest sequence
    table = rows.to_table(width=200).splitlines()
    assert len(table) == 1 + len(rows[0].flat()) - len(unknown) and len(unknown) == 9
    narrow = rows.to_table(width=50).split("\n\n")
    assert [lines.splitlines()[1].split()[1:] for lines in narrow] == [["1024", "1024"], ["2048", "2048"]]


def test_the_command_ends_quietly_when_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sizes = ["--tokens", "1Ki", "--ranks", "2", "--heads", "2", "--head-dim", "8", "--json"]
    ended = subprocess.run([sys.executable, "-m", "ring.estimate", *sizes], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


def test_the_command_prints_what_the_function_returns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--tokens", "1Ki", "--ranks", "2", "4", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"]
    rates = ["--forward-rate", "4e14", "--backward-rate", "3e14", "--link-rate", "1e11", "--latency", "1e-5"]
    same: dict[str, Any] = {"tokens": 1024, "ranks": [2, 4], **SIZES}
    assert main([*sizes, *rates, "--causal", "--json", "--memory", "1Gi"]) == 0
    expected = estimate(Pattern.dense(True), **same, rates=Rates(4e14, 3e14, 1e11, 1e-5), memory=2**30)
    assert capsys.readouterr().out == expected.to_json() + "\n"
    main([*sizes, "--segments", "64", "256", "--dilations", "1", "4", "--exchange", "all-to-all:2+ring", "--json"])
    longnet = Pattern.longnet([64, 256], [1, 4], 32)
    assert capsys.readouterr().out == estimate(longnet, **same, exchange="all-to-all:2+ring").to_json() + "\n"
    packed = Pattern.dense(True, (1000, 24))
    (tmp_path / "pattern.json").write_text(json.dumps(packed.to_dict()))
    main([*sizes, "--pattern", str(tmp_path / "pattern.json"), "--order", "balanced", "--json"])
    assert capsys.readouterr().out == estimate(packed, **same, order="balanced").to_json() + "\n"
    main([*sizes, "--gpu", "NVIDIA H200", "--ranks-per-host", "2", "--link-rate-between", "4e10", "--json"])
    gpu = Rates.of("NVIDIA H200", ranks_per_host=2, link_between=4e10)
    assert capsys.readouterr().out == estimate(Pattern.dense(), **same, rates=gpu).to_json() + "\n"
    main([*sizes, *rates])
    assert "forward exposed" in capsys.readouterr().out
    between = ["--ranks-per-host", "2", "--link-rate-between", "1e9", "--latency-between", "1e-4"]
    between += ["--stage", "1e-5", "--packing-rate", "1e12"]
    main([*sizes, *rates, *between, "--exchange", "all-to-all+ring", "--json"])
    far = Rates(4e14, 3e14, 1e11, 1e-5, 2, 1e9, 1e-4, 1e-5, 1e12)
    assert (
        capsys.readouterr().out
        == estimate(Pattern.dense(), **same, rates=far, exchange="all-to-all+ring").to_json() + "\n"
    )
    main(["--tokens", "1Ki", "--ranks", "4", *sizes[5:], "--exchange", "auto", "--json"])
    assert capsys.readouterr().out == choose(Pattern.dense(), tokens=1024, ranks=4, **SIZES).to_json() + "\n"
    for wrong, named in (
        (["--exchange", "auto"], "--exchange auto takes one number of --tokens and of --ranks"),
        (["--window", "3", "--segments", "4"], "exclude each other"),
        (["--segments", "4"], "--segments and --dilations must be given together"),
        (["--link-rate", "1"], "--link-rate must be given together"),
        (["--latency", "5"], "--link-rate must be given together"),
        (["--ranks-per-host", "2"], "--link-rate must be given together"),
        ([*rates, "--latency-between", "2"], "latency_between is 2.0; it must be None without ranks_per_host"),
        ([*rates, "--gpu", "NVIDIA H200"], "--gpu has rates of its own: --backward-rate must not be given beside it"),
        (["--gpu", "NVIDIA H200", "--ranks-per-host", "2"], "link_between is None; it must be given with ranks_per"),
        (["--gpu", "abacus"], "gpu is 'abacus'; it must be 'NVIDIA H200'"),
        (["--exchange", "ring+direct"], "exchange is 'ring+direct'; it must have a number, or rates ranks_per_host"),
        (["--bucket", "0"], "bucket is 0"),
        (["--tokens", "1K"], "'1K'; it must be an integer such as"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*sizes, *wrong])
        assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pattern": None}, "pattern must be a Pattern"),
        ({"heads": 0}, "heads is 0; it must be an integer from 1 to 2147483648"),
        ({"head_dim": 2**30, "batch": 2**22}, "batch, heads, head_dim and value_dim are too large"),
        ({"ranks": 4097}, "ranks is 4097; it must be an integer from 1 to 4096"),
        ({"kv_heads": 3}, "heads is 32; it must be a multiple of kv_heads, 3"),
        ({"pattern": Pattern((Branch(heads=range(40)),))}, "pattern must be one for the 32 query heads"),
        ({"dtype": torch.int8}, "dtype is torch.int8; it must be one of torch.float64"),
        ({"exchange": "star"}, "exchange must be one of 'ring', .* 'all-to-all-kept', or two that keep .* got 'star'"),
        ({"exchange": "auto"}, ".*'ring:2.direct', for 'auto' ring.estimate.choose.* lists all of them, got 'auto'"),
        ({"exchange": "all-to-all:3+ring"}, "exchange must divide the 2 ranks .*, got 'all-to-all:3\\+ring'; allowed"),
        ({"bucket": 0}, "bucket is 0; it must be an integer from 1"),
        ({"device": "tpu"}, "device is 'tpu'; it must be one of cpu, cuda"),
        ({"order": "random"}, "order is 'random'; it must be one of contiguous"),
        ({"tokens": 2**32}, "tokens is 4294967296; it must be an integer from 1 to 2147483648"),
        ({"ranks": [2, 0]}, "ranks is 0; it must be an integer from 1"),
        ({"ranks": []}, "ranks is \\[\\]; it must be an integer, or at least one"),
        ({"ranks": None}, "layout must be given"),
        ({"layout": Layout.zigzag(8, 2)}, "tokens, ranks and order must be None"),
        ({"layout": Layout.zigzag(8, 2), "tokens": None, "ranks": None, "order": "zigzag"}, "tokens, ranks and order"),
        ({"layout": 3, "tokens": None, "ranks": None}, "layout is 3; it must be a Layout"),
        ({"key_layout": Layout.zigzag(8, 2)}, "layout must be given with a key_layout"),
        ({"pattern": Pattern.dense(documents=(3,))}, "documents must add up to the 1024 tokens"),
        ({"rates": 3}, "rates is 3; it must be Rates"),
        ({"memory": 0}, "memory is 0; it must be an integer of at least 1"),
        ({"pattern": Pattern.dense(documents=(1024,)), "memory": 1}, "memory must be None"),
    ],
)
def test_refuses(change: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"pattern": Pattern.dense(), "tokens": 1024, "ranks": 2, **SIZES}
    with pytest.raises(ValueError, match=f"^{named}"):
        estimate(**{**given, **change})


def test_refuses_what_it_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="layout has too many runs of positions: 536870912 pairs"):
        estimate(Pattern.longnet([2048], [1], 32), tokens=2**18, ranks=2048, order="striped", **SIZES)
    with pytest.raises(ValueError, match="tokens are too many: 2\\*\\*53"):
        estimate(Pattern.dense(), tokens=2**31, ranks=2, **SIZES)
    with pytest.raises(ValueError, match="memory is .* less than 2\\*\\*31 tokens take on 64 ranks"):
        estimate(Pattern.dense(), tokens=1024, ranks=64, memory=2**60, **SIZES)
    monkeypatch.setattr(counting, "MAX_CHUNKS", 4)
    assert estimate(Pattern.dense(), tokens=8, ranks=2, bucket=2, **SIZES)[0].forward.messages == 2
    with pytest.raises(ValueError, match="bucket is 1; it must be large enough"):
        estimate(Pattern.dense(), tokens=8, ranks=2, bucket=1, **SIZES)
    for wrong, named in (
        ({"link": 0}, "link is 0"),
        ({"link": None}, "link is None"),
        ({"latency": None}, "latency is None"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0"),
        ({"ranks_per_host": 2, "link_between": 0}, "link_between is 0"),
        ({"link_between": 1}, "link_between is 1; it must be None without ranks_per_host"),
    ):
        with pytest.raises(ValueError, match=named):
            replace(HAND, **wrong)


TIMELINES = (
    *KEY_EXCHANGES,
    "direct-kept",
    "all-to-all",
    "all-to-all-kept",
    "all-to-all:2+ring",
    "direct+all-to-all:2",
    "ring:2+direct",
)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("exchange", "p"), [*product(TIMELINES, (4, 40)), ("ring", 1), ("all-to-all", 1)])
def test_timelines_draw_the_predicted_times(exchange: str, p: int, backward: bool) -> None:
    """With the bucket, exchanges by heads have two blocks or more. Of 40 ranks the slowest may be one not drawn."""
    call: dict[str, Any] = {"rates": Rates(1e9, 1e9, 1e9, 1e-4, packing=1e9), "exchange": exchange, "bucket": 128}
    pattern, layout = Pattern.dense(causal=True), Layout.contiguous(512, p)
    (row,) = estimate(pattern, layout, **call, **SIZES)
    svg = timeline(pattern, layout, **call, backward=backward, **SIZES).svg
    predicted = vars(row.backward if backward else row.forward)
    assert f"{exchange}, {'back' if backward else 'for'}ward, predicted: {1e3 * predicted['seconds']:.4g} ms on" in svg
    assert len(re.findall(">rank [0-9]+<", svg)) == min(p, 16) and f">rank {p - 1}<" in svg
    if p <= 16:
        lanes = lanes_of(svg, p)
        # A bar has at least half a pixel, and places are rounded.
        assert max(end for rank in lanes for lane in rank for _, end, _ in lane) == pytest.approx(720, abs=0.6)
        sums = np.array([[sum(ms for *_, ms in lane) for lane in rank] for rank in lanes])
        slowest = np.array([1e3 * predicted[name] for name in ("computing", "messaging")])
        assert np.isclose(sums, slowest, rtol=1e-3, atol=0).all(1).any()


def test_timelines_by_heads_by_hand() -> None:
    """Rows of the second block take longer than the kernels of the first, as in `test_times_by_heads_by_hand`."""
    layout, rates = Layout.contiguous(8, 2), replace(HAND, link=0.25)
    svg = timeline(
        Pattern.dense(), layout, heads=4, head_dim=1, dtype=torch.float64, exchange="all-to-all", bucket=1,
        device="cpu", rates=rates,
    ).svg  # fmt: skip
    end = 384 + 384 + 256 + 256
    kernels, messages = [(384, 640), (768, 1024)], [(0, 384), (384, 640), (640, 768), (768, 1024), (1024, end)]
    for lanes in lanes_of(svg, 2):
        for lane, expected in zip(lanes, (kernels, messages), strict=True):
            places = [(begin * end / 720, stop * end / 720) for begin, stop, _ in lane]
            assert np.array(places) == pytest.approx(np.array(expected), abs=0.15 * end / 720)
            assert [ms for *_, ms in lane] == [1e3 * (stop - begin) for begin, stop in expected]


Lane = list[tuple[float, float, float]]


def lanes_of(svg: str, ranks: int) -> list[tuple[Lane, Lane]]:
    """Bars of kernels and of messages of each rank: begin and end in pixels of the axis, and milliseconds."""
    left = min(float(x) for x in re.findall(r'<path stroke="#ccc" d="M([\d.]+)', svg))
    bars = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" [^>]*><title>(\S+) ms of (\w+)', svg)
    lanes: list[tuple[Lane, Lane]] = [([], []) for _ in range(ranks)]
    for x, y, width, ms, kind in bars:
        lanes[(int(y) - 22) // 28][kind == "messages"].append(
            (float(x) - left, float(x) - left + float(width), float(ms))
        )
    return lanes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates": None}, "rates is None; it must be Rates"),
        ({"layout": 4096}, "layout is 4096; it must be a Layout"),
        ({"exchange": "all-to-all:3+ring"}, "exchange must divide the 2 ranks of the group"),
        ({"exchange": "all-to-all+ring"}, "exchange is 'all-to-all.ring'; it must have a number, or rates ranks_per_h"),
    ],
)
def test_timelines_refuse_what_estimates_refuse(change: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"layout": Layout.zigzag(64, 2), "rates": HAND, **SIZES, **change}
    with pytest.raises(ValueError, match=said):
        timeline(Pattern.dense(), **arguments)
