"""Measures the fused kernels of one GPU: rates by the lengths of sequences, and the cost of a fixed order of sums.

    python scripts/bench rates [--section lengths order] [--lengths 64 ... 4Ki] [--json FILE]

lengths: calls of several sequences, all of one length or of mixed ones. Of kind "documents", causal; of kind "shards",
so many queries that all see --context keys of their own. A rate counts the pattern's operations alone.
order: the backward with sums in any order, and under `torch.use_deterministic_algorithms`, for documents of one length
(a batch) and of mixed ones; and in how many of 4 repetitions all bits are those of the first call.

A time is taken as by `bench kernels`. `--device cpu` is a trial of the kernel math, with tiny sizes.

Exit status: 0 measured; 2 the run could not start.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import kernels
from bench.command import BenchRecord, Parser, columns, command_line, stop, tokens
from bench.kernels import KernelCall
from bench.rank_group import RankGroup, described
from bench.timing import clocked
from bench.workload import named
from ring.compute.kernels import FA4, FLASH, MATH, MEASURED
from verification.cli.arguments import count

SECTIONS, KINDS = ("lengths", "order"), ("documents", "shards")
PASSES = ("forward", "backward")
KERNELS = {"cuda": MEASURED, "cpu": (MATH,)}  # by device
LENGTHS = (64, 100, 128, 192, 256, 512, 1000, 1024, 2048, 4096)
REPEATS = 4  # backwards whose bits are compared with those of the first
COLUMNS = {
    "section": "lengths or order",
    "kind": "documents: causal; batch: of one length, without cumulative lengths; shards: queries with other keys",
    "causal": "True for a causal mask",
    "length": "tokens of each sequence, or None for mixed lengths",
    "shortest": "the shortest sequence",
    "longest": "the longest sequence",
    "sequences": "in the call",
    "keys": "of each sequence of a shard",
    "dim": "of a head",
    "kernel": "cudnn, flash (FlashAttention-2 of torch) or fa4, each if it takes the call",
    "pass": "forward or backward",
    "fixed_order": "True under torch.use_deterministic_algorithms",
    "ms": "median time of a call",
    "tflops": "10^12 floating-point operations per second, counting only those of the pattern",
    "off": "largest difference from the results of flash, relative to their largest",
    "repeats": f"of {REPEATS} repetitions, those with the bits of the first call",
    "error": "why the kernel did not take the call",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0. Raises SystemExit of 2 if it cannot start."""
    options = parsed(arguments)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            stop("there is no GPU: --device cpu is a trial without")
        if (missing := FA4.missing()) is not None:
            print(f"without FlashAttention-4: {missing}", flush=True)
    place = torch.device(options.device)
    alone = command_line(1).replace("torchrun --nproc-per-node=1 ", "python ")
    record = BenchRecord(
        RankGroup(0, 1, place), options.json, command=alone, heads=options.heads, kv_heads=options.kv_heads
    )
    for section in options.section:
        for row in (rows_of_lengths if section == "lengths" else rows_of_order)(options, place):
            record.add(section=section, **row)
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("rates", __doc__, columns(COLUMNS))
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    add("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="(default: both)")
    add("--kind", nargs="+", choices=KINDS, default=KINDS, help="of calls in section lengths (default: both)")
    add("--tokens", type=tokens, default=2**15, metavar="N", help="of a call on documents (default: 32Ki)")
    add("--queries", type=tokens, default=2**13, metavar="N", help="of a call on shards (default: 8Ki)")
    add("--context", type=tokens, default=2**12, metavar="N", help="keys of each shard (default: 4Ki)")
    add("--lengths", type=tokens, nargs="+", default=LENGTHS, metavar="N", help="of sequences "
        f"({' '.join(map(named, LENGTHS))})")  # fmt: skip
    add("--order-lengths", type=tokens, nargs="+", default=[512, 2048, 8192, 32768], metavar="N", help="of sequences "
        "in section order (512 2Ki 8Ki 32Ki)")  # fmt: skip
    add("--heads", type=count, default=32, metavar="N", help="(default: 32)")
    add("--kv-heads", type=count, default=8, metavar="N", help="(default: 8)")
    add("--head-dim", type=count, default=128, metavar="N", help="(default: 128)")
    options = parser.parsed(arguments)
    if options.heads % options.kv_heads:
        stop(f"--heads is {options.heads}; it must be a multiple of --kv-heads, {options.kv_heads}")
    return options


# --- sizes of calls ---------------------------------------------------------------------------------------------------


def filled(total: int, length: int) -> tuple[int, ...]:
    """Return equal lengths that add up to at most `total`, at least one of them."""
    return (length,) * max(1, total // length)


def mixed(total: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Draw lengths between the least and the greatest, log-uniform with a fixed seed, that add up to `total`."""
    random, low, high = np.random.default_rng(1), math.log(min(lengths)), math.log(max(lengths) + 1)
    drawn: list[int] = []
    while (left := total - sum(drawn)) > 0:
        drawn.append(min(left, int(math.exp(random.uniform(low, high)))))
    return tuple(drawn)


def call_of(
    options: argparse.Namespace, query: tuple[int, ...], keys: int | None = None, packed: bool = True
) -> KernelCall:
    """Return a call. keys: of each sequence of shards; None for causal documents."""
    key, dim = query if keys is None else (keys,) * len(query), options.head_dim
    return KernelCall(query, key, keys is None, packed, options.heads, options.kv_heads, dim, dim)


def named_call(kind: str, call: KernelCall, length: int | None) -> dict[str, Any]:
    """Return the columns that name a call."""
    row: dict[str, Any] = {"kind": kind, "causal": call.causal, "length": length, "sequences": len(call.query)}
    row |= {"shortest": min(call.query), "longest": max(call.query), "dim": call.dim}
    return row | ({"keys": call.key[0]} if kind == "shards" else {})


# --- sections ---------------------------------------------------------------------------------------------------------


def rows_of_lengths(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of section lengths."""
    sizes_of_kind = {"documents": (options.tokens, None), "shards": (options.queries, options.context)}
    for kind in options.kind:
        total, keys = sizes_of_kind[kind]
        several: list[int | None] = [*options.lengths, None]
        for length in several:
            query = mixed(total, options.lengths) if length is None else filled(total, length)
            call = call_of(options, query, keys)
            for row in measured(call, device, orders=(False,), passes=PASSES):
                yield named_call(kind, call, length) | row


def rows_of_order(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of section order."""
    for causal, length in itertools.product((True, False), options.order_lengths):
        call = replace(call_of(options, filled(options.tokens, length), packed=False), causal=causal)
        for row in measured(call, device, orders=(False, True), passes=PASSES[1:]):
            yield named_call("batch", call, length) | row
    call = call_of(options, mixed(options.tokens, options.lengths))
    for row in measured(call, device, orders=(False, True), passes=PASSES[1:]):
        yield named_call("documents", call, None) | row


def measured(
    call: KernelCall, device: torch.device, orders: Sequence[bool], passes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Iterate over a row for each kernel that takes a call, pass and order of sums."""
    expected: tuple[torch.Tensor, ...] | None = None
    for kernel in sorted(KERNELS[device.type], key=lambda kernel: kernel is not FLASH):
        if not call.taken_by(kernel, device):
            continue
        tensors = call.draw(kernel, device)
        for fixed in orders:
            row: dict[str, Any] = {"kernel": kernel.name, "fixed_order": fixed}
            try:
                with order_of_sums(fixed):
                    out, lse = call.forward(kernel, tensors)
                    backward = call.backward(kernel, tensors, out, lse)
                    grads = backward()
                    expected = expected or (out, *grads)
                    row["off"] = max(map(difference, (out, *grads), expected))
                    if len(orders) > 1:
                        row["repeats"] = sum(all(map(torch.equal, grads, backward())) for _ in range(REPEATS))
                    calls: tuple[Callable[[], object], ...] = partial(call.forward, kernel, tensors), backward
                    for passed, flops, timed in zip(PASSES, call.flops, calls, strict=True):
                        if passed in passes:
                            ms = milliseconds(timed, device)
                            yield row | {"pass": passed, "ms": ms, "tflops": flops / ms / 1e9}
            except Exception as error:  # kernels and compilers may raise anything
                yield row | {"error": described(error)[:200]}


@contextmanager
def order_of_sums(fixed: bool) -> Iterator[None]:
    """Return a context with sums in a fixed order. New memory is not filled, as torch would: that takes time."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(fixed)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def difference(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((x.float() - expected.float()).abs().max() / expected.float().abs().max())


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call."""
    return kernels.milliseconds(call) if device.type == "cuda" else median(clocked(call, device, 3))
