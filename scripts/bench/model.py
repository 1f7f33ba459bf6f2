"""Times a training step of a Llama-shaped and a LongNet-shaped model whose sequence is sharded over one host's GPUs.

    torchrun --nproc-per-node=P scripts/bench model [--tokens 512 8Ki ...] [--ways ours zigzag ...]
        [--only eager] [--json FILE] ...

A step is forward and backward in bf16, of 8 layers with 16 heads of 128 on GPUs, in eager mode and with torch.compile;
tokens are those of each GPU. Only the attention differs between the ways: ours, other people's, and one GPU with the
whole sequence, whose time divided by the number of GPUs is the ceiling. Gradients are not reduced. Before it is timed,
each way is compared with an fp32 model that has the oracle's attention. Then the ways are measured by turns. Times of
one section (model, mode, tokens) can be compared with each other, times of different runs cannot. `--device cpu` tries
it out over gloo, with tiny sizes.

With --recompute: the same Llama under FSDP2 instead, with ours only, with layers computed again or not. A step then has
the reduction of gradients, too, and tokens are those of the whole sequence.

Exit status: 0 measured; 1 a way computed something else; 2 the run could not be carried out, or not to its end (the
file has what was measured before). torchrun gives its own, 1, for any that is not 0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.command import BenchRecord, Parser, check_place, columns, measured_on_ranks, positive, tokens
from bench.rank_group import Failed, Lost, RankGroup
from bench.step_models import KINDS, SHAPES, StepLayer, made
from bench.step_run import Exact, Stepper, StepTime, Turns, Wrong, by_turns, step
from bench.step_ways import ALONE, MEANING, OURS, PEERS, UNCHECKED, StepProblem, Way, names_of, ring_attend, way_of
from bench.workload import Unsupported, named
from ring import Layout
from ring.nn import ContextParallel, shard_batch, token_mean
from ring.nn.frameworks import fsdp, recompute

MODES = ("eager", "compiled")
BACKENDS = {"cuda": "inductor", "cpu": "aot_eager"}  # C++ for the processor takes minutes to compile
GRAPHS = 64  # of one function: each way, and each part between two breaks, has its own
RECOMPUTED = ("none", "all", "attention-kept")  # which layers are computed again
TOKENS = {"cuda": (512, 2 * 2**10, 8 * 2**10, 32 * 2**10), "cpu": (32, 64)}
RECOMPUTED_TOKENS = {"cuda": (16 * 2**10, 64 * 2**10), "cpu": (256,)}
# Times are milliseconds: the median of a round's steps on the slowest rank, then the median of the rounds.
STEP_COLUMNS = {
    "model": "llama or longnet: what it is shaped like",
    "mode": "eager or compiled: torch.compile, in one graph for ring_attention, with breaks where others need them",
    "tokens": "of each rank",
    "way": "; ".join(f"{name}: {meaning}" for name, meaning in MEANING.items()),
    "ms": "a step, forward and backward, between two CUDA events; gradients are not reduced",
    "wall_ms": "until the GPU is done",
    "host_ms": "until the host has launched all",
    "rounds": "these three in each round; in a round every way has its turn",
    "warmup": "steps before the first round",
    "steps": "of a way in a round",
    "peak_bytes": "peak of torch's allocator in a step on the fullest rank, parameters included",
    "efficiency": "(ms of one GPU with the whole sequence) / GPUs / ms: 1 is the ceiling, a perfect division",
    "best_peer": "of ours: the fastest of other people's ways",
    "of_best_peer": "of ours: ms / (ms of that one)",
    "loss": "of the first step: the mean over all tokens",
    "losses_off": "at the smallest size: norm of the difference of all tokens' losses from those of an fp32 model with "
    "the oracle's attention, / their norm",
    "gradients_off": "the same of all parameters' gradients, summed over ranks",
    "rounding_losses": "the same of one GPU, eagerly: how far rounding alone is off",
    "rounding_gradients": "likewise",
    "first_seconds": "of the first step; compiled: compilation",
    "left_out": "why it was not tried here",
    "error": "the error with which it failed",
    "wrong": "what it computed instead; it is then not timed",
}
TITLE = (
    f"{'model':8} {'mode':8} {'tokens':>6} {'way':16} {'ms':>9} {'wall':>9} {'host':>9} {'GiB':>6} {'effic.':>6} "
    "of best peer"
)


def table_line(row: dict[str, Any]) -> str:
    """A row under TITLE."""
    start = f"{row['model']:8} {row['mode']:8} {named(row['tokens']):>6} {row.get('way', ''):16}"
    for reason in ("left_out", "error", "wrong"):
        if reason in row:
            return f"{start} {reason.replace('_', ' ')}: {row[reason]}"
    peak = row["peak_bytes"]
    times = " ".join(f"{row[name]:9.3f}" for name in ("ms", "wall_ms", "host_ms"))
    share = f"{row['efficiency']:6.2f}" if "efficiency" in row else " " * 6
    ratio = f" {row['of_best_peer']:6.3f} of {row['best_peer']}" if "best_peer" in row else ""
    return f"{start} {times} {'-' if peak is None else f'{peak / 2**30:.2f}':>6} {share}{ratio}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("model", __doc__, columns(STEP_COLUMNS))
    parser.on_ranks()
    add = parser.add_argument
    add("--models", choices=KINDS, nargs="+", default=list(KINDS), help="(default: both)")
    add("--ways", choices=MEANING, nargs="+", default=list(MEANING), metavar="WAY", help=f"of {', '.join(MEANING)} "
        "(default: all)")  # fmt: skip
    add("--only", choices=MODES, help="(default: eager, then compiled)")
    add("--tokens", type=tokens, nargs="+", metavar="N", help="(default: 512 2Ki 8Ki 32Ki; with --recompute 16Ki 64Ki)")
    add("--warmup", type=positive, default=8, metavar="N", help="steps; 3 from 32Ki tokens (default: 8)")
    add("--rounds", type=positive, default=3, metavar="N", help="in each, every way has its turn (default: 3)")
    add("--steps", type=positive, default=5, metavar="N", help="of a turn; 3 from 32Ki tokens (default: 5)")
    add("--minutes", type=float, default=9.0, metavar="M", help="after which no section begins (default: 9)")
    add("--recompute", choices=RECOMPUTED, nargs="+", help="under FSDP2: which layers are computed again")
    add("--compare", action="store_true", help="with --recompute: compare the loss with that of one GPU")
    given = parser.parsed(arguments)
    given.tokens = given.tokens or (RECOMPUTED_TOKENS if given.recompute else TOKENS)[given.device]
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """0 measured, 1 a way computed something else; SystemExit of 2: not measured, or not to the end."""
    given = parsed(arguments)
    check_place(given.device)

    def measure(ranks: RankGroup) -> list[str]:
        shape = asdict(SHAPES[given.device])
        if given.recompute:
            measure_recomputed(ranks, BenchRecord(ranks, given.json, shape=shape), given)
            return []
        if ranks.rank == 0:
            print(TITLE, flush=True)
        return measure_ways(ranks, BenchRecord(ranks, given.json, table_line, shape=shape), given)

    return measured_on_ranks(given.device, measure)


# --- ways -------------------------------------------------------------------------------------------------------------


def measure_ways(ranks: RankGroup, record: BenchRecord, given: argparse.Namespace) -> list[str]:
    """Adds the rows of each model in each mode at each size. Every rank makes the same steps in the same order.
    Returns what computed something else, and by how much; it is not timed at greater sizes."""
    wrong: dict[tuple[str, str, str], str] = {}
    began = time.monotonic()
    with torch._dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
        for mode in (given.only,) if given.only else MODES:
            for kind in given.models:
                for size in sorted(given.tokens):
                    head = {"model": kind, "mode": mode, "tokens": size}
                    minutes = max(ranks.gathered((time.monotonic() - began) / 60))
                    if minutes > given.minutes:
                        record.add(**head, left_out=f"the run had taken {minutes:.1f} minutes")
                        continue
                    before = {way: reason for (*where, way), reason in wrong.items() if where == [kind, mode]}
                    for way, row in StepSection(ranks, kind, mode, size, given).rows(before).items():
                        record.add(**head, way=way, **row)
                        if "wrong" in row:
                            wrong[kind, mode, way] = row["wrong"]
                    torch._dynamo.reset()  # with all that graphs hold
                    if ranks.device.type == "cuda":
                        torch.cuda.empty_cache()
    return [f"{way} of {kind}, {mode}: {reason}" for (kind, mode, way), reason in wrong.items()]


class StepSection:
    """The ways of one model in one mode at one size, which share its parameters.

    A way that cannot run has a row that says why; one that computes something else has a row, and is not timed.
    """

    def __init__(self, ranks: RankGroup, kind: str, mode: str, size: int, given: argparse.Namespace) -> None:
        self.ranks, self.compiled, self.given = ranks, mode == "compiled", given
        self.problem = _problem(kind, size, ranks, ranks.world)
        self.model = made(kind, self.problem.shape, ranks.device, self.problem.workload.dtype)
        self.turns = Turns(given.warmup, given.rounds, given.steps).at(size)

    def rows(self, wrong: dict[str, str]) -> dict[str, dict[str, Any]]:
        """A row for each way. wrong: those that are not timed, since they were wrong at a smaller size, and why.

        Raises Failed, on every rank, for what no single way can help, and Lost where ranks were left waiting.
        """
        found: dict[str, dict[str, Any]] = {name: {"wrong": reason} for name, reason in wrong.items()}
        ready: dict[str, Stepper] = {}
        names = [name for name in names_of(self.problem.kind) if name in self.given.ways and name not in wrong]
        try:
            # At the smallest size only: it is dense.
            smallest = self.problem.tokens == min(self.given.tokens)
            exact = Exact(self.ranks, self.model, self.problem) if smallest else None
        except Wrong as reason:  # of what all ways are compared with
            return {name: {"wrong": str(reason)} for name in names}
        for name in names:
            try:
                way = way_of(name, self.problem)
            except Unsupported as reason:
                found[name] = {"left_out": str(reason)}
                continue
            try:
                found[name], ready[name] = self._begun(way, exact)
            except Wrong as reason:
                found[name] = {"wrong": str(reason)}
            except Failed as failure:
                found[name] = {"error": str(failure)}
                if not way.alone and (failure.memory or not failure.everywhere):
                    raise Lost(f"{name} with {self.problem.tokens} tokens a rank: {failure}") from failure
            self.model.zero_grad()
        del exact  # before memory is looked at
        for name, stepper in ready.items():
            stepper.turn(self.ranks, max(1, self.turns.warmup - 1))
            found[name]["peak_bytes"] = stepper.peak(self.ranks)
        for name, rounds in by_turns(self.ranks, ready, self.turns).items():
            found[name] |= asdict(StepTime.each(statistics.median, rounds))
            found[name] |= {"rounds": [asdict(one) for one in rounds]}
            found[name] |= {"warmup": self.turns.warmup, "steps": self.turns.steps}
        compare(found, self.problem)
        return found

    def _begun(self, way: Way, exact: Exact | None) -> tuple[dict[str, Any], Stepper]:
        """The way's first step, in which it is compiled, and the check. Raises Failed and Wrong, on every rank."""
        run: Any = self.model
        if self.compiled:
            backend = BACKENDS[self.ranks.device.type]
            run = torch.compile(self.model, fullgraph=way.whole, dynamic=False, backend=backend)
        losses: list[Tensor] = []

        def first() -> tuple[float, float]:
            started = time.perf_counter()
            with way.inside():
                losses.append(step(run, way))
            return losses[0].double().sum().item(), time.perf_counter() - started

        everyone = self.ranks.attempt(first)
        total = everyone[0][0] if way.alone else sum(own for own, _ in everyone)
        row: dict[str, Any] = {"loss": total / (way.context.layout.n - 1)}
        row["first_seconds"] = max(seconds for _, seconds in everyone)
        if exact is not None:
            off = exact.off(losses[0], self.model, way)
            row |= {"losses_off": off.losses, "gradients_off": off.gradients}
            row |= {"rounding_losses": exact.rounding.losses, "rounding_gradients": exact.rounding.gradients}
        return row, Stepper(lambda: step(run, way), way.inside, self.model.zero_grad)


