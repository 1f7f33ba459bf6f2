"""Times the fused kernels of one GPU, and writes the table by which kernel="auto" chooses.

    python scripts/bench kernels [--dims 64 128 192/128 256] [--longest 32Ki] [--json FILE]

A time is that of a call in a CUDA graph of several calls, the median of 5 replays: the host's time does not count,
since short calls are replayed as graphs and long ones hide it. Every kernel that takes a call is timed, in turn.

Exit status: 0 measured; 2 the run could not start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.command import Parser, command_line, stop, tokens
from bench.workload import document_lengths
from ring.compute import kernel_calls
from ring.compute.gpu.kernel_times import FILE, PASSES, Work
from ring.compute.kernels import FA4, FUSED
from ring.compute.kernels.fa4 import VERSION
from ring.compute.kernels.kernel import Kernel, KernelSetting, SavedRows, Scores
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile
from verification import whole_file
from verification.report.provenance import surroundings

DTYPE = torch.bfloat16
DIMS = ("64", "128", "192/128", "256")
HEADS = {(64, 64): (32, 8), (96, 96): (32, 8), (128, 128): (32, 8), (192, 128): (16, 16), (256, 256): (16, 4)}
SHORTEST, MEAN_LENGTHS = 256, (128, 512, 2048, 8192)
MILLISECONDS, REPLAYS = 2.0, 5  # of a graph; its replays


def head_dims(text: str) -> tuple[int, int]:
    dims = tuple(int(part) for part in text.split("/"))
    if (pair := (dims[0], dims[-1])) not in HEADS:
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must be one of {', '.join('/'.join(map(str, x)) for x in HEADS)}"
        )
    return pair


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("kernels", __doc__)
    parser.add_argument("--dims", nargs="+", type=head_dims, default=[head_dims(x) for x in DIMS], help="of keys and "
        f"values (default: {' '.join(DIMS)})")  # fmt: skip
    parser.add_argument("--longest", type=tokens, default=2**15, metavar="N", help="tokens of a call (default: 32Ki)")
    options = parser.parsed(arguments)
    if not torch.cuda.is_available():
        stop("there is no GPU: kernel times are of GPUs")
    if (missing := FA4.missing()) is not None:
        print(f"without FlashAttention-4: {missing}", flush=True)
    rows = []
    for dims in options.dims:
        for work, sizes in grid(dims, options.longest):
            ms = {name: time for name, time in timed(work, sizes) if time is not None}
            rows.append(dict(zip(Work._fields, work, strict=True)) | {"ms": ms})
            print(" ".join(map(str, work)), {name: round(time, 4) for name, time in ms.items()}, flush=True)
    record = surroundings("cuda", 1, command_line(1).replace("torchrun --nproc-per-node=1 ", "python "))
    record |= {
        "flash-attn-4": None if missing else VERSION,
        "capability": torch.cuda.get_device_capability(),
        "rows": rows,
    }
    write(options.json or FILE, record)
    return 0


def write(file: Path, record: dict[str, Any]) -> None:
    """Write the record, a row in a line."""
    head = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    whole_file.write(file, f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def grid(dims: tuple[int, int], longest: int) -> Iterator[tuple[Work, list[int]]]:
    """Iterate over the calls to time, with the lengths of their sequences."""
    heads = HEADS[dims][0]
    lengths = [length for length in (2**n for n in range(30)) if SHORTEST <= length <= longest]
    for passed, causal in itertools.product(PASSES, (True, False)):
        for length in lengths:
            for count in sorted({1, longest // length}):
                yield Work(passed, *dims, causal, False, length, heads * count), [length] * count
        for mean in MEAN_LENGTHS:
            if mean < longest:
                sizes = list(document_lengths(longest, mean))
                yield Work(passed, *dims, causal, True, longest / len(sizes), heads * len(sizes)), sizes


def timed(work: Work, sizes: list[int]) -> Iterator[tuple[str, float | None]]:
    """Iterate over the kernels that take a call, with milliseconds; None for one that raises."""
    for kernel in FUSED:
        heads, kv_heads = HEADS[work.dim, work.value_dim]
        tile, tensors = call_of(work, sizes, heads, kv_heads)
        setting = KernelSetting(
            (kernel,), "cuda", torch.cuda.get_device_capability(), DTYPE, (work.dim, work.value_dim), heads // kv_heads,
            1, Scores(work.dim**-0.5),
        )  # fmt: skip
        if not (kernel.takes(setting) and kernel.takes_tile(tile, repeatable=work.passed == PASSES[2])):
            continue
        torch.use_deterministic_algorithms(work.passed == PASSES[2])
        try:
            yield kernel.name, milliseconds(calls(kernel, work, tile, tensors, setting.scoring))
        except RuntimeError as error:
            print(f"{kernel.name} raised {str(error).splitlines()[0][:200]}", flush=True)
            yield kernel.name, None
        finally:
            torch.use_deterministic_algorithms(False)


def call_of(work: Work, sizes: list[int], heads: int, kv_heads: int) -> tuple[Tile, list[torch.Tensor]]:
    """Return a tile and its batched q, k, v, dout."""
    folds, length = (1, sum(sizes)) if work.varied else (len(sizes), sizes[0])
    rows, lengths = Rows(0, 1, length, length, folds), np.array(sizes)
    tile = Tile(
        rows, rows, Heads(kv_heads, heads // kv_heads, 0, heads // kv_heads, 1), Heads(kv_heads, 1, 0, 1, 1),
        Mask.CAUSAL if work.causal else Mask.FULL, sequences=Sequences.of(lengths, lengths) if work.varied else None,
    )  # fmt: skip
    shapes = ((heads, work.dim), (kv_heads, work.dim), (kv_heads, work.value_dim), (heads, work.value_dim))
    return tile, [
        torch.randn(folds, length, count, dim, device="cuda", dtype=DTYPE).transpose(1, 2) for count, dim in shapes
    ]


def calls(kernel: Kernel, work: Work, tile: Tile, tensors: list[torch.Tensor], scoring: Scores) -> Callable[[], object]:
    """Return the call to time."""
    q, k, v, dout = tensors
    if work.passed == PASSES[0]:
        return lambda: kernel_calls.forward(kernel, q, k, v, tile, scoring)
    out, lse = kernel_calls.forward(kernel, q, k, v, tile, scoring)
    batched = out.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1).unsqueeze(-1)
    saved = SavedRows(dout, *batched, None)
    return lambda: kernel_calls.backward(kernel, q, k, v, saved, tile, scoring)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of a call in a graph of enough calls to fill MILLISECONDS."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
        once = elapsed(call)
        count = max(1, min(50, round(MILLISECONDS / once)))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(count):
                call()
        graph.replay()
        median = statistics.median(elapsed(graph.replay) for _ in range(REPLAYS))
        torch.cuda.synchronize()
    graph.reset()
    return median / count


def elapsed(call: Callable[[], object]) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)
