"""Which methods are timed for each workload, and the rows of the record that come of it.

For every size: what limits any implementation (one GPU with the whole sequence, the kernels alone), ring_attention with
every exchange, with and without its messages, and on request other people's methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from verification.benchmarks import baselines, ours, packed_peers, peer_rings, published
from verification.benchmarks.baselines import Impossible
from verification.benchmarks.contender import PASSES, Contender, Inputs
from verification.benchmarks.longest import longest
from verification.benchmarks.options import Options
from verification.benchmarks.rank_group import Failed, Lost, RankGroup
from verification.benchmarks.results import BenchRecord
from verification.benchmarks.timing import captured, measured, peak_beyond
from verification.benchmarks.workload import Workload
from verification.wording import counted

Times = dict[tuple[str, bool], float]  # (pass, whether from a graph) -> milliseconds
SEED = 1
OURS, SILENT = "ring_attention", "ring_attention without messages"
WITH_KERNELS = ("dense", "longnet")  # sections in which the kernels alone are timed
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
    """One run. Every rank times the same contenders in the same order."""

    def __init__(self, ranks: RankGroup, options: Options, record: BenchRecord) -> None:
        self.ranks, self.options, self.record = ranks, options, record

    def dense(self) -> None:
        for tokens in self.options.tokens:
            self._measure(Section("dense", self.options.workload("dense", tokens, self.ranks.world)))

    def longnet(self) -> None:
        for tokens in self.options.tokens:
            self._measure(Section("longnet", self.options.workload("longnet", tokens, self.ranks.world)))

    def packed(self) -> None:
        for tokens in self.options.tokens:
            for mean in self.options.mean_lengths:
                multiple = 2 * self.ranks.world if self.options.divisible else 1
                workload = Workload.packed(tokens, self.ranks.world, self.options.shape, mean, multiple)
                self._measure(Section("packed", workload, {"mean_length": mean, "multiple": multiple}))

    def window(self) -> None:
        for tokens in self.options.tokens:
            for window in self.options.windows:
                workload = Workload.windowed(tokens, self.ranks.world, self.options.shape, window)
                self._measure(Section("window", workload, {"window": window}))

    def reach(self) -> None:
        """The longest shards; the records call this section "reach"."""
        for pattern in ("dense", "longnet"):
            for exchange in self.options.exchanges:
                row = longest(self.ranks, pattern, exchange, self.options)
                self.record.add(section="reach", pattern=pattern, world=self.ranks.world, exchange=exchange, **row)

    def _measure(self, section: Section) -> None:
        self.ranks.connect()
        section.whole = self._timed(section, section.row(WHOLE), self._whole(section))
        if section.name in WITH_KERNELS:
            section.kernels = self._timed(section, section.row(KERNELS), self._kernels(section))
        for exchange in self.options.exchanges:
            self._ours(section, exchange)
        if self.options.peers:
            for method, contender in self._others(section):
                self._timed(section, section.row(method), contender)

    # --- contenders ---------------------------------------------------------------------------------------------------

    def _inputs(self, workload: Workload) -> Inputs:
        return workload.draw(self.ranks.device, SEED + self.ranks.rank, workload.layout.counts[self.ranks.rank])

    @contextmanager
    def _whole(self, section: Section) -> Iterator[Contender]:
        total = section.workload.total
        if section.name == "dense":
            if total > self.options.whole_limit:
                raise Impossible(
                    f"{total} tokens are more than --whole-limit {self.options.whole_limit}, so there is no efficiency"
                )
            yield baselines.whole(section.workload, self.ranks.device, SEED)
        elif section.name in ("packed", "window"):
            yield baselines.whole_by_flash(section.workload, self.ranks.device, SEED)
        else:
            alone = self.options.workload(section.name, total, 1)
            inputs = alone.draw(self.ranks.device, SEED)
            yield published.longnet_kernels(alone, inputs, 0)

    @contextmanager
    def _kernels(self, section: Section) -> Iterator[Contender]:
        make = baselines.zigzag_kernels if section.name == "dense" else published.longnet_kernels
        yield make(section.workload, self._inputs(section.workload), self.ranks.rank)

    def _others(self, section: Section) -> Iterator[tuple[str, AbstractContextManager[Contender]]]:
        workload, inputs = section.workload, self._inputs(section.workload)
        if section.name == "dense":
            yield "all-to-all (Ulysses)", _made(partial(baselines.all_to_all, workload, inputs))
            yield "ring-flash-attn zigzag", peer_rings.zigzag(workload, inputs)
            for rotation in peer_rings.ROTATIONS:
                yield f"torch context_parallel, {rotation}", peer_rings.context_parallel(workload, inputs, rotation)
        elif section.name in ("packed", "window"):
            even = workload.draw(self.ranks.device, SEED + self.ranks.rank)
            for heads in sorted({1, workload.shape.kv}):
                method = f"ring-flash-attn llama3, {counted(heads, 'head')} at a time"
                yield method, packed_peers.llama3(workload, even, self.ranks.rank, heads)
            for ring in packed_peers.RINGS if section.name == "packed" else ():
                yield f"ring-flash-attn {ring}, by document", packed_peers.by_document(workload, even, ring)
        else:
            yield "LongNet as published", _made(partial(published.longnet, workload, inputs, self.ranks.rank))

    def _ours(self, section: Section, exchange: str) -> None:
        """The call without its messages first: the rows of the call itself are compared with it."""
        options, workload = self.options, section.workload
        inputs = self._inputs(workload)
        make = partial(ours.ring, workload, inputs, exchange, options.kernel, options.bucket)
        silent = partial(
            ours.without_messages, workload, inputs, self.ranks.rank, exchange, options.kernel, options.bucket
        )
        section.silent = self._timed(section, section.row(SILENT, exchange), _made(silent))
        row = section.row(OURS, exchange)
        self._timed(section, row, nullcontext(make(check=True)))
        if options.graph:
            self._timed(section, row, nullcontext(make(check=False)))
        section.silent = {}

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _timed(self, section: Section, row: dict[str, Any], made: AbstractContextManager[Contender]) -> Times:
        """Adds a row for each pass of a contender; or one that says why the contender cannot take this workload."""
        times: Times = {}
        try:
            with self._entered(made) as contender:
                for number, (name, call) in enumerate(contender.passes()):
                    for graph in self._graphs(contender, row):
                        one = {**row, "pass": name, "graph": graph}
                        ms = self._one(section, one, contender, number, call)
                        if ms is not None:
                            times[name, graph] = ms
                del contender, call  # with all that they hold, before memory is given back
        except (Impossible, Failed) as reason:
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
                except Impossible as reason:
                    return str(reason)
                return None

            reasons = [reason for reason in self.ranks.attempt(enter) if reason is not None]
            if reasons:
                raise Impossible(reasons[0])
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
                timing = measured(self.ranks, timed, self.options.repeats)
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
    yield make()
