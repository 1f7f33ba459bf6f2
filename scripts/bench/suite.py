"""Measures the speed of the verification on this machine's CPU.

    python scripts/bench verification [--json FILE] [--examples N]    examples per second on gloo, pools, plans
    python scripts/bench simulation [--json FILE] [--examples N]      with simulated ranks, 256 ranks, deadlocks

Compare only numbers of the same run, on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.command import Parser, positive
from reference.pattern import Pattern
from ring.comm.transport import Message
from ring.default_bucket import default_bucket
from ring.layout import Layout
from ring.plan.exchanges import KEY_EXCHANGES
from ring.plan.plan import plan_of
from verification import experiments, whole_file
from verification.case import Case
from verification.check import properties
from verification.failures import Deadlock, RankCrash
from verification.report.report import Report
from verification.run.backends import PRELOAD, Backend, GlooBackend, SimBackend
from verification.run.processes.pool import Pool
from verification.run.rank import observe
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation
from verification.search.search import Search

Check = Callable[[Backend, Case], dict[str, float]]
WORLDS = (2, 4, 8)
MANY, TOKENS = 256, 512
# One rank of an example with processes of its own, for comparison with the pool.
RANK = """
import sys
import torch.distributed as dist
from ring.comm.process_group import ProcessGroupTransport
from verification.case import Case
from verification.run.rank import observe
rank, world, port, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
observe(ProcessGroupTransport(), Case.from_json(text))
dist.destroy_process_group()
"""


def verification(arguments: Sequence[str] | None = None) -> int:
    options = _parsed("verification", arguments, 1000, "timed at two ranks; fewer at more")

    def measured() -> Iterator[tuple[str, Any]]:
        yield "pool_of_8_seconds", pool_times()  # goal of whole_again: 0.5
        rates = {}
        for world in WORLDS:  # goals of "pool" on two cores: 200, 50, 17
            count = max(10, options.examples * 2 // world)
            fast, twice = rate(GlooBackend, world, count), rate(GlooBackend, world, count, experiments.check_case)
            plain, slow = plain_rate(GlooBackend, world, count), spawned_rate(world, 3)
            rates[world] = {"pool": fast, "pool, every pass twice": twice, "pool, plain dense ring": plain}
            rates[world] |= {"spawned": slow, "ratio": fast / slow}
        yield "examples_per_second", rates
        yield "plan_seconds", plan_seconds()  # of 1 Mi tokens on 8 ranks; goal: 0.1

    return _recorded(options.json, measured())


def simulation(arguments: Sequence[str] | None = None) -> int:
    options = _parsed("simulation", arguments, 400, "timed at each world")

    def measured() -> Iterator[tuple[str, Any]]:
        yield "deadlock_of_8_seconds", deadlock_seconds()  # goal: 0.05
        rates = {}
        for world in WORLDS:  # goal of "any" at 4 ranks: 150
            rates[world] = {"any": rate(SimBackend, world, options.examples)}
            rates[world] |= {"plain dense ring": plain_rate(SimBackend, world, options.examples)}
        yield "examples_per_second", rates
        yield "seconds_on_256", many_ranks()  # goal: 30

    return _recorded(options.json, measured())


def _parsed(name: str, arguments: Sequence[str] | None, examples: int, timed: str) -> argparse.Namespace:
    parser = Parser(name, __doc__)
    parser.add_argument(
        "--examples", type=positive, default=examples, metavar="N", help=f"{timed} (default: {examples})"
    )
    return parser.parsed(arguments)


def _recorded(file: Path | None, measured: Iterator[tuple[str, Any]]) -> int:
    """Print each number at once, and write all at the end."""
    torch.set_num_threads(1)
    record: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"}
    for name, value in measured:
        print(f"{name}: {json.dumps(value, indent=2)}", flush=True)
        record[name] = value
    if file is not None:
        whole_file.write(file, json.dumps(record, indent=2) + "\n")
    return 0


# --- examples per second ----------------------------------------------------------------------------------------------


def check_once(backend: Backend, case: Case) -> dict[str, float]:
    """Check a Case as `experiments.check_case` does, without the second pass that checks that results repeat."""
    backend.submit(observe, case, None, False)
    expectation = properties.prepare(case)
    return properties.check(case, expectation, backend.collect())


@contextmanager
def _ready(backend: Backend, world: int) -> Iterator[Backend]:
    backend.start(world)
    try:
        yield backend
    finally:
        backend.close()


def rate(kind: type[Backend], world: int, examples: int, check: Check = check_once) -> float:
    """Measure examples per second, with drawing, forward and backward, exact values and all checks."""
    with _ready(kind(), world) as backend:
        report = Report(Console(quiet=True))
        for count in (max(5, examples // 20), examples):  # warm-up first
            search = Search(replace(experiments.EXAMPLES, check=check), backend, report, world)
            report.start_world(world, count)
            started = time.perf_counter()
            failures = search.explore(count, 0)
            seconds = time.perf_counter() - started
            if failures:
                raise SystemExit(f"a counter-example; run python -m verification first:\n{failures[0].failure}")
    return examples / seconds


def plain_rate(kind: type[Backend], world: int, examples: int) -> float:
    """Measure fixed examples per second: dense causal ring attention on 1 to 64 tokens, one pass each."""
    with _ready(kind(), world) as backend:
        dense = small(world, pattern=Pattern.dense(causal=True), heads=2, kv_heads=2)
        cases = [replace(dense, tokens=1 + (29 * i) % 64, seed=i) for i in range(examples)]
        for case in cases[:20]:
            check_once(backend, case)
        started = time.perf_counter()
        for case in cases:
            check_once(backend, case)
        return examples / (time.perf_counter() - started)


def spawned_rate(world: int, examples: int) -> float:
    """Measure examples per second if each starts its own processes, without the checks, which cost little."""
    case = small(world)
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = time.perf_counter()
    for _ in range(examples):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        commands = [[sys.executable, "-c", RANK, str(rank), str(world), port, case.to_json()] for rank in range(world)]
        ranks = [subprocess.Popen(command, env=settings) for command in commands]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise SystemExit("a spawned rank failed")
    return examples / (time.perf_counter() - started)


def small(world: int, **changes: Any) -> Case:
    settings: dict[str, Any] = dict(
        world=world, group=None, tokens=64, order="contiguous", cuts=None, pattern=Pattern.longnet((16, 32), (1, 2), 4),
        batch=1, heads=4, kv_heads=4, head_dim=16, dtype="float32", scale=None, score_scale=1.0, values="normal",
        seed=0, exchange="ring", bucket=None, kernel="auto", lse="unused", strided=False,
    )  # fmt: skip
    return Case(**settings | changes)


# --- other times ------------------------------------------------------------------------------------------------------


def pool_times() -> dict[str, float]:
    """Measure the start of 8 ranks in seconds: first (the forkserver imports torch), again, and after one died."""
    started = time.perf_counter()
    Pool(8, preload=PRELOAD).close()
    first = time.perf_counter() - started
    started = time.perf_counter()
    with Pool(8, preload=PRELOAD) as pool:
        ready = time.perf_counter() - started
        os.kill(pool.pids[3], 9)
        started = time.perf_counter()
        with suppress(RankCrash):
            pool.run(os.getpid)
        whole = time.perf_counter() - started
        pool.run(os.getpid)
    return {"first": first, "ready": ready, "whole_again": whole}


def plan_seconds() -> dict[str, float]:
    """Measure the slowest plan of 8 ranks, 1 Mi tokens, LongNet's published pattern: seconds new and cached."""
    pattern = Pattern.longnet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), 12, causal=True)
    seconds = {}
    for order in ("contiguous", "zigzag", "striped"):
        for exchange in KEY_EXCHANGES:
            layout = getattr(Layout, order)(2**20, 8)
            bucket = default_bucket(layout, 12, 12, torch.bfloat16)
            for state in ("", ", cached"):
                times = []
                gc.collect()
                gc.disable()  # as timeit does: exclude garbage collection of the verification's objects
                for rank in range(8):
                    started = time.perf_counter()
                    plan_of(pattern, layout, rank, 12, 12, KEY_EXCHANGES[exchange], bucket)
                    times.append(time.perf_counter() - started)
                gc.enable()
                seconds[f"{order}, {exchange}{state}"] = max(times)
    return seconds


