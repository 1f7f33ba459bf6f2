"""What is kept beside an object: made once for it and the other arguments, and freed with it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import torch

from ring.caching.beside import kept_beside
from ring.caching.captured import kept_for_one_graph, kept_while_captured


@dataclass(frozen=True, eq=False)
class Thing:
    number: int


class Made:
    pass


def test_it_is_made_once_and_freed_with_its_object() -> None:
    made = []

    @kept_beside
    def table(of: Thing, size: int) -> Made:
        found = Made()
        made.append((of.number, size, weakref.ref(found)))
        return found

    one, other = Thing(1), Thing(1)
    assert table(one, 2) is table(one, 2) is not table(one, 3)
    assert table(other, 2) is not table(one, 2), "objects are told apart by identity"
    assert [(number, size) for number, size, _ in made] == [(1, 2), (1, 3), (1, 2)]
    del one
    gc.collect()
    assert [found() is None for *_, found in made] == [True, True, False]


def test_on_cpus_no_graph_is_captured() -> None:
    with kept_for_one_graph() as kept:
        kept_while_captured(torch.zeros(1))
    assert kept == []
