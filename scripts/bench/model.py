"""Times a training step of a Llama-shaped and a LongNet-shaped model whose sequence is sharded over one host's GPUs.

    torchrun --nproc-per-node=P scripts/bench model [--tokens 512 8Ki ...] [--ways ours zigzag ...]
        [--only eager] [--json FILE] ...

A step is forward and backward in bf16, of 8 layers with 16 heads of 128 on GPUs, in eager mode and with torch.compile.
Tokens are per GPU. The ways differ only in the attention: ours, peers, and one GPU with the whole sequence, whose time
/ GPUs is the ceiling. Gradients are not reduced. Each way is first compared with an fp32 model that has the oracle's
attention, then all are timed in turn. Compare only times of one section (model, mode, tokens) of the same run.
`--device cpu` is a trial over gloo, with tiny sizes.

--recompute instead times the same Llama under FSDP2, with ours only, and with or without recomputed layers. A step then
includes the reduction of gradients, and tokens are those of the whole sequence.

Exit status: 0 measured; 1 a way gave wrong results; 2 the run could not start or finish (the file has the rows so far).
torchrun turns any status but 0 into 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.command import BenchRecord, Parser, check_place, columns, measured_on_ranks, stop, tokens
from bench.rank_group import Failed, Lost, RankGroup
from bench.step_models import KINDS, SHAPES, StepLayer, build_model
from bench.step_run import Exact, Stepper, StepTime, Turns, Wrong, by_turns, step
from bench.step_timeline import KINDS as KINDS_OF_WORK
from bench.step_timeline import profiled, timeline
from bench.step_ways import ALONE, EXCHANGES, MEANING, PEERS, StepProblem, Way, names_of, ring_attend, way_of
from bench.workload import Unsupported, named
from ring import Layout
from ring.integrations.wrappers import fsdp, recompute
from ring.nn import ContextParallel, shard_batch, token_mean
from verification.cli.arguments import count

MODES = ("eager", "compiled")
BACKENDS = {"cuda": "inductor", "cpu": "aot_eager"}  # inductor's C++ takes minutes to compile
GRAPHS = 64  # recompilations of one function: one per way and per part between graph breaks
RECOMPUTED = ("none", "all", "attention-kept")  # layers that are recomputed
TOKENS = {"cuda": (512, 2 * 2**10, 8 * 2**10, 32 * 2**10), "cpu": (32, 64)}
RECOMPUTED_TOKENS = {"cuda": (16 * 2**10, 64 * 2**10), "cpu": (256,)}
# Times are milliseconds: the median of a round's steps on the slowest rank, then the median of the rounds.
STEP_COLUMNS = {
    "model": "llama or longnet: its shape",
    "mode": "eager or compiled: by torch.compile, ring_attention as one graph, others with graph breaks if needed",
    "tokens": "of each rank",
    "way": "; ".join(f"{name}: {meaning}" for name, meaning in MEANING.items()),
    "exchange": "of ours",
    "ms": "a step, forward and backward, between two CUDA events; gradients are not reduced",
    "wall_ms": "until the GPU has finished",
    "host_ms": "until the host has launched all kernels",
    "rounds": "these three times of each round; a round has one turn of every way",
    "warmup": "steps before the first round",
    "steps": "steps per turn",
    "peak_bytes": "peak of torch's allocator in a step on the fullest rank, parameters included",
    "efficiency": "(ms of one GPU with the whole sequence, by its faster kernel) / GPUs / ms: 1 is the ceiling, a "
    "perfect division",
    "best_peer": "of ours: the fastest peer",
    "of_best_peer": "of ours: ms / (ms of best_peer)",
    "timeline": "with --timeline, of each rank: milliseconds of a step by kind of work on its GPU: "
    f"{', '.join(KINDS_OF_WORK)}: it computes nothing",
    "new_segments": "with --timeline: times that torch's allocator asks the GPU for memory in a step, most of a rank",
    "loss": "mean loss of the first step over all tokens",
    "losses_off": "at the smallest size: |losses - exact| / |exact|, in norms over all tokens; exact: of an fp32 model "
    "with the oracle's attention",
    "gradients_off": "the same for the gradients of all parameters, summed over ranks",
    "rounding_losses": "the same for one GPU in eager mode: the error of rounding alone",
    "rounding_gradients": "the same for gradients",
    "first_seconds": "time of the first step, with compilation",
    "left_out": "why it was not tried",
    "error": "the error with which it failed",
    "wrong": "the error of a wrong result; it is then not timed",
}
TITLE = (
    f"{'model':8} {'mode':8} {'tokens':>6} {'way':18} {'ms':>9} {'wall':>9} {'host':>9} {'GiB':>6} {'effic.':>6} "
    "of best peer"
)


def table_line(row: dict[str, Any]) -> str:
    """Format a row under TITLE."""
    start = f"{row['model']:8} {row['mode']:8} {named(row['tokens']):>6} {row.get('way', ''):18}"
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
    add("--tokens", type=tokens, nargs="+", metavar="N", help="of a rank; the smallest is compared with a dense "
        "oracle: memory O(tokens^2) (default: 512 2Ki 8Ki 32Ki; with --recompute 16Ki 64Ki)")  # fmt: skip
    add(
        "--warmup",
        type=count,
        default=8,
        metavar="N",
        help="steps before the timing; 3 from 32Ki tokens (default: 8)",
    )
    add("--rounds", type=count, default=3, metavar="N", help="turns of each way (default: 3)")
    add("--steps", type=count, default=5, metavar="N", help="steps per turn; 3 from 32Ki tokens (default: 5)")
    add("--minutes", type=float, default=9.0, metavar="M", help="start no section after M minutes (default: 9)")
    add("--timeline", action="store_true", help="also trace a step of each way: milliseconds by kind of work")
    add("--recompute", choices=RECOMPUTED, nargs="+", help="under FSDP2: layers to recompute")
    add("--compare", action="store_true", help="with --recompute: compare the loss with one GPU's")
    options = parser.parsed(arguments)
    if options.timeline and options.device == "cpu":
        stop("--timeline traces a GPU: leave out --device cpu")
    if options.timeline and options.recompute:
        stop("--timeline traces the ways: leave out --recompute")
    options.tokens = options.tokens or (RECOMPUTED_TOKENS if options.recompute else TOKENS)[options.device]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark: 0 measured, 1 wrong results. Raises SystemExit of 2 if it cannot start or finish."""
    options = parsed(arguments)
    check_place(options.device)

    def measure(ranks: RankGroup) -> list[str]:
        shape = asdict(SHAPES[options.device])
        if options.recompute:
            measure_recomputed(ranks, BenchRecord(ranks, options.json, shape=shape), options)
            return []
        if ranks.rank == 0:
            print(TITLE, flush=True)
        return measure_ways(ranks, BenchRecord(ranks, options.json, table_line, shape=shape), options)

    return measured_on_ranks(options.device, measure)


