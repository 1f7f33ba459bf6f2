"""`reference.oracle` against loops written straight from the formulas, against autograd, and what holds always."""

from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Pattern, attention, gradients, oracle
from reference.pattern import multiplicity
from tests.support import drawn_patterns
from tests.support.oracle_loops import Example, assert_all_close, everything, example, loops, mixture

PATTERNS = {
    "dense": Pattern.dense(),
    "causal": Pattern.dense(causal=True),
    "longnet": Pattern.longnet([4, 8, None], [1, 2, 3], 4),
    "longnet causal, short tail": Pattern.longnet([3, 5], [1, 2], 4, causal=True, offsets="torchscale"),
    "rate beyond the segment, dead rows": Pattern((Branch(3, 5, (0, 2, 4, 1)),)),
    "head groups": Pattern.head_groups([4, 6, 8], [1, 2, 3], 4, causal=True),
    "a head is not served": Pattern((Branch(4, heads=range(1, 3)), Branch(None, 2, 1, range(2, 4)))),
}
patterns = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())


@patterns
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_loops(pattern: Pattern, kv_heads: int) -> None:
    x = example(9, 9, heads=4, kv_heads=kv_heads, batch=2)
    assert_all_close(everything(x, pattern), loops(x, pattern))
    assert_all_close(everything(x, pattern, scale=-1.3), loops(x, pattern, scale=-1.3))
    assert_all_close(everything(x, pattern, weights="detached"), loops(x, pattern, detached=True))


def test_one_sided_positions_count_the_other_side_from_zero() -> None:
    pattern = Pattern((Branch(4, 2),), causal=True)
    for x in (example([5, 2], 7), example(7, [4, 0, 2])):
        assert_all_close(everything(x, pattern), loops(x, pattern))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 6), st.integers(0, 6), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
def test_loops_on_any_pattern(data: st.DataObject, n_q: int, n_k: int, heads: tuple[int, int]) -> None:
    pattern, points = data.draw(drawn_patterns.patterns(heads[0])), st.integers(0, 12)
    i = data.draw(st.lists(points, min_size=n_q, max_size=n_q))
    j = data.draw(st.lists(points, min_size=n_k, max_size=n_k))
    x = example(i, j, *heads)
    assert_all_close(everything(x, pattern), loops(x, pattern))
    assert_all_close(everything(x, pattern, weights="detached"), loops(x, pattern, detached=True))


@patterns
def test_mixture_of_branches_and_its_autograd(pattern: Pattern) -> None:
    """One softmax over the multiset is the mixture of separately computed branches, gradients included."""
    x = example(9, 9, heads=4, kv_heads=2, batch=2)
    leaves = [t.clone().requires_grad_() for t in x.qkv]
    out, total = mixture(leaves, pattern)
    alive = total > 0  # the loss leaves out the lse of dead rows: autograd has only NaN for log 0
    loss = (x.dout * out).sum() + (x.dlse[alive] * total[alive].log()).sum()
    wanted = torch.autograd.grad(loss, leaves)
    assert_all_close(everything(x, pattern), [out.detach(), total.detach().log(), *wanted])


@patterns
def test_detached_is_autograd_with_constant_weights(pattern: Pattern) -> None:
    x = example(9, 9, heads=4, kv_heads=2, batch=2)
    leaves = [t.clone().requires_grad_() for t in x.qkv]
    wanted = torch.autograd.grad((x.dout * mixture(leaves, pattern, detached=True)[0]).sum(), leaves)
    assert_all_close(gradients(*x.qkv, pattern, x.dout, weights="detached"), wanted)


# --- laws ------------------------------------------------------------------------------------------


