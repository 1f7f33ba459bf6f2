"""Summary of a run, in at most LINES lines of 80 columns unless it is verbose. If these are too few, properties
with the smallest errors are counted instead of listed.
"""

from __future__ import annotations

import json
import math

from verification.console import BOLD, GREEN, RED, styled
from verification.failures import RankHang, WrongResult
from verification.record_kinds import KINDS, kind_of
from verification.report.counter_example import CounterExample
from verification.report.run_record import DTYPES, RunRecord, Summed
from verification.report.text import WIDTH, command_lines, json_lines, paragraph
from verification.wording import counted

LINES = 39  # with the line that a run begins with, 40
MESSAGE_LINES = 5  # of a message with stacks; it was printed in full when the failure was found
OTHERS = 3  # further counter-examples in the list
COUNTS = 8  # columns of the number of examples, and of seconds
RATIO = 6  # columns of a ratio
NAME = WIDTH - 2 * COUNTS - RATIO * len(DTYPES)  # columns of a property's title


def summarize_run(record: RunRecord, everything: bool = False) -> list[str]:
    """Return the summary of a run."""
    covered: list[str] = []
    if record.coverage.cases and (everything or not record.failures):  # a failure cuts the run, and its coverage, short
        covered = record.coverage.lines() if everything else record.coverage.rarest()
    failed = _counter_examples(record.failures, everything)
    rest = [*_notable(record), *covered, "", _verdict(record), *failed]
    return [*_table(record, everything, LINES - len(rest)), *rest]


def summarize_replay(record: RunRecord) -> list[str]:
    """Return the summary of one replayed example, with the verdict last. Its message has been printed."""
    cases = [line for failure in record.failures for line in _case(failure)]
    return [*_table(record, False, LINES), *_notable(record), *cases, _verdict(record)]


def describe(failure: CounterExample, most: int | None = None) -> list[str]:
    """Return the headline and the message: numbers, or stacks of a crash or hang. most: lines of the message."""
    message = paragraph(failure.message, "  ")
    if most is not None and len(message) > most:
        message = [*message[: most - 1], f"  ... ({len(message) - most + 1} more lines were printed when it was found)"]
    lines = [_headline(failure), *message]
    simulated = KINDS[kind_of(failure.record)].simulated
    if failure.kind == RankHang.kind and failure.backend != "sim" and simulated:
        lines.append("  if a replay with --backend sim hangs too, it says which rank waits for which")
    return lines


def _table(record: RunRecord, everything: bool, most: int) -> list[str]:
    """Return at most `most` lines, if possible; everything: also a row per world size."""
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
    left = most - len(title) - 3  # lines for properties, one of which may count the others
    listed = names if everything or len(names) <= left + 1 else _largest(record, names, broken, max(0, left))
    for name in listed:
        body.append(_row(f"! {name}" if name in broken else name, rows.total(name)))
        if everything and len(worlds) > 1:
            body += [_row(f"  world {world}", rows.total(name, world)) for world in rows.worlds(name)]
    if len(listed) < len(names):
        body.append(f"and {len(names) - len(listed)} more, which --verbose lists")
    body.append(_row("all", Summed(record.examples, rows.total().worst, record.seconds)))
    return [*(styled(line, BOLD) for line in (*title, header)), *body]


def _largest(record: RunRecord, names: list[str], broken: set[str], most: int) -> list[str]:
    """Select `most` properties, broken ones first, then those with the largest ratios; keep their order."""

    def size(name: str) -> tuple[bool, float]:
        worst = (math.inf if math.isnan(ratio) else ratio for ratio in record.rows.total(name).worst.values())
        return name in broken, max(worst, default=0.0)

    largest = sorted(names, key=size, reverse=True)[:most]
    return [name for name in names if name in largest]


def _row(name: str, total: Summed) -> str:
    name = name if len(name) < NAME else name[: NAME - 2] + "…"
    ratios = "".join(f"{_ratio(total.worst.get(dtype)):>{RATIO}}" for dtype in DTYPES)
    return f"{name:<{NAME}}{total.examples:>{COUNTS}}{ratios}{total.seconds:>{COUNTS}.1f}"


def _ratio(value: float | None) -> str:
    if not value:
        return "-" if value is None else "0"
    return f"{value:.0e}" if value < 0.001 else f"{value:.3f}"


def _notable(record: RunRecord) -> list[str]:
    return [line for text in record.notable for line in paragraph(text, hanging="  ")]


def _verdict(record: RunRecord) -> str:
    """Return the number of examples that held, the time, and the verdict."""
    failures, examples = len(record.failures), record.examples
    held = counted(examples, "example") + (" held" if failures else "")
    if examples > 1:
        held += f", {record.distributed} of them distributed,"
    elif not examples and failures:
        held = "no example held"
    verdict = counted(failures, "counter-example") if failures else "it held" if examples == 1 else "all held"
    end = ", then interrupted" if record.interrupted else ""
    style = RED if failures or record.interrupted else GREEN
    return f"{held} in {record.seconds:.1f} s: {styled(f'{verdict}{end}', style)}"


def _counter_examples(failures: list[CounterExample], everything: bool) -> list[str]:
    """Return the smallest one last and in full, and one line for each other, unless `everything`. One with a cause goes
    before smaller ones."""
    if not failures:
        return []
    smallest = min(failures, key=lambda x: (not x.cause, x.world, len(json.dumps(dict(x.record)))))
    others = [failure for failure in failures if failure is not smallest]
    if everything:
        return [line for failure in (*others, smallest) for line in in_full(failure)]
    lines = [_headline(failure) for failure in others[:OTHERS]]
    if len(others) > OTHERS:
        lines.append(f"and {counted(len(others) - OTHERS, 'more counter-example')}")
    if others:
        lines.append("--verbose and --json have these in full; the smallest one is:")
    return [*lines, *in_full(smallest, None if smallest.kind == WrongResult.kind else MESSAGE_LINES)]


def in_full(failure: CounterExample, most: int | None = None) -> list[str]:
    """Return headline, message (in at most `most` lines), Case and the command that replays it."""
    return [*describe(failure, most), *_case(failure), *command_lines("replay: ", failure.command)]


def _headline(failure: CounterExample) -> str:
    where = f"{counted(failure.world, 'rank')}, {failure.backend}"
    return f"{styled('counter-example', RED)}: {failure.broken} ({failure.kind}, {where})"


def _case(failure: CounterExample) -> list[str]:
    return json_lines("Case: ", failure.record)