def many_ranks() -> dict[str, float]:
    """Measure one example on 256 ranks of two tokens in seconds: forward, backward, exact values, checks."""
    longnet = Pattern.longnet((8, 32, 128), (1, 2, 4), 2, True)
    seconds = {}
    with _ready(SimBackend(60.0), MANY) as backend:
        for name, pattern in (("dense causal", Pattern.dense(causal=True)), ("LongNet", longnet)):
            for exchange in KEY_EXCHANGES:
                case = small(MANY, tokens=TOKENS, pattern=pattern, heads=2, kv_heads=2, exchange=exchange)
                started = time.perf_counter()
                check_once(backend, case)
                seconds[f"{name}, {exchange}"] = time.perf_counter() - started
    return seconds


def deadlock_seconds() -> float:
    """Measure from the start of 8 ranks to the report with all stacks: the median of 20, in seconds."""

    def blocking_ring(transport: SimulatedTransport) -> None:
        """Receive before sending, on every rank."""
        before, after = ((transport.rank + step) % transport.world_size for step in (-1, 1))
        transport.post([], [Message(before, torch.empty(4), "keys")]).wait()
        transport.post([Message(after, torch.ones(4), "keys")], []).wait()

    times = []
    for seed in range(20):
        started = time.perf_counter()
        try:
            Simulation(8, seed).run(blocking_ring)
        except Deadlock as failure:
            str(failure)
            times.append(time.perf_counter() - started)
    assert len(times) == 20
    return statistics.median(times)
