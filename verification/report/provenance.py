"""Provenance of a record: commit, versions, machine and command of a run."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ring import __version__

SETTINGS = ("NCCL_", "TORCH_", "CUDA_", "PYTORCH_")
ROOT = Path(__file__).resolve().parents[2]  # of the working tree


def commit() -> str | None:
    """Return the commit of the working tree, with "+" if there are changes; None without git, and from a wheel."""
    if not (ROOT / ".git").exists():  # git would name the commit of a repository around the environment
        return None
    try:
        run = [
            subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=True, timeout=30)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")


def typed_words(words: Sequence[str]) -> str:
    """Quote a command line for a shell. Of a file to write only the name is left: folders differ between machines."""
    files = ("--json", "--page")
    return shlex.join(Path(word).name if before in files else word for before, word in pairwise(["", *words]))


def processor_run(command: str) -> dict[str, Any]:
    """Return the record of a run on the CPU: device, versions, commit, command."""
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__,
        "version": __version__, "python": platform.python_version(), "commit": commit(), "command": command,
    }  # fmt: skip


def command_run(name: str, backend: str = "gloo", world: int = 0) -> dict[str, Any]:
    """Return the record of a run of `python -m verification NAME`. world: the largest, on GPUs."""
    command = f"python -m verification {name} {typed_words(sys.argv[2:])}".rstrip()
    return surroundings("cuda", world, command) if backend == "nccl" else processor_run(command)


def surroundings(device: str, world: int, command: str) -> dict[str, Any]:
    """Return the same with world size, GPU versions and settings. device: "cuda" for the name of the current GPU."""
    gpu = device == "cuda"
    return processor_run(command) | {
        **({"device": torch.cuda.get_device_name()} if gpu else {}),
        "world": world,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
