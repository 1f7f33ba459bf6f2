"""Exact results of every call of a ServingCase, merged and of each rank's keys alone, with the bounds of rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reference import roundoff
from reference.bounds import Array
from reference.fast_oracle import Expectation, Inputs, Ints, evaluate
from reference.pattern import Pattern
from reference.roundoff import Arithmetic, Counts
from verification.serving.server import Server
from verification.serving.serving_case import ServingCase

CAUSAL = Pattern.dense(causal=True)
Named = dict[str, Array]


@dataclass(frozen=True, eq=False)
class ServingExpectation:
    """Exact results and bounds of each call, by call, rank and name, in the shapes that a `Server` returns.

    places  for each row of each call: slot, position in its request
    """

    exact: list[list[Named]]
    bound: list[list[Named]]
    places: list[list[tuple[int, int]]]


def numbers_of(case: ServingCase) -> tuple[Array, Array, Array]:
    """Return q, k and v of all calls in order, in fp64."""
    q, k, v = (np.asarray(torch.cat(parts).double()) for parts in zip(*case.tensors(), strict=True))
    return q, k, v


def arithmetic_of(server: Server, case: ServingCase, keys: int) -> Arithmetic:
    """Return the arithmetic of a right server of that class, for rows of so many keys. A row merges at most the partial
    results that each rank makes."""
    narrow = case.dtype in ("bfloat16", "float16")
    kernel = "math" if server.arithmetic in ("half", "gpu") and not narrow else server.arithmetic
    merges = min(keys, server.splits * case.world)
    blocks = (1, 2) if kernel == "gpu" else roundoff.max_call_blocks(keys)
    counts = Counts(keys, keys * (case.heads // case.kv_heads), merges, 1, *blocks)
    return Arithmetic.of(case.dtype, kernel, case.head_dim, case.calls_of(0)[0].scale, counts)


def expect(server: Server, case: ServingCase) -> ServingExpectation:
    """Return the exact results of all that the server returns."""
    (q, k, v), calls = numbers_of(case), case.calls_of(0)
    shapes = [(sum(call.new), case.heads, case.dim_of_values) for call in calls]
    exact, bound = (
        [
            [{n: np.zeros(shape[:2] if n.endswith("lse") else shape) for n in server.returns} for _ in case.ranks]
            for shape in shapes
        ]
        for _ in range(2)
    )
    places: list[list[tuple[int, int]]] = [[(0, 0)] * shape[0] for shape in shapes]
    starts = np.cumsum([0, *(shape[0] for shape in shapes)])
    for number, slot, rows, tokens in case.requests():
        call, total = calls[number], len(tokens)
        positions, queries = np.arange(call.before[slot], total), q[starts[number] : starts[number + 1]][rows]
        places[number][rows] = [(slot, int(position)) for position in positions]
        solve = solver(server, case, queries, k[tokens], v[tokens], positions)
        merged = solve(None)
        for rank in case.ranks:
            whole = case.replicated or "partial_out" not in server.returns
            owned = np.array([[call.owns(p, rank) for p in range(total)]] * case.kv_heads)
            partial = merged if whole else solve(owned)
            for name in server.returns:
                result = partial if name.startswith("partial") else merged
                for into, values in ((exact, result.exact), (bound, result.bound)):
                    into[number][rank][name][rows] = values["lse"][0].T if name.endswith("lse") else values["out"][0]
    return ServingExpectation(exact, bound, places)


def solver(
    server: Server, case: ServingCase, q: Array, k: Array, v: Array, positions: Ints
) -> Callable[[Any], Expectation]:
    """Return a function of the keys that count, (Hk, N), that gives the results of these queries."""
    dout, arithmetic = np.zeros((1, len(q), case.heads, case.dim_of_values)), arithmetic_of(server, case, len(k))
    scale = case.calls_of(0)[0].scale
    return lambda counted: evaluate(
        Inputs(q[None], k[None], v[None], dout, None, CAUSAL, scale, positions, counted), arithmetic
    )
