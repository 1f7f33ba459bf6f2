"""What came of the syntactic changes, as a text: counts by file, the rate, and the survivors that show a gap.

`survivors.toml` has the reasons, by file, function and the line before and after. A verdict is one of

    equivalent      no legal call can tell the difference
    performance     the results are the same; time or memory need not be
    gap             a legal call can, and no check does: the reason says what would
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SURVIVORS = Path(__file__).with_name("survivors.toml")
VERDICTS = ("equivalent", "performance", "gap")
SAME = ("equivalent", "performance")
Place = tuple[str, str, str, str]  # file, function, before, after


@dataclass(frozen=True)
class Record:
    """The outcome for one change: "properties" and "tests" killed it; "survived"; "not run", for the reason `message`.

    by: the property or law, or the test; examples: until it was found in the simulation, of a survivor all; tested:
    whether the unit tests have seen it.
    """

    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    key: str
    outcome: str
    by: str | None
    kind: str | None
    message: str | None
    examples: int
    tested: bool
    seed: int
    seconds: float

    @property
    def survived(self) -> bool:
        return self.outcome == "survived"

    @property
    def place(self) -> Place:
        return self.file, self.function, self.before, self.after

    def __str__(self) -> str:
        said = {"properties": f"{self.by}, example {self.examples}", "tests": str(self.by)}.get(
            self.outcome, f"{self.before} => {self.after}" + (f": {self.message}" if self.message else "")
        )
        return f"{self.file}:{self.line} {self.operator}: {self.outcome}: {said} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class Reason:
    verdict: str
    reason: str


Judged = list[tuple[Record, str | None, str]]  # of survivors the verdict, with its reason; None for the others


def read_reasons(path: Path) -> dict[Place, Reason]:
    """Raises ValueError for an entry that is incomplete, unknown or there twice."""
    found: dict[Place, Reason] = {}
    for entry in tomllib.loads(path.read_text()).get("survivor", []):
        if set(entry) != {"file", "function", "before", "after", "verdict", "reason"}:
            raise ValueError(f"{path}: an entry needs file, function, before, after, verdict, reason; got {entry}")
        if entry["verdict"] not in VERDICTS or not entry["reason"].strip():
            raise ValueError(f"{path}: verdict must be one of {VERDICTS}, with a reason; got {entry}")
        place = entry["file"], entry["function"], entry["before"], entry["after"]
        if place in found:
            raise ValueError(f"{path}: this survivor is there twice: {entry}")
        found[place] = Reason(entry["verdict"], entry["reason"].strip())
    return found


def explained(records: Sequence[Record], reasons: dict[Place, Reason]) -> Judged:
    """Every record with the verdict on it: "unexplained" for a survivor without a reason."""
    judged: Judged = []
    for record in records:
        reason = reasons.get(record.place)
        if not record.survived:
            judged.append((record, None, ""))
        elif reason is None:
            judged.append((record, "unexplained", ""))
        else:
            judged.append((record, reason.verdict, reason.reason))
    return judged


def rate(judged: Judged, folder: str = "ring/") -> float:
    """The killed part of the changes that are not equivalent; 1 if there are none. What was not run is not counted."""
    outcomes = [(r.survived, v) for r, v, _ in judged if r.file.startswith(folder) and r.outcome != "not run"]
    real = [survived for survived, verdict in outcomes if verdict not in SAME]
    return 1.0 if not real else real.count(False) / len(real)


def interval(judged: Judged) -> tuple[float, float]:
    """Where the killed part of all changes lies with 95 %, of which these are a sample (Wilson 1927).

    http://www.jstor.org/stable/2276774
    """
    n = sum(r.outcome != "not run" and v not in SAME for r, v, _ in judged)
    if not n:
        return 0.0, 1.0
    p, z = rate(judged), 1.96
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


_COLUMNS = (
    "changes", "not run", "killed by properties", "killed by unit tests", "equivalent", "performance only", "gap",
    "unexplained",
)  # fmt: skip


def counts(judged: Judged) -> tuple[int, ...]:
    """As `_COLUMNS` has it; the first is the sum of the others."""
    outcomes = [record.outcome for record, _, _ in judged]
    verdicts = [verdict for _, verdict, _ in judged]
    return (
        len(judged), *map(outcomes.count, ("not run", "properties", "tests")),
        *map(verdicts.count, (*VERDICTS, "unexplained")),
    )  # fmt: skip


def markdown(
    records: Sequence[Record], reasons: dict[Place, Reason], seed: int, files: Sequence[str], absent: Sequence[str],
    commit: str | None, of: int,
) -> str:  # fmt: skip
    """The whole summary. files: in the order of the table; absent: those that were not judged; commit: of the code;
    of: changes that there are, if the records are a sample.
    """
    which = "Every small change" if len(records) == of else f"A sample of {len(records)} of the {of} small changes"
    judged = explained(records, reasons)
    survivors = [record for record in records if record.survived]
    seen = [record.examples for record in survivors] or [0]
    lines = [
        "# Syntactic changes", "",
        (f"{which} of the code of commit `{commit or 'unknown'}`: later code is not judged here. Written by "
        "`scripts/mutate --summary verification/mutants/syntactic/SYNTACTIC.md`; `mutations.py` says which changes "
        "are made, `survivors.toml` why a survivor is equivalent, costs only time or memory, or shows a gap."), "",
        (f"Seed {seed}. The {len(survivors)} survivors have seen {min(seen)} to {max(seen)} examples in the "
        f"simulation, and {sum(record.tested for record in survivors)} of them the unit tests. The last column has "
        "the killed part of those changes that change a result."), "",
        *([f"Not judged: {', '.join(f'`{file}`' for file in absent)}.", ""] if absent else []),
        "| file | " + " | ".join(_COLUMNS) + " | killed of the not equivalent |",
        "|---|" + "---:|" * (len(_COLUMNS) + 1),
    ]  # fmt: skip
    for file in files:
        own = [entry for entry in judged if entry[0].file == file]
        lines.append(_row(f"`{file}`", own, rate(own, file)))
    inside = [entry for entry in judged if entry[0].file.startswith("ring/")]
    lines += [_row("**`ring/`**", inside, rate(inside)), ""]
    if len(records) < of:
        lines += [
            "Of all changes of `ring/` that are not equivalent, {:.1%} to {:.1%} are killed (95 % interval).".format(
                *interval(inside)
            ),
            "",
        ]
    lines += _found_by(judged) + _not_run(judged) + _open_survivors(judged)
    return "\n".join(lines).rstrip() + "\n"


def _row(name: str, judged: Judged, killed: float) -> str:
    return f"| {name} | " + " | ".join(map(str, counts(judged))) + f" | {killed:.1%} |"


def _found_by(judged: Judged) -> list[str]:
    found = sorted(record.examples for record, _, _ in judged if record.outcome == "properties")
    if not found:
        return []
    names = [record.by or "" for record, _, _ in judged if record.outcome == "properties"]
    most = sorted({name: names.count(name) for name in names}.items(), key=lambda item: (-item[1], item[0]))
    soon = sum(number <= 10 for number in found)
    return [
        f"Killed by properties: {soon} of {len(found)} within 10 examples, the median after "
        f"{found[len(found) // 2]}. By " + ", ".join(f"{name} ({number})" for name, number in most) + ".",
        "",
    ]  # fmt: skip


def _not_run(judged: Judged) -> list[str]:
    lines = [
        f"- `{record.file}:{record.line}` {_change(record)}: {record.kind}: {record.message}"
        for record, _, _ in judged
        if record.outcome == "not run"
    ]
    return ["## Not run", "", *lines, ""] if lines else []


def _open_survivors(judged: Judged) -> list[str]:
    """Those that nobody has explained, and those that a legal call could tell."""
    lines = []
    titles = {"unexplained": "Unexplained", "gap": "Gaps: a legal call can tell, and no check does"}
    for verdict, title in titles.items():
        own = [(record, reason) for record, found, reason in judged if found == verdict]
        if not own:
            continue
        lines += [f"## {title} ({len(own)})", ""]
        for record, reason in sorted(own, key=lambda entry: (entry[0].file, entry[0].line, entry[0].after)):
            where = f" in `{record.function}`" if record.function else ""
            lines.append(f"- `{record.file}:{record.line}`{where}: {_change(record)}{f': {reason}' if reason else ''}")
        lines.append("")
    return lines


def _change(record: Record) -> str:
    return f"`{record.before}` becomes `{record.after}`" if record.after else f"`{record.before}` left out"
