#!/usr/bin/env python3
"""Measures speed; each subcommand explains itself with --help.

torchrun --nproc-per-node=P scripts/bench attention ...    ring_attention, its kernels alone, and other methods
torchrun --nproc-per-node=P scripts/bench model ...        training steps of whole models, by attention method
torchrun --nproc-per-node=P scripts/bench patterns ...     training losses over time, dense and dilated
python scripts/bench kernels ...                         times of the fused kernels, for the choice of "auto"
python scripts/bench rates ...                           their rates by length, and the cost of a fixed order of sums
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
MODULES = {
    "attention": "attention",
    "model": "model",
    "kernels": "kernels",
    "rates": "kernel_rates",
    "patterns": "patterns",
}

if __name__ == "__main__":
    # Replace this folder in sys.path: its modules must not be importable by their bare names.
    sys.path[:1] = [str(SCRIPTS), str(SCRIPTS.parent)]
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    if name not in MODULES:
        import_module("bench.command").stop(f"subcommand {name!r}; it must be one of {', '.join(MODULES)}")
    sys.exit(import_module(f"bench.{MODULES[name]}").main(rest))
