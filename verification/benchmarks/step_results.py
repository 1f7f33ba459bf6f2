"""What a row of a timed training step has, and how it is printed."""

from __future__ import annotations

from typing import Any

from verification.benchmarks.step_ways import MEANING
from verification.benchmarks.workload import named

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
