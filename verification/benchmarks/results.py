"""One run as JSON: device, versions, commit and command, and a row for everything that was measured."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from verification.peers.adapters import ring_flash_attn
from verification.report.provenance import surroundings, typed_words

# The columns that a row may have. Times are wall-clock milliseconds; bytes are those of one rank.
COLUMNS = {
    "section": "dense, longnet, packed, window or reach",
    "tokens": "of each rank; of reach the longest shard that every rank finished, 0 for none",
    "world": "ranks, a GPU each",
    "kv_heads": "key/value heads",
    "mean_length": "of packed documents, in tokens",
    "multiple": "of which each of these lengths is one",
    "window": "positions before its own that a query sees",
    "method": "the method that is timed",
    "exchange": "of ring_attention: how keys and values travel",
    "pass": "forward, or forward+backward",
    "graph": "True: replayed from a CUDA graph",
    "ms": "median of a call on the slowest rank",
    "samples": "calls that the median is of",
    "warmup": "calls before them",
    "tflops": "floating-point operations that the pattern needs of a GPU in a second, on average, / 10^12",
    "efficiency": "(ms of one GPU with the whole sequence, from a graph if that is faster) / world / ms: 1 is a "
    "perfect division",
    "kernels_alone_ms": "a rank's kernel calls without exchange and merge: a lower bound",
    "beyond_kernels_ms": "ms - kernels_alone_ms: messages, packing, merges, and gaps between kernels",
    "exposed_ms": "ms - (ms of the same call without messages): the part of the exchange that computing does not hide",
    "sent_bytes": "bytes that the busiest rank sends, as reference/cost.py counts them",
    "closed_form_bytes": "accumulators and communication buffers of the fullest rank, by reference/cost.py",
    "peak_bytes": "peak of torch's allocator on the fullest rank: in a call without a graph beyond inputs and results, "
    "of reach in total",
    "note": "what to know when comparing",
    "left_out": "why it could not be timed here",
    "error": "the error with which it failed",
    "pattern": "of reach: dense or longnet",
    "total": "of reach: tokens of all ranks",
    "seconds": "of reach: one forward and backward at that size on the slowest rank",
    "stopped": "of reach: what ended the search",
}


def described_run(device: torch.device, world: int, script: str = "bench_ring.py") -> dict[str, Any]:
    """`provenance.surroundings`, and the version of what peers run."""
    command = f"torchrun --nproc-per-node={world} scripts/{script} {typed_words(sys.argv[1:])}".rstrip()
    return surroundings(device.type, world, command) | {"ring-flash-attn": ring_flash_attn.zigzag.version}


class BenchRecord:
    """Prints rows, and writes the file anew after each: if the run is interrupted, the file has all rows so far.

    file: where the JSON goes, or None. speaks: whether this rank prints and writes: rank 0 alone does. shown: a row as
    it is printed, by default `line`.
    """

    def __init__(
        self, surroundings: dict[str, Any], file: Path | None, speaks: bool,
        shown: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:  # fmt: skip
        self.content: dict[str, Any] = {**surroundings, "rows": []}
        self._file, self._speaks, self._shown = file, speaks, shown or line

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.content["rows"]
        return rows

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if not self._speaks:
            return
        print(self._shown(row), flush=True)
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.new")
            new.write_text(json.dumps(self.content, indent=1) + "\n")
            new.replace(self._file)


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    shown = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()]
    return "  ".join(text for text in shown if not text.endswith("=None"))


def columns(meanings: Mapping[str, str] = COLUMNS) -> str:
    """What every column of a row means, in a line or two each."""
    found = ["columns of a row; one that does not apply is not printed:"]
    for name, meaning in meanings.items():
        found += textwrap.wrap(meaning, 116, initial_indent=f"  {name:<19}", subsequent_indent=" " * 21)
    return "\n".join(found)


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
