#!/usr/bin/env python3
"""Runs `verification.cli.validate` on the ranks that torchrun starts. The packages must be installed.

torchrun --nproc-per-node=P scripts/validate_nccl.py [--help]
"""

from __future__ import annotations

import sys

try:
    from verification.cli.validate import main
except ModuleNotFoundError as error:
    if error.name != "verification":
        raise
    command = "torchrun --nproc-per-node=P -m verification.cli.validate"
    print(f"error: install the packages with `pip install -e .`, or run in the checkout: {command}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
