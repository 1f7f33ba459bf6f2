"""The bounds hold for an emulation of attention merged from partial results, and do not hold for broken ones.

The emulation is written from the formulas, in torch's own fp32 with 16-bit roundings where a kernel has them: keys are
dealt to p sources at random, and every source and branch gives a partial result. These are merged by lse, and so, by
sums, are the gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import Branch, Pattern, attention, exact, gradients
from reference.arithmetic import Arithmetic, Counts, most_partials, most_seen
from reference.bounds import delta_error
from reference.exact import QUANTITIES, Expectation, Inputs, evaluate, multiplicity
from tests.support.plain_case import plain
from verification.case import DTYPES, Case
from verification.check.expectation import arithmetic_of, expect

B, N, H, HK, D = 1, 48, 4, 2, 8
PATTERNS = {
    "full": Pattern.dense(),
    "causal": Pattern.dense(causal=True),
    "dilated": Pattern((Branch(20, 3, 1),), causal=True),  # two rows in three are dead
    "mixture": Pattern.longnet((8, None), (1, 2), H, causal=True),
    "thrice": Pattern((Branch(), Branch(), Branch())),
}
FAULTS = ("scale", "lse in bf16", "accumulator in bf16", "lse of the part", "D of a wrong O")


def problem(dtype: str, size: float, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout, dlse."""
    draw = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(B, N, H, D, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(B, N, HK, D, generator=draw, dtype=torch.float64) for _ in range(2))
    dlse = torch.randn(B, H, N, generator=draw)
    return [x.to(DTYPES[dtype]) for x in (q * size, k, v, dout)] + [dlse]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def emulate(
    tensors: list[Tensor], pattern: Pattern, parts: int, kernel: str, fault: str = "", seed: int = 1
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv as an implementation with that many sources would give them."""
    dtype = tensors[0].dtype
    half = dtype if kernel == "flash" and dtype.itemsize == 2 else torch.float32  # of P, dS and partial results
    q, k, v, dout, dlse = (x.float() for x in tensors)
    q, dout = q.transpose(1, 2), dout.transpose(1, 2)  # (B, H, N, D)
    k, v = (x.transpose(1, 2).repeat_interleave(H // HK, 1) for x in (k, v))
    branches = [multiplicity(Pattern((branch,), pattern.causal), H, N) for branch in pattern.branches]
    scale = D**-0.5 * (1.001 if fault == "scale" else 1.0)
    source = torch.randint(parts, (N,), generator=torch.Generator().manual_seed(seed))
    groups = [torch.nonzero(source == i).flatten() for i in range(parts)]
    pieces = [(torch.from_numpy(seen), keys) for seen in branches for keys in groups]

    def scores(seen: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        return (q[:, :, rows] @ k[:, :, keys].mT * scale).masked_fill(seen[:, rows][..., keys] == 0, -torch.inf)

    every = torch.arange(N)
    out, lse = torch.zeros(B, H, N, D), torch.full((B, H, N), -torch.inf)
    partial_lse = []
    for seen, keys in pieces:
        s = scores(seen, every, keys)
        top = s.amax(-1, keepdim=True) if len(keys) else torch.full((B, H, N, 1), -torch.inf)
        top = top.masked_fill(top == -torch.inf, 0.0)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        new = rounded(rounded(p, half) @ v[:, :, keys] / total.masked_fill(total == 0, 1.0), half)
        new_lse = (top + total.log()).squeeze(-1)
        partial_lse.append(new_lse)
        both = torch.logaddexp(lse, new_lse)
        shift = both.masked_fill(both == -torch.inf, 0.0)
        out = out * torch.exp(lse - shift)[..., None] + new * torch.exp(new_lse - shift)[..., None]
        if fault == "accumulator in bf16":
            out = rounded(out, torch.bfloat16)
        lse = both
    if fault == "lse in bf16":
        lse = rounded(lse, torch.bfloat16)

    saved = rounded(out, dtype) * (1.01 if fault == "D of a wrong O" else 1.0)
    delta = (dout * saved).sum(-1) - dlse
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for (seen, keys), part in zip(pieces, partial_lse, strict=True):
        used = part if fault == "lse of the part" else lse
        used = used.masked_fill(used == -torch.inf, 0.0)
        for rows in groups:
            p = torch.exp(scores(seen, rows, keys) - used[:, :, rows, None])
            ds = p * (dout[:, :, rows] @ v[:, :, keys].mT - delta[:, :, rows, None])
            ds = rounded(ds, half)
            dq[:, :, rows] += rounded(scale * ds @ k[:, :, keys], half)
            dk[:, :, keys] += rounded(scale * ds.mT @ q[:, :, rows], half)
            dv[:, :, keys] += rounded(rounded(p, half).mT @ dout[:, :, rows], half)
    dk, dv = (x.view(B, HK, H // HK, N, D).sum(2) for x in (dk, dv))
    results = {name: x.transpose(1, 2).to(dtype) for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    return results | {"lse": lse}


def fused(dtype: str) -> str:
    """The fused kernel on operands of that type."""
    return "half" if dtype in ("bfloat16", "float16") else "flash"


def expected(tensors: list[Tensor], pattern: Pattern, parts: int, kernel: str) -> Expectation:
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    count = multiplicity(pattern, H, N)
    keys, rows = int(count.sum(-1).max()), int(count.reshape(HK, -1, N).sum(1).max())
    merges = parts * len(pattern.branches)
    counts = Counts(keys, rows, merges, merges * (H // HK))
    r = Arithmetic.of(dtype, fused(dtype) if kernel == "flash" else kernel, D, D**-0.5, counts)
    q, k, v, dout, dlse = (x.double().numpy() for x in tensors)
    return evaluate(Inputs(q, k, v, dout, dlse, pattern, D**-0.5), r)


def ratios(results: dict[str, Tensor], expectation: Expectation) -> dict[str, float]:
    """Worst error / bound; where the bound is 0 the result must be exact."""
    worst = {}
    for name in QUANTITIES:
        seen, exact, bound = results[name].double().numpy(), expectation.exact[name], expectation.bound[name]
        live = bound > 0
        assert np.array_equal(seen[~live], exact[~live]), name
        worst[name] = float((np.abs(seen[live] - exact[live]) / bound[live]).max(initial=0.0))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["math", "flash"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_an_emulation_never_exceeds_the_bounds(name: str, dtype: str, kernel: str) -> None:
    for parts in (1, 3, 16):
        for size in (1.0, 12.0, 300.0):  # the last with scores of hundreds
            for seed in range(2):
                tensors = problem(dtype, size, seed)
                found = emulate(tensors, PATTERNS[name], parts, kernel, seed=seed)
                worst = ratios(found, expected(tensors, PATTERNS[name], parts, kernel))
                assert max(worst.values()) <= 1.0, (parts, size, seed, worst)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["math", "flash"])
@pytest.mark.parametrize("name", PATTERNS)
def test_results_that_underflow_stay_within_the_bounds(name: str, kernel: str) -> None:
    """Values and incoming gradients around fp16's smallest numbers: 2^-25 is lost wherever something is rounded."""
    for exponent in (9, 13, 17, 20):
        for seed in range(2):
            tensors = problem("float16", 1.0, seed)
            tensors[2] *= 2.0**-exponent
            tensors[4] *= 2.0**-exponent
            for parts in (1, 3, 16):
                found = emulate(tensors, PATTERNS[name], parts, kernel, seed=seed)
                worst = ratios(found, expected(tensors, PATTERNS[name], parts, kernel))
                assert max(worst.values()) <= 1.0, (exponent, parts, seed, worst)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("parts", [3, 16])
@pytest.mark.parametrize("size", [1.0, 12.0])
def test_in_fp32_each_fault_exceeds_the_bounds(fault: str, parts: int, size: float) -> None:
    tensors = problem("float32", size)
    right = expected(tensors, PATTERNS["causal"], parts, "math")
    assert max(ratios(emulate(tensors, PATTERNS["causal"], parts, "math"), right).values()) <= 1.0
    worst = ratios(emulate(tensors, PATTERNS["causal"], parts, "math", fault), right)
    assert max(worst.values()) > 10.0, worst


# --- the formulas as they are written ---------------------------------------------------------------------------------


def literal(r: Arithmetic, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, c: Tensor) -> dict[str, Tensor]:
    """The bounds of the module's docstring, first order, without dlse, term by term. (H, N, D) each, equal heads."""
    a, u, n, live = r.scale, r.u, r.counts, c.sum(-1) > 0
    g = r.gamma
    s = a * q @ k.mT
    top = s.masked_fill(c == 0, -torch.inf).amax(-1, keepdim=True)
    lse = (c * (s - top).exp()).sum(-1, keepdim=True).log() + top
    p = c * (s - lse).exp()
    out, dp = p @ v, dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)
    t = (dp - delta).abs()
    ds = p * t
    size = g(r.dim + 2) * a * q.abs() @ k.abs().mT
    eps = size + u * (s - top).abs() + r.u_exp
    mean = (p * eps).sum(-1, keepdim=True)
    mu = n.merges * u * (2 * lse.abs() + 2 * top.abs() + 4)
    t_lse = mean + g(n.keys + 1) + mu + u * lse.abs()
    t_out = (p * (eps + r.u_prob)) @ v.abs() + (mean + 2 * g(n.keys + 2) + mu + r.u_prob + r.u_partial) * (p @ v.abs())
    t_out = t_out + r.u_out * out.abs()
    e = size + t_lse + u * (s - lse).abs() + r.u_exp
    t_delta = g(r.dim) * (dout.abs() * out.abs()).sum(-1, keepdim=True)
    t_delta = t_delta + (dout.abs() * t_out).sum(-1, keepdim=True)
    t_ds = p * (e * t + g(r.dim) * dout.abs() @ v.abs().mT + t_delta + 2 * u * t) + r.u_prob * ds
    over_q = g(n.keys) + n.merges * r.u_buf + 2 * u + n.key_blocks * r.u_partial
    over_k = g(n.rows) + n.row_merges * r.u_buf + n.row_blocks * r.u_partial
    dq, dk, dv = a * (p * (dp - delta)) @ k, a * (p * (dp - delta)).mT @ q, p.mT @ dout
    found = {
        "lse": t_lse.squeeze(-1),
        "out": t_out,
        "dq": a * (t_ds + over_q * ds) @ k.abs() + r.u_out * dq.abs(),
        "dk": a * (t_ds + (over_k + 2 * u) * ds).mT @ q.abs() + r.u_out * dk.abs(),
        "dv": (p * (e + r.u_prob + over_k)).mT @ dout.abs() + r.u_out * dv.abs(),
    }
    assert live.all()
    return {name: x if name == "lse" else x.transpose(0, 1) for name, x in found.items()}


