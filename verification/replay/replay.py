"""Run one saved counter-example again, on any backend."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from verification.replay.records import parse
from verification.report.report import Report
from verification.run.backends import MAX_RANKS, Backend, Unavailable

MAX_BYTES = 2**20  # of a file; runs save some kilobytes
_SHOWN = 500  # characters of an error, which may quote the file


def _refuse_torchrun(record: object, file: Path, backend: Backend) -> None:
    """Raise ValueError with the command for problems of ranks that torchrun starts: links and long sequences."""
    problem = next((record[name] for name in ("links", "long") if isinstance(record, dict) and name in record), None)
    if isinstance(problem, dict):
        words = ["torchrun", f"--nproc-per-node={problem.get('world')}", "-m", "verification.cli.validate"]
        words += ["--backend", "nccl" if backend.name == "nccl" else "gloo", "--replay", str(file)]
        raise ValueError(f"it is a problem of ranks that torchrun starts; write {shlex.join(words)}")


def replay(
    file: Path, report: Report, backend: Backend, argument: str = "FILE", attention: str | None = None
) -> Report:
    """Replay a saved counter-example, report the result, and close the backend. argument: that named the file.
    attention: as for `verification.replay.records.parse`.

    Raises Unavailable for a file that cannot be read or holds no counter-example."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes; a counter-example has at most that many")
        try:
            record = json.loads(content.decode())
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from error
        _refuse_torchrun(record, file, backend)
        saved = parse(record, attention)
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: too deeply nested lists
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}..."
        raise Unavailable(f"argument {argument}: cannot read a counter-example from {file}: {reason}") from error
    saved.prepare(backend)
    most = MAX_RANKS[backend.name]
    if saved.world > most:
        raise Unavailable(
            f"argument {argument}: world is {saved.world} in {file}; on {backend.name} it must be at most {most}"
        )
    try:
        backend.start(saved.world)
        with report:
            saved.run(backend, report, file)
    finally:
        backend.close()
    report.summary(replayed=True)
    return report
