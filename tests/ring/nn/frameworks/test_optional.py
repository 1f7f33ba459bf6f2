"""A framework is imported by the module that is for it, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FRAMEWORKS = ("transformers", "deepspeed", "fairscale")


@pytest.mark.slow
def test_no_framework_is_imported() -> None:
    modules = "ring.nn, ring.nn.frameworks, ring.nn.frameworks.ddp, ring.nn.frameworks.fsdp"
    program = f"import sys, {modules}; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