@pytest.mark.parametrize("kernel", ["math", "flash"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_fused_computation_is_the_formulas_as_written(dtype: str, kernel: str) -> None:
    pattern = Pattern.longnet((8, None), (1, 2), H, causal=True)
    kernel = fused(dtype) if kernel == "flash" else kernel
    r = Arithmetic.of(dtype, kernel, D, 0.3, Counts(30, 40, merges=7, row_merges=9, key_blocks=2, row_blocks=3))
    draw = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(1, N, H, D, generator=draw, dtype=torch.float64) for _ in range(4))
    found = evaluate(Inputs(q.numpy(), k.numpy(), v.numpy(), dout.numpy(), None, pattern, 0.3), r)
    q, k, v, dout = (x[0].transpose(0, 1) for x in (q, k, v, dout))
    wanted = literal(r, q, k, v, dout, torch.from_numpy(multiplicity(pattern, H, N)))
    for name in QUANTITIES:
        # What is left out above is second order in e <= 2^-10 or so, and underflow.
        np.testing.assert_allclose(found.bound[name][0], r.sides * wanted[name].numpy(), rtol=2e-3)


def test_gradients_of_lse_widen_the_bounds() -> None:
    tensors = problem("float32", 1.0)
    q, k, v, dout, dlse = (x.double().numpy() for x in tensors)
    r = Arithmetic.of("float32", "math", D, D**-0.5, Counts(N, N))
    with_dlse = evaluate(Inputs(q, k, v, dout, dlse, PATTERNS["full"], D**-0.5), r)
    with_zero = evaluate(Inputs(q, k, v, dout, 0 * dlse, PATTERNS["full"], D**-0.5), r)
    without = evaluate(Inputs(q, k, v, dout, None, PATTERNS["full"], D**-0.5), r)
    # With dlse = 0 what is added is u |D| in T_D and u |t|, weighted by P: more than nothing, less than all the rest.
    assert (with_zero.bound["dq"] > without.bound["dq"]).all()
    assert (with_zero.bound["dq"] < 1.5 * without.bound["dq"]).all()
    row, deltas, logs = np.ones((1, D)), np.array([3.0]), np.array([-2.0])
    more = delta_error(r, row, row, 0 * row, deltas, logs) - delta_error(r, row, row, 0 * row, deltas, None)
    np.testing.assert_allclose(more, 5 * r.u, rtol=1e-6)
    assert np.array_equal(with_zero.exact["dq"], without.exact["dq"])
    assert not np.array_equal(with_dlse.exact["dk"], without.exact["dk"])
    assert np.array_equal(with_dlse.bound["dv"], without.bound["dv"])


@pytest.mark.parametrize("error", [0.01, 0.7, 3.0])
def test_large_relative_errors_of_exp_are_bounded_exactly(error: float) -> None:
    """To first order an error of 0.7 moves a weight by 1.4 times itself; it can move it by e^1.4 - 1 = 3.05 times."""
    tensors = problem("float64", 4.0)
    q, k, v, dout, _ = (x.numpy() for x in tensors)
    pattern = PATTERNS["full"]
    r = replace(Arithmetic.of("float32", "math", D, D**-0.5, Counts(N, N)), u_exp=error)
    found = evaluate(Inputs(q, k, v, dout, None, pattern, D**-0.5), r)
    sign = torch.where(torch.arange(N) == 5, error, -error).double()
    s = D**-0.5 * torch.einsum("bihd,bjhd->bhij", tensors[0], tensors[1].repeat_interleave(H // HK, 2)) + sign
    p = s.softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", p, tensors[2].repeat_interleave(H // HK, 2)).numpy()
    assert (np.abs(out - found.exact["out"]) <= found.bound["out"]).all()
    assert (np.abs(s.logsumexp(-1).numpy() - found.exact["lse"]) <= found.bound["lse"]).all()
    if error < 1:
        assert (np.abs(out - found.exact["out"]) / found.bound["out"]).max() > 0.2


def test_each_branch_that_sees_a_pair_may_lose_its_gradient_to_underflow() -> None:
    """Three branches, each with a dS of just below 2^-25: in fp16 all three are rounded to 0."""
    r = Arithmetic.of("float16", "half", D, 1.0, Counts(3 * N, 3 * N))
    q, k, v, dout, _ = (x.double().numpy() for x in problem("float16", 1.0))
    found = evaluate(Inputs(q, k, 0 * v, 0 * dout, None, PATTERNS["thrice"], 1.0), r)
    per_key = np.abs(q).reshape(B, N, HK, H // HK, D).sum((1, 3))  # (B, HK, D): every row sees every key
    np.testing.assert_allclose(found.bound["dk"], np.broadcast_to(3 * r.eta * per_key[:, None] + r.floor_dk, k.shape))


def test_only_fp64_has_an_oracle_as_coarse_as_itself() -> None:
    sides = {x: Arithmetic.of(x, "math", D, 1.0, Counts(1, 1)).sides for x in DTYPES}
    assert sides == {"float64": 2, "float32": 1, "bfloat16": 1, "float16": 1}


# --- counts -----------------------------------------------------------------------------------------------------------


def small(**changes: Any) -> Case:
    sizes = {"tokens": 24, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "seed": 5}
    world: int = changes.pop("world", 2)
    return plain(world, **sizes | {"kernel": "math", "lse": "differentiated", "pattern": Pattern.dense()} | changes)


MIXED = Pattern(
    (Branch(7, 3, (0, 1, 2, 2)), Branch(None, 2, 1, range(1, 3)), Branch(4, 6, (5, 1), range(2, 4))), causal=True
)


@pytest.mark.parametrize("pattern", [*PATTERNS.values(), MIXED])
@pytest.mark.parametrize("tokens", [1, 5, 24])
def test_counts_of_keys_and_rows_bound_what_the_mask_has(pattern: Pattern, tokens: int) -> None:
    count = multiplicity(pattern, 4, tokens)
    keys, rows = most_seen(pattern, tokens, heads=4, kv_heads=2)
    assert keys >= count.sum(-1).max() and rows >= count.reshape(2, -1, tokens).sum(1).max()
    if not pattern.causal:
        assert keys == count.sum(-1).max() and rows == count.reshape(2, -1, tokens).sum(1).max()


def test_counts_of_partial_results() -> None:
    assert most_partials("contiguous", False, ranks=4, tokens=24, bucket=32, branches=1) == 4
    assert most_partials("zigzag", False, ranks=4, tokens=24, bucket=32, branches=1) == 8
    assert most_partials("contiguous", False, ranks=4, tokens=24, bucket=5, branches=3) == 3 * (4 + 4 + 4)
    assert most_partials("striped", True, ranks=4, tokens=24, bucket=32, branches=1) == 7
    assert arithmetic_of(small(world=4)).counts.merges == 4
    long = arithmetic_of(small(world=4, tokens=240, bucket=5)).counts
    assert (long.merges, long.row_merges) == (4 + 48 + 4, 2 * (4 + 48 + 4))
    assert arithmetic_of(small(world=4, order="striped", cuts=(0, 1, 1, 9, 24))).counts.merges == 7
    assert arithmetic_of(small(world=8, order="zigzag", tokens=3)).counts.merges == 3


# --- exact values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [*PATTERNS.values(), MIXED])
@pytest.mark.parametrize("values", ["normal", "huge", "tiny", "ties"])
@pytest.mark.parametrize("lse", ["unused", "differentiated"])
@pytest.mark.parametrize("blocks", [False, True])
def test_exact_values_are_the_oracles(
    pattern: Pattern, values: str, lse: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small(pattern=pattern, values=values, lse=lse, dtype="float64", scale=-0.7)
    if blocks:
        monkeypatch.setattr(exact, "WHOLE", 0)
        monkeypatch.setitem(exact.BLOCK, "cpu", 300)
    found = expect(case)
    q, k, v, dout, dlse = case.tensors()
    out, logs = attention(q, k, v, pattern, scale=-0.7)
    grads = gradients(q, k, v, pattern, dout, dlse, scale=-0.7)
    for name, wanted in zip(QUANTITIES, (out, logs, *grads), strict=True):
        # Both sides come from fp64, and so does the bound: they agree to it.
        seen, bound = wanted.numpy(), found.bound[name]
        live = bound > 0
        assert found.exact[name].shape == seen.shape
        assert np.array_equal(found.exact[name][~live], seen[~live])
        assert (np.abs(found.exact[name][live] - seen[live]) <= bound[live]).all()
    count = multiplicity(pattern, 4, 24)
    assert np.array_equal(found.dead_rows, ~count.any(-1))
    assert np.array_equal(found.dead_keys, ~count.reshape(2, -1, 24).any(1))


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_blocks_have_the_same_bounds(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(pattern=MIXED, score_scale=size)
    whole = expect(case)
    monkeypatch.setattr(exact, "WHOLE", 0)
    monkeypatch.setitem(exact.BLOCK, "cpu", 300)
    blocks = expect(case)
    for name in QUANTITIES:
        np.testing.assert_allclose(blocks.bound[name], whole.bound[name], rtol=1e-3)