@patterns
@pytest.mark.parametrize("rows", [1, 2, 4])  # in blocks of 4 the last one is short
def test_row_blocks_change_nothing(pattern: Pattern, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = example(9, 9, heads=4, kv_heads=2, batch=2)
    whole, whole_detached = everything(x, pattern), everything(x, pattern, weights="detached")
    monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", 16 * rows * 2 * 4 * 9)  # 1/16 of it on a CPU
    seen = []

    def counted(pattern: Pattern, i: Tensor, j: Tensor, heads: int) -> Tensor:
        seen.append(len(i))
        return multiplicity(pattern, i, j, heads)

    monkeypatch.setattr(oracle, "multiplicity", counted)
    assert_all_close(everything(x, pattern), whole)
    assert_all_close(everything(x, pattern, weights="detached"), whole_detached)
    assert max(seen) == rows
    monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", 1)  # never less than one row
    assert_all_close(everything(x, pattern), whole)


def test_rows_that_nothing_selects_are_exactly_nothing() -> None:
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
    for t in (x.k, x.v):  # not even when the tokens that nobody sees hold NaN
        t[:, dead] = nan
    for t in (attention(*x.qkv, pattern)[0], gradients(*x.qkv, pattern, x.dout, x.dlse)[0]):
        assert (t[:, dead] == 0).all()


def test_scores_of_minus_inf_have_no_weight() -> None:
    """As if nothing selected these keys; rows 0 and 1, which see no others, are as rows that see none."""
    x = example(6, 6, heads=2, kv_heads=1)
    x.q[..., 0], x.k[..., 0] = 1.0, 0.0
    pattern, hidden = PATTERNS["causal"], [0, 1, 4]
    kept = [2, 3, 5]
    left = (x.q, x.k[:, kept], x.v[:, kept])
    positions: dict[str, Any] = {"q_positions": torch.arange(6), "k_positions": torch.tensor(kept)}
    x.k[:, hidden, :, 0] = -inf
    for weights in ("attached", "detached"):
        out, lse, dq, dk, dv = everything(x, pattern, weights=weights)
        assert_all_close((out, lse), attention(*left, pattern, **positions))
        wanted = gradients(*left, pattern, x.dout, x.dlse, weights=weights, **positions)
        assert_all_close((dq[..., 1:], dk[:, kept], dv[:, kept]), (wanted[0][..., 1:], *wanted[1:]))
        assert (dk[:, hidden] == 0).all() and (dv[:, hidden] == 0).all()
        assert (out[:, :2] == 0).all() and (lse[..., :2] == -inf).all() and (dq[:, :2] == 0).all()


def test_no_keys_and_no_queries() -> None:
    x = example(3, [])
    out, lse, dq, dk, dv = everything(x, Pattern.dense())
    assert (out == 0).all() and (lse == -inf).all() and (dq == 0).all() and dk.shape == dv.shape == x.k.shape
    out, lse, dq, dk, dv = everything(example([], 3), Pattern.dense())
    assert out.numel() == lse.numel() == dq.numel() == 0 and (dk == 0).all() and (dv == 0).all()


def test_nothing_unselected_gets_in() -> None:
    """A causal row does not see later tokens, not even a later score that would overflow its exponential."""
    x = example(5, 5)
    later = x._replace(k=x.k.clone(), v=x.v.clone())
    later.k[:, 3:] = 1e5
    later.v[:, 3:] = -1e5
    (out, lse), (later_out, later_lse) = (attention(*y.qkv, PATTERNS["causal"]) for y in (x, later))
    assert out[:, :3].equal(later_out[:, :3]) and lse[..., :3].equal(later_lse[..., :3])
    assert not out[:, 3:].isclose(later_out[:, 3:]).any()


def test_nan_and_inf_propagate() -> None:
    for value in (nan, inf):
        x = example(3, 3, heads=1, kv_heads=1)
        x.v[0, 1] = value
        out, lse = attention(*x.qkv, Pattern.dense())
        assert not out.isfinite().any() and lse.isfinite().all()
        assert not gradients(*x.qkv, Pattern.dense(), x.dout)[0].isfinite().any()
        x.q[0, 1] = nan
        out, lse = attention(*x.qkv, Pattern.dense())
        assert lse.isnan().flatten().tolist() == [False, True, False]


def test_working_types_come_out_as_fp64_of_the_rounded_inputs() -> None:
    x = example(5, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v, dout, dlse = (t.to(dtype) for t in (*x.qkv, x.dout, x.dlse))
        low = Example(q, k, v, dout, dlse, {})
        exact = Example(q.double(), k.double(), v.double(), dout.double(), dlse.double(), {})
        for a, b in zip(everything(low, Pattern.dense()), everything(exact, Pattern.dense()), strict=True):
            assert a.dtype == torch.float64 and a.equal(b) and a.is_contiguous()


def test_default_scale() -> None:
    q = torch.ones(1, 1, 1, 4)  # q . k = 2 and D ** -0.5 = 1 / 2
    assert float(attention(q, q / 2, q, Pattern.dense())[1]) == 1.0


def test_bad_arguments_are_refused() -> None:
    x, p = example(4, 4, heads=4, kv_heads=2), Pattern.dense()
    i = torch.arange(4)
    bad: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = [
        ((x.q[0], x.k, x.v), {}, "q must be"),
        ((x.q, x.k, x.v[:, :3]), {}, "k and v both"),
        ((x.q, x.k[..., :2], x.v[..., :2]), {}, "q must be"),
        ((x.q, x.k.repeat(2, 1, 1, 1), x.v.repeat(2, 1, 1, 1)), {}, "q must be"),
        ((x.q[..., :0], x.k[..., :0], x.v[..., :0]), {}, "D >= 1"),
        ((x.q[:, :, :3], x.k, x.v), {}, "multiple of the key/value heads"),
        ((x.q, x.k[:, :, :0], x.v[:, :, :0]), {}, "multiple of the key/value heads"),
        ((x.q[:, :3], x.k, x.v), {}, "no positions"),
        ((x.q, x.k, x.v), {"q_positions": i[:3]}, r"q_positions must be int64 of shape \(4,\)"),
        ((x.q, x.k, x.v), {"k_positions": i[None]}, "k_positions must be"),
        ((x.q, x.k, x.v), {"k_positions": i.double()}, "k_positions must be"),
        ((x.q, x.k, x.v), {"k_positions": i - 1}, "k_positions must be >= 0, got -1"),
    ]
    for tensors, at, message in bad:
        with pytest.raises(ValueError, match=message):
            attention(*tensors, p, **at)
        with pytest.raises(ValueError, match=message):
            gradients(*tensors, p, x.dout, **at)
    with pytest.raises(ValueError, match="pattern must be one for the 4 query heads, got one that was made for 2"):
        attention(*x.qkv, Pattern((Branch(4, 2, (0, 1)),)))
    with pytest.raises(ValueError, match=r"^pattern must be a Pattern, got 'dense': write Pattern.dense\(\), or one"):
        attention(*x.qkv, "dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dout must have the shape"):
        gradients(*x.qkv, p, x.dout[:, :3])
    with pytest.raises(ValueError, match="dlse must have the shape"):
        gradients(*x.qkv, p, x.dout, x.dlse.transpose(1, 2)[:, :3])
    with pytest.raises(ValueError, match="weights must be"):
        gradients(*x.qkv, p, x.dout, weights="none")


@pytest.mark.parametrize("elements", [2**26, 16 * 4 * 9 * 2])  # all rows are one block; two rows are
def test_output_and_gradients_in_one_are_those_of_both(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", elements)
    x, pattern = example(9, 9, heads=4, kv_heads=2), PATTERNS["rate beyond the segment, dead rows"]
    found = oracle.attention_and_gradients(x.q, x.k, x.v, pattern, x.dout, x.dlse)
    wanted = *attention(x.q, x.k, x.v, pattern), *gradients(x.q, x.k, x.v, pattern, x.dout, x.dlse)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
