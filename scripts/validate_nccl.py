"""Validates ring_attention on the ranks that torchrun starts: links, drawn Cases, laws, long problems.

    torchrun --nproc-per-node=P scripts/validate_nccl.py [--examples N] [--seed S] [--json FILE] [--timeout S]
                                                         [--replay CASE.json] [--long N] [--backend nccl|gloo]

Exit status: 0 all held, 1 a counter-example, 2 it could not be carried out (torchrun makes 1 of that).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of scripts/: the packages need not be installed

from verification.cli.validate import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
