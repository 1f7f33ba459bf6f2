"""`scripts/validate_nccl.py` with a defect planted in every rank: torchrun starts this, the defect's name first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import torchrun_tasks
from verification.cli.validate import main

if __name__ == "__main__":
    prepare = getattr(torchrun_tasks, sys.argv.pop(1))
    sys.exit(main(sys.argv[1:], prepare=prepare))
