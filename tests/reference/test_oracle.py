"""`reference.oracle` against loops from the formulas and their autograd, sums on paper, and what holds always."""

from math import inf, log, nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Pattern, attention, gradients, oracle
from reference.pattern import multiplicity
from tests.support import drawn_patterns
from tests.support.oracle_loops import Example, assert_all_close, everything, example, loops

DENSE, CAUSAL = Pattern.dense(), Pattern.dense(causal=True)
DEAD_ROWS = Pattern((Branch(3, 5, (0, 2, 4, 1)),))  # the rate is beyond the segment
PATTERNS = {
    "dense": DENSE,
    "causal": CAUSAL,
    "longnet": Pattern.longnet([4, 8, None], [1, 2, 3], 4),
    "longnet causal, short tail": Pattern.longnet([3, 5], [1, 2], 4, causal=True, offsets="torchscale"),
    "dead rows": DEAD_ROWS,
    "head groups": Pattern.head_groups([4, 6, 8], [1, 2, 3], 4, causal=True),
    "a head is not served": Pattern((Branch(4, heads=range(1, 3)), Branch(None, 2, 1, range(2, 4)))),
}


SINKS = torch.tensor([0.4, -inf, -1.5, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 0.5, 3.0])
def test_loops(pattern: Pattern, kv_heads: int, softcap: float | None) -> None:
    for value_dim in (3, 5):
        x = example(9, 9, heads=4, kv_heads=kv_heads, batch=2, value_dim=value_dim)._replace(softcap=softcap)
        for sinks in (None, SINKS):
            x = x._replace(sinks=sinks)
            assert_all_close(everything(x, pattern, scale=-1.3), loops(x, pattern, scale=-1.3))
            assert_all_close(everything(x, pattern, weights="detached"), loops(x, pattern, detached=True))


def test_one_sided_positions_count_the_other_side_from_zero() -> None:
    pattern = Pattern((Branch(4, 2),), causal=True)
    for x in (example([5, 2], 7), example(7, [4, 0, 2])):
        assert_all_close(everything(x, pattern), loops(x, pattern))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 6), st.integers(0, 6), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
def test_loops_on_any_pattern(data: st.DataObject, n_q: int, n_k: int, heads: tuple[int, int]) -> None:
    pattern = data.draw(drawn_patterns.patterns(heads[0], packed=True))
    last = 30 if pattern.documents is None else sum(pattern.documents) - 1
    i, j = (data.draw(st.lists(st.integers(0, last), max_size=n)) if last >= 0 else [] for n in (n_q, n_k))
    softcap, sink = data.draw(st.sampled_from((None, 0.5, 4.0))), st.sampled_from((-inf, -2.0, 0.0, 3.0))
    sinks = data.draw(st.none() | st.lists(sink, min_size=heads[0], max_size=heads[0]))
    x = example(i, j, *heads, value_dim=data.draw(st.integers(1, 4)))._replace(softcap=softcap)
    x = x._replace(sinks=None if sinks is None else torch.tensor(sinks, dtype=torch.float64))
    assert_all_close(everything(x, pattern), loops(x, pattern))
    assert_all_close(everything(x, pattern, weights="detached"), loops(x, pattern, detached=True))


