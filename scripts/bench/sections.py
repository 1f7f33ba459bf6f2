"""Methods that are timed for each workload, and their rows in the record.

For every size these are the limits of any implementation (one GPU with the whole sequence, the kernels alone);
ring_attention with every exchange, with and without messages; and on request the peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from bench import baselines, fused, ours, peers, published
from bench.command import BenchRecord
from bench.longest import Search, longest
from bench.rank_group import Failed, Lost, RankGroup
from bench.timing import captured, measured, peak_beyond
from bench.workload import PATTERNS, Contender, Inputs, Unsupported, Workload
from verification.wording import counted

SECTIONS = ("dense", "longnet", "packed", "window", "reach")
SEED = 1
OURS, SILENT, BY_HEADS = "ring_attention", "ring_attention without messages", "ring_attention by heads"
WHOLE, KERNELS = "one GPU, whole sequence", "kernels alone"


@dataclass
class Section:
    """One workload. size: additional columns. bucket: the current one."""

    name: str
    workload: Workload
    size: dict[str, int] = field(default_factory=dict)
    bucket: int | None = None

    def row(self, method: str, exchange: str | None = None) -> dict[str, Any]:
        """Return the columns that identify a row."""
        load = self.workload
        row: dict[str, Any] = {"section": self.name, "tokens": load.tokens, "world": load.world}
        row |= {"kv_heads": load.shape.kv, "dims": load.shape.dims} | self.size
        if exchange is not None:
            row |= {"exchange": exchange} | ({} if self.bucket is None else {"bucket": self.bucket})
        return row | {"method": method}


class Bench:
    """One run. Every rank times the same contenders in the same order. options: of `attention`."""

    def __init__(self, ranks: RankGroup, options: argparse.Namespace, record: BenchRecord) -> None:
        self.ranks, self.options, self.record = ranks, options, record
        segments, rates = PATTERNS[options.device]
        # (tokens per rank, ranks) -> workload
        self.make: dict[str, Callable[[int, int], Workload]] = {
            "dense": partial(Workload.dense, shape=options.shape),
            "longnet": partial(Workload.longnet, shape=options.longnet_shape, segments=segments, rates=rates),
        }

    def run(self, name: str) -> None:
        """Time a section. name: of SECTIONS."""
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
        """Search for the longest shards."""
        options = self.options
        for pattern, exchange, bucket in product(self.make, options.exchange, options.bucket):
            search = Search(
                self.make[pattern], options.device, exchange, bucket, options.tokens[0],
                options.reach_limit, float(options.reach_seconds),
            )  # fmt: skip
            row = longest(self.ranks, search) | ({} if bucket is None else {"bucket": bucket})
            self.record.add(section="reach", pattern=pattern, world=self.ranks.world, exchange=exchange, **row)

    def _measure(self, section: Section) -> None:
        self.ranks.connect()
        for kernel in self.options.baseline_kernels:
            with fused.kernel(kernel):
                row = {"kernel": kernel}
                self._timed(section, section.row(WHOLE) | row, self._whole(section))
                if section.name in self.make:
                    self._timed(section, section.row(KERNELS) | row, self._kernels(section))
        for exchange, section.bucket in product(self.options.exchange, self.options.bucket):
            self._ours(section, exchange)
        for kernel in self.options.baseline_kernels if self.options.peers else ():
            with fused.kernel(kernel):
                for method, contender in self._others(section):
                    if kernel == fused.KERNELS[0] or "context_parallel" not in method:  # it has torch's kernels only
                        self._timed(section, section.row(method) | {"kernel": kernel}, contender)

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
            yield "all-to-all (Ulysses)", _deferred(lambda: exchanged(baselines.all_to_all(workload)))
            yield "ring-flash-attn zigzag", peers.zigzag(workload, inputs)
            for rotation in peers.ROTATIONS:
                yield f"torch context_parallel, {rotation}", peers.context_parallel(workload, inputs, rotation)
        elif section.name == "longnet":
            yield "LongNet as published", _deferred(lambda: exchanged(published.longnet(workload, self.ranks.rank)))
        else:
            even = workload.draw(self.ranks.device, SEED + self.ranks.rank)
            for heads in sorted({1, workload.shape.kv}):
                method = f"ring-flash-attn llama3, {counted(heads, 'head')} at a time"
                yield method, peers.llama3(workload, even, self.ranks.rank, heads)
            for ring in peers.RINGS if section.name == "packed" else ():
                yield f"ring-flash-attn {ring}, by document", peers.by_document(workload, even, ring)

    def _ours(self, section: Section, exchange: str) -> None:
        """Time the call without messages, then the call itself, whose rows are compared with the first."""
        workload, settings = section.workload, (exchange, section.bucket)
        inputs = self._inputs(workload)
        silent = partial(ours.without_messages, workload, inputs, self.ranks.rank, *settings)
        self._timed(section, section.row(SILENT, exchange), _deferred(silent))
        for check in (True, False) if self.options.graph else (True,):
            contender = ours.ring(workload, [inputs], *settings, check=check)
            self._timed(section, section.row(OURS, exchange), nullcontext(contender))
        for heads in self.options.heads_a_call:
            row = section.row(BY_HEADS, exchange) | {"heads_a_call": heads}
            self._timed(section, row, _deferred(partial(self._by_heads, workload, heads, *settings)))

    def _by_heads(self, workload: Workload, heads: int, exchange: str, bucket: int | None) -> Contender:
        shape = workload.shape
        share = replace(shape, kv=heads, query=heads * shape.query // shape.kv)
        one = replace(workload, shape=share)
        return ours.ring(one, [self._inputs(one) for _ in range(shape.kv // heads)], exchange, bucket, check=True)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _timed(self, section: Section, row: dict[str, Any], deferred: AbstractContextManager[Contender]) -> None:
        """Add a row for each pass of a contender, or one with the reason why it cannot be timed."""
        try:
            with self._entered(deferred) as contender:
                for number, (name, call) in enumerate(contender.passes):
                    for graph in self._graphs(contender, row):
                        self._time_pass(section, {**row, "pass": name, "graph": graph}, contender, number, call)
                del contender, call  # free their tensors before the cache is emptied
        except (Unsupported, Failed) as reason:
            self.record.add(**row, left_out=str(reason))
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _entered(self, deferred: AbstractContextManager[Contender]) -> Iterator[Contender]:
        """Enter the contender on all ranks. Raises Unsupported or Failed on every rank if it fails on one."""
        with ExitStack() as stack:
            contenders: list[Contender] = []

            def enter() -> str | None:
                try:
                    contenders.append(stack.enter_context(deferred))
                except Unsupported as reason:
                    return str(reason)
                return None

            reasons = [reason for reason in self.ranks.attempt(enter) if reason is not None]
            if reasons:
                raise Unsupported(reasons[0])
            yield contenders.pop()

    def _graphs(self, contender: Contender, row: dict[str, Any]) -> tuple[bool, ...]:
        if not self.options.graph or not contender.capturable:
            return (False,)
        return (True,) if row["method"] == OURS else (False, True)  # without a graph, ours is timed with check=True

    def _time_pass(
        self, section: Section, row: dict[str, Any], contender: Contender, number: int, call: Callable[[], Any]
    ) -> None:
        """Time one pass and add its row. Raises Lost if the ranks cannot go on."""
        try:
            with captured(self.ranks, call) if row["graph"] else nullcontext(call) as timed:
                timing = measured(self.ranks, timed, self.options.timing)
            peak = None
            if row["method"] in (OURS, BY_HEADS) and self.ranks.device.type == "cuda" and not row["graph"]:
                peak = peak_beyond(self.ranks, call)
        except Failed as failure:
            self.record.add(**row, error=str(failure))
            if not contender.local and (failure.memory or not failure.everywhere):
                raise Lost(f"{row['method']} of {section.workload.tokens} tokens a rank: {failure}") from failure
            return
        if self.ranks.rank:
            return  # rank 0 alone counts and records
        row |= {"ms": timing.ms, "samples": timing.samples, "warmup": timing.warmup}
        row["tflops"] = section.workload.flops[number] / section.workload.world / timing.ms * 1000 / 1e12
        whole = self._fastest(section.row(WHOLE) | {"pass": row["pass"]})
        if whole is not None and row["method"] != WHOLE:
            row["efficiency"] = whole / section.workload.world / timing.ms
        if row["method"] == OURS:
            row |= self._compared(section, row, number)
        if row["method"] in (OURS, BY_HEADS):
            row["peak_bytes"] = peak
        self.record.add(**row, note=contender.note or None)

    def _fastest(self, columns: dict[str, Any]) -> float | None:
        """Return the least milliseconds of the rows so far with these columns; None without any."""
        same = (row for row in self.record.rows if columns.items() <= row.items())
        return min((float(row["ms"]) for row in same if "ms" in row), default=None)

    def _compared(self, section: Section, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Return times and counts to compare ring_attention with; a time of a graph with those of graphs."""
        timed, workload, exchange = {"pass": row["pass"], "graph": row["graph"]}, section.workload, row["exchange"]
        kernels = self._fastest(section.row(KERNELS) | timed)
        silent = self._fastest(section.row(SILENT, exchange) | timed)
        bucket = ours.bucket_of(workload, section.bucket, self.ranks.device)
        on_gpus = self.ranks.device.type == "cuda"
        return {
            "kernels_alone_ms": kernels,
            "beyond_kernels_ms": None if kernels is None else row["ms"] - kernels,
            "exposed_ms": None if silent is None else row["ms"] - silent,
            "sent_bytes": workload.sent(exchange, on_gpus)[number],
            "closed_form_bytes": workload.memory(exchange, bucket, on_gpus)[number],
        }


@contextmanager
def _deferred(make: Callable[[], Contender]) -> Iterator[Contender]:
    """Make the contender on entry, so that its memory is freed on exit."""
    yield make()
