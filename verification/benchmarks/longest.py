"""The longest shards for which forward and backward succeed: they are doubled until memory or time runs out.

Every rank runs `longest_rank` in a process of its own: where one rank runs out of memory, others may wait on their GPU
for a message that never comes, and only the end of the process ends that wait. The processes go from size to size
together; when one fails, all are ended.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from verification.benchmarks import longest_rank
from verification.benchmarks.longest_rank import OUT_OF_MEMORY, LongestTask
from verification.benchmarks.options import Options
from verification.benchmarks.rank_group import RankGroup
from verification.report.provenance import ROOT

STEP = 0.2  # seconds between two looks at the processes
START = 120.0  # seconds that they may take to start, on top of the time they are given


@dataclass
class Progress:
    """What a rank's process has printed so far: the largest size done, its seconds and peak memory, why it ended."""

    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    ended: str | None = None


def longest(ranks: RankGroup, pattern: str, exchange: str, options: Options) -> dict[str, Any]:
    """The most tokens of each rank that the whole group finished, the slowest rank's seconds for that pass, and what
    ended the search."""
    with socket.create_server(("", 0)) as server:
        port = ranks.gathered(server.getsockname()[1])[0]
    task = LongestTask.of(options, pattern, exchange, ranks.device.type)
    command = [sys.executable, "-m", longest_rank.__name__, task.to_json()]
    return followed(ranks, command, environment(ranks, port), START + 2 * task.seconds)


def environment(ranks: RankGroup, port: int) -> dict[str, str]:
    """torchrun's variables for this rank, with another port and without torchrun's own store."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False", "PYTHONPATH": path}
    own |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world)}
    return {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(ranks.rank)} | os.environ | own


def followed(ranks: RankGroup, command: list[str], settings: dict[str, str], deadline: float) -> dict[str, Any]:
    """Starts the command on every rank, reads what it prints until all have ended or one has failed, then ends all."""
    child = subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(child, lines), daemon=True).start()
    mine, began = Progress(), time.monotonic()
    try:
        while True:
            _take(mine, lines, child)
            if mine.ended is None and time.monotonic() - began > deadline:
                mine.ended = f"failed: no answer within {deadline:.0f} s"
            everyone = ranks.gathered(mine)
            if any(x.ended is not None and x.ended.startswith("failed") for x in everyone):
                break
            if all(x.ended is not None for x in everyone):
                break
            time.sleep(STEP)
    finally:
        child.kill()
        child.wait()
    return _summary(everyone)


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for text in child.stdout:
        lines.put(text)
    lines.put(None)


def _take(mine: Progress, lines: queue.Queue[str | None], child: subprocess.Popen[str]) -> None:
    """Reads the new JSON lines of the process, {"tokens": ...} or {"ended": why}, into `mine`."""
    while mine.ended is None:
        try:
            text = lines.get_nowait()
        except queue.Empty:
            return
        if text is None:
            mine.ended = f"failed: ended with exit status {child.wait()}"
        else:
            for name, value in json.loads(text).items():
                setattr(mine, name, value)


def _summary(everyone: list[Progress]) -> dict[str, Any]:
    """A size counts if all ranks finished it."""
    least = min(everyone, key=lambda x: x.tokens)
    same = [x for x in everyone if x.tokens == least.tokens]
    reasons = [(rank, x.ended) for rank, x in enumerate(everyone) if x.ended is not None]
    failed = [(rank, why) for rank, why in reasons if why.startswith("failed")]
    first = [(rank, why) for rank, why in failed if why.startswith(OUT_OF_MEMORY)]  # other ranks then fail of that
    rank, why = (first or failed or reasons)[0]
    peaks = [x.peak_bytes for x in same if x.peak_bytes is not None]
    return {
        "tokens": least.tokens,
        "total": least.tokens * len(everyone),
        "seconds": max(x.seconds for x in same),
        "peak_bytes": max(peaks, default=None),
        "stopped": f"rank {rank} {why}",
    }
