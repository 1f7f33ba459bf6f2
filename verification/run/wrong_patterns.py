"""Patterns that are wrong with a Case, or beside those of other ranks: what `verification.run.wrong_calls` spoils a
call with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference.pattern import Branch, Pattern
from verification.case import Case

Arguments = dict[str, Any]  # of ring_attention, by name


def too_many_heads(arguments: Arguments, case: Case) -> None:
    arguments["pattern"] = Pattern((Branch(heads=range(case.heads, case.heads + 1)),))


def other_pattern(arguments: Arguments, case: Case) -> None:
    arguments["pattern"] = replace(case.pattern, causal=not case.pattern.causal)


def other_window(arguments: Arguments, case: Case) -> None:
    """Of the last branch one position more, or 0 where it has none."""
    *others, last = case.pattern.branches
    last = replace(last, window=0 if last.window is None else last.window + 1)
    arguments["pattern"] = replace(case.pattern, branches=(*others, last))
