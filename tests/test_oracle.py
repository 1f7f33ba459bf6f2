"""`reference.oracle` against loops written straight from the formulas, autograd, and sums on paper."""

from collections.abc import Sequence
from math import exp, inf, log, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Pattern, attention, gradients, oracle
from reference.pattern import multiplicity

# fp64, at most some dozens of terms of size ~1: rounding stays a thousand times below this.
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


class Example(NamedTuple):
    q: Tensor  # (B, Nq, Hq, D)
    k: Tensor  # (B, Nk, Hk, D)
    v: Tensor
    dout: Tensor  # (B, Nq, Hq, D)
    dlse: Tensor  # (B, Hq, Nq)
    at: dict[str, Any]  # positions, where they are given

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


Tokens = int | list[int]  # how many, or their positions


def example(queries: Tokens, keys: Tokens, heads: int = 2, kv_heads: int = 2, batch: int = 1, dim: int = 3) -> Example:
    """Seeded normal values."""
    generator = torch.Generator().manual_seed(7)
    given = {"q_positions": queries, "k_positions": keys}
    at = {name: torch.tensor(p, dtype=torch.int64) for name, p in given.items() if isinstance(p, list)}
    n_q, n_k = (p if isinstance(p, int) else len(p) for p in (queries, keys))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k, v = normal(batch, n_k, kv_heads, dim), normal(batch, n_k, kv_heads, dim)
    q, dout = normal(batch, n_q, heads, dim), normal(batch, n_q, heads, dim)
    return Example(q, k, v, dout, normal(batch, heads, n_q), at)


def sees(branch: Branch, h: int, i: int, j: int, heads: int, causal: bool) -> bool:
    """M_b[h, i, j] from its definition."""
    served = range(heads) if branch.heads is None else branch.heads
    if h not in served or (causal and j > i):
        return False
    o = branch.offset[h - served.start] if isinstance(branch.offset, tuple) else branch.offset
    w, r = branch.segment_length or max(i, j) + 1, branch.dilation_rate
    on_grid = [p % w >= o and (p % w - o) % r == 0 for p in (i, j)]
    return i // w == j // w and all(on_grid)


def loops(x: Example, pattern: Pattern, scale: float | None = None, detached: bool = False) -> tuple[Any, ...]:
    """out, lse, dq, dk, dv by Python loops over batch, head, query, branch and key, for moderate scores."""
    q, k, v, dout, dlse = (t.numpy() for t in x[:5])
    batch, n_q, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    i_positions = x.at.get("q_positions", torch.arange(n_q)).tolist()
    j_positions = x.at.get("k_positions", torch.arange(k.shape[1])).tolist()
    out, lse = np.zeros_like(q), np.full((batch, heads, n_q), -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[2])
            for a, i in enumerate(i_positions):
                seen = [
                    (m, c)
                    for m, branch in enumerate(pattern.branches)
                    for c, j in enumerate(j_positions)
                    if sees(branch, h, i, j, heads, pattern.causal)
                ]
                if not seen:
                    continue
                weight = [exp(scale * sum(q[b, a, h, d] * k[b, c, g, d] for d in range(dim))) for _, c in seen]
                total = sum(weight)
                lse[b, h, a] = log(total)
                for (_, c), w in zip(seen, weight, strict=True):
                    out[b, a, h] += w / total * v[b, c, g]
                for (m, c), w in zip(seen, weight, strict=True):
                    mean = out[b, a, h]
                    if detached:  # the output of branch m alone
                        own = [(u, s) for (n, s), u in zip(seen, weight, strict=True) if n == m]
                        mean = sum(u * v[b, s, g] for u, s in own) / sum(u for u, _ in own)
                    ds = w / total * (dout[b, a, h] @ (v[b, c, g] - mean) + dlse[b, h, a])
                    dq[b, a, h] += scale * ds * k[b, c, g]
                    dk[b, c, g] += scale * ds * q[b, a, h]
                    dv[b, c, g] += w / total * dout[b, a, h]
    return out, lse, dq, dk, dv


def everything(x: Example, pattern: Pattern, scale: float | None = None, weights: str = "attached") -> list[Tensor]:
    out, lse = attention(x.q, x.k, x.v, pattern, scale=scale, **x.at)
    return [out, lse, *gradients(*x.qkv, pattern, x.dout, x.dlse, scale=scale, weights=weights, **x.at)]


