"""What is measured beside what: for every size the ceilings, the ring with every exchange, and what else there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from verification.benchmarks import baselines, ours, published
from verification.benchmarks import peer_rings as peers
from verification.benchmarks.baselines import Impossible
from verification.benchmarks.contender import PASSES, Contender
from verification.benchmarks.longest import reach
from verification.benchmarks.ranks import Failed, Lost, Ranks
from verification.benchmarks.results import Record
from verification.benchmarks.settings import RATES, SEGMENTS, Heads, Problem
from verification.benchmarks.timing import Repeats, captured, measured, peak_beyond

Times = dict[tuple[str, bool], float]  # (pass, whether from a graph) -> milliseconds
SEED = 1
OURS, SILENT = "ring_attention", "ring_attention without messages"
WHOLE, KERNELS = "one GPU, whole sequence", "kernels alone"


@dataclass(frozen=True)
class Options:
    """What the command line chose. whole_limit: the longest sequence, in tokens, that one GPU is given whole; a dense
    one takes as long as its square. longnet_heads: LongNet's own, which has as many key/value heads as query heads."""

    tokens: tuple[int, ...]
    exchanges: tuple[str, ...] = ("direct", "ring", "gather")
    kernel: str = "auto"
    bucket: int | None = None
    graph: bool = False
    peers: bool = False
    heads: Heads = Heads()
    longnet_heads: Heads = Heads(kv=32)
    segments: tuple[int, ...] = SEGMENTS
    rates: tuple[int, ...] = RATES
    repeats: Repeats = Repeats()
    whole_limit: int = 256 * 2**10
    reach_limit: int = 4 * 2**20
    reach_seconds: float = 120.0

    def problem(self, name: str, tokens: int, world: int) -> Problem:
        if name == "dense":
            return Problem.dense(tokens, world, self.heads)
        return Problem.longnet(tokens, world, self.longnet_heads, self.segments, self.rates)


@dataclass
class Found:
    """Times of: one GPU with the whole sequence, the kernels alone, the call without its messages."""

    whole: Times = field(default_factory=dict)
    kernels: Times = field(default_factory=dict)
    silent: Times = field(default_factory=dict)


