#!/usr/bin/env python3
"""Measures the verification: when ranks are ready, examples a second, the time for a plan.

    .venv/bin/python scripts/bench_verification.py [--json FILE] [--examples N]

Numbers of one run can be compared with each other; on another or a busy machine they differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from reference.pattern import Pattern
from ring.budget import default_bucket
from ring.layout import Layout
from ring.plan.plan import plan_of
from verification import runner
from verification.case import Case
from verification.check import properties
from verification.cli.arguments import check_file
from verification.failures import RankCrash
from verification.report.report import Report
from verification.run.backends import PRELOAD, Backend, GlooBackend
from verification.run.processes.pool import Pool
from verification.run.rank import observe
from verification.search.search import Search

GOALS = {2: 200, 4: 50, 8: 17}  # examples a second on two cores
# One rank of an example whose processes are started for it alone, for comparison with the pool.
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


def pool_times() -> dict[str, float]:
    """Seconds until 8 ranks are ready: the first time (the forkserver imports torch), again, and after one was lost."""

    def timed() -> tuple[Pool, float]:
        started = time.perf_counter()
        return Pool(8, preload=PRELOAD), time.perf_counter() - started

    pool, first = timed()
    pool.close()
    pool, ready = timed()
    with pool:
        os.kill(pool.pids[3], 9)
        started = time.perf_counter()
        with suppress(RankCrash):
            pool.run(os.getpid)
        whole = time.perf_counter() - started
        pool.run(os.getpid)
    return {"first": first, "ready": ready, "whole_again": whole}


def check_once(backend: Backend, case: Case) -> dict[str, float]:
    """As `runner.check_case`, without the second pass that checks that results repeat."""
    backend.submit(observe, case, None, False)
    expectation = properties.prepare(case)
    return properties.check(case, expectation, backend.collect())


def rate(
    world: int, examples: int, check: Callable[[Backend, Case], dict[str, float]], place: type[Backend] = GlooBackend
) -> float:
    """Examples a second, with drawing, forward and backward, exact values and all checks."""
    backend = place()
    backend.start(world)
    try:
        report = Report(Console(quiet=True))
        for count in (max(5, examples // 20), examples):  # the first are a warm-up
            search = Search(replace(runner.EXAMPLES, check=check), backend, report, world)
            report.start_world(world, count)
            started = time.perf_counter()
            found = search.explore(count, 0)
            spent = time.perf_counter() - started
            if found:
                raise SystemExit(f"a counter-example; run python -m verification first:\n{found[0].failure}")
    finally:
        backend.close()
    return examples / spent


def plain_rate(world: int, examples: int, place: type[Backend] = GlooBackend) -> float:
    """Examples a second of dense causal ring attention on 1 to 64 tokens, one pass each, not drawn."""
    backend = place()
    backend.start(world)
    try:
        dense = small(world, pattern=Pattern.dense(causal=True), heads=2, kv_heads=2)
        cases = [replace(dense, tokens=1 + (29 * i) % 64, seed=i) for i in range(examples)]
        for case in cases[:20]:
            check_once(backend, case)
        started = time.perf_counter()
        for case in cases:
            check_once(backend, case)
        return examples / (time.perf_counter() - started)
    finally:
        backend.close()


def spawned_rate(world: int, examples: int) -> float:
    """Examples a second if every example starts its own processes (without the comparison, which costs little)."""
    case = small(world)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    for _ in range(examples):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(world), port, case.to_json()], env=environment)
            for rank in range(world)
        ]
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


def plan_seconds() -> dict[str, float]:
    """Seconds for the slowest plan of 8 ranks for 1 Mi tokens, LongNet's published pattern; then from the cache."""
    pattern = Pattern.longnet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), 12, causal=True)
    found = {}
    for order in ("contiguous", "zigzag", "striped"):
        for exchange in ("ring", "direct", "gather"):
            layout = getattr(Layout, order)(2**20, 8)
            bucket = default_bucket(layout, 12, 12, torch.bfloat16)
            times = []
            for _ in ("fresh", "cached"):
                spent = []
                gc.collect()
                gc.disable()  # as timeit does: collecting the verification's objects is no part of the plan's time
                for rank in range(8):
                    started = time.perf_counter()
                    plan_of(pattern, layout, rank, 12, 12, exchange, bucket)
                    spent.append(time.perf_counter() - started)
                gc.enable()
                times.append(max(spent))
            found[f"{order}, {exchange}"], found[f"{order}, {exchange}, cached"] = times
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog=sys.argv[0], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON too")
    arguments.add_argument(
        "--examples", type=int, default=1000, metavar="N", help="timed at two ranks; fewer at more (default: 1000)"
    )
    options = arguments.parse_args()
    if options.json is not None:
        try:
            check_file("--json", options.json)
        except OSError as error:
            arguments.error(str(error))
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"}

    found["pool_of_8_seconds"] = times = pool_times()
    print(f"pool of 8 ranks: first {times['first']:.2f} s, ready {times['ready']:.2f} s, ", end="")
    print(f"whole after a loss {times['whole_again']:.2f} s (goal 0.5)", flush=True)
    found["examples_per_second"] = {}
    for world, goal in GOALS.items():
        count = max(10, options.examples * 2 // world)
        fast, twice = rate(world, count, check_once), rate(world, count, runner.check_case)
        plain, slow = plain_rate(world, count), spawned_rate(world, 3)
        found["examples_per_second"][world] = {
            "pool": fast,
            "pool, every pass twice": twice,
            "pool, plain dense ring": plain,
            "spawned": slow,
            "ratio": fast / slow,
        }
        print(
            f"p = {world}: {fast:.1f} examples/s (goal {goal}), {twice:.1f} with every pass twice, as a run has it, "
            f"{plain:.1f} of plain dense rings; spawned {slow:.2f}/s: {fast / slow:.0f} times",
            flush=True,
        )
    found["plan_seconds"] = plan_seconds()
    for name, seconds in found["plan_seconds"].items():
        print(f"plan of 1 Mi tokens on 8 ranks, {name}: {seconds * 1000:.3f} ms (goal 100)", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