def mixture(qkv: Sequence[Tensor], pattern: Pattern, detached: bool = False) -> tuple[Tensor, Tensor]:
    """LongNet, equations 9-10, differentiable: each branch alone, weighted by its softmax denominator.

    Returns out and the whole denominator, exp(lse) (B, H, Nq)."""
    q, k, v = qkv
    heads, points = q.shape[2], torch.arange(q.shape[1])
    k, v = (t.repeat_interleave(heads // k.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    outs, denominators = [], []
    for branch in pattern.branches:
        weight = multiplicity(Pattern((branch,), pattern.causal), points, points, heads) * s.exp()
        denominators.append(weight.sum(-1))  # (B, H, Nq)
        alone = weight / denominators[-1].unsqueeze(-1).clamp(min=1e-300)  # (B, H, Nq, Nk)
        outs.append(torch.einsum("bhij,bjhd->bihd", alone, v))
    total = torch.stack(denominators).sum(0)
    shares = [(d / total.clamp(min=1e-300)).transpose(1, 2).unsqueeze(-1) for d in denominators]
    shares = [share.detach() if detached else share for share in shares]
    return torch.stack([share * out for share, out in zip(shares, outs, strict=True)]).sum(0), total


def assert_all_close(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **CLOSE, err_msg=f"result {index}")


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


@patterns
def test_loops_with_positions(pattern: Pattern) -> None:
    x = example([17, 2, 9, 4, 0, 11], [3, 16, 0, 2, 8, 9, 4, 17, 12], heads=4, kv_heads=2)
    assert_all_close(everything(x, pattern), loops(x, pattern))


def test_one_sided_positions_count_the_other_side_from_zero() -> None:
    pattern = Pattern((Branch(4, 2),), causal=True)
    for x in (example([5, 2], 7), example(7, [4, 0, 2])):
        assert_all_close(everything(x, pattern), loops(x, pattern))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 6), st.integers(0, 6), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
def test_loops_on_any_pattern(data: st.DataObject, n_q: int, n_k: int, heads: tuple[int, int]) -> None:
    branches = []
    for _ in range(data.draw(st.integers(1, 3))):
        r = data.draw(st.integers(1, 4))
        offset = data.draw(st.lists(st.integers(0, r - 1), min_size=heads[0], max_size=heads[0]))
        branches.append(Branch(data.draw(st.none() | st.integers(1, 7)), r, tuple(offset)))
    pattern = Pattern(tuple(branches), data.draw(st.booleans()))
    points = st.integers(0, 12)
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


def test_detached_differs_from_attached_in_q_and_k_only() -> None:
    x, pattern = example(9, 9, heads=4), PATTERNS["longnet"]
    attached = gradients(*x.qkv, pattern, x.dout)
    detached = gradients(*x.qkv, pattern, x.dout, weights="detached")
    for a, b in zip(attached[:2], detached[:2], strict=True):
        assert (a - b).norm() > 0.01 * a.norm()
    assert_all_close(attached[2:], detached[2:])
    one = Pattern((Branch(4, 2),))  # a single branch has no weights to detach
    assert_all_close(everything(x, one), everything(x, one, weights="detached"))


class _Oracle(torch.autograd.Function):
    """The oracle's two functions as one, so that gradcheck holds them against each other."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.pattern = pattern
        return attention(q, k, v, pattern)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        return (*gradients(q, k, v, ctx.pattern, dout, dlse), None)


@pytest.mark.parametrize("name", ["causal", "longnet", "longnet causal, short tail"])
def test_gradcheck(name: str) -> None:
    """Finite differences of out and lse are `gradients` (without dead rows: there lse is not finite)."""
    x = example(6, 6, heads=4, kv_heads=2, dim=2)
    leaves = [t.clone().requires_grad_() for t in x.qkv]
    assert attention(*x.qkv, PATTERNS[name])[1].isfinite().all()
    assert torch.autograd.gradcheck(lambda *t: _Oracle.apply(*t, PATTERNS[name]), leaves)


# --- on paper --------------------------------------------------------------------------------------


def column(*values: float) -> Tensor:
    """One batch, one head, one dimension."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


def by_hand(pattern: Pattern, out: list[float], lse: list[float]) -> None:
    """q = 1, k = log 1, log 2, log 3, ..., v = 1, 2, 3, ... and scale 1: the weight of key j is j + 1."""
    n = len(out)
    k = column(*(log(j + 1) for j in range(n)))
    got = attention(column(*[1.0] * n), k, column(*(j + 1.0 for j in range(n))), pattern, scale=1.0)
    assert_all_close([t.flatten() for t in got], [out, lse])


def test_by_hand_dense_and_causal() -> None:
    by_hand(Pattern.dense(), [14 / 6] * 3, [log(6)] * 3)  # (1 + 4 + 9) / (1 + 2 + 3)
    by_hand(Pattern.dense(causal=True), [1, 5 / 3, 14 / 6], [0, log(3), log(6)])


def test_by_hand_short_tail_and_offset_beyond_it() -> None:
    lse = [log(3), log(3), log(7), log(7), log(5)]
    by_hand(Pattern((Branch(2),)), [5 / 3, 5 / 3, 25 / 7, 25 / 7, 5], lse)
    by_hand(Pattern((Branch(2, 2, 1),)), [0, 2, 0, 4, 0], [-inf, log(2), -inf, log(4), -inf])


def test_by_hand_rate_beyond_the_segment() -> None:
    by_hand(Pattern((Branch(2, 3),)), [1, 0, 3, 0, 5], [0, -inf, log(3), -inf, log(5)])
    by_hand(Pattern((Branch(2, 3, 2),)), [0] * 5, [-inf] * 5)


def test_by_hand_two_branches_count_a_pair_twice() -> None:
    # Row 0 sees weights 1 + 2 within {0, 1} and 1 + 3 on the even positions: 1 counts twice.
    pattern = Pattern((Branch(2), Branch(4, 2)))
    by_hand(pattern, [15 / 7, 5 / 3, 35 / 11, 25 / 7], [log(7), log(3), log(11), log(7)])


def test_by_hand_gradients() -> None:
    # One query, weights 1 and 3 of v = 0 and 4: P = (1/4, 3/4), O = 3, dO = 1, so dP - D = (-3, 1).
    args = (column(1.0), column(0.0, log(3)), column(0.0, 4.0), Pattern.dense(), column(1.0))
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0}
    wanted = [column(0.75 * log(3)), column(-0.75, 0.75), column(0.25, 0.75)]
    assert_all_close(gradients(*args, **at), wanted)
    wanted = [column(2.25 * log(3)), column(-0.25, 2.25), column(0.25, 0.75)]  # dlse = 2 adds 2 P to dS
    assert_all_close(gradients(*args, torch.full((1, 1, 1), 2.0), **at), wanted)


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


