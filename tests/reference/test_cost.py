"""`reference.cost` against a triple loop over (head, query, key), and against closed forms and laws."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.cost import Setting, buffers, flops, resident, sent
from reference.head_groups import head_blocks
from reference.pattern import Branch, Pattern
from tests.support import drawn_patterns
from tests.support.oracle_loops import sees

Slot = tuple[int, int, int, int]  # branch, offset, key position, key/value head
budget = settings(max_examples=150, deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> Setting:
    documents, p = draw(st.none() | drawn_patterns.documents(3)), draw(st.integers(1, 5))
    n = draw(st.integers(0, 16)) if documents is None else sum(documents)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)))
    positions = np.split(np.array(draw(st.permutations(range(n))), np.int64), cuts)
    sizes = draw(st.integers(1, 2)), kv_heads * group, kv_heads, draw(st.integers(1, 3))
    itemsize, value_dim = draw(st.sampled_from([2, 4, 8])), draw(st.none() | st.integers(1, 4))
    keys = None
    if draw(st.booleans()):
        m = draw(st.integers(0, 16)) if documents is None else n
        cuts = sorted(draw(st.lists(st.integers(0, m), min_size=p - 1, max_size=p - 1)))
        keys = np.split(np.array(draw(st.permutations(range(m))), np.int64), cuts)
    shortest = n if keys is None else min(n, sum(map(len, keys)))
    pattern = replace(draw(drawn_patterns.patterns(kv_heads * group, sliced=shortest)), documents=documents)
    return Setting(pattern, positions, *sizes, itemsize, value_dim, keys)


@dataclass
class Count:
    """Straight from the definition: no vectors, no shortcuts."""

    # Ranks other than the owner that need the slot.
    users: dict[Slot, set[int]] = field(default_factory=lambda: defaultdict(set))
    pairs: Counter[int] = field(default_factory=Counter)
    owner: dict[int, int] = field(default_factory=dict)  # of keys
    widest: int = 0


def count(s: Setting) -> Count:
    found = Count()
    reader, found.owner = (
        {int(x): rank for rank, held in enumerate(positions) for x in held} for positions in (s.positions, s.keys)
    )
    for b, branch in enumerate(s.pattern.branches):
        offsets = branch.offsets(s.heads)
        for head, i, j in np.ndindex(s.heads, len(reader), len(found.owner)):
            if (o := offsets[head]) is not None and sees(s.pattern, branch, head, i, j, s.heads):
                found.pairs[reader[i]] += 1
                if reader[i] != found.owner[j]:
                    found.users[b, o, j, head * s.kv_heads // s.heads].add(reader[i])
        for offset in {slot[1] for slot in found.users if slot[0] == b}:
            served = {h * s.kv_heads // s.heads for h, x in enumerate(offsets) if x == offset}
            found.widest = max(found.widest, len(served))
    return found


def units(s: Setting, narrow: bool) -> tuple[int, int]:
    """Bytes of a slot and of its gradients."""
    elements = s.batch * (s.head_dim + (s.head_dim if s.value_dim is None else s.value_dim))
    return elements * s.itemsize, elements * (8 if s.itemsize == 8 else 2 if narrow and s.itemsize == 2 else 4)


@budget
@given(problems())
def test_need_and_pairs(s: Setting) -> None:
    true, p = count(s), len(s.positions)
    assert list(flops(s).pairs) == [true.pairs[rank] for rank in range(p)]
    assert s.widest == true.widest
    for src, dst in np.ndindex(p, p):
        taken = [dst in users for slot, users in true.users.items() if true.owner[slot[2]] == src]
        assert s.slots[src, dst] == sum(taken)
    for b, need in enumerate(s.needs):
        for at, row in enumerate(s.rows):
            slots = {x: users for x, users in true.users.items() if x[0] == b and x[2] == row}
            assert set(np.flatnonzero(need.needed[:, at])) == set().union(*slots.values())
            assert [x[1] for x in slots] == [need.offset[at]] * len(slots)
            assert need.width[at] == len(slots) or not slots


@budget
@given(problems(), st.booleans())
def test_sent_message_by_message(s: Setting, narrow: bool) -> None:
    """Every message of every slot, one at a time."""
    true, p = count(s), len(s.positions)
    size, gradient_size = units(s, narrow)
    groups = [f"ring:{n}+direct" for n in range(1, p + 1) if p % n == 0]
    for exchange in ("ring", "direct", "gather", *groups):
        kv, gradients = np.zeros((2, p, p), np.int64)
        if exchange == "gather":
            for src, dst in np.ndindex(p, p):
                if src != dst:
                    kv[src, dst] += len(s.keys[src]) * s.kv_heads
                    gradients[dst, src] += len(s.keys[src]) * s.kv_heads
        for slot, users in true.users.items():
            owner = true.owner[slot[2]]
            if exchange == "direct":
                for user in users:
                    kv[owner, user] += 1
                    gradients[user, owner] += 1
            elif exchange != "gather":
                n = p if exchange == "ring" else int(exchange.split(":")[1].split("+")[0])
                for first in range(0, p, n):
                    place, left = owner, users & set(range(first, first + n))
                    to = first + (owner - (owner // n * n != first)) % n  # the next place is that of the owner
                    while left:
                        to = first + (to + 1) % n
                        kv[place, to] += 1
                        gradients[place, to] += place != owner
                        place = to
                        left.discard(place)
                    if place != owner:
                        gradients[place, owner] += 1
        traffic = sent(s, exchange, narrow)
        assert (traffic.forward == kv * size).all() and (traffic.backward_kv == kv * size).all()
        assert (traffic.backward_gradients == gradients * gradient_size).all()
        assert (traffic.backward == traffic.backward_kv + traffic.backward_gradients).all()
    kept, plainly = sent(s, "direct-kept", narrow), sent(s, "direct", narrow)
    assert not kept.backward_kv.any() and (kept.forward == plainly.forward).all()
    assert (kept.backward_gradients == plainly.backward_gradients).all()


@budget
@given(problems(), st.booleans())
def test_heads_sent_row_by_row(s: Setting, lse_gradient: bool) -> None:
    """Every row of every head, one at a time."""
    s, p = replace(s, lse_gradient=lse_gradient), len(s.positions)
    queries = [[h for h in range(s.heads) if r * s.heads // p <= h < (r + 1) * s.heads // p] for r in range(p)]
    keys = [{h * s.kv_heads // s.heads for h in shares} for shares in queries]
    shared = sum(map(len, keys)) > s.kv_heads
    dim, value_dim, item = s.head_dim, s.dims[1], s.itemsize
    wide = 8 if item == 8 else 4
    forward, again, gradients = np.zeros((3, p, p), np.int64)
    for owner, at in np.ndindex(p, p):
        if owner == at:
            continue
        for _ in range(len(s.positions[owner]) * len(queries[at])):
            forward[owner, at] += dim * item
            forward[at, owner] += value_dim * item + wide
            again[owner, at] += (dim + value_dim + value_dim) * item + wide + lse_gradient * wide
            gradients[at, owner] += dim * item
        for _ in range(len(s.keys[owner]) * len(keys[at])):
            forward[owner, at] += (dim + value_dim) * item
            again[owner, at] += (dim + value_dim) * item
            gradients[at, owner] += (dim + value_dim) * (wide if shared else item)
    traffic = sent(s, "all-to-all")
    if p == 1:
        assert not traffic.forward.any()
    assert (traffic.forward == forward * s.batch).all() and (traffic.backward_kv == again * s.batch).all()
    assert (traffic.backward_gradients == gradients * s.batch).all()
    kept, of_gradient = sent(s, "all-to-all-kept"), value_dim * item + lse_gradient * wide
    rows = np.array([[len(s.positions[a]) * len(queries[b]) * (a != b) for b in range(p)] for a in range(p)])
    assert (kept.forward == traffic.forward).all() and (kept.backward_kv == rows * of_gradient * s.batch).all()
    assert (kept.backward_gradients == traffic.backward_gradients).all()


def test_blocks_and_buffers_of_heads_by_hand() -> None:
    """Six query heads with three key/value heads on four ranks, 1 + 2 + 1 + 0 rows: heads 0 | 1 2 | 3 | 4 5."""
    s = Setting(Pattern.dense(), shards([0], [1, 2], [3], []), 1, 6, 3, 5, 2)
    one, two = range(1), [(range(1, 2), 1), (range(2, 3), 1)]
    assert head_blocks(6, 3, 4, 1) == [[(one, 1)], two, [(range(3, 4), 1)], [(range(4, 6), 1)]]
    assert head_blocks(6, 6, 4, 3) == [[(one, 1)], [(range(1, 3), 2)], [(range(3, 4), 1)], [(range(4, 6), 2)]]
    held = buffers(s, "all-to-all", 1)
    # Two stages, so two buffers of q (10 bytes), k and v (20); one of out and lse (14). By head 4 rows of the widest
    # block, by owner the own rows of the others': 5, 4 or 3 query heads, 4 or 3 key/value heads in the first stage.
    assert held.receive.tolist() == [4 * (20 + 14) + 4 * 40] * 3 + [8 * (20 + 14) + 4 * 40]
    assert held.send.tolist() == [4 * 34 + 3 * 40, 2 * (4 * 34 + 3 * 40), 4 * 34 + 3 * 40, 0]
    # Backward q, out, dout (30) and lse twice, and dq, dk, dv: these are sums over ranks, so of 4 bytes.
    assert (held.receive + held.gradients).tolist() == [4 * (68 + 10) + 4 * (40 + 40)] * 3 + [8 * 78 + 4 * 80]


def shards(*held: list[int]) -> list[np.ndarray]:
    return [np.array(x, np.int64) for x in held]


def test_worked_by_hand() -> None:
    """Positions 0 1 2 | 3 | - | 4 5, causal, w = 4, r = 2, offset 1 for the one head: 1 -> 3; 5 is alone.

    Row 1 of rank 0 is needed by rank 1 only. A pair (3, 1), and the selected rows 1, 3, 5 see themselves.
    """
    s = Setting(Pattern((Branch(4, 2, 1),), True), shards([2, 1, 0], [3], [], [5, 4]), 1, 1, 1, 1, 2)
    assert s.slots.sum() == s.slots[0, 1] == 1 and flops(s).pairs == (1, 2, 0, 1)
    assert sent(s, "ring").forward[0, 1] == 4 == sent(s, "ring").forward.sum()
    assert sent(s, "ring").backward_gradients[1, 0] == 8 == sent(s, "ring").backward_gradients.sum()
    assert flops(s).forward == (4, 8, 0, 4) and flops(s).backward == (10, 20, 0, 10)
    assert flops(s).imbalance == 2.0
    # Shards of 3 rows: q, k, v, out of 2 bytes and an lse of 4; out and lse again of 4; dq, dk, dv of 4.
    held = resident(s)
    assert (held.shards[0], held.accumulator[0], held.gradients[0]) == (3 * 4 * 2 + 3 * 4, 3 * 8, 3 * 12)
    assert not (held.shards[2] or held.accumulator[2] or held.gradients[2])


@pytest.mark.parametrize(
    ("exchange", "bucket", "receive", "send", "returned"),
    [
        ("ring", 6, (4, 6, 6), (6, 4, 2), (10, 10, 8)),
        ("ring", 2, (4, 5, 5), (5, 4, 2), (9, 9, 7)),
        ("direct", 6, (6, 8, 10), (12, 8, 4), (12, 8, 4)),  # both distances in one round
        ("direct", 3, (4, 6, 6), (6, 4, 2), (6, 4, 2)),
        ("direct", 2, (4, 5, 5), (5, 4, 2), (5, 4, 2)),  # both are cut
        ("gather", 2, (6, 8, 10), (6, 4, 2), (12, 8, 4)),
    ],
)
def test_buffers_by_hand(
    exchange: str, bucket: int, receive: tuple[int, ...], send: tuple[int, ...], returned: tuple[int, ...]
) -> None:
    """Ranks hold 6, 4 and 2 slots, which all others need; a chunk ends with a whole row, of 2 slots."""
    s = Setting(Pattern.dense(), shards([0, 1, 2], [3, 4], [5]), 1, 2, 2, 3, 2)
    copies, ints = 1 if exchange == "gather" else 2, [np.array(x) for x in (receive, send, returned)]
    for narrow in (False, True):
        (size, gradient_size), got = units(s, narrow), buffers(s, exchange, bucket, narrow)
        forward, returning = (copies * ints[0] + ints[1]) * size, ints[2] * gradient_size
        assert (got.forward == forward).all() and (got.gradients == copies * ints[0] * gradient_size).all()
        assert (got.backward == forward + got.gradients + returning).all()


def test_sums_of_chunks_return_in_the_accumulator_type() -> None:
    """Ranges 01 2 3 45. Rank 1 returns two sums of 01, for 2 and for 3; rank 2 one of 2 and one of 3. A slot has 6
    numbers, in fp32: `narrow` is for other calls."""
    s = Setting(Pattern.dense(True, window=2), shards([0, 1], [2, 3], [4, 5]), 1, 1, 1, 3, 2, chunk=2)
    assert sent(s, "direct", True).backward_gradients.tolist() == [[0, 0, 0], [4 * 24, 0, 0], [0, 2 * 24, 0]]
    for exchange, copies in (("direct", 2), ("gather", 1)):
        held = buffers(s, exchange, 2, True)
        assert held.gradients.tolist() == [0, copies * 4 * 24, copies * 2 * 24]
        assert held.returned.tolist() == [4 * 24, 2 * 24, 0]


def test_lengths_beyond_the_sequence() -> None:
    """No table grows with a segment or a rate that no sequence has."""
    huge = Setting(Pattern((Branch(10**15, 10**15, 2),)), shards([0, 2], [1]), 1, 1, 1, 1)
    assert flops(huge).pairs == (1, 0) and not huge.slots.any()
    wide = Setting(Pattern((Branch(10**15, 2),)), shards([0, 1], [2]), 1, 1, 1, 1)
    assert flops(wide).pairs == (2, 2) and wide.slots.tolist() == [[0, 1], [1, 0]]


def test_resident_counts_elements() -> None:
    s = Setting(Pattern.dense(), [np.arange(r, 12, 3) for r in range(3)], 2, 6, 3, 5, 8)
    q, kv, lse = 2 * 4 * 6 * 5, 2 * 4 * 3 * 5, 2 * 4 * 6
    assert resident(s).shards.tolist() == [8 * (2 * q + 2 * kv + lse)] * 3
    assert resident(s).accumulator.tolist() == [8 * (q + lse)] * 3
    assert resident(s).gradients.tolist() == [8 * (q + 2 * kv)] * 3
    out, v = 2 * 4 * 6 * 7, 2 * 4 * 3 * 7
    other = resident(replace(s, value_dim=7))
    assert other.shards.tolist() == [8 * (q + kv + v + out + lse)] * 3
    assert other.accumulator.tolist() == [8 * (out + lse)] * 3
    assert other.gradients.tolist() == [8 * (q + kv + v)] * 3


def test_flops_and_memory_by_heads_by_hand() -> None:
    """Causal, 1 + 2 + 1 + 0 rows: 10 pairs of each head of the blocks 0 | 1, 2 | 3 | 4 5; sums of dk and dv in fp32."""
    s = Setting(Pattern.dense(True), shards([0], [1, 2], [3], []), 1, 6, 3, 5, 2)
    assert flops(s, "all-to-all").pairs == (10, 20, 10, 20) and flops(s).pairs == (6, 30, 24, 0)
    of_groups = flops(s, "all-to-all:2+ring")  # 3 heads each of rows 0 1 2 and of 3
    assert of_groups.pairs == (18, 18, 12, 12) and of_groups.forward == tuple(20 * x for x in of_groups.pairs)
    held = resident(s, "all-to-all", 1)  # a query head of 4 rows has 20 numbers; a key/value head 40
    assert held.accumulator.tolist() == [4 * 24] * 3 + [4 * 48]
    own = 6 * 5 * 2 + 3 * 10 * 4  # of a row
    assert held.gradients.tolist() == [4 * 60 + own, 4 * 60 + 2 * own, 4 * 60 + own, 4 * 80]
    assert (held.shards == resident(s).shards).all()
    # Whole key/value heads of one rank each: sums in the working type, and one block for a large bucket.
    whole = resident(replace(s, heads=4, kv_heads=4), "all-to-all:2+ring", 4)
    assert whole.gradients.tolist() == [3 * 2 * 15 * 4 + rows * 4 * 15 * 2 for rows in (1, 2)] + [
        1 * 2 * 15 * 4 + 120,
        120,
    ]


def test_flops_of_values_of_another_head_dim() -> None:
    """MLA, 2 query heads, 3 pairs each: S, dQ, dK of 192 and, forward and backward, S again; O, dP, dV of 128."""
    s = Setting(Pattern.dense(True), [np.arange(2)], 1, 2, 2, 192, 2, 128)
    assert flops(s).forward == (6 * 2 * (192 + 128),) and flops(s).backward == (6 * 2 * (3 * 192 + 2 * 128),)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"positions": ([0, 1], [1])}, "positions"),
        ({"positions": ([0, 1], [3])}, "positions"),
        ({"positions": ([0, 1], [-1])}, "positions"),
        ({"positions": ()}, "positions"),
        ({"key_positions": ([0], [2])}, "key_positions"),
        ({"key_positions": ([0, 1],)}, "key_positions"),
        ({"positions": ([[0], [1]],)}, "positions"),
        ({"kv_heads": 3}, "heads"),
        ({"batch": 0}, "batch"),
        ({"value_dim": 0}, "value_dim"),
        ({"itemsize": 3}, "itemsize"),
        ({"pattern": Pattern((Branch(heads=range(5)),))}, "heads"),
    ],
)
def test_refuses(change: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"pattern": Pattern.dense(), "positions": ([0, 1], [2]), "batch": 1, "heads": 4}
    with pytest.raises(ValueError, match=named):
        Setting(**{**given, "kv_heads": 2, "head_dim": 8, "itemsize": 4, **change})


def test_refuses_exchange_and_bucket() -> None:
    s = Setting(Pattern.dense(), shards([0, 1], [2]), 1, 1, 1, 1)
    for call, named in (
        (lambda: sent(s, "star"), "exchange"),
        (lambda: buffers(s, "star", 1), "exchange"),
        (lambda: buffers(s, "ring", 0), "bucket"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
