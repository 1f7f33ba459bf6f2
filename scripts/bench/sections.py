"""Which methods are timed for each workload, and the rows of the record that come of it.

For every size: what limits any implementation (one GPU with the whole sequence, the kernels alone), ring_attention with
every exchange, with and without its messages, and on request other people's methods.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench import baselines, ours, peers, published
from bench.command import BenchRecord
from bench.longest import Search, longest
from bench.rank_group import Failed, Lost, RankGroup
from bench.timing import captured, measured, peak_beyond
from bench.workload import PASSES, Contender, Inputs, Unsupported, Workload
from verification.wording import counted

Times = dict[tuple[str, bool], float]  # (pass, whether from a graph) -> milliseconds
SECTIONS = ("dense", "longnet", "packed", "window", "reach")
SEED = 1
OURS, SILENT = "ring_attention", "ring_attention without messages"
WHOLE, KERNELS = "one GPU, whole sequence", "kernels alone"


@dataclass
class Section:
    """One workload while it is measured, and the times that others are compared with: one GPU with the whole sequence,
    the kernels alone, the present exchange's call without its messages."""

    name: str
    workload: Workload
    size: dict[str, int] = field(default_factory=dict)  # a column of its own
    whole: Times = field(default_factory=dict)
    kernels: Times = field(default_factory=dict)
    silent: Times = field(default_factory=dict)

    def row(self, method: str, exchange: str | None = None) -> dict[str, Any]:
        """The columns that say what is timed."""
        one = self.workload
        row: dict[str, Any] = {"section": self.name, "tokens": one.tokens, "world": one.world}
        row |= {"kv_heads": one.shape.kv} | self.size
        return row | ({} if exchange is None else {"exchange": exchange}) | {"method": method}