def column(*values: float) -> Tensor:
    """One batch, one head, one dimension."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


TWICE = Pattern((Branch(2), Branch(4, 2)))  # row 0 sees weights 1 + 2 within {0, 1} and 1 + 3 on the even positions


@pytest.mark.parametrize(
    ("pattern", "out", "total"),
    [
        (DENSE, [14 / 6] * 3, [6] * 3),  # (1 + 4 + 9) / (1 + 2 + 3)
        (CAUSAL, [1, 5 / 3, 14 / 6], [1, 3, 6]),
        (Pattern((Branch(2),)), [5 / 3, 5 / 3, 25 / 7, 25 / 7, 5], [3, 3, 7, 7, 5]),
        (Pattern((Branch(2, 2, 1),)), [0, 2, 0, 4, 0], [0, 2, 0, 4, 0]),  # the offset lies beyond the tail
        (Pattern((Branch(2, 3),)), [1, 0, 3, 0, 5], [1, 0, 3, 0, 5]),
        (Pattern((Branch(2, 3, 2),)), [0] * 5, [0] * 5),
        (TWICE, [15 / 7, 5 / 3, 35 / 11, 25 / 7], [7, 3, 11, 7]),
    ],
)
def test_by_hand(pattern: Pattern, out: list[float], total: list[float]) -> None:
    """q = 1, k = log 1, log 2, log 3, ..., v = 1, 2, 3, ... and scale 1: the weight of key j is j + 1."""
    values = range(1, len(out) + 1)
    got = attention(column(*[1.0] * len(out)), column(*map(log, values)), column(*values), pattern, scale=1.0)
    assert_all_close([t.flatten() for t in got], [out, [log(x) if x else -inf for x in total]])


def test_by_hand_gradients() -> None:
    # One query, weights 1 and 3 of v = 0 and 4: P = (1/4, 3/4), O = 3, dO = 1, so dP - D = (-3, 1).
    args = (column(1.0), column(0.0, log(3)), column(0.0, 4.0), DENSE, column(1.0))
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0}
    wanted = [column(0.75 * log(3)), column(-0.75, 0.75), column(0.25, 0.75)]
    assert_all_close(gradients(*args, **at), wanted)
    wanted = [column(2.25 * log(3)), column(-0.25, 2.25), column(0.25, 0.75)]  # dlse = 2 adds 2 P to dS
    assert_all_close(gradients(*args, torch.full((1, 1, 1), 2.0), **at), wanted)


def test_sink_and_softcap_by_hand() -> None:
    # Weights 1 and 3 of v = 0 and 4, and 4 of the sink: P = (1/8, 3/8, 1/2), O = 3/2, dP - D + dlse = (1/2, 9/2, 1/2).
    args = (column(1.0), column(0.0, log(3)), column(0.0, 4.0), DENSE)
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0, "sinks": column(log(4)).flatten()}
    assert_all_close([x.item() for x in attention(*args, **at)], [1.5, log(8)])
    wanted = [column(27 / 16 * log(3)), column(1 / 16, 27 / 16), column(1 / 8, 3 / 8), torch.tensor([1 / 4])]
    assert_all_close(gradients(*args, column(1.0), torch.full((1, 1, 1), 2.0), **at), wanted)
    # t tanh(x / t) = log 3 for t = 2 log 3 and x = t atanh(1/2) = log(3)^2; the slope is 3/4 there.
    capped = (args[0], column(0.0, log(3) ** 2), *args[2:])
    assert_all_close(attention(*capped, softcap=2 * log(3), **at), attention(*args, **at))
    wanted = [column(81 / 64 * log(3) ** 2), column(1 / 16, 81 / 64), column(1 / 8, 3 / 8), torch.tensor([1 / 4])]
    assert_all_close(gradients(*capped, column(1.0), torch.full((1, 1, 1), 2.0), softcap=2 * log(3), **at), wanted)


@pytest.mark.parametrize("pattern", [CAUSAL, DEAD_ROWS, PATTERNS["a head is not served"]])
def test_sinks_at_their_limits(pattern: Pattern) -> None:
    x = example(9, 9, heads=4, kv_heads=2, batch=2, value_dim=5)
    plain, nothing = everything(x, pattern), torch.full((4,), -inf, dtype=torch.float64)
    *same, dsinks = everything(x._replace(sinks=nothing), pattern)
    assert all(map(torch.equal, same, plain)) and (dsinks == 0).all()
    out, lse, dq, dk, dv, dsinks = everything(x._replace(sinks=torch.full((4,), 1e4)), pattern)
    for t in (out, dq, dk, dv):
        assert (t == 0).all()
    assert (lse == 1e4).all() and torch.allclose(dsinks, x.dlse.sum((0, 2)))
    dead = plain[1] == -inf  # (B, H, N)
    *small, dsinks = everything(x._replace(sinks=torch.full((4,), -1e4)), pattern)
    small[1] = small[1].masked_fill(dead, -inf)
    assert_all_close(small, plain)
    assert torch.allclose(dsinks, x.dlse.where(dead, torch.zeros(())).sum((0, 2)))


def test_rows_of_a_lone_sink_pass_on_gradients_of_lse_alone() -> None:
    x = example(6, 6, heads=1, kv_heads=1)._replace(sinks=torch.tensor([0.75]).double())
    pattern, dead = Pattern((Branch(3, 3, 1),)), [0, 2, 3, 5]
    x.dout[:, dead] = nan
    out, lse, dq, dk, dv, dsinks = everything(x, pattern)
    for t in (out, dq, dk, dv):
        assert (t[:, dead] == 0).all() and t.isfinite().all()
    assert (lse[..., dead] == 0.75).all()
    kept = x._replace(q=x.q[:, 1:5:3], dout=x.dout[:, 1:5:3], dlse=x.dlse[..., 1:5:3])
    (selected,) = everything(kept._replace(at={"q_positions": torch.tensor([1, 4])}), pattern)[5:]
    assert_all_close([dsinks], [selected + x.dlse[..., dead].sum()])
    hidden = everything(x._replace(k=x.k - inf, q=x.q.abs()), pattern)  # scores of -inf are no keys
    assert (hidden[0] == 0).all() and (hidden[1] == 0.75).all() and torch.allclose(hidden[5], x.dlse.sum((0, 2)))


def test_softcap_acts_at_any_size() -> None:
    x = example(9, 9, heads=2, kv_heads=1, batch=2)
    assert_all_close(everything(x._replace(softcap=1e9), CAUSAL), everything(x, CAUSAL))  # apart by x^3 / 3 t^2
    x.q[:], x.k[:] = 1e200, 1e200
    capped = everything(x._replace(softcap=2.0), DENSE)
    assert torch.allclose(capped[1], torch.tensor(2.0 + log(9), dtype=torch.float64))
    assert (capped[2] == 0).all() and (capped[3] == 0).all() and capped[4].isfinite().all()


@pytest.mark.parametrize("size", [-1e300, -1e8, 1e8, 1e300])
def test_any_finite_score_is_a_score(size: float) -> None:
    """No value stands for "nothing": scores all alike share the weight, however large."""
    one, k, v = column(1.0), column(*[size] * 8), column(1.0, 9.0, 2.0, 9.0, 6.0, 9.0, 7.0, 9.0)
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0}
    pattern = Pattern((Branch(None, 2),))
    out, lse = attention(one, k, v, pattern, **at)
    assert (out == 4).all() and (lse == size + log(4)).all()
    assert gradients(one, k, v, pattern, one, **at)[2].equal(column(*[0.25, 0.0] * 4))


@pytest.mark.parametrize("pattern", [PATTERNS["longnet causal, short tail"], DEAD_ROWS])
@pytest.mark.parametrize("rows", [1, 2, 4])  # in blocks of 4 the last one is short
def test_row_blocks_change_nothing(pattern: Pattern, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, both = example(9, 9, heads=4, kv_heads=2, batch=2, value_dim=2), ("attached", "detached")
    x = x._replace(sinks=SINKS, softcap=2.0)
    whole = [everything(x, pattern, weights=weights) for weights in both]
    seen = []

    def counted(pattern: Pattern, i: Tensor, j: Tensor, heads: int) -> Tensor:
        seen.append(len(i))
        return multiplicity(pattern, i, j, heads)

    monkeypatch.setattr(oracle, "multiplicity", counted)
    for elements in (16 * rows * 2 * 4 * 9, 1):  # 1/16 of it on a CPU; never less than one row
        seen.clear()
        monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", elements)
        for weights, wanted in zip(both, whole, strict=True):
            assert_all_close(everything(x, pattern, weights=weights), wanted)
        both_ways = oracle.attention_and_gradients(*x.qkv, pattern, x.dout, x.dlse, sinks=SINKS, softcap=2.0)
        assert_all_close(both_ways, whole[0])
        assert max(seen) == (rows if elements > 1 else 1)


def test_unselected_rows_are_exactly_zero() -> None:
    """Whatever comes in for them: the derivative of lse ** 2 is -inf there."""
    x = example(6, 6, heads=1, kv_heads=1)
    pattern = Pattern((Branch(3, 3, 1),))  # positions 1 and 4
    dead = [0, 2, 3, 5]
    x.dlse[:, :, dead] = -inf
    x.dout[:, dead] = nan
    for weights in ("attached", "detached"):
        out, lse, dq, dk, dv = everything(x, pattern, weights=weights)
        for t in (out, dq, dk, dv):
            assert (t[:, dead] == 0).all() and t.isfinite().all()
        assert (lse[..., dead] == -inf).all() and lse[..., [1, 4]].isfinite().all()
    assert (everything(x._replace(sinks=torch.tensor([-inf])), pattern)[5] == 0).all()  # 0 times -inf would be NaN
    for t in (x.k, x.v):  # not even when the tokens that nobody sees hold NaN
        t[:, dead] = nan
    for t in (attention(*x.qkv, pattern)[0], gradients(*x.qkv, pattern, x.dout, x.dlse)[0]):
        assert (t[:, dead] == 0).all()


def test_scores_of_minus_inf_have_no_weight() -> None:
    """Compare with keys that nothing selects. Rows 0 and 1 see no others, so they equal rows that see none."""
    x, hidden, kept = example(6, 6, heads=2, kv_heads=1), [0, 1, 4], [2, 3, 5]
    x.q[..., 0], x.k[..., 0] = 1.0, 0.0
    left = x._replace(k=x.k[:, kept], v=x.v[:, kept], at={"k_positions": torch.tensor(kept)})
    x.k[:, hidden, :, 0] = -inf
    for weights in ("attached", "detached"):
        (out, lse, dq, dk, dv), wanted = (everything(y, CAUSAL, weights=weights) for y in (x, left))
        found = out, lse, dq[..., 1:], dk[:, kept], dv[:, kept]
        assert_all_close(found, (*wanted[:2], wanted[2][..., 1:], *wanted[3:]))
        assert (dk[:, hidden] == 0).all() and (dv[:, hidden] == 0).all()
        assert (out[:, :2] == 0).all() and (lse[..., :2] == -inf).all() and (dq[:, :2] == 0).all()


@pytest.mark.parametrize("value", (nan, inf))
def test_nan_and_inf_propagate(value: float) -> None:
    x = example(3, 3, heads=1, kv_heads=1)
    x.v[0, 1] = value
    out, lse, dq, *_ = everything(x, DENSE)
    assert not out.isfinite().any() and lse.isfinite().all() and not dq.isfinite().any()
    x.q[0, 1] = nan
    assert attention(*x.qkv, DENSE)[1].isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_results_are_fp64_of_rounded_inputs(dtype: torch.dtype) -> None:
    low = [t.to(dtype) for t in example(5, 5)[:5]]
    found, exact = (
        everything(Example._make([*tensors, {}, None, None]), DENSE) for tensors in (low, [t.double() for t in low])
    )
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.float64 and a.equal(b) and a.is_contiguous()


def heads_first(kv_heads: int) -> dict[str, Any]:
    x = example(6, 6, heads=4, kv_heads=kv_heads)
    return {name: getattr(x, name).transpose(1, 2) for name in "qkv"}


X, AT = example(4, 4, heads=4, kv_heads=2), torch.arange(4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": X.q[0]}, "q must be"),
        ({"v": X.v[:, :3]}, r"v \(B, Nk, Hk, Dv\)"),
        ({"k": X.k[..., :2], "v": X.v[..., :2]}, "q must be"),
        ({"k": X.k.repeat(2, 1, 1, 1), "v": X.v.repeat(2, 1, 1, 1)}, "q must be"),
        ({name: getattr(X, name)[..., :0] for name in "qkv"}, "D and Dv >= 1"),
        ({"q": X.q[:, :, :3]}, "multiple of the key/value heads"),
        ({"k": X.k[:, :, :0], "v": X.v[:, :, :0]}, "multiple of the key/value heads"),
        ({"q": X.q[:, :3]}, "no positions"),
        ({"q_positions": AT[:3]}, r"q_positions must be int64 of shape \(4,\)"),
        ({"k_positions": AT[None]}, "k_positions must be"),
        ({"k_positions": AT.double()}, "k_positions must be"),
        ({"k_positions": AT - 1}, "k_positions must be >= 0, got -1"),
        ({"pattern": Pattern((Branch(4, 2, (0, 1)),))}, "pattern must be one for the 4 query heads, got one that was"),
        *(
            (
                heads_first(kv_heads) | changes,
                rf"^{said}.*; heads first\? Write q\.transpose\(1, 2\), and so for k and v$",
            )
            for kv_heads, changes, said in (
                (2, {}, "queries and keys differ in number and have no positions"),
                (4, {"pattern": Pattern.longnet([4], [2], 4)}, "pattern must be one for the 6 query heads"),
                (4, {"pattern": Pattern.dense(documents=(2, 4))}, "documents must add up to the 4 tokens"),
                (4, {"q_positions": torch.arange(6)}, "q_positions must be int64 of shape"),
            )
        ),
        ({"v": X.v[..., :0]}, "D and Dv >= 1"),
        ({"sinks": SINKS[:3]}, r"^sinks must have the shape \(4,\), one per query head; got \(3,\)$"),
        ({"sinks": SINKS[:, None]}, "sinks must have the shape"),
        *(
            ({"softcap": t}, "softcap is .*; it must be a finite number above 0")
            for t in (0.0, -1, inf, nan, True, "1")
        ),
        (heads_first(4) | {"sinks": SINKS}, r"^sinks must .*; heads first\? Write q\.transpose"),
        ({"pattern": "dense"}, r"^pattern must be a Pattern, got 'dense': write Pattern.dense\(\), or one"),
        ({"dout": X.dout[:, :3]}, "dout must have the shape"),
        ({"dlse": X.dlse.transpose(1, 2)[:, :3]}, "dlse must have the shape"),
        ({"weights": "none"}, "weights must be"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {**X._asdict(), "pattern": DENSE, **changes}
    del given["at"]
    with pytest.raises(ValueError, match=said):
        gradients(**given)
    if not changes.keys() & {"dout", "dlse", "weights"}:
        del given["dout"], given["dlse"]
        with pytest.raises(ValueError, match=said):
            attention(**given)