def compare(rows: dict[str, dict[str, Any]], problem: StepProblem) -> None:
    """Adds what follows from several rows: the ceiling, and ours beside the fastest of the peers."""
    timed = {name: row for name, row in rows.items() if "ms" in row}
    peers = [name for name in PEERS[problem.kind] if name in timed]
    best = min(peers, key=lambda name: float(timed[name]["ms"]), default=None)
    for name, row in timed.items():
        if ALONE in timed:
            row["efficiency"] = timed[ALONE]["ms"] / problem.world / row["ms"]
        if name in (OURS, UNCHECKED) and best is not None:
            row |= {"best_peer": best, "of_best_peer": row["ms"] / timed[best]["ms"]}


def _problem(kind: str, size: int, ranks: RankGroup, world: int) -> StepProblem:
    """size: tokens of each of `world` ranks."""
    return StepProblem(kind, SHAPES[ranks.device.type], size, ranks.rank, world, ranks.device)


# --- recomputation under FSDP2 ----------------------------------------------------------------------------------------


def measure_recomputed(ranks: RankGroup, record: BenchRecord, given: argparse.Namespace) -> None:
    """Adds a row for each number of tokens, of the whole sequence, and each of RECOMPUTED that is asked for."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("context",))
    for total in given.tokens:
        alone = loss_alone(_problem("llama", total, ranks, 1)) if given.compare and ranks.rank == 0 else None
        for again in given.recompute:
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            problem = _problem("llama", total // ranks.world, ranks, ranks.world)
            row = _recomputed(problem, again, mesh, given.steps)
            if alone is not None:
                row |= {"loss_of_one_gpu": alone, "relative_difference": abs(row["loss"] - alone) / alone}
            record.add(**row)


def _recomputed(problem: StepProblem, again: str, mesh: DeviceMesh, steps: int) -> dict[str, Any]:
    """The median of `steps` steps after two more, on the slowest rank: forward, backward and the reduction of
    gradients, in bf16 with fp32 sums."""
    device, total = problem.device, problem.tokens * problem.world
    model = made("llama", problem.shape, device, torch.float32)
    if again != "none":
        recompute.wrap(model, StepLayer, keep_attention=again == "attention-kept")
    fsdp.shard(model, mesh, StepLayer, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    context = ContextParallel(Layout.zigzag(total, problem.world), mesh)
    batch = shard_batch(context, *problem.whole())
    assert batch.labels is not None
    attend = ring_attend(context, problem.workload)
    times, losses = [], []
    for _ in range(steps + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = token_mean(model(batch.tokens, batch.labels, context, attend), batch.labels, mesh)
        loss.backward()
        losses.append(loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
        model.zero_grad()
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"tokens": total, "recompute": again, "ms": slowest.item(), "loss": losses[0], "peak_bytes": peak}


@torch.no_grad()
def loss_alone(problem: StepProblem) -> float:
    """The loss of one GPU with the whole sequence, its parameters in bf16 as FSDP's policy has them."""
    model = made("llama", problem.shape, problem.device, torch.bfloat16)
    way = way_of(ALONE, problem)
    with way.inside():
        losses = model(way.batch.tokens, way.batch.labels, way.context, way.attend)
    return (losses.double().sum() / (problem.tokens - 1)).item()
