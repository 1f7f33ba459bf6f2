"""Faults of saved files: mutated ones, and what is no regular file. Each must be refused in one line, or replayed."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from verification.faults.files.mutations import MUTATIONS, mutated
from verification.faults.files.reading import TRAP, read_in_fork, replay_by_command
from verification.faults.seeded_faults import SeededFault, SeededFaults

MUST = "refused in a line, or read"


def _socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(file))


def _huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**40)


SPECIAL: tuple[Callable[[Path], object], ...] = (
    os.mkfifo, _socket, _huge, Path.mkdir, Path.touch,
    *(lambda file, target=target: file.symlink_to(target) for target in ("/dev/zero", "/dev/null", "/dev/tty", "none")),
)  # fmt: skip


def _written(draw: random.Random, folder: Path, kind: str) -> Path:
    """Write the file of a kind beside a module that would end the process."""
    (folder / "trap.py").write_text(TRAP)
    file = folder / "case.json"
    if kind == "special":
        draw.choice(SPECIAL)(file)
    else:
        file.write_bytes(mutated(kind, draw))
    return file


def _read(kind: str) -> Callable[[random.Random, Path], None]:
    return lambda draw, folder: read_in_fork(_written(draw, folder, kind))


def _replayed(draw: random.Random, folder: Path) -> None:
    replay_by_command(_written(draw, folder, draw.choice((*MUTATIONS, "special"))))


IN_FORKS = {
    **{kind: SeededFault(title, MUST, _read(kind)) for kind, (title, _) in MUTATIONS.items()},
    "special": SeededFault("no regular file", "refused in a line", _read("special")),
}
FILE_FAULTS = SeededFaults(
    "file_fault", "file", IN_FORKS,
    {"command": SeededFault("any of these, by the command", "refused in a line, or replayed", _replayed)}, every=64,
)  # fmt: skip