class Bench:
    """One run. Every rank times the same contenders in the same order. options: as `attention` parses them."""

    def __init__(self, ranks: RankGroup, options: argparse.Namespace, record: BenchRecord) -> None:
        self.ranks, self.options, self.record = ranks, options, record
        segments, rates = tuple(options.segments), tuple(options.rates)
        # Of so many tokens of each rank, on so many ranks.
        self.make: dict[str, Callable[[int, int], Workload]] = {
            "dense": partial(Workload.dense, shape=options.shape),
            "longnet": partial(Workload.longnet, shape=options.longnet_shape, segments=segments, rates=rates),
        }

    def run(self, name: str) -> None:
        """name: of SECTIONS."""
        if name == "reach":
            self._reach()
            return
        for tokens in self.options.tokens:
            for section in self._sections(name, tokens, self.ranks.world, self.options.shape):
                self._measure(section)

    def _sections(self, name: str, tokens: int, world: int, shape: Any) -> Iterator[Section]:
        if name == "packed":
            multiple = 2 * world if self.options.divisible else 1
            for mean in self.options.mean_length:
                workload = Workload.packed(tokens, world, shape, mean, multiple)
                yield Section(name, workload, {"mean_length": mean, "multiple": multiple})
        elif name == "window":
            for window in self.options.window:
                yield Section(name, Workload.windowed(tokens, world, shape, window), {"window": window})
        else:
            yield Section(name, self.make[name](tokens, world))

    def _reach(self) -> None:
        """The longest shards."""
        given = self.options
        for pattern, make in self.make.items():
            for exchange in given.exchange:
                search = Search(
                    make, given.device, exchange, given.kernel, given.bucket, given.tokens[0], given.reach_limit,
                    float(given.reach_seconds),
                )  # fmt: skip
                row = longest(self.ranks, search)
                self.record.add(section="reach", pattern=pattern, world=self.ranks.world, exchange=exchange, **row)

    def _measure(self, section: Section) -> None:
        self.ranks.connect()
        section.whole = self._timed(section, section.row(WHOLE), self._whole(section))
        if section.name in self.make:
            section.kernels = self._timed(section, section.row(KERNELS), self._kernels(section))
        for exchange in self.options.exchange:
            self._ours(section, exchange)
        if self.options.peers:
            for method, contender in self._others(section):
                self._timed(section, section.row(method), contender)

    # --- contenders ---------------------------------------------------------------------------------------------------

    def _inputs(self, workload: Workload) -> Inputs:
        return workload.draw(self.ranks.device, SEED + self.ranks.rank, workload.layout.counts[self.ranks.rank])

    @contextmanager
    def _whole(self, section: Section) -> Iterator[Contender]:
        total, limit = section.workload.total, self.options.whole_limit
        if section.name == "dense":
            if total > limit:
                raise Unsupported(f"{total} tokens are more than --whole-limit {limit}, so there is no efficiency")
            yield baselines.whole(section.workload, self.ranks.device, SEED)
        elif section.name == "longnet":
            alone = self.make["longnet"](total, 1)
            yield published.longnet_kernels(alone, alone.draw(self.ranks.device, SEED), 0)
        else:
            yield baselines.whole_by_flash(section.workload, self.ranks.device, SEED)

    @contextmanager
    def _kernels(self, section: Section) -> Iterator[Contender]:
        make = baselines.zigzag_kernels if section.name == "dense" else published.longnet_kernels
        yield make(section.workload, self._inputs(section.workload), self.ranks.rank)

    def _others(self, section: Section) -> Iterator[tuple[str, AbstractContextManager[Contender]]]:
        workload, inputs = section.workload, self._inputs(section.workload)
        exchanged = partial(Contender.of, inputs=inputs, capturable=True)
        if section.name == "dense":
            yield "all-to-all (Ulysses)", _made(lambda: exchanged(baselines.all_to_all(workload)))
            yield "ring-flash-attn zigzag", peers.zigzag(workload, inputs)
            for rotation in peers.ROTATIONS:
                yield f"torch context_parallel, {rotation}", peers.context_parallel(workload, inputs, rotation)
        elif section.name == "longnet":
            yield "LongNet as published", _made(lambda: exchanged(published.longnet(workload, self.ranks.rank)))
        else:
            even = workload.draw(self.ranks.device, SEED + self.ranks.rank)
            for heads in sorted({1, workload.shape.kv}):
                method = f"ring-flash-attn llama3, {counted(heads, 'head')} at a time"
                yield method, peers.llama3(workload, even, self.ranks.rank, heads)
            for ring in peers.RINGS if section.name == "packed" else ():
                yield f"ring-flash-attn {ring}, by document", peers.by_document(workload, even, ring)

    def _ours(self, section: Section, exchange: str) -> None:
        """The call without its messages first: the rows of the call itself are compared with it."""
        workload, asked = section.workload, (exchange, self.options.kernel, self.options.bucket)
        inputs = self._inputs(workload)
        silent = partial(ours.without_messages, workload, inputs, self.ranks.rank, *asked)
        section.silent = self._timed(section, section.row(SILENT, exchange), _made(silent))
        for check in (True, False) if self.options.graph else (True,):
            contender = ours.ring(workload, inputs, *asked, check=check)
            self._timed(section, section.row(OURS, exchange), nullcontext(contender))
        section.silent = {}

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _timed(self, section: Section, row: dict[str, Any], made: AbstractContextManager[Contender]) -> Times:
        """Adds a row for each pass of a contender; or one that says why the contender cannot take this workload."""
        times: Times = {}
        try:
            with self._entered(made) as contender:
                for number, (name, call) in enumerate(contender.passes):
                    for graph in self._graphs(contender, row):
                        one = {**row, "pass": name, "graph": graph}
                        ms = self._one(section, one, contender, number, call)
                        if ms is not None:
                            times[name, graph] = ms
                del contender, call  # with all that they hold, before memory is given back
        except (Unsupported, Failed) as reason:
            self.record.add(**row, left_out=str(reason))
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
                except Unsupported as reason:
                    return str(reason)
                return None

            reasons = [reason for reason in self.ranks.attempt(enter) if reason is not None]
            if reasons:
                raise Unsupported(reasons[0])
            yield held.pop()

    def _graphs(self, contender: Contender, row: dict[str, Any]) -> tuple[bool, ...]:
        if not self.options.graph or not contender.capturable:
            return (False,)
        return (True,) if row["method"] == OURS else (False, True)  # ours without a graph is timed with its checks

    def _one(
        self, section: Section, row: dict[str, Any], contender: Contender, number: int, call: Callable[[], Any]
    ) -> float | None:
        """Times one pass and adds its row. Returns its milliseconds, None where it failed. Raises Lost where the
        ranks cannot go on."""
        try:
            with captured(self.ranks, call) if row["graph"] else nullcontext(call) as timed:
                timing = measured(self.ranks, timed, self.options.timing)
            peak = None
            if row["method"] == OURS and self.ranks.device.type == "cuda" and not row["graph"]:
                peak = peak_beyond(self.ranks, call)
        except Failed as failure:
            self.record.add(**row, error=str(failure))
            if not contender.local and (failure.memory or not failure.everywhere):
                raise Lost(f"{row['method']} of {section.workload.tokens} tokens a rank: {failure}") from failure
            return None
        if self.ranks.rank:
            return timing.ms  # the counts below are made on one rank
        row |= {"ms": timing.ms, "samples": timing.samples, "warmup": timing.warmup}
        row["tflops"] = section.workload.flops[number] / section.workload.world / timing.ms * 1000 / 1e12
        whole = [section.whole[at] for at in ((row["pass"], False), (row["pass"], True)) if at in section.whole]
        if whole:
            row["efficiency"] = min(whole) / section.workload.world / timing.ms
        if row["method"] == OURS:
            row |= self._compared(section, row, number) | {"peak_bytes": peak}
        self.record.add(**row, note=contender.note or None)
        return timing.ms

    def _compared(self, section: Section, row: dict[str, Any], number: int) -> dict[str, Any]:
        """The times and counts that a time of ring_attention is compared with; from graphs where it is from one."""
        which, workload, exchange = (PASSES[number], row["graph"]), section.workload, row["exchange"]
        kernels, silent = section.kernels.get(which), section.silent.get(which)
        bucket = ours.bucket_of(workload, self.options.bucket, self.ranks.device)
        on_gpus = self.ranks.device.type == "cuda"
        return {
            "kernels_alone_ms": kernels,
            "beyond_kernels_ms": None if kernels is None else row["ms"] - kernels,
            "exposed_ms": None if silent is None else row["ms"] - silent,
            "sent_bytes": workload.sent(exchange, on_gpus)[number],
            "closed_form_bytes": workload.memory(exchange, bucket, on_gpus)[number],
        }


@contextmanager
def _made(make: Callable[[], Contender]) -> Iterator[Contender]:
    """Made when it is entered: what it holds goes with it."""
    yield make()
