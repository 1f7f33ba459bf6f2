"""The conformance table as a page: Markdown of its record, and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verification.peers.conformance.row import FAILED, HELD, NOT_CLAIMED
from verification.wording import counted

HEAD = """\
# Conformance, {date}

`{command}` wrote this page and {its_record}: torch {torch}, Python {python},
{device}, commit {commit}, seed {seed}. No cell is written by hand; names of the command without a row had not ended.

A row is an implementation, a column a feature. Each cell is a search of its own: {examples} examples on each of
{worlds} ranks, Cases that have the feature and that the implementation claims, compared with the fp64 oracle.

- *held* and the number of examples that held.
- *fails*, with the ranks and tokens of the smallest failing Case; a note has what is wrong and a command that shows it.
- *-*: not claimed. No Case with the feature is left by what the adapter says it supports.
- *not run*, with the reason in a note.

*output* and *lse* are judged in a forward alone, *gradients* by dq, dk and dv, *packed* to *empty ranks* by all of
these. *memory O(n/p)* holds if a rank's peak, measured on p and on p' ranks with as many tokens for each, grows by less
than one head of the further keys ([how it is measured](peers/conformance/memory.py)); the growth of a forward stays
unseen where its peak is below the backward's. *bytes sent* shows the bytes that a rank sends on the fewest and on the
most of its ranks, forward and, after the semicolon, with backward: multiples of a shard's keys and values. It holds if
they grow no faster than a ring's ([how](peers/conformance/traffic.py)).
"""


def page(record: Mapping[str, Any], at: str | None) -> str:
    """Return the page of a record, as `python -m verification conformance --json` writes it. at: its file, from the
    page's folder.
    """
    its_record = "its record" if at is None else f"[its record]({at})"
    notes: dict[str, int] = {}
    columns, worlds = record["columns"], " and ".join(map(str, record["worlds"]))
    lines = [HEAD.format(**{**record, "worlds": worlds, "its_record": its_record})]
    lines += [f"| implementation | version | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row in record["rows"]:
        cells = [f"{cell_text(cell)}{_reference(row, cell, notes)}" for cell in row["cells"]]
        lines.append(f"| {row['name']} | {row['version'] or '-'} | {' | '.join(cells)} |")
    lines += ["", "## Notes", "", *(f"{number}. {text}" for text, number in notes.items()), "", "## Claims", ""]
    return "\n".join(lines + [f"- {row['name']}: {row['supported'] or 'not known'}" for row in record["rows"]]) + "\n"


def cell_text(cell: Mapping[str, Any]) -> str:
    """Return the verdict of a cell in a few words."""
    verdict, case = cell["verdict"], cell["case"]
    if cell.get("shown"):  # records of before have none
        return f"{'held' if verdict == HELD else 'fails'}: {cell['shown']}"
    if verdict == FAILED:
        return f"fails: {counted(case['world'], 'rank')}, {counted(case['tokens'], 'token')}"
    return f"held {cell['examples']}" if verdict == HELD else "-" if verdict == NOT_CLAIMED else str(verdict)


def _reference(row: Mapping[str, Any], cell: Mapping[str, Any], notes: dict[str, int]) -> str:
    """Return the number of a cell's note, which is added; nothing for a cell that has none."""
    if cell["verdict"] == NOT_CLAIMED or not (cell["message"] or cell["reason"]):
        return ""
    text = f"{row['name']}: {cell['reason'].splitlines()[0]}" if cell["reason"] else ""
    if cell["verdict"] == FAILED:
        first, *others = cell["message"].splitlines()
        cause = next((f" ({line})" for line in others if line.startswith("cause: ")), "")
        text = f"{row['name']}, {cell['column']}: {cell['check']}: {first}{cause}. `{cell['replay']}`"
    return f" [{notes.setdefault(text, len(notes) + 1)}]"
