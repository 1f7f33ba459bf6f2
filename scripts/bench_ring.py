#!/usr/bin/env python3
"""Times ring_attention on the GPUs of one host: `verification.cli.bench`, for which the packages must be installed.

torchrun --nproc-per-node=P scripts/bench_ring.py [--help]
"""

from __future__ import annotations

import sys

try:
    from verification.cli.bench import main
except ModuleNotFoundError as error:
    if error.name != "verification":
        raise
    again = "torchrun --nproc-per-node=P -m verification.cli.bench"
    print(f"error: install the packages with `pip install -e .`, or run in the checkout: {again}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