# --- ways -------------------------------------------------------------------------------------------------------------


def measure_ways(ranks: RankGroup, record: BenchRecord, options: argparse.Namespace) -> list[str]:
    """Add the rows of each model, mode and size. Every rank makes the same steps in the same order. Return a message
    for each way with wrong results, which is not timed at larger sizes."""
    wrong: dict[tuple[str, str, str], str] = {}
    started = time.monotonic()
    with torch._dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
        for mode in (options.only,) if options.only else MODES:
            for kind in options.models:
                for size in sorted(options.tokens):
                    head = {"model": kind, "mode": mode, "tokens": size}
                    minutes = max(ranks.gathered((time.monotonic() - started) / 60))
                    if minutes > options.minutes:
                        record.add(**head, left_out=f"the run had taken {minutes:.1f} minutes")
                        continue
                    before = {way: reason for (*where, way), reason in wrong.items() if where == [kind, mode]}
                    for way, row in StepSection(ranks, kind, mode, size, options).rows(before).items():
                        exchange = {"exchange": EXCHANGES[way]} if way in EXCHANGES else {}
                        record.add(**head, way=way, **exchange, **row)
                        if "wrong" in row:
                            wrong[kind, mode, way] = row["wrong"]
                    torch._dynamo.reset()  # frees the memory of graphs
                    if ranks.device.type == "cuda":
                        torch.cuda.empty_cache()
    return [f"{way} of {kind}, {mode}: {reason}" for (kind, mode, way), reason in wrong.items()]


