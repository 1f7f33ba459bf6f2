#!/usr/bin/env python3
"""Measures the simulated backend: examples a second, 256 ranks forward and backward, the time to report a deadlock.

    .venv/bin/python scripts/bench_simulation.py [--json FILE] [--examples N]

Numbers of one run can be compared with each other; on another or a busy machine they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_verification import check_once, plain_rate, rate, small

from reference.pattern import Pattern
from ring.comm.transport import Message
from verification.cli.arguments import check_file
from verification.failures import Deadlock
from verification.run.backends import SimBackend
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

GOAL = 150  # examples a second at four ranks
WORLD, TOKENS = 256, 512


def many_ranks() -> dict[str, float]:
    """Seconds for one example on 256 ranks of two tokens: forward, backward, exact values, checks."""
    patterns = {
        "dense causal": Pattern.dense(causal=True),
        "LongNet": Pattern.longnet((8, 32, 128), (1, 2, 4), 2, True),
    }
    backend, found = SimBackend(60.0), {}
    backend.start(WORLD)
    try:
        for name, pattern in patterns.items():
            for exchange in ("ring", "direct", "gather"):
                case = replace(small(WORLD, pattern=pattern, heads=2, kv_heads=2), tokens=TOKENS, exchange=exchange)
                started = time.perf_counter()
                check_once(backend, case)
                found[f"{name}, {exchange}"] = time.perf_counter() - started
    finally:
        backend.close()
    return found


def blocking_ring(transport: SimulatedTransport) -> None:
    """Every rank receives before it sends."""
    before, after = (transport.rank - 1) % transport.world_size, (transport.rank + 1) % transport.world_size
    transport.post([], [Message(before, torch.empty(4), "keys")]).wait()
    transport.post([Message(after, torch.ones(4), "keys")], []).wait()


def deadlock_seconds(world: int = 8) -> float:
    """From the start of the ranks to the report with every rank's stack; the median of 20."""
    spent = []
    for seed in range(20):
        started = time.perf_counter()
        try:
            Simulation(world, seed).run(blocking_ring)
        except Deadlock as failure:
            str(failure)
            spent.append(time.perf_counter() - started)
    assert len(spent) == 20
    return statistics.median(spent)


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog=sys.argv[0], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON too")
    arguments.add_argument("--examples", type=int, default=400, metavar="N", help="timed at each world (default: 400)")
    options = arguments.parse_args()
    if options.json is not None:
        try:
            check_file("--json", options.json)
        except OSError as error:
            arguments.error(str(error))
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"}

    found["deadlock_of_8_seconds"] = seconds = deadlock_seconds()
    print(f"a deadlock of 8 ranks is reported in {1000 * seconds:.1f} ms (goal 50)", flush=True)
    found["examples_per_second"] = {}
    for world in (2, 4, 8):
        any_case = rate(world, options.examples, check_once, SimBackend)
        plain = plain_rate(world, options.examples, SimBackend)
        found["examples_per_second"][world] = {"any": any_case, "plain dense ring": plain}
        goal = f" (goal {GOAL})" if world == 4 else ""
        print(f"p = {world}: {any_case:.1f} examples/s of any Case, {plain:.1f} of plain dense rings{goal}", flush=True)
    found["seconds_on_256"] = many_ranks()
    for name, spent in found["seconds_on_256"].items():
        print(f"{WORLD} ranks, {TOKENS} tokens, {name}: {spent:.1f} s (goal 30)", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
