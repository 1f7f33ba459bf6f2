"""One run as JSON: where, with what, by which command; and a row for everything that was measured."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from verification.peers.adapters import ring_flash_attn

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("NCCL_", "TORCH_", "CUDA_", "PYTORCH_")


def surroundings(device: torch.device, world: int) -> dict[str, Any]:
    """Device, versions, commit, command and the settings in force."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "world": world,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "python": platform.python_version(),
        "ring-flash-attn": ring_flash_attn.zigzag.version,
        "commit": commit(),
        "command": f"torchrun --nproc-per-node={world} scripts/bench_ring.py {shlex.join(sys.argv[1:])}".rstrip(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Of the working tree, with "+" where it differs from it; None where there is no git."""
    try:
        run = [
            subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=True, timeout=30)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")


class Record:
    """Prints rows, and keeps the file up to date: what was measured is there whatever becomes of the run.

    file: None, or where the JSON goes; on rank 0 only, others keep silent.
    """

    def __init__(self, surroundings: dict[str, Any], file: Path | None, speaks: bool) -> None:
        self.content: dict[str, Any] = {**surroundings, "rows": []}
        self._file, self._speaks = file, speaks

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.content["rows"]
        return rows

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if not self._speaks:
            return
        print(line(row), flush=True)
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.new")
            new.write_text(json.dumps(self.content, indent=1) + "\n")
            new.replace(self._file)


def line(row: dict[str, Any]) -> str:
    """A row as it is printed: names first, then what was found."""
    shown = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()]
    return "  ".join(text for text in shown if not text.endswith("=None"))


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
