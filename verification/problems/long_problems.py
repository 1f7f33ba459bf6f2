"""Long problems, judged on the ranks: each computes exact results and bounds on its own device, by
`reference.fast_oracle` in blocks of rows.

Only error texts and ratios travel to rank 0. If all rows are too much work, some are sampled: `out`, `lse` and `dq` are
checked on those, and `dout` is zero on all others. Then `dk` and `dv` of every key are exactly the contributions of the
sampled rows, and `dq` is exactly zero elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference import validators
from reference.fast_oracle import QUANTITIES, Expectation, Inputs, evaluate
from reference.pattern import Pattern
from reference.roundoff import Arithmetic
from ring.comm.transport import Transport
from verification.case import Case
from verification.case_line import read_case_line
from verification.check.expectation import arithmetic_of
from verification.failures import WrongResult
from verification.problems.links import finish
from verification.problems.longnet import longnet, make_case
from verification.run.layouts import layout_of
from verification.run.memory_meter import process_peak
from verification.run.rank import CallResult, rank_device, repeats, run_attention, same_bits, shards
from verification.run.second_run import sums_in_fixed_order
from verification.saved_fields import SavedFields, checked_by, choice, integer

TITLE = "long problems"
HEADS, KV_HEADS = 4, 2
MIN_TOKENS = 64  # tokens: with fewer, the smallest segment would be shorter than its dilated grid
KINDS = {  # name -> (dtype, exchange, True for LongNet's pattern, False for dense)
    "dense bfloat16": ("bfloat16", "ring", False),
    "dense float32": ("float32", "direct", False),
    "LongNet bfloat16": ("bfloat16", "direct", True),
    "LongNet float32": ("float32", "ring", True),
}
OWN = "own"
# Number of scores that are computed in a few seconds, with their bounds.
WHOLE = {"cuda": 2**36, "cpu": 2**26}
SAMPLED = 256  # rows of a problem with more scores


@dataclass(frozen=True)
class LongProblem(SavedFields):
    """A long problem. kind: a name in KINDS, or OWN with a Case of the user's own in `line` (`verification.case_line`).
    Raises ValueError for a field that is not allowed."""

    world: int = field(metadata=integer(1, 2**16))
    tokens: int = field(metadata=integer(1))
    kind: str = field(metadata=choice(*KINDS, OWN))
    seed: int = field(default=0, metadata=integer(0))
    line: str = field(default="", metadata=checked_by(validators.text))

    @classmethod
    def own(cls, world: int, line: str) -> LongProblem:
        """Return the problem of a Case written in a line, on that many ranks. Raises ValueError."""
        case = read_case_line(line if "world=" in line else f"world={world} {line}")
        if case.through_lse or case.world != world or case.sinks is not None:
            raise ValueError(
                f"world is {case.world}, lse is {case.lse!r}, sinks is {case.sinks!r}; they must be {world}, 'unused' "
                "or 'returned', None"
            )
        return cls(world, case.tokens, OWN, case.seed, line)

    def __post_init__(self) -> None:
        super().__post_init__()
        validators.integer("tokens", self.tokens, 1 if self.kind == OWN else MIN_TOKENS)

    def case(self, device: str) -> Case:
        """Make its Case. device: "cuda" on GPUs, whose fused kernels have other bounds, otherwise "cpu"."""
        if self.kind == OWN:
            return replace(read_case_line(f"world={self.world} {self.line}"), device=device)
        dtype, exchange, sparse = KINDS[self.kind]
        pattern = longnet(self.tokens, HEADS) if sparse else Pattern.dense(causal=True)
        return make_case(
            self.world, self.tokens, pattern, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype, exchange=exchange,
            seed=self.seed, device=device,
        )  # fmt: skip


def judged_rows(case: Case) -> Tensor:
    """Ascending positions of the rows to judge on the Case's type of device: all, or SAMPLED of them.

    Samples are both ends of the sequence and of each range of a rank, and rows drawn from the Case's seed."""
    if case.heads * case.tokens**2 <= WHOLE[case.device]:
        return torch.arange(case.tokens)
    ends = []
    for positions in case.shards().positions:
        jumps = np.flatnonzero(np.diff(positions) != 1)
        ends += [*positions[:1], *positions[-1:], *positions[jumps], *positions[jumps + 1]]
    required = torch.unique(torch.tensor([0, case.tokens - 1, *map(int, ends)]))[:SAMPLED]
    others = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(case.seed))
    others = others[~torch.isin(others, required)][: SAMPLED - len(required)]
    return torch.cat((required, others)).sort().values


@dataclass(frozen=True)
class Judgement:
    """The verdict of one rank."""

    rows: int  # number of rows judged
    ratios: dict[str, float]  # worst error / bound, by quantity
    wrong: tuple[str, ...]  # errors, in words
    seconds: float  # of forward and backward with a cached plan
    bytes: int  # peak memory in use, of the GPU or else of the process


Attend = Callable[[Transport, Case, tuple[Tensor, ...]], CallResult]


