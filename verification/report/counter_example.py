"""CounterExample: a failure in a report, with the file that replays it."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verification.failures import VerificationFailure
from verification.record_kinds import OPTIONS
from verification.whole_file import write


@dataclass(frozen=True)
class CounterExample:
    """A failed property or law, the record that replays it, and a message.

    kind      of failure, as in `verification.failures`
    broken    title of the property or law
    record    a `verification.record_kinds.Record`, as JSON
    file      of the record
    backend   on which it fails
    command   words of the command line that replays it
    """

    kind: str
    broken: str
    world: int
    record: Mapping[str, Any]
    file: Path
    message: str
    backend: str
    command: tuple[str, ...]

    @property
    def replay(self) -> str:
        """Command line that replays it, quoted for a shell."""
        return shlex.join(self.command)

    @property
    def cause(self) -> str | None:
        """The line of the message that names the cause."""
        return next((line for line in self.message.splitlines() if line.startswith("cause: ")), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "property": self.broken, "world": self.world, "backend": self.backend,
            "case": dict(self.record), "replay": self.replay, "message": self.message,
        }  # fmt: skip


def counter_example(
    failure: VerificationFailure, broken: str, world: int, record: Mapping[str, Any], file: Path, backend: str
) -> CounterExample:
    """Return a counter-example whose record is saved in that file. Notes on the cause precede any stacks."""
    options = [] if backend == "gloo" else ["--backend", backend]
    case = record.get("case")
    if backend == "gloo" and isinstance(case, Mapping) and case.get("device") == "cuda":  # a kernel on one GPU
        options += ["--device", "cuda"]
    for name_field, option in OPTIONS.items():
        if ":" in str(record.get(name_field)):  # a user's own module, which the file alone must not import
            options += [option, str(record[name_field])]
    command = (sys.executable, "-m", "verification", "replay", *options, str(file.resolve()))
    first, *rest = str(failure).splitlines() or [""]
    message = "\n".join([first, *getattr(failure, "__notes__", ()), *rest])
    return CounterExample(failure.kind, broken, world, record, file, message, backend, command)


def save_record(
    failure: VerificationFailure, broken: str, world: int, record: Mapping[str, Any], folder: Path, backend: str
) -> CounterExample:
    """Save a minimal example as JSON, in a file named after the kind of failure and a digest of the example."""
    text = json.dumps(record, indent=2) + "\n"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    file = folder / f"{failure.kind.replace(' ', '-')}-world-{world}-{digest}.json"
    example = counter_example(failure, broken, world, record, file, backend)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(file, text)
    except OSError as error:  # report the counter-example all the same: it contains the Case
        return replace(example, message=f"{example.message}\n(the Case could not be saved: {error})")
    return example
