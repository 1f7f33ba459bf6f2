"""Run one saved counter-example again, on any backend."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ring.regular_file import read_regular
from verification.replay.registry import parse
from verification.replay.saved import Saved
from verification.report.report import Report
from verification.run.backends import MAX_RANKS, Backend, Unavailable

_SHOWN = 500  # characters of an error, which may quote the file


def read_record(file: Path) -> object:
    """Return the JSON of a file. Raises OSError, ValueError, or RecursionError for too deeply nested lists."""
    content = read_regular(file)
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error


@contextmanager
def naming(file: Path, argument: str) -> Iterator[None]:
    """Raise what reading a counter-example raises as Unavailable, in a line. argument: that named the file."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}..."
        raise Unavailable(f"argument {argument}: cannot read a counter-example from {file}: {reason}") from error


def _with_torchrun(saved: Saved, file: Path, backend: Backend) -> str:
    """Return the command for a problem of ranks that torchrun starts: links and long sequences."""
    words = ["torchrun", f"--nproc-per-node={saved.world}", "-m", "verification.cli.validate"]
    return shlex.join([*words, "--backend", "nccl" if backend.name == "nccl" else "gloo", "--replay", str(file)])


def replay(
    file: Path, report: Report, backend: Backend, argument: str = "FILE", attention: str | None = None
) -> Report:
    """Replay a saved counter-example, report the result, and close the backend. argument: that named the file.
    attention: as for `verification.replay.registry.parse`.

    Raises Unavailable for a file that cannot be read or holds no counter-example."""
    with naming(file, argument):
        saved = parse(read_record(file), attention)
        if (run := saved.run) is None:
            command = _with_torchrun(saved, file, backend)
            raise ValueError(f"it is a problem of ranks that torchrun starts; write {command}")
    saved.prepare(backend)
    most = MAX_RANKS[backend.name]
    if saved.world > most:
        raise Unavailable(
            f"argument {argument}: world is {saved.world} in {file}; on {backend.name} it must be at most {most}"
        )
    try:
        backend.start(saved.world)
        run(saved, backend, report, file)
    finally:
        backend.close()
    report.summary(replayed=True)
    return report