class Bench:
    """One run. Every rank walks through the same contenders in the same order."""

    def __init__(self, ranks: Ranks, options: Options, record: Record) -> None:
        self.ranks, self.options, self.record = ranks, options, record

    def dense(self) -> None:
        for tokens in self.options.tokens:
            self._section("dense", self.options.problem("dense", tokens, self.ranks.world))

    def longnet(self) -> None:
        for tokens in self.options.tokens:
            self._section("longnet", self.options.problem("longnet", tokens, self.ranks.world))

    def reach(self) -> None:
        """The longest shards, in processes of their own."""
        for name in ("dense", "longnet"):
            for exchange in self.options.exchanges:
                row = reach(self.ranks, self.options.problem(name, 1, self.ranks.world), name, exchange, self.options)
                self.record.add(section="reach", pattern=name, world=self.ranks.world, exchange=exchange, **row)

    def _section(self, name: str, problem: Problem) -> None:
        self.ranks.connect()
        found, base = Found(), {"section": name, "tokens": problem.tokens, "world": problem.world}
        base["kv_heads"] = problem.heads.kv
        found.whole = self._timed({**base, "method": WHOLE}, problem, found, self._whole(name, problem))
        found.kernels = self._timed({**base, "method": KERNELS}, problem, found, self._kernels(name, problem))
        for exchange in self.options.exchanges:
            self._ours({**base, "exchange": exchange}, problem, found, exchange)
        if self.options.peers:
            for method, contender in self._others(name, problem):
                self._timed({**base, "method": method}, problem, found, contender)

    # --- contenders ---------------------------------------------------------------------------------------------------

    def _inputs(self, problem: Problem) -> Any:
        return problem.draw(self.ranks.device, SEED + self.ranks.rank)

    @contextmanager
    def _whole(self, name: str, problem: Problem) -> Iterator[Contender]:
        if name == "dense":
            if problem.total > self.options.whole_limit:
                raise Impossible(
                    f"{problem.total} tokens are more than --whole-limit {self.options.whole_limit}, so there is no "
                    "efficiency"
                )
            yield baselines.whole(problem, self.ranks.device, SEED)
        else:
            alone = self.options.problem(name, problem.total, 1)
            inputs = alone.draw(self.ranks.device, SEED)
            yield published.longnet_kernels(alone, inputs, 0)

    @contextmanager
    def _kernels(self, name: str, problem: Problem) -> Iterator[Contender]:
        inputs, rank = self._inputs(problem), self.ranks.rank
        if name == "dense":
            yield baselines.zigzag_kernels(problem, inputs, rank)
        else:
            yield published.longnet_kernels(problem, inputs, rank)

    def _others(self, name: str, problem: Problem) -> Iterator[tuple[str, AbstractContextManager[Contender]]]:
        inputs = self._inputs(problem)
        if name == "dense":
            yield "all-to-all (Ulysses)", _made(partial(baselines.all_to_all, problem, inputs))
            yield "ring-flash-attn zigzag", peers.zigzag(problem, inputs)
            for rotation in peers.ROTATIONS:
                yield f"torch context_parallel, {rotation}", peers.context_parallel(problem, inputs, rotation)
        else:
            yield "LongNet as published", _made(partial(published.longnet, problem, inputs, self.ranks.rank))

    def _ours(self, base: dict[str, Any], problem: Problem, found: Found, exchange: str) -> None:
        options, inputs = self.options, self._inputs(problem)
        make = partial(ours.ring, problem, inputs, exchange, options.kernel, options.bucket)
        alone = partial(
            ours.without_messages, problem, inputs, self.ranks.rank, exchange, options.kernel, options.bucket
        )
        found.silent = self._timed({**base, "method": SILENT}, problem, found, _made(alone))
        base["method"] = OURS
        self._timed(base, problem, found, nullcontext(make(check=True)), exchange)
        if options.graph:
            self._timed(base, problem, found, nullcontext(make(check=False)), exchange)
        found.silent = {}

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _timed(
        self, base: dict[str, Any], problem: Problem, found: Found, made: AbstractContextManager[Contender],
        exchange: str | None = None,
    ) -> Times:  # fmt: skip
        """A row for each pass. A contender that cannot be is a row that says why."""
        times: Times = {}
        try:
            with self._entered(made) as contender:
                self._passes(base, problem, found, contender, exchange, times)
                del contender  # with all that it holds, before memory is given back
        except (Impossible, Failed) as reason:
            self.record.add(**base, left_out=str(reason))
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        return times

    @contextmanager
    def _entered(self, made: AbstractContextManager[Contender]) -> Iterator[Contender]:
        """Raises Impossible or Failed, on every rank, where a contender cannot be made on one."""
        with ExitStack() as stack:
            held: list[Contender] = []

            def enter() -> str | None:
                try:
                    held.append(stack.enter_context(made))
                except Impossible as reason:
                    return str(reason)
                return None

            reasons = [reason for reason in self.ranks.attempt(enter) if reason is not None]
            if reasons:
                raise Impossible(reasons[0])
            yield held.pop()

    def _passes(
        self, base: dict[str, Any], problem: Problem, found: Found, contender: Contender, exchange: str | None,
        times: Times,
    ) -> None:  # fmt: skip
        for number, (name, call) in enumerate(contender.passes()):
            for graph in self._graphs(contender, exchange):
                row = {**base, "pass": name, "graph": graph}
                self._one(row, problem, found, contender, number, call, exchange, times)

    def _graphs(self, contender: Contender, exchange: str | None) -> tuple[bool, ...]:
        if not self.options.graph or not contender.capturable:
            return (False,)
        return (True,) if exchange is not None else (False, True)  # ours without a graph is timed with its checks

    def _one(
        self, row: dict[str, Any], problem: Problem, found: Found, contender: Contender, number: int,
        call: Callable[[], Any], exchange: str | None, times: Times,
    ) -> None:  # fmt: skip
        try:
            with captured(self.ranks, call) if row["graph"] else nullcontext(call) as timed:
                timing = measured(self.ranks, timed, self.options.repeats)
            peak = None
            if exchange is not None and self.ranks.device.type == "cuda" and not row["graph"]:
                peak = peak_beyond(self.ranks, call)
        except Failed as failure:
            self.record.add(**row, error=str(failure))
            if not contender.local and (failure.memory or not failure.everywhere):
                raise Lost(f"{row['method']} of {problem.tokens} tokens a rank: {failure}") from failure
            return
        times[row["pass"], row["graph"]] = timing.ms
        if self.ranks.rank:
            return  # what follows is counted once
        seconds = timing.ms / 1000
        whole = min(
            (found.whole[at] for at in ((row["pass"], False), (row["pass"], True)) if at in found.whole), default=None
        )
        row |= {"ms": timing.ms, "samples": timing.samples, "warmup": timing.warmup}
        row["tflops"] = problem.flops[number] / problem.world / seconds / 1e12
        if whole is not None:
            row["efficiency"] = whole / problem.world / timing.ms
        if exchange is not None:
            row |= self._beside(problem, found, exchange, number, row["graph"], timing.ms)
            row["peak_bytes"] = peak
        self.record.add(**row, note=contender.note or None)

    def _beside(
        self, problem: Problem, found: Found, exchange: str, number: int, graph: bool, ms: float
    ) -> dict[str, Any]:
        """What a time of ours is to be read beside; from graphs where it is."""
        which = PASSES[number], graph
        kernels, silent = found.kernels.get(which), found.silent.get(which)
        bucket = ours.bucket_of(problem, self.options.bucket, self.ranks.device)
        on_gpus = self.ranks.device.type == "cuda"
        return {
            "kernels_alone_ms": kernels,
            "beyond_kernels_ms": None if kernels is None else ms - kernels,
            "exposed_ms": None if silent is None else ms - silent,
            "sent_bytes": problem.sent(exchange, on_gpus)[number],
            "closed_form_bytes": problem.memory(exchange, bucket, on_gpus)[number],
        }


@contextmanager
def _made(make: Callable[[], Contender]) -> Iterator[Contender]:
    yield make()
