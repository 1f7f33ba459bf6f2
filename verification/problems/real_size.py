"""One problem of real size, checked like any example: 12 heads of 64, causal, fp32, in LongNet's proportions
(`verification.problems.longnet`).

Tokens are the words of the standard library's sources, embedded and projected with a fixed seed. The projections of
queries and keys have a common part, so that a word attends to its other occurrences, as in trained heads.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from reference.fast_oracle import evaluate
from ring.comm.transport import Transport, one_sided
from verification.case import Case
from verification.check import properties
from verification.check.checks import costs
from verification.check.expectation import arithmetic_of, inputs_of
from verification.failures import VerificationFailure
from verification.problems.longnet import HEAD_DIM, MIN_TOKENS, longnet, make_case
from verification.record_kinds import Record
from verification.report.counter_example import save_record
from verification.report.report import Report
from verification.run.backends import Backend
from verification.run.memory_meter import Meter, process_peak
from verification.run.observation import Observation
from verification.run.rank import layout_answers, observation_of, run_attention, shards
from verification.saved_fields import SavedFields, integer
from verification.wording import counted

TITLE = "one problem of real size"
HEADS, VOCABULARY = 12, 4096
TOKENS = 8192
MAX_TOKENS = 2**17  # tokens: with more, the oracle would take a day
TIMEOUT = 300.0  # seconds that the ranks may take


@dataclass(frozen=True)
class RealSizeProblem(SavedFields):
    """A problem by its ranks, tokens, and seed of embedding and projections. Raises ValueError for a wrong field."""

    world: int = field(metadata=integer(1, 2**16))
    tokens: int = field(default=TOKENS, metadata=integer(MIN_TOKENS, MAX_TOKENS))
    seed: int = field(default=0, metadata=integer(0, 2**63 - 1))

    def case(self) -> Case:
        return make_case(
            self.world, self.tokens, longnet(self.tokens, HEADS), heads=HEADS, kv_heads=HEADS, dtype="float32",
            exchange="ring", bucket=256, seed=self.seed, measured=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One rank's Observation, wall seconds of a run whose plan is cached, and memory."""

    observation: Observation
    seconds: float
    tensor_bytes: int  # peak of live tensors, inputs and results included; scratch inside torch's kernels is not seen
    resident_bytes: int  # peak resident set of the process, torch itself included


def words(count: int) -> list[int]:
    """Return so many words of the licence and the standard library's sources, as numbers below VOCABULARY."""
    library = Path(os.__file__).parent
    ids: list[int] = []
    for file in (library / "LICENSE.txt", *sorted(library.glob("*.py"))):
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            ids += (zlib.crc32(word.encode()) % VOCABULARY for word in re.findall(r"\w+|[^\w\s]", text))
        if len(ids) >= count:
            return ids[:count]
    raise RuntimeError(f"{library} holds {len(ids)} words of Python source; {count} are needed")


def tensors(problem: RealSizeProblem) -> tuple[Tensor, ...]:
    """Make q, k, v, dout (1, n, 12, 64) and dlse (1, 12, n) of zeros, fp32."""
    width, normal = HEADS * HEAD_DIM, partial(torch.randn, generator=torch.Generator().manual_seed(problem.seed))
    embedding = normal(VOCABULARY, width)
    to_q, to_k, to_v = (normal(width, width) / width**0.5 for _ in range(3))
    to_k = (to_q + to_k) / 2**0.5
    ids = torch.tensor(words(problem.tokens))
    q, k, v = ((embedding @ to)[ids].view(1, -1, HEADS, HEAD_DIM) for to in (to_q, to_k, to_v))
    return q, k, v, normal(*q.shape), torch.zeros(1, HEADS, problem.tokens)


def measured(transport: Transport, case: Case, file: str) -> Measurement:
    """Task: run forward and backward twice on this rank's shards of the tensors in a file; meter the first run."""
    whole = torch.load(file, mmap=True)
    inputs = shards(case, transport.rank, whole)
    del whole
    copies = [x.clone() for x in inputs]
    meter = Meter(case.head_dim)
    for x in inputs:
        meter.count(x)
    run = run_attention(transport, case, inputs, meter=meter)
    started = time.perf_counter()
    again = run_attention(transport, case, inputs)
    seconds = time.perf_counter() - started
    observation = observation_of(layout_answers(case, transport.rank), inputs, copies, run, again)
    observation = replace(observation, one_sided=one_sided(transport))
    return Measurement(observation, seconds, meter.peak, process_peak())


def run(backend: Backend, report: Report, problem: RealSizeProblem, failures: Path) -> None:
    """Check every row and every gradient on the backend's ranks, and report their measurements."""
    case, timeout, started = replace(problem.case(), device=backend.device), backend.timeout, time.perf_counter()
    about = f"{problem.tokens} tokens, {HEADS} heads of {HEAD_DIM}, {counted(problem.world, 'rank')}"
    report.start_world(problem.world, 1, TITLE)
    report.note(f"{TITLE}: {about} ...")
    inputs = tensors(problem)
    backend.timeout = TIMEOUT
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "tensors.pt")
            torch.save(inputs, file)
            backend.submit(measured, case, file)
            expectation = evaluate(inputs_of(case, inputs), arithmetic_of(case))
            costs(case)
            measurements: list[Measurement] = backend.collect()
        ratios = properties.check(case, expectation, [x.observation for x in measurements])
    except VerificationFailure as failure:
        report.end_world(TITLE)
        record = Record("real size", problem.to_dict()).to_dict()
        report.failed(save_record(failure, TITLE, problem.world, record, failures, backend.name))
        return
    finally:
        backend.timeout = timeout
    seconds = time.perf_counter() - started
    report.held(case.dtype, {TITLE: float(np.max(list(ratios.values())))}, seconds)
    report.end_world(TITLE)
    ranks = []
    for x in measurements:
        sent = sum(size for _, size, _ in (*x.observation.sent_forward, *x.observation.sent_backward))
        memory = {"tensor_bytes": x.tensor_bytes, "resident_bytes": x.resident_bytes}
        ranks.append({"seconds": round(x.seconds, 3), "bytes_sent": sent, **memory})
    report.extras["real_size"] = {
        "tokens": problem.tokens, "world": problem.world, "seconds": round(seconds, 3),
        "worst_ratio": max(ratios.values()), "ranks": ranks,
    }  # fmt: skip
    for rank, cost in enumerate(ranks):
        report.detail(f"  rank {rank}: {_in_words(**cost)}")
    most = {name: max(cost[name] for cost in ranks) for name in ranks[0]}
    report.notable.append(f"{TITLE}, {about}: {_in_words(**most)} (the most of any rank)")


def _in_words(seconds: float, bytes_sent: float, tensor_bytes: float, resident_bytes: float) -> str:
    memory = f"{tensor_bytes / 2**20:.1f} MiB in tensors, {resident_bytes / 2**20:.0f} MiB resident"
    return f"forward + backward {seconds:.2f} s, {bytes_sent / 2**20:.1f} MiB sent, {memory}"
