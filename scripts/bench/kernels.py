"""Times the fused kernels of one GPU, and writes the table by which kernel="auto" chooses.

    python scripts/bench kernels [--dims 64 96 128 192/128 256] [--longest 32Ki] [--json FILE]

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
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.command import Parser, command_line, stop, tokens
from bench.timing import clocked
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

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
DIMS = ("64", "96", "128", "192/128", "256")
HEADS = {(64, 64): (32, 8), (96, 96): (32, 8), (128, 128): (32, 8), (192, 128): (16, 16), (256, 256): (16, 4)}
CUDA = torch.device("cuda")
SHORTEST, MEAN_LENGTHS, WINDOWS = 256, (128, 512, 2048, 8192), (127, 511, 1023, 2047, 4095)
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
        for length, window in itertools.product((longest // 4, longest), WINDOWS if causal else ()):
            if window < length:
                yield Work(passed, *dims, causal, False, length, heads, window), [length]


def timed(work: Work, lengths: list[int]) -> Iterator[tuple[str, float | None]]:
    """Iterate over the kernels that take a call, with milliseconds; None for one that raises."""
    heads, kv_heads = HEADS[work.dim, work.value_dim]
    call = KernelCall(
        tuple(lengths), tuple(lengths), work.causal, work.varied, heads, kv_heads, work.dim, work.value_dim,
        work.window or None,
    )  # fmt: skip
    for kernel in FUSED:
        if not call.taken_by(kernel, CUDA, repeatable=work.passed == PASSES[2]):
            continue
        torch.use_deterministic_algorithms(work.passed == PASSES[2])
        try:
            tensors = call.draw(kernel, CUDA)
            forward = partial(call.forward, kernel, tensors)
            yield (
                kernel.name,
                milliseconds(forward if work.passed == PASSES[0] else call.backward(kernel, tensors, *forward())),
            )
        except RuntimeError as error:
            print(f"{kernel.name} raised {str(error).splitlines()[0][:200]}", flush=True)
            yield kernel.name, None
        finally:
            torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class KernelCall:
    """A call on several sequences. packed: they follow each other, else they are a batch of one length."""

    query: tuple[int, ...]  # lengths of the sequences
    key: tuple[int, ...]
    causal: bool
    packed: bool
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None = None

    @cached_property  # one tile: its lengths are copied to a GPU once, before a graph is captured
    def tile(self) -> Tile:
        folds = 1 if self.packed else len(self.query)
        query, key = (Rows(0, 1, sum(x) // folds, sum(x) // folds, folds) for x in (self.query, self.key))
        share = self.heads // self.kv_heads
        return Tile(
            query, key, Heads(self.kv_heads, share, 0, share, 1), Heads(self.kv_heads, 1, 0, 1, 1),
            Mask.CAUSAL if self.causal else Mask.FULL,
            sequences=Sequences.of(np.array(self.query), np.array(self.key)) if self.packed else None,
            window=self.window,
        )  # fmt: skip

    @property
    def scoring(self) -> Scores:
        return Scores(self.dim**-0.5)

    @property
    def flops(self) -> tuple[int, int]:
        """Operations of a forward and of a backward: 2 and 5 products."""
        pairs = sum(q * (q + 1) // 2 if self.causal else q * k for q, k in zip(self.query, self.key, strict=True))
        products = pairs * self.heads * (self.dim + self.value_dim)
        return 2 * products, 4 * products + 2 * pairs * self.heads * self.dim

    def taken_by(self, kernel: Kernel, device: torch.device, repeatable: bool = False) -> bool:
        capability = torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
        setting = KernelSetting(
            (kernel,), device.type, capability, DTYPES[device.type], (self.dim, self.value_dim),
            self.heads // self.kv_heads, 1, self.scoring,
        )  # fmt: skip
        return kernel.takes(setting) and kernel.takes_tile(self.tile, repeatable=repeatable)

    def draw(self, kernel: Kernel, device: torch.device) -> tuple[Tensor, ...]:
        """Draw q, k, v, dout, the same for every kernel, in its shapes."""
        generator, tile = torch.Generator(device).manual_seed(1), self.tile

        def normal(rows: Rows, heads: int, dim: int) -> Tensor:
            size = (rows.folds, rows.length, heads, dim)
            x = torch.randn(size, generator=generator, device=device, dtype=DTYPES[device.type]).transpose(1, 2)
            return x if kernel.batched else x.unflatten(1, (self.kv_heads, -1)).unsqueeze(1)

        q, k = normal(tile.query_rows, self.heads, self.dim), normal(tile.key_rows, self.kv_heads, self.dim)
        v = normal(tile.key_rows, self.kv_heads, self.value_dim)
        return q, k, v, normal(tile.query_rows, self.heads, self.value_dim)

    def forward(self, kernel: Kernel, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, _ = tensors
        return kernel_calls.forward(kernel, q, k, v, self.tile, self.scoring)

    def backward(
        self, kernel: Kernel, tensors: tuple[Tensor, ...], out: Tensor, lse: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Return the call of a backward."""
        q, k, v, dout = tensors
        if kernel.batched:
            saved = SavedRows(
                dout, out.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1).unsqueeze(-1), None
            )
        else:
            saved = SavedRows(dout, out, lse, (dout * out).sum(-1))
        return partial(kernel_calls.backward, kernel, q, k, v, saved, self.tile, self.scoring)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of a call in a graph of enough calls to fill MILLISECONDS."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
        (once,) = clocked(call, CUDA, 1)
        count = max(1, min(50, round(MILLISECONDS / once)))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(count):
                call()
        graph.replay()
        median = statistics.median(clocked(graph.replay, CUDA, 1)[0] for _ in range(REPLAYS))
        torch.cuda.synchronize()
    graph.reset()
    return median / count
