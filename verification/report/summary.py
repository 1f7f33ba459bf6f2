"""What is printed when a run ends: at most LINES lines of at most 80 columns, unless every detail is wanted. Where that
is too few, the properties that held exactly are counted instead of listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from rich.text import Text

from verification.failures import RankHang
from verification.report.counter_example import CounterExample
from verification.report.run_result import DTYPES, RunRecord, Summed
from verification.report.text import WIDTH, command_lines, json_lines, paragraph
from verification.wording import counted

LINES = 39  # with the line that a run begins with, 40
MESSAGE_LINES = 5  # of what was seen; the rest was printed when it was found
OTHERS = 3  # further counter-examples that are listed
COUNTS = 8  # columns of the numbers of examples, and of seconds
RATIO = 6  # columns of a ratio
NAME = WIDTH - 2 * COUNTS - RATIO * len(DTYPES)  # columns of a property


def of_run(record: RunRecord, everything: bool = False) -> list[Text]:
    """The summary of a run."""
    covered: list[str] = []
    if record.coverage.cases and (everything or not record.failures):  # of a run that was cut short it says little
        covered = record.coverage.lines() if everything else record.coverage.rarest()
    failed = _counter_examples(record.failures, everything)
    rest = [*_notable(record), *_plain(covered), Text(), _verdict(record), *failed]
    return [*_table(record, everything, LINES - len(rest)), *rest]


def of_replay(record: RunRecord) -> list[Text]:
    """The summary of one example that was run again. What was seen has been printed; the verdict comes last."""
    cases = [line for failure in record.failures for line in _case(failure)]
    return [*_table(record, False, LINES), *_notable(record), *cases, _verdict(record)]


def seen(failure: CounterExample, most: int | None = None) -> list[Text]:
    """What is broken, where, and the numbers, or of a crash or a hang the stacks. most: lines of these."""
    said = paragraph(failure.message, "  ")
    if most is not None and len(said) > most:
        said = [*said[: most - 1], f"  ... (when it was found, {len(said) - most + 1} more lines were printed)"]
    found = [_headline(failure), *_plain(said)]
    needs_groups = {"peer", "training", "step_peer"} & set(failure.record)  # which a simulation does not have
    if failure.kind == RankHang.kind and failure.backend != "sim" and not needs_groups:
        found.append(Text("  a replay with --backend sim says who waits for whom, if it hangs there too"))
    return found


def _table(record: RunRecord, everything: bool, most: int) -> list[Text]:
    """At most so many lines, if that can be; everything: with a row for each world size as well."""
    rows, worlds = record.rows, record.rows.worlds()
    broken = {failure.broken for failure in record.failures}
    if not rows.by_key:
        return []
    where = counted(worlds[0], "rank") if len(worlds) == 1 else f"{', '.join(map(str, worlds))} ranks"
    marks = "0: exact, -: not drawn" + (", !: broken" if broken else "")
    title = paragraph(f"worst error / bound on {where} ({marks})")
    types = "".join(f"{short:>{RATIO}}" for short in DTYPES.values())
    header = f"{'property':<{NAME}}{'examples':>{COUNTS}}{types}{'seconds':>{COUNTS}}"
    body: list[str] = []
    names = list(dict.fromkeys((*rows.properties(), *sorted(broken))))
    left = most - len(title) - 3  # lines for properties, with one that counts the others
    listed = names if everything or len(names) <= left + 1 else _most_telling(record, names, broken, max(0, left))
    for name in listed:
        body.append(_row(f"! {name}" if name in broken else name, rows.of(name)))
        if everything and len(worlds) > 1:
            body += [_row(f"  world {world}", rows.of(name, world)) for world in rows.worlds(name)]
    if len(listed) < len(names):
        body.append(f"and {len(names) - len(listed)} more, which --verbose lists")
    body.append(_row("all", Summed(record.examples, rows.of().worst, record.seconds)))
    return [*_plain(title, "bold"), Text(header, "bold"), *_plain(body)]


def _most_telling(record: RunRecord, names: list[str], broken: set[str], most: int) -> list[str]:
    """So many properties, in their order: first of all those that are broken, then those with the largest ratios."""

    def size(name: str) -> tuple[bool, float]:
        worst = (math.inf if math.isnan(ratio) else ratio for ratio in record.rows.of(name).worst.values())
        return name in broken, max(worst, default=0.0)

    chosen = sorted(names, key=size, reverse=True)[:most]
    return [name for name in names if name in chosen]


def _row(name: str, found: Summed) -> str:
    name = name if len(name) < NAME else name[: NAME - 2] + "…"
    ratios = "".join(f"{_ratio(found.worst.get(dtype)):>{RATIO}}" for dtype in DTYPES)
    return f"{name:<{NAME}}{found.examples:>{COUNTS}}{ratios}{found.seconds:>{COUNTS}.1f}"


def _ratio(value: float | None) -> str:
    if not value:
        return "-" if value is None else "0"
    return f"{value:.0e}" if value < 0.001 else f"{value:.3f}"


def _notable(record: RunRecord) -> list[Text]:
    return [line for text in record.notable for line in _plain(paragraph(text, hanging="  "))]


def _verdict(record: RunRecord) -> Text:
    """How many examples held, of how many ranks, in what time; and that this was all, or what was not."""
    failures, examples = len(record.failures), record.examples
    held = counted(examples, "example") + (" held" if failures else "")
    if examples > 1:
        held += f", {record.distributed} of them distributed,"
    elif not examples and failures:
        held = "no example held"
    found = counted(failures, "counter-example") if failures else "it held" if examples == 1 else "all held"
    end = ", then interrupted" if record.interrupted else ""
    style = "bold red" if failures or record.interrupted else "bold green"
    return Text(f"{held} in {record.seconds:.1f} s: ").append(f"{found}{end}", style)


def _counter_examples(failures: list[CounterExample], everything: bool) -> list[Text]:
    """The smallest one last, and in full; of the others one line each, unless everything is wanted."""
    if not failures:
        return []
    smallest = min(failures, key=lambda failure: (failure.world, len(json.dumps(dict(failure.record)))))
    others = [failure for failure in failures if failure is not smallest]
    if everything:
        return [line for failure in (*others, smallest) for line in in_full(failure)]
    found = [_headline(failure) for failure in others[:OTHERS]]
    if len(others) > OTHERS:
        found.append(Text(f"and {counted(len(others) - OTHERS, 'more counter-example')}"))
    if others:
        found.append(Text("--verbose and --json have these in full; the smallest one is:"))
    return [*found, *in_full(smallest, MESSAGE_LINES)]


def in_full(failure: CounterExample, most: int | None = None) -> list[Text]:
    """What is broken, where, the numbers (in at most so many lines), the Case, and last the line that replays it."""
    return [*seen(failure, most), *_case(failure), *_plain(command_lines("replay: ", failure.command))]


def _headline(failure: CounterExample) -> Text:
    line = Text("counter-example", "bold red")
    where = f"{counted(failure.world, 'rank')}, {failure.backend}"
    return line.append(f": {failure.broken} ({failure.kind}, {where})", "not bold default")


def _case(failure: CounterExample) -> list[Text]:
    return _plain(json_lines("Case: ", failure.record))


def _plain(lines: Iterable[str], style: str = "") -> list[Text]:
    return [Text(line, style) for line in lines]
