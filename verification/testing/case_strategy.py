"""The strategy of Cases for users' own tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

from verification.case import Case
from verification.check.attention_on_ranks import Claims, any_case, claimed
from verification.peers.claims import applied
from verification.strategies import cases as drawn


def cases(world: int | Sequence[int] = 2, claims: Claims = any_case) -> st.SearchStrategy[Case]:
    """Return a strategy of Cases, from small and plain ones up.

    Args:
        world: number of ranks, or several to draw from.
        claims: maps a Case to the nearest one that your implementation supports, or to None; the functions of
            `verification.testing.claims` are made for it. It is given no sinks, softcap, value_dim, keys or slices
            unless it `claims.takes` them.

    Returns:
        A strategy. A Case has the sizes, pattern, layout, dtype and seed; `case.tensors()` are q, k, v, dout, dlse of
        the whole sequence, with sinks also these, and `case.shards().positions` those of each rank.
    """
    worlds = (world,) if isinstance(world, int) else tuple(world)
    return st.sampled_from(worlds).flatmap(drawn.cases_of_others).map(partial(claimed, partial(applied, claims)))