def judge(
    transport: Transport,
    case: Case,
    attend: Attend = run_attention,
    arithmetic: Callable[[Case], Arithmetic] = arithmetic_of,
) -> Judgement:
    """Task: run forward and backward on this rank's shards, and compare with exact results of its own device.

    Repeats with deterministic kernels, since at this length the fastest ones need not give the same bits again.
    attend: forward and backward of the attention under test. arithmetic: of which its bounds follow."""
    rows = judged_rows(case)
    q, k, v, dout, dlse = case.tensors()
    others = torch.ones(case.tokens, dtype=torch.bool).scatter_(0, rows, False)
    dout[:, others] = 0
    inputs = shards(case, transport.rank, (q, k, v, dout, dlse))
    copies = [x.clone() for x in inputs]
    if rank_device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # an earlier problem's exact results took more
    fastest = replace(case, again="no_grad")  # in no fixed order (`Case.fixed_order`)
    attend(transport, fastest, inputs)  # plan and warm up
    finish()
    started = time.perf_counter()
    run = attend(transport, fastest, inputs)
    finish()
    seconds, peak = time.perf_counter() - started, process_peak(rank_device())
    with sums_in_fixed_order():
        once, again = (attend(transport, case, inputs) for _ in range(2))
    wrong = [] if repeats(once, again) else ["the second run differs from the first"]
    if not all(same_bits(x, y) for x, y in zip(inputs, copies, strict=True)):
        wrong.append("an input was changed")
    del once, again, inputs, copies
    positions, whole = layout_of(case).positions(transport.rank), (q, k, v, dout)
    ratios, errors = _compare(case, positions, rows, run.results, whole, arithmetic(case))
    return Judgement(len(rows), ratios, (*wrong, *errors), seconds, peak)


def _compare(
    case: Case, positions: Tensor, rows: Tensor, results: tuple[Tensor | None, ...], whole: tuple[Tensor, ...],
    arithmetic: Arithmetic,
) -> tuple[dict[str, float], list[str]]:  # fmt: skip
    rows, positions = rows.to(rank_device()), positions.to(rank_device())
    expectation: Any = expect_rows(case, rows, tuple(x.to(rank_device()) for x in whole), arithmetic)
    exact, bound = expectation.exact, expectation.bound
    indices = torch.searchsorted(rows, positions).clamp_(max=len(rows) - 1)
    judged = rows[indices] == positions  # mask of this rank's tokens
    ratios, wrong = {}, []
    for name, result in zip(QUANTITIES, results, strict=False):  # without sinks there is no more
        if result is None:  # lse that is not returned, or forward alone
            continue
        x, expected, limit = result.detach().double(), exact[name], bound[name]
        if name == "lse":  # move tokens to dimension 1, as in the other quantities
            x, expected, limit = (t.transpose(1, 2) for t in (x, expected, limit))
        of_keys = name in ("dk", "dv")
        if name == "dq" and bool((x[:, ~judged] != 0).any()):
            wrong.append("dq is not exactly 0 in rows whose incoming gradient is")
        x = x if of_keys else x[:, judged]
        columns = positions if of_keys else indices[judged]
        ratio = _ratio(x, expected[:, columns], limit[:, columns])
        ratios[name] = float(ratio.max()) if ratio.numel() else 0.0
        if not ratios[name] <= 1:
            token = int((ratio.flatten(2).amax(2)[0] == ratio.max()).nonzero()[0])
            position = int(positions[token] if of_keys else positions[judged][token])
            wrong.append(f"{name} of token {position} is off by {ratios[name]:.3g} times its bound")
    return ratios, wrong


def expect_rows(
    case: Case, rows: Tensor, whole: tuple[Tensor, ...], arithmetic: Arithmetic | None = None
) -> Expectation:
    """Exact results and bounds of these query rows against all keys, as tensors on the device of `rows`.
    whole: q, k, v, dout of the whole sequence. arithmetic: None for that of this project's attention."""
    q, k, v, dout = (x.double() for x in whole)
    tensors: dict[str, Any] = {"q": q[:, rows], "k": k, "v": v, "dout": dout[:, rows], "rows": rows}
    inputs = Inputs(**tensors, dlse=None, pattern=case.pattern, scale=case.softmax_scale, softcap=case.softcap)
    return evaluate(inputs, arithmetic_of(case) if arithmetic is None else arithmetic)


def _ratio(x: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """Compute |x - exact| / bound; 0 where both are equal, even infinite; inf where the ratio is NaN."""
    ratio = torch.where(x == exact, 0.0, (x - exact).abs() / bound)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def verdict(problem: LongProblem, judgements: list[Judgement]) -> dict[str, float]:
    """Return the worst ratios of all ranks. Raises WrongResult with the errors of each rank."""
    wrong = [f"on rank {rank}: {'; '.join(x.wrong)}" for rank, x in enumerate(judgements) if x.wrong]
    if wrong:
        raise WrongResult(f"long: {problem.kind}, {problem.tokens} tokens: {'. '.join(wrong)}")
    return {name: max(x.ratios[name] for x in judgements) for name in QUANTITIES if name in judgements[0].ratios}