class StepSection:
    """Ways of one model, mode and size, which share the parameters.

    A way that cannot run has a row with the reason; one with wrong results has a row with the error, and is not timed.
    """

    def __init__(self, ranks: RankGroup, kind: str, mode: str, size: int, options: argparse.Namespace) -> None:
        self.ranks, self.compiled, self.options = ranks, mode == "compiled", options
        self.problem = _problem(kind, size, ranks, ranks.world)
        self.model = build_model(kind, self.problem.shape, ranks.device, self.problem.workload.dtype)
        self.turns = Turns(options.warmup, options.rounds, options.steps).at(size)

    def rows(self, wrong: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Return a row for each way. wrong: ways that failed at a smaller size, and why; they are not timed.

        Raises Failed on every rank if the ways cannot be compared or timed, and Lost if ranks may still be waiting.
        """
        by_way: dict[str, dict[str, Any]] = {name: {"wrong": reason} for name, reason in wrong.items()}
        ready: dict[str, Stepper] = {}
        names = [name for name in names_of(self.problem.kind) if name in self.options.ways and name not in wrong]
        try:
            # The oracle is dense: compare at the smallest size only.
            smallest = self.problem.tokens == min(self.options.tokens)
            exact = Exact(self.ranks, self.model, self.problem) if smallest else None
        except Wrong as reason:  # one GPU itself is wrong
            return {name: {"wrong": str(reason)} for name in names}
        for name in names:
            try:
                way = way_of(name, self.problem)
            except Unsupported as reason:
                by_way[name] = {"left_out": str(reason)}
                continue
            try:
                by_way[name], ready[name] = self._first_step(way, exact)
            except Wrong as reason:
                by_way[name] = {"wrong": str(reason)}
            except Failed as failure:
                by_way[name] = {"error": str(failure)}
                if not way.alone and (failure.memory or not failure.everywhere):
                    raise Lost(f"{name} with {self.problem.tokens} tokens a rank: {failure}") from failure
            self.model.zero_grad()
        del exact  # frees memory before peaks are measured
        for name, stepper in ready.items():
            stepper.turn(self.ranks, max(1, self.turns.warmup - 1))
            by_way[name]["peak_bytes"] = stepper.peak(self.ranks)
            if self.options.timeline:
                by_way[name] |= self._traced(stepper)
        for name, rounds in by_turns(self.ranks, ready, self.turns).items():
            by_way[name] |= asdict(StepTime.each(statistics.median, rounds))
            by_way[name] |= {"rounds": [asdict(one) for one in rounds]}
            by_way[name] |= {"warmup": self.turns.warmup, "steps": self.turns.steps}
        compare(by_way, self.problem)
        return by_way

    def _traced(self, stepper: Stepper) -> dict[str, Any]:
        """Trace a step on every rank, which start it together."""

        def segments() -> int:
            return int(torch.cuda.memory_stats(self.ranks.device)["segment.all.allocated"])

        def own() -> tuple[dict[str, float], int]:
            before = segments()
            with stepper.inside():
                dist.all_reduce(torch.zeros(1, device=self.ranks.device))
                torch.cuda.synchronize(self.ranks.device)
                ms = timeline(profiled(stepper.run))
            stepper.clear()
            return ms, segments() - before

        everyone = self.ranks.attempt(own)
        return {"timeline": [ms for ms, _ in everyone], "new_segments": max(count for _, count in everyone)}

    def _first_step(self, way: Way, exact: Exact | None) -> tuple[dict[str, Any], Stepper]:
        """Compile a way, make its first step and check it. Raises Failed and Wrong on every rank."""
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
        total = everyone[0][0] if way.alone else sum(loss for loss, _ in everyone)
        row: dict[str, Any] = {"loss": total / (way.context.layout.n - 1)}
        row["first_seconds"] = max(seconds for _, seconds in everyone)
        if exact is not None:
            off = exact.off(losses[0], self.model, way)
            row |= {"losses_off": off.losses, "gradients_off": off.gradients}
            row |= {"rounding_losses": exact.rounding.losses, "rounding_gradients": exact.rounding.gradients}
        return row, Stepper(lambda: step(run, way), way.inside, self.model.zero_grad)


def compare(rows: dict[str, dict[str, Any]], problem: StepProblem) -> None:
    """Add columns that compare rows: the efficiency, and ours relative to the fastest peer."""
    timed = {name: row for name, row in rows.items() if "ms" in row}
    peers = [name for name in PEERS[problem.kind] if name in timed]
    best = min(peers, key=lambda name: float(timed[name]["ms"]), default=None)
    whole = min((row["ms"] for name, row in timed.items() if name.startswith(ALONE)), default=None)
    for name, row in timed.items():
        if whole is not None:
            row["efficiency"] = whole / problem.world / row["ms"]
        if name in EXCHANGES and best is not None:
            row |= {"best_peer": best, "of_best_peer": row["ms"] / timed[best]["ms"]}


def _problem(kind: str, size: int, ranks: RankGroup, world: int) -> StepProblem:
    """Make a problem. size: tokens of each of `world` ranks."""
    return StepProblem(kind, SHAPES[ranks.device.type], size, ranks.rank, world, ranks.device)


# --- recomputation under FSDP2 ----------------------------------------------------------------------------------------


def measure_recomputed(ranks: RankGroup, record: BenchRecord, options: argparse.Namespace) -> None:
    """Add a row for each number of tokens of the whole sequence, and each choice of --recompute."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("context",))
    for total in options.tokens:
        alone = loss_alone(_problem("llama", total, ranks, 1)) if options.compare and ranks.rank == 0 else None
        for recomputed in options.recompute:
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            problem = _problem("llama", total // ranks.world, ranks, ranks.world)
            row = _recomputed(ranks, problem, recomputed, mesh, options.steps)
            if alone is not None:
                row |= {"loss_of_one_gpu": alone, "relative_difference": abs(row["loss"] - alone) / alone}
            record.add(**row)


def _recomputed(
    ranks: RankGroup, problem: StepProblem, recomputed: str, mesh: DeviceMesh, steps: int
) -> dict[str, Any]:
    """Time `steps` steps after two of warm-up: forward, backward and the reduction of gradients, in bf16 with fp32
    sums."""
    total = problem.tokens * problem.world
    model = build_model("llama", problem.shape, problem.device, torch.float32)
    if recomputed != "none":
        recompute.wrap(model, StepLayer, keep_attention=recomputed == "attention-kept")
    fsdp.shard(model, mesh, StepLayer, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    context = ContextParallel(Layout.zigzag(total, problem.world), mesh)
    batch = shard_batch(context, *problem.whole())
    assert batch.labels is not None
    labels, attend, losses = batch.labels, ring_attend(context, problem.workload), list[float]()

    def run() -> None:
        loss = token_mean(model(batch.tokens, labels, context, attend), labels, mesh)
        loss.backward()
        losses.append(loss.item())

    stepper = Stepper(run, nullcontext, model.zero_grad)
    stepper.turn(ranks, 2)
    ms, peak = stepper.turn(ranks, steps).wall_ms, stepper.peak(ranks)
    return {"tokens": total, "recompute": recomputed, "ms": ms, "loss": losses[0], "peak_bytes": peak}


@torch.no_grad()
def loss_alone(problem: StepProblem) -> float:
    """Return the loss of one GPU with the whole sequence and bf16 parameters, as in FSDP's policy."""
    model = build_model("llama", problem.shape, problem.device, torch.bfloat16)
    way = way_of(ALONE, problem)
    with way.inside():
        losses = model(way.batch.tokens, way.batch.labels, way.context, way.attend)
    return (losses.double().sum() / (problem.tokens - 1)).item()
