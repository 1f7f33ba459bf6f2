"""What laws say of layouts, patterns and refusals holds, and a planted breakage of each promise is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import reference.pattern
import ring.balance
import ring.compute.kernels
import ring.layout
from reference.pattern import Branch, Pattern
from ring import compiled
from ring.compute import kernel_counts
from ring.layout import Layout
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.laws import document_layouts, kernel_choice, layout_rows, pattern_values, refusals, values
from verification.check.laws.what_is_kept import PACKAGES
from verification.draw.document_lists import even_list, lists_for
from verification.run.caches import clear_caches

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(5)


def told(statement: Callable[[Case], Iterator[str]]) -> list[str]:
    clear_caches(PACKAGES)  # which hold what calls before a breakage have settled
    return [word for seed in SEEDS for word in statement(plain(1, seed=seed))]


def _of(module: Any, name: str, ranks: int = 3) -> Callable[[Case], Iterator[str]]:
    statement = getattr(module, name)
    return lambda case: statement(case, ranks)


STATEMENTS: dict[str, Callable[[Case], Iterator[str]]] = {
    "zigzags": _of(document_layouts, "zigzags"),
    "balanced": _of(document_layouts, "balanced"),
    "helpers": _of(document_layouts, "helpers"),
    "named": layout_rows.named,
    "orders": layout_rows.orders,
    "rows": layout_rows.rows,
    "equality": layout_rows.equality,
    "patterns": pattern_values.patterns,
    "refusals": lambda case: iter(filter(None, [refusals.not_refused()])),
    "kernels": lambda case: chain(*kernel_choice.looked_at(case)),
    "operators": lambda case: values._operators(),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_it_holds(name: str) -> None:
    assert told(STATEMENTS[name]) == []


def _set(where: Any, name: str, spoil: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setattr(where, name, spoil(getattr(where, name)))


def _shortest_first(real: Any) -> Any:
    """Of documents that stay whole."""
    return lambda documents, p: np.concatenate(
        [np.zeros(0, np.int64)] + [np.full(x, i % p) if x < 2 * p else real([x], p) for i, x in enumerate(documents)]
    )


def _forgetting(field: str, value: Any) -> Callable[[Any], Any]:
    """`to_dict` without one of a branch's fields."""

    def spoil(real: Any) -> Any:
        def to_dict(self: Pattern) -> dict[str, Any]:
            found: dict[str, Any] = real(self)
            for branch in found["branches"]:
                branch[field] = value
            return found

        return to_dict

    return spoil


def _shared(order: Any, cuts: Any) -> Layout:
    """Of an array that is not copied."""
    return Layout(len(order), tuple(map(int, cuts)), None, np.asarray(order))


def _half(x: torch.Tensor) -> torch.Tensor:
    return x / 2 + (x / 2).detach() if x.requires_grad else x


def _without_windows(real: Any, pattern: Pattern) -> str:
    text: str = real(replace(pattern, branches=tuple(replace(branch, window=None) for branch in pattern.branches)))
    return text


def _loosely(value: object) -> bool:
    return isinstance(value, int)


def _for_ever() -> Callable[[str], None]:
    """Every counter that there ever was counts each call."""
    every: list[Any] = []

    def count(name: str) -> None:
        every.extend(one for one in kernel_counts._counters if not any(one is known for known in every))
        for counter in every:
            counter[name] += 1

    return count


PLANTED: dict[str, tuple[str, Plant, str]] = {
    "whole documents in their order": ("zigzags", _set(ring.layout, "zigzag_owners", _shortest_first), "zigzag of"),
    "no division into whole documents": (
        "balanced", _set(ring.balance, "PARTS", lambda real: ()), "of the tokens",
    ),
    "as chunks at once": (
        "balanced", _set(ring.balance, "_divisions", lambda real: lambda _, *rest: [ring.balance._by_chunks(*rest)]),
        "must be contiguous",
    ),
    "cu_seqlens without the last": (
        "helpers",
        _set(document_layouts, "documents_from_cu_seqlens", lambda real: lambda edges, n: real(edges, n)[:-1]),
        "documents_from_cu_seqlens makes",
    ),
    "zigzag that is none": ("named", _set(Layout, "zigzag", lambda real: Layout.contiguous), "Layout.zigzag("),
    "an order that is shared": ("orders", _set(Layout, "from_cuts", lambda real: _shared), "changed later"),
    "shards in another type": (
        "rows", _set(Layout, "shard", lambda real: lambda self, x, *rest: real(self, x, *rest).double()), "turn",
    ),
    "half the gradient of shards": (
        "rows", _set(Layout, "shard", lambda real: lambda self, x, *rest: _half(real(self, x, *rest))), "gradients",
    ),
    "ranks from behind": (
        "rows", _set(Layout, "_check_rank", lambda real: lambda self, rank: real(self, max(rank, 0))), "rank -1",
    ),
    "cuts do not count": (
        "equality", _set(Layout, "__eq__", lambda real: lambda self, other: self.runs == getattr(other, "runs", 0)),
        "must not be equal",
    ),
    "copies of one number": (
        "equality", lambda patch: patch.setattr(Layout, "__copy__", lambda self: self, raising=False), "number",
    ),
    "windows that JSON loses": ("patterns", _set(Pattern, "to_dict", _forgetting("window", None)), "what JSON makes"),
    "heads that JSON loses": ("patterns", _set(Pattern, "to_dict", _forgetting("heads", None)), "what"),
    "windows that a text loses": (
        "patterns", _set(compiled, "text_of", lambda real: lambda pattern: _without_windows(real, pattern)), "text",
    ),
    "windows that do not count": (
        "patterns",
        _set(Branch, "__eq__", lambda real: lambda self, other: real(self, replace(other, window=self.window))),
        "must not be equal",
    ),
    "flags that are integers": ("refusals", _set(reference.pattern, "is_integer", lambda real: _loosely), "True"),
    "a scale of 0 by fused kernels": (
        "kernels",
        _set(ring.compute.kernels, "choose", lambda real: lambda *given: real(*given[:5], given[5] or 1.0, *given[6:])),
        "must take",
    ),
    "few keys by fused kernels": ("kernels", _set(ring.compute.kernels, "VECTOR", lambda real: 2), "must take"),
    "counters that go on": (
        "kernels", _set(kernel_counts, "count", lambda real: _for_ever()), "picked_kernels goes on",
    ),
    "layouts that are never gone": (
        "operators", _set(values, "numbered_layout", lambda real: lambda number: Layout.contiguous(2, 1)), "layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_broken_promise_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statement, plant, said = PLANTED[name]
    plant(monkeypatch)
    found = told(STATEMENTS[statement])
    assert found and any(said in word for word in found)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_lists_have_whole_documents_and_divided_ones(ranks: int) -> None:
    for seed in range(20):
        lists = list(lists_for(ranks, seed))
        assert len(lists) == 6 and all(sum(lengths) for lengths in lists)
        assert any(min(lengths) < 2 * ranks <= max(lengths) for lengths in lists)
        assert all(even_list(ranks, seed).count(length) % ranks == 0 for length in even_list(ranks, seed))
