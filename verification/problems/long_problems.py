"""Long problems, judged where they are computed: each rank computes exact results and bounds on its own device, by
`reference.fast_oracle` in blocks of rows.

Only what was wrong and how large the errors were travels to rank 0. Where all rows are too much work, some are sampled:
`out`, `lse` and `dq` are checked on those, and `dout` is zero on all others, so that `dk` and `dv` of every key are
exactly what the sampled rows contribute, and `dq` elsewhere is exactly zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference import validators
from reference.fast_oracle import QUANTITIES, Expectation, Inputs, evaluate
from reference.pattern import Pattern
from ring.comm.transport import Transport
from verification.case import Case
from verification.check.expectation import arithmetic_of
from verification.failures import WrongResult
from verification.problems.links import finish
from verification.problems.longnet import case_of, longnet
from verification.run.layouts import layout_of
from verification.run.memory_meter import process_peak
from verification.run.rank import attend, rank_device, repeats, same_bits, shards

TITLE = "long problems"
HEADS, KV_HEADS = 4, 2
LEAST = 64  # tokens: of fewer, the smallest segment would be shorter than its dilated grid
KINDS = {  # name -> (dtype, exchange, whether LongNet's pattern; otherwise dense)
    "dense bfloat16": ("bfloat16", "ring", False),
    "dense float32": ("float32", "direct", False),
    "LongNet bfloat16": ("bfloat16", "direct", True),
    "LongNet float32": ("float32", "ring", True),
}
# Scores that are computed in a few seconds, with their bounds.
WHOLE = {"cuda": 2**36, "cpu": 2**26}
SAMPLED = 256  # rows, where the whole is more than that


@dataclass(frozen=True)
class LongProblem:
    """kind: a name in KINDS. Raises ValueError for a field that is not allowed."""

    world: int
    tokens: int
    kind: str
    seed: int = 0

    def __post_init__(self) -> None:
        validators.integer("world", self.world, 1)
        validators.integer("tokens", self.tokens, LEAST)
        validators.integer("seed", self.seed, 0)
        validators.choice("kind", self.kind, KINDS)

    def case(self, device: str) -> Case:
        """device: "cuda" where it will run on GPUs, whose fused kernels have bounds of their own; else "cpu"."""
        dtype, exchange, sparse = KINDS[self.kind]
        pattern = longnet(self.tokens, HEADS) if sparse else Pattern.dense(causal=True)
        return case_of(
            self.world, self.tokens, pattern, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype, exchange=exchange,
            seed=self.seed, device=device,
        )  # fmt: skip


def judged_rows(case: Case) -> Tensor:
    """Ascending positions of the rows that are judged on the Case's type of device: all, or SAMPLED of them, which are
    both ends of the sequence and of each range of a rank, and others drawn from the Case's seed."""
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
    """What one rank says. ratios: by quantity the worst error / bound; wrong: what does not hold, in words; seconds: of
    forward and backward, the plan being cached; bytes: the most memory in use, of the GPU or else of the process."""

    rows: int
    ratios: dict[str, float]
    wrong: tuple[str, ...]
    seconds: float
    bytes: int


def judge(transport: Transport, case: Case) -> Judgement:
    """Task: forward and backward on this rank's share, compared with exact results of its own device; and twice with
    deterministic kernels, since at such a length the fastest ones need not give the same bits again."""
    rows = judged_rows(case)
    q, k, v, dout, dlse = case.tensors()
    others = torch.ones(case.tokens, dtype=torch.bool).scatter_(0, rows, False)
    dout[:, others] = 0
    inputs = shards(case, transport.rank, (q, k, v, dout, dlse))
    kept = [x.clone() for x in inputs]
    if rank_device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # an earlier problem's exact results took more
    attend(transport, case, inputs)  # a first call plans and warms up
    finish()
    started = time.perf_counter()
    run = attend(transport, case, inputs)
    finish()
    seconds, most = time.perf_counter() - started, process_peak(rank_device())
    torch.use_deterministic_algorithms(True)
    try:
        once, again = (attend(transport, case, inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    wrong = [] if repeats(once, again) else ["the second run differs from the first"]
    if not all(same_bits(x, y) for x, y in zip(inputs, kept, strict=True)):
        wrong.append("an input was changed")
    del once, again, inputs, kept
    ratios, more = _compare(case, layout_of(case).positions(transport.rank), rows, run.results, (q, k, v, dout))
    return Judgement(len(rows), ratios, (*wrong, *more), seconds, most)


def _compare(
    case: Case, positions: Tensor, rows: Tensor, results: tuple[Tensor | None, ...], whole: tuple[Tensor, ...]
) -> tuple[dict[str, float], list[str]]:
    rows, positions = rows.to(rank_device()), positions.to(rank_device())
    expectation: Any = expect_rows(case, rows, tuple(x.to(rank_device()) for x in whole))
    exact, bound = expectation.exact, expectation.bound
    at = torch.searchsorted(rows, positions).clamp_(max=len(rows) - 1)
    mine = rows[at] == positions  # of the own tokens, those that are judged
    ratios, wrong = {}, []
    for name, result in zip(QUANTITIES, results, strict=True):
        assert result is not None
        x, wanted, most = result.detach().double(), exact[name], bound[name]
        if name == "lse":  # tokens in front, as everywhere else
            x, wanted, most = (t.transpose(1, 2) for t in (x, wanted, most))
        of_keys = name in ("dk", "dv")
        if name == "dq" and bool((x[:, ~mine] != 0).any()):
            wrong.append("dq is not exactly 0 in rows whose incoming gradient is")
        x = x if of_keys else x[:, mine]
        place = positions if of_keys else at[mine]
        ratio = _ratio(x, wanted[:, place], most[:, place])
        ratios[name] = float(ratio.max()) if ratio.numel() else 0.0
        if not ratios[name] <= 1:
            token = int((ratio.flatten(2).amax(2)[0] == ratio.max()).nonzero()[0])
            where = int(positions[token] if of_keys else positions[mine][token])
            wrong.append(f"{name} of token {where} is off by {ratios[name]:.3g} times its bound")
    return ratios, wrong


def expect_rows(case: Case, rows: Tensor, whole: tuple[Tensor, ...]) -> Expectation:
    """Exact results and bounds of these rows of queries against all keys, as tensors on the device of `rows`. whole: q,
    k, v, dout of the whole sequence."""
    q, k, v, dout = (x.double() for x in whole)
    tensors: dict[str, Any] = {"q": q[:, rows], "k": k, "v": v, "dout": dout[:, rows], "rows": rows}
    inputs = Inputs(**tensors, dlse=None, pattern=case.pattern, scale=case.softmax_scale)
    return evaluate(inputs, arithmetic_of(case))


def _ratio(x: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """|x - exact| / bound; 0 where they are equal, infinite ones too; inf where that is not a number."""
    ratio = torch.where(x == exact, 0.0, (x - exact).abs() / bound)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def verdict(problem: LongProblem, seen: list[Judgement]) -> dict[str, float]:
    """The worst ratios of all ranks. Raises WrongResult naming what is wrong on which rank."""
    wrong = [f"on rank {rank}: {'; '.join(one.wrong)}" for rank, one in enumerate(seen) if one.wrong]
    if wrong:
        raise WrongResult(f"long: {problem.kind}, {problem.tokens} tokens: {'. '.join(wrong)}")
    return {name: max(one.ratios[name] for one in seen) for name in QUANTITIES}
