"""Commands as scripts run them: with -P, so that the working directory is no place to import from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def verification(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m verification` in a folder. path: of further modules."""
    places = os.pathsep.join(map(str, (ROOT, *([] if path is None else [path]))))
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "verification", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
