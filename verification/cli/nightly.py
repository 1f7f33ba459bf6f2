"""A run that goes on for hours: round after round with new seeds, on every backend and many world sizes, with faults
struck into ranks (`verification.faults`) in each.

A round is a list of chunks. After each the report so far is written as JSON, with the place in the round; a run that
was interrupted, or ended because its time was over, goes on from there when it is started again. Failing examples stay
in Hypothesis' database and are tried first the next time.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reference import fields
from verification import runner
from verification.faults import fault_run
from verification.problems import real_size
from verification.report.report import Report
from verification.run.backends import BACKENDS, SimBackend, Unavailable, open_backend
from verification.wording import counted

STATE = Path(".verification/nightly.json")
HOURS = 8.0
PROFILE = runner.Profile("hours, resumable: round after round with new seeds", 0, 290, remembers=True)

CONTENTS = ("examples", "faults")


@dataclass(frozen=True)
class Chunk:
    """Examples and laws on one world size, or (no examples) the problem of real size; or so many faults."""

    backend: str
    world: int
    examples: int
    what: str = "examples"  # of CONTENTS


# Few ranks find most defects and cost least. Beyond 64 ranks an example takes from half a minute to many.
ROUND = (
    Chunk("sim", 2, 1500), Chunk("sim", 3, 1000), Chunk("sim", 4, 800), Chunk("sim", 8, 300), Chunk("sim", 16, 100),
    Chunk("gloo", 1, 1000), Chunk("gloo", 2, 1000), Chunk("gloo", 3, 800), Chunk("gloo", 4, 600), Chunk("gloo", 8, 250),
    Chunk("gloo", 2, 100, "faults"), Chunk("gloo", 3, 100, "faults"), Chunk("gloo", 4, 100, "faults"),
    Chunk("gloo", 4, 0), Chunk("sim", 64, 20), Chunk("sim", 256, 2), Chunk("sim", 1024, 1),
)  # fmt: skip


@dataclass
class Night:
    """What is to be done, and how far it has come."""

    state: Path
    failures: Path
    chunks: Sequence[Chunk] = ROUND
    seed: int | None = None  # of the first round; None: a new one for every round
    round: int = 0
    round_seed: int = 0
    done: int = 0  # chunks of the round
    examples_on: dict[str, int] = field(default_factory=dict)  # by backend; faults by themselves

    def begin_round(self) -> None:
        fresh = random.SystemRandom().randrange(2**32)
        self.round_seed = fresh if self.seed is None else self.seed + self.round
        self.round, self.done = self.round + 1, 0


def run(night: Night, report: Report, hours: float) -> Report:
    """Go on until `hours` have passed; what is under way then is finished. Whatever is found is in the report.

    Raises Unavailable where ranks do not start, or `night.state` holds no state of a run.
    """
    last = time.monotonic() + 3600 * hours
    resume(night, report)
    with report:
        while time.monotonic() < last:
            if night.done == len(night.chunks) or not night.round:
                night.begin_round()
                save(night, report)  # an interrupted run goes on with the same seed
                report.say(f"round {night.round}, seed {night.round_seed}")
            try:
                run_chunk(night, report, night.chunks[night.done])
            except KeyboardInterrupt:
                report.say(f"interrupted: {night.state} has all up to the last world size that was finished")
                raise
            night.done += 1
            save(night, report)
    report.say(f"time is over in round {night.round}; the next run goes on with {night.state}")
    report.summary()
    return report


def run_chunk(night: Night, report: Report, chunk: Chunk) -> None:
    before, faults = report.examples, chunk.what == "faults"
    if faults:
        report.say(f"faults on {chunk.backend}:")
        fault_run.run_faults_on(report, chunk.world, chunk.examples, night.round_seed, night.failures)
    else:
        _run_examples(night, report, chunk)
    counted_as = chunk.what if faults else chunk.backend
    night.examples_on[counted_as] = night.examples_on.get(counted_as, 0) + report.examples - before


def _run_examples(night: Night, report: Report, chunk: Chunk) -> None:
    backend = open_backend(chunk.backend)
    shrink_backend = backend if isinstance(backend, SimBackend) else SimBackend()
    plan = runner.RunPlan(
        (chunk.world,), PROFILE, chunk.examples, night.round_seed, chunk.backend, night.failures, real_size.TOKENS
    )
    report.say(f"on {chunk.backend}:")
    try:
        if chunk.examples:
            runner.run_world(plan, report, backend, shrink_backend, chunk.world)
        else:
            runner.run_real_size(plan, report, backend)
    finally:
        backend.close()
        shrink_backend.close()


def save(night: Night, report: Report) -> None:
    """Whole or not at all: a run may be killed at any time."""
    record = report.to_dict() | {"nightly": _place(night)}
    fresh = night.state.with_suffix(".new")
    night.state.parent.mkdir(parents=True, exist_ok=True)
    fresh.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    os.replace(fresh, night.state)


def resume(night: Night, report: Report) -> None:
    """Take up what `save` left, if there is anything. Raises Unavailable for a file that is no such thing."""
    if not night.state.exists():
        return
    try:
        record = json.loads(night.state.read_text())
        report.restore(record)
        chunks = _restore(night, record["nightly"])
    except KeyError as error:
        raise Unavailable(f"argument --state: cannot go on from {night.state}: there is no {error}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise Unavailable(f"argument --state: cannot go on from {night.state}: {error}") from error
    if chunks != list(night.chunks):
        night.done = len(night.chunks)
        report.say("other world sizes or backends than last time: they begin a round of their own")
    elif night.seed is not None and night.done < len(chunks) and night.round_seed != night.seed + night.round - 1:
        raise Unavailable(
            f"argument --seed: {night.state} is within round {night.round}, of seed {night.round_seed}; "
            "leave --seed out to go on with it, or name another file by --state"
        )
    done = f"{counted(report.examples, 'example')} in {report.seconds:.0f} s"
    report.say(f"going on with round {night.round}, after {done}")


def _restore(night: Night, place: Any) -> list[Chunk]:
    """Take up what `_place` said; the chunks that there were. Raises KeyError, TypeError, ValueError."""
    chunks = [Chunk(**chunk) for chunk in place["chunks"]]
    for chunk in chunks:
        fields.choice("backend", chunk.backend, BACKENDS)
        fields.integer("world", chunk.world, 1)
        fields.integer("examples", chunk.examples, 0)
        fields.choice("what", chunk.what, CONTENTS)
    night.round, night.done = fields.integer("round", place["round"], 0), fields.integer("done", place["done"], 0)
    if night.done > len(chunks):
        raise ValueError(f"done is {night.done}; a round has {counted(len(chunks), 'chunk')}")
    if type(place["round_seed"]) is not int:
        raise ValueError(f"round_seed is {place['round_seed']!r}; it must be an integer")
    night.round_seed = place["round_seed"]
    night.examples_on = {
        str(name): fields.integer(f"examples on {name}", n, 0) for name, n in dict(place["examples_on"]).items()
    }
    return chunks


def _place(night: Night) -> dict[str, Any]:
    return {
        "round": night.round,
        "round_seed": night.round_seed,
        "done": night.done,
        "chunks": [asdict(chunk) for chunk in night.chunks],
        "examples_on": night.examples_on,
    }
