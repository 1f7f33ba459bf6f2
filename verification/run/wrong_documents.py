"""What wrong calls of ring_attention do with the documents of their pattern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verification.case import Case

Arguments = dict[str, Any]  # of ring_attention, by name


def over(change: Callable[[tuple[int, ...]], tuple[int, ...] | None]) -> Callable[[Arguments, Case], None]:
    """Other documents, made of those that there are."""

    def spoil(arguments: Arguments, case: Case) -> None:
        pattern = arguments["pattern"]
        arguments["pattern"] = replace(pattern, documents=change(pattern.documents or (case.tokens,)))

    return spoil


def without_documents(arguments: Arguments, case: Case) -> None:
    arguments["pattern"] = replace(case.pattern, documents=None)


def some_documents(arguments: Arguments, case: Case) -> None:
    """The Case's own, if their order can be another one; else one of one token, the others, and one of none."""
    own = case.pattern.documents or ()
    documents = own if own != own[::-1] else (1, case.tokens - 1, 0)
    arguments["pattern"] = replace(case.pattern, documents=documents)


def without_the_last(documents: tuple[int, ...]) -> tuple[int, ...]:
    """The last one that has tokens, and those behind it."""
    return documents[: max(i for i, length in enumerate(documents) if length)]


def one_moved(documents: tuple[int, ...]) -> tuple[int, ...]:
    """From the first document that has tokens to another: as many, and as many tokens together."""
    giver = next(i for i, length in enumerate(documents) if length)
    taker = (giver + 1) % len(documents)
    return tuple(length - (i == giver) + (i == taker) for i, length in enumerate(documents))
