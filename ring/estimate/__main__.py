"""The command `python -m ring.estimate`: prints a table or JSON."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from reference.pattern import Pattern
from ring.estimate.choice import choose
from ring.estimate.estimates import DEVICES, ORDERS, Estimates, estimate
from ring.estimate.rates import Rates
from ring.estimate.tile_seconds import GPU
from ring.plan.exchange import AUTO
from ring.regular_file import read_regular

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_WIDTH = 2**12  # columns of a line in a file
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
RATES = {  # options of `Rates`
    "forward": ("--forward-rate", "R", "FLOP/s, for times"),
    "backward": ("--backward-rate", "R", "FLOP/s, for times"),
    "link": ("--link-rate", "R", "bytes/s, for times"),
    "latency": ("--latency", "S", "seconds of a message beyond its bytes (default: 0)"),
    "stage": ("--stage", "S", "seconds of a stage beyond its operations (default: 0)"),
    "packing": ("--packing-rate", "R", "bytes/s of rows copied for messages (default: packing takes no time)"),
    "ranks_per_host": ("--ranks-per-host", "P", "neighbours that share a host (default: all ranks)"),
    "link_between": ("--link-rate-between", "R", "bytes/s between hosts (default: as within)"),
    "latency_between": ("--latency-between", "S", "seconds of a message between hosts (default: as within)"),
}
OF_HOSTS = ("ranks_per_host", "link_between", "latency_between")
EPILOG = """examples, of which every time needs --gpu or all of the rates:
  python -m ring.estimate --tokens 1Mi --ranks 8 --causal --heads 32 --kv-heads 8 --head-dim 128 --gpu "NVIDIA H200"
  python -m ring.estimate --tokens 1Mi --ranks 8 64 --causal --heads 32 --kv-heads 8 --head-dim 128 \\
      --forward-rate 600e12 --backward-rate 450e12 --link-rate 100e9 --latency 1e-5 --memory 80Gi"""


def integer(text: str) -> int:
    """Parse "2048", "2Ki", "1Mi" or "80Gi"."""
    match = re.fullmatch("([0-9]+)(Ki|Mi|Gi)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer such as 2048, 2Ki, 1Mi or 80Gi")
    return int(match[1]) * UNITS[match[2] or ""]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    top = argparse.ArgumentParser(
        prog="python -m ring.estimate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        description="Predicts memory, messages, work and time of ring_attention, on the rank with most of each.",
    )
    add = top.add_argument
    add("--tokens", type=integer, nargs="+", required=True, metavar="N", help="of the whole sequence, such as 1Mi")
    add("--ranks", type=integer, nargs="+", required=True, metavar="P")
    add("--order", choices=ORDERS, default="zigzag", help="of the tokens (default: zigzag)")
    add("--causal", action="store_true")
    add("--window", type=integer, metavar="W", help="largest distance of a key (default: no limit)")
    add("--segments", type=integer, nargs="+", metavar="W", help="segment lengths of LongNet's branches")
    add("--dilations", type=integer, nargs="+", metavar="R", help="their dilation rates")
    add("--pattern", type=Path, metavar="FILE", help="any pattern instead, with documents: JSON of Pattern.to_dict()")
    add("--heads", type=integer, required=True, metavar="H")
    add("--kv-heads", type=integer, metavar="H", help="(default: as many)")
    add("--head-dim", type=integer, required=True, metavar="D")
    add("--value-dim", type=integer, metavar="D", help="head dim of the values (default: the same)")
    add("--batch", type=integer, default=1, metavar="B")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--exchange", default="ring", metavar="X", help="ring (default), direct, direct-kept, gather, all-to-all, "
        "all-to-all-kept; two of them: all-to-all:2+ring, ring+all-to-all:2, ring:2+direct, without a number with "
        "--ranks-per-host; auto: all of these but gather and those that keep something, in order of time")  # fmt: skip
    add("--bucket", type=integer, metavar="N", help="tokens (default: that of ring_attention)")
    add("--device", choices=DEVICES, default="cuda")
    for name, (option, metavar, text) in RATES.items():
        add(option, dest=name, type=integer if metavar == "P" else float, metavar=metavar, help=text)
    add("--gpu", metavar="NAME", help=f"measured rates in place of those above but of hosts, of {GPU!r}")
    add("--memory", type=integer, metavar="BYTES", help="of a rank: adds the longest sequence that fits, such as 80Gi")
    add("--json", action="store_true", help="print JSON")
    return top


def pattern_of(given: argparse.Namespace) -> Pattern:
    """Return the pattern of the options, or raise ValueError."""
    alone = given.pattern is not None, given.segments is not None, given.window is not None
    if sum(alone) > 1 or (given.pattern is not None and given.causal):
        raise ValueError("--pattern, --segments and --window exclude each other, and --pattern has --causal within")
    if (given.segments is None) != (given.dilations is None):
        raise ValueError("--segments and --dilations must be given together")
    if given.pattern is not None:
        try:
            return Pattern.from_dict(json.loads(read_regular(given.pattern)))
        except ValueError as error:
            raise ValueError(f"--pattern {given.pattern} cannot be read: {error}") from error
    if given.segments is not None:
        return Pattern.longnet(given.segments, given.dilations, given.heads, given.causal)
    return Pattern.dense(given.causal, window=given.window)


def rates_of(given: argparse.Namespace) -> Rates | None:
    """Return the rates of the options; None without any."""
    rates = {name: getattr(given, name) for name in RATES if getattr(given, name) is not None}
    if given.gpu is not None:
        if others := sorted(set(rates) - set(OF_HOSTS)):
            raise ValueError(f"--gpu has rates of its own: {RATES[others[0]][0]} must not be given beside it")
        return Rates.of(given.gpu, **rates)
    if rates and not {"forward", "backward", "link"} <= set(rates):
        raise ValueError("--forward-rate, --backward-rate and --link-rate must be given together")
    return Rates(**rates) if rates else None


def rows_of(given: argparse.Namespace) -> Estimates:
    """Return the estimates of the options, or raise ValueError."""
    pattern = pattern_of(given)
    arguments: dict[str, Any] = {
        "order": given.order, "heads": given.heads, "kv_heads": given.kv_heads, "head_dim": given.head_dim,
        "value_dim": given.value_dim, "batch": given.batch, "dtype": DTYPES[given.dtype], "bucket": given.bucket,
        "device": given.device, "rates": rates_of(given),
    }  # fmt: skip
    if given.exchange != AUTO:
        sizes = {"tokens": given.tokens, "ranks": given.ranks, "memory": given.memory}
        return estimate(pattern, exchange=given.exchange, **sizes, **arguments)
    if given.memory is not None or len(given.tokens) > 1 or len(given.ranks) > 1:
        raise ValueError("--exchange auto takes one number of --tokens and of --ranks, and no --memory")
    return choose(pattern, tokens=given.tokens[0], ranks=given.ranks[0], **arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the estimates, and return the exit status: 2 for a wrong argument."""
    top = parser()
    given = top.parse_args(arguments)
    try:
        rows = rows_of(given)
    except (ValueError, OSError, RecursionError) as error:
        top.error(str(error))
    if given.json:
        print(rows.to_json())
    else:
        print(rows.to_table(shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_WIDTH))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that stops, as `head`, ends it as it ends other commands
    sys.exit(main())