@patterns
def test_shared_heads_are_repeated_heads(pattern: Pattern) -> None:
    x = example(9, 9, heads=4, kv_heads=2)
    repeated = x._replace(k=x.k.repeat_interleave(2, 2), v=x.v.repeat_interleave(2, 2))
    out, lse, dq, dk, dv = everything(repeated, pattern)
    folded = [out, lse, dq, *(t.unflatten(2, (2, 2)).sum(3) for t in (dk, dv))]
    assert_all_close(everything(x, pattern), folded)


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


def test_no_keys_and_no_queries() -> None:
    x = example(3, [])
    out, lse, dq, dk, dv = everything(x, Pattern.dense())
    assert (out == 0).all() and (lse == -inf).all() and (dq == 0).all() and dk.shape == dv.shape == x.k.shape
    out, lse, dq, dk, dv = everything(example([], 3), Pattern.dense())
    assert out.numel() == lse.numel() == dq.numel() == 0 and (dk == 0).all() and (dv == 0).all()


@pytest.mark.parametrize("size", [-1e300, -1e10, -1e8, 1e8, 1e10, 1e300])
def test_any_finite_score_is_a_score(size: float) -> None:
    """No value stands for "nothing": scores all alike share the weight, however large."""
    one, k, v = column(1.0), column(*[size] * 8), column(1.0, 9.0, 2.0, 9.0, 6.0, 9.0, 7.0, 9.0)
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0}
    pattern = Pattern((Branch(None, 2),))
    out, lse = attention(one, k, v, pattern, **at)
    assert (out == 4).all() and (lse == size + log(4)).all()
    assert gradients(one, k, v, pattern, one, **at)[2].equal(column(*[0.25, 0.0] * 4))


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
    with pytest.raises(ValueError, match="query heads"):
        attention(*x.qkv, Pattern((Branch(4, 2, (0, 1)),)))
    with pytest.raises(ValueError, match="dout must have the shape"):
        gradients(*x.qkv, p, x.dout[:, :3])
    with pytest.raises(ValueError, match="dlse must have the shape"):
        gradients(*x.qkv, p, x.dout, x.dlse.transpose(1, 2)[:, :3])
    with pytest.raises(ValueError, match="weights must be"):
        gradients(*x.qkv, p, x.dout, weights="none")
