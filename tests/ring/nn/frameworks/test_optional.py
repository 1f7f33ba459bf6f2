"""A framework is imported by the module that is for it, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FRAMEWORKS = ("transformers", "deepspeed", "fairscale")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["ring.nn.frameworks", *(f"ring.nn.frameworks.{name}" for name in ("ddp", "fsdp"))])
def test_no_framework_is_imported(module: str) -> None:
    program = f"import sys, ring.nn, {module}; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
