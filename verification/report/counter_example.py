"""CounterExample: what a report keeps of a failure, and the file from which it is replayed."""

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


@dataclass(frozen=True)
class CounterExample:
    """What is broken, the record that replays it, and what was seen in words.

    kind      of failure, as `verification.failures` names it
    broken    title of the property or law
    record    the Case as JSON has it; for a law, what else it takes as well
    file      where the record is saved
    backend   the one on which it shows
    command   the words of the command line that replays it
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
        """The command line, for a shell."""
        return shlex.join(self.command)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "property": self.broken, "world": self.world, "backend": self.backend,
            "case": dict(self.record), "replay": self.replay, "message": self.message,
        }  # fmt: skip


def counter_example(
    failure: VerificationFailure, broken: str, world: int, record: Mapping[str, Any], file: Path, backend: str
) -> CounterExample:
    """A counter-example whose record is saved in that file. Before any stacks it has what was noted on the cause."""
    place = [] if backend == "gloo" else ["--backend", backend]
    command = (sys.executable, "-m", "verification", "replay", *place, str(file.resolve()))
    first, *rest = str(failure).splitlines() or [""]
    message = "\n".join([first, *getattr(failure, "__notes__", ()), *rest])
    return CounterExample(failure.kind, broken, world, record, file, message, backend, command)


def save_record(
    failure: VerificationFailure, broken: str, world: int, record: Mapping[str, Any], folder: Path, backend: str
) -> CounterExample:
    """Write a minimal example as JSON in a file named after the kind of failure and a digest of the example."""
    written = json.dumps(record, indent=2) + "\n"
    digest = hashlib.blake2b(written.encode(), digest_size=4).hexdigest()
    file = folder / f"{failure.kind.replace(' ', '-')}-world-{world}-{digest}.json"
    found = counter_example(failure, broken, world, record, file, backend)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(written)
    except OSError as error:  # what was found is reported all the same, with the Case in it
        return replace(found, message=f"{found.message}\n(the Case could not be saved: {error})")
    return found
