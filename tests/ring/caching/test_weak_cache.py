"""A cache beside an object: made once for it and the other arguments, and freed with it."""

from __future__ import annotations

import gc
import weakref

import torch

from ring.caching.graph_keepalive import keep_alive_for_one_graph, keep_alive_in_graph
from ring.caching.weak_cache import cached_on


class Thing:
    """May be referred to weakly."""


def test_values_are_made_once_and_freed_with_their_object() -> None:
    made = []

    @cached_on
    def table(of: Thing, size: int) -> Thing:
        found = Thing()
        made.append((size, weakref.ref(found)))
        return found

    one, other = Thing(), Thing()
    assert table(one, 2) is table(one, 2) is not table(one, 3)
    assert table(other, 2) is not table(one, 2), "objects are told apart by identity"
    del one
    gc.collect()
    assert [(size, found() is None) for size, found in made] == [(2, True), (3, True), (2, False)]


def test_on_cpus_no_graph_is_captured() -> None:
    with keep_alive_for_one_graph() as kept:
        keep_alive_in_graph(torch.zeros(1))
    assert kept == []
