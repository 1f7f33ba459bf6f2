"""Long problems, judged where they are computed: the row-blocked oracle and the bounds run on each rank's own device.

Nothing but what was wrong and how large the errors were travels to rank 0. Where the whole is too much work for the
oracle, rows are sampled: `out`, `lse` and `dq` are checked on those, and `dout` is zero on all others, so that `dk` and
`dv` of every key are exactly what the sampled rows contribute, and `dq` elsewhere is exactly zero.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference import Pattern, attention, gradients
from reference.pattern import multiplicity
from ring.comm.transport import Transport
from verification.case import Case
from verification.check import bounds as numpy_bounds
from verification.check.bounds import Arithmetic
from verification.failures import WrongResult
from verification.run.rank import attend, home, repeats, same_bits, shards

TITLE = "long problems"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LEAST = 64  # tokens: of fewer, the smallest segment would be shorter than its dilated grid
KINDS = {  # name -> (dtype, exchange, whether LongNet's pattern; otherwise dense)
    "dense bfloat16": ("bfloat16", "ring", False),
    "dense float32": ("float32", "direct", False),
    "LongNet bfloat16": ("bfloat16", "direct", True),
    "LongNet float32": ("float32", "ring", True),
}
# Scores that the oracle computes in a few seconds, all of them in fp64 (and the bounds another thirty numbers each).
WHOLE = {"cuda": 2**36, "cpu": 2**26}
SAMPLED = 256  # rows, where the whole is more than that
BLOCK = {"cuda": 2**24, "cpu": 2**19}  # scores at a time
_bounds: Any = numpy_bounds  # its formulas take tensors as well
QUANTITIES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class LongProblem:
    """kind: a name in KINDS. Raises ValueError for a field that is not allowed."""

    world: int
    tokens: int
    kind: str
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("world", self.world, 1), ("tokens", self.tokens, LEAST), ("seed", self.seed, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")

    def case(self, device: str) -> Case:
        """device: "cuda" where it will run on GPUs, whose fused kernels have bounds of their own; else "cpu"."""
        dtype, exchange, sparse = KINDS[self.kind]
        segments = [self.tokens // part for part in (16, 8, 4, 2, 1)]
        pattern = Pattern.longnet(segments, (1, 2, 4, 6, 12), HEADS, causal=True) if sparse else Pattern.dense(True)
        return Case(
            world=self.world, group=None, tokens=self.tokens, order="zigzag", cuts=None, pattern=pattern, batch=1,
            heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, scale=None, score_scale=1.0,
            values="normal", seed=self.seed, exchange=exchange, bucket=None, kernel="auto", lse="returned",
            strided=False, device=device,
        )  # fmt: skip


def judged_rows(case: Case) -> Tensor:
    """Ascending positions of the rows that are judged on the Case's type of device: all, or SAMPLED of them.

    The sample has both ends of the sequence and of each rank's stretches, and others by the Case's seed.
    """
    if case.heads * case.tokens**2 <= WHOLE[case.device]:
        return torch.arange(case.tokens)
    ends = []
    for positions in case.shards().positions:
        jumps = np.flatnonzero(np.diff(positions) != 1)
        ends += [*positions[:1], *positions[-1:], *positions[jumps], *positions[jumps + 1]]
    chosen = torch.unique(torch.tensor([0, case.tokens - 1, *map(int, ends)]))[:SAMPLED]
    others = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(case.seed))
    others = others[~torch.isin(others, chosen)][: SAMPLED - len(chosen)]
    return torch.cat((chosen, others)).sort().values


@dataclass(frozen=True)
class Judgement:
    """What one rank says. ratios: by quantity the worst error / bound; wrong: what does not hold, in words.

    seconds: of forward and backward, the plan being cached; bytes: the most memory in use, of the GPU or, on a CPU, of
    the process.
    """

    rows: int
    ratios: dict[str, float]
    wrong: tuple[str, ...]
    seconds: float
    bytes: int


def judge(transport: Transport, case: Case) -> Judgement:
    """Task: forward and backward on this rank's share, held against the oracle on this rank's device; and twice with
    deterministic kernels, for at such a length the fastest need not give the same bits again."""
    rows = judged_rows(case)
    q, k, v, dout, dlse = case.tensors()
    others = torch.ones(case.tokens, dtype=torch.bool).scatter_(0, rows, False)
    dout[:, others] = 0
    inputs = shards(case, transport.rank, (q, k, v, dout, dlse))
    kept = [x.clone() for x in inputs]
    attend(transport, case, inputs)  # with all that happens once
    _finish()
    started = time.perf_counter()
    run = attend(transport, case, inputs)
    _finish()
    seconds, most = time.perf_counter() - started, _most_memory()
    with _deterministic():
        once, again = (attend(transport, case, inputs) for _ in range(2))
    wrong = [] if repeats(once, again) else ["the second run differs from the first"]
    if not all(same_bits(x, y) for x, y in zip(inputs, kept, strict=True)):
        wrong.append("an input was changed")
    del once, again, inputs, kept
    ratios, more = _compare(case, case.layout().positions(transport.rank), rows, run.results, (q, k, v, dout))
    return Judgement(len(rows), ratios, (*wrong, *more), seconds, most)


def _compare(
    case: Case, positions: Tensor, rows: Tensor, results: tuple[Tensor | None, ...], whole: tuple[Tensor, ...]
) -> tuple[dict[str, float], list[str]]:
    q, k, v, dout = (x.to(home()) for x in whole)
    rows = rows.to(home())
    q, dout = q[:, rows], dout[:, rows]
    how: dict[str, Any] = {"q_positions": rows, "scale": case.scale}
    exact = dict(zip(QUANTITIES[:2], attention(q, k, v, case.pattern, **how), strict=True))
    exact |= dict(zip(QUANTITIES[2:], gradients(q, k, v, case.pattern, dout, **how), strict=True))
    exact["lse"] = exact["lse"].transpose(1, 2)  # (1, rows, H), tokens in front as everywhere else
    bound = allowed(case, (q, k, v, dout), rows, exact)
    positions = positions.to(home())
    at = torch.searchsorted(rows, positions).clamp_(max=len(rows) - 1)
    mine = rows[at] == positions  # of the own tokens, those that are judged
    ratios, wrong = {}, []
    for name, result in zip(QUANTITIES, results, strict=True):
        assert result is not None
        x = result.detach().double()
        x = x.transpose(1, 2) if name == "lse" else x
        of_keys = name in ("dk", "dv")
        if name == "dq" and bool((x[:, ~mine] != 0).any()):
            wrong.append("dq is not exactly 0 in rows whose incoming gradient is")
        x = x if of_keys else x[:, mine]
        place = positions if of_keys else at[mine]
        ratio = _ratio(x, exact[name][:, place], bound[name][:, place])
        ratios[name] = float(ratio.max()) if ratio.numel() else 0.0
        if not ratios[name] <= 1:
            token = int((ratio.flatten(2).amax(2)[0] == ratio.max()).nonzero()[0])
            where = int(positions[token] if of_keys else positions[mine][token])
            wrong.append(f"{name} of token {where} is off by {ratios[name]:.3g} times its bound")
    return ratios, wrong


def _ratio(x: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """|x - exact| / bound; 0 where they are equal, infinite ones too; inf where that is not a number."""
    ratio = torch.where(x == exact, 0.0, (x - exact).abs() / bound)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def allowed(case: Case, tensors: tuple[Tensor, ...], rows: Tensor, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """`verification.check.bounds` of these rows of queries against all keys, in blocks of rows.

    tensors: q, dout (1, rows, H, D) and k, v (1, N, Hk, D), in the order q, k, v, dout. Bounds are shaped like `exact`,
    which has lse as (1, rows, H).
    """
    r: Any = Arithmetic.of(case)
    share = case.heads // case.kv_heads
    q, k, v, dout = (x[0].double().transpose(0, 1) for x in tensors)  # (H, rows, D), (Hk, N, D)
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    keys = torch.arange(case.tokens, device=rows.device)
    out, dq, lse = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q[..., 0])
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    seen_keys = torch.zeros(k.shape[:2], dtype=torch.bool, device=rows.device)
    step = max(1, BLOCK[rows.device.type] // (case.heads * case.tokens))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        count = multiplicity(case.pattern, rows[part], keys, case.heads).double()  # (H, R, N)
        live = (count > 0).any(-1)
        out[:, part], lse[:, part], w_q, w_k, w_v = _block(
            r, case.softmax_scale, q[:, part], k, v, dout[:, part], count
        )
        dq[:, part] = _bounds.product(w_q, k.abs()) * live[..., None]
        out[:, part] *= live[..., None]
        lse[:, part] *= live
        dk += _bounds.product(w_k.mT, q[:, part].abs())
        dv += _bounds.product(w_v.mT, dout[:, part].abs())
        seen_keys |= (count > 0).any(1)
    seen = seen_keys.view(case.kv_heads, share, -1).any(1).T[None, :, :, None]  # (1, N, Hk, 1)
    found = {"out": out * r.sides, "lse": lse * r.sides, "dq": dq}
    found = {name: x.transpose(0, 1)[None] for name, x in found.items()}
    found["dq"] = _bounds.settle(r, found["dq"], exact["dq"], r.floor_dq)
    for name, sums, floor in (("dk", dk, r.floor_dk), ("dv", dv, r.floor_dv)):
        folded = sums.view(case.kv_heads, share, *sums.shape[1:]).sum(1).transpose(0, 1)[None]  # (1, N, Hk, D)
        settled = _bounds.settle(r, folded, exact[name], floor)
        found[name] = settled * seen
    numpy_bounds.refuse_nan(found)
    return found


def _block(
    r: Any, scale: float, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, count: Tensor
) -> tuple[Any, Any, Any, Any, Any]:
    """(T_O (H, R, D), T_L (H, R), W_q, W_k, W_v (H, R, N)) of `verification.check.bounds`. q, dout (H, R, D); k, v (H,
    N, D); count (H, R, N)."""
    unseen = count == 0
    dead = unseen.all(-1)
    s = scale * (q @ k.mT)
    base = _bounds.base_error(r, (q.abs() @ k.abs().mT) * abs(scale))
    top = s.masked_fill(unseen, -torch.inf).amax(-1).masked_fill(dead, 0.0)
    p = count * (s - top[..., None]).clamp_(max=1.0).exp_()
    total = p.sum(-1).masked_fill(dead, 1.0)
    p /= total[..., None]
    lse, out = top + total.log(), p @ v
    t_lse, t_out = _bounds.forward(r, base, p, s, top, lse, count, v.abs(), out.abs())
    delta = (dout * out).sum(-1)
    t_delta = _bounds.delta_error(r, dout.abs(), out.abs(), t_out, delta, None)
    t = dout @ v.mT - delta[..., None]
    products = dout.abs() @ v.abs().mT
    w_q, w_k, w_v = _bounds.backward(r, base, p, s, lse, count, t_lse, t_delta, products, t.abs(), (p * t).abs(), False)
    return t_out, t_lse, w_q, w_k, w_v


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _finish() -> None:
    if home().type == "cuda":
        torch.cuda.synchronize()


def _most_memory() -> int:
    if home().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def verdict(problem: LongProblem, seen: list[Judgement]) -> dict[str, float]:
    """The worst ratios of all ranks. Raises WrongResult naming what is wrong on which rank."""
    wrong = [f"on rank {rank}: {'; '.join(one.wrong)}" for rank, one in enumerate(seen) if one.wrong]
    if wrong:
        raise WrongResult(f"long: {problem.kind}, {problem.tokens} tokens: {'. '.join(wrong)}")
    return {name: max(one.ratios[name] for one in seen) for name in QUANTITIES}
