"""Exact results of every call of a ServingCase, merged and of each rank's keys alone, with the bounds of rounding."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch

from reference import roundoff
from reference.bounds import Array
from reference.fast_oracle import Inputs, evaluate
from reference.pattern import Pattern
from reference.roundoff import Arithmetic, Counts
from verification.serving.server import Server
from verification.serving.serving_case import ServingCase

Named = dict[str, Array]


@dataclass(frozen=True, eq=False)
class ServingExpectation:
    """Exact results and bounds by call, rank and name, in the shapes that a `Server` returns. places: for each row of
    each call, its slot and its position in the request."""

    exact: list[list[Named]]
    bound: list[list[Named]]
    places: list[list[tuple[int, int]]]


def arithmetic_of(server: Server, case: ServingCase, keys: int) -> Arithmetic:
    """Return the arithmetic of a right server of that class, for rows of so many keys."""
    narrow = case.dtype in ("bfloat16", "float16")
    kernel = "math" if server.arithmetic in ("half", "gpu") and not narrow else server.arithmetic
    blocks = (1, 2) if kernel == "gpu" else roundoff.max_call_blocks(keys)
    merges = min(keys, server.splits * case.world)
    counts = Counts(keys, keys * (case.heads // case.kv_heads), merges, 1, *blocks)
    return Arithmetic.of(case.dtype, kernel, case.head_dim, case.scale, counts)


def expect(server: Server, case: ServingCase) -> ServingExpectation:
    """Return the exact results of all that the server returns."""
    q, k, v = (np.asarray(torch.cat(xs).double()) for xs in zip(*case.tensors(), strict=True))
    calls, wide = case.calls_of(0), (case.heads, case.value_dim)
    rows_of = [sum(call.new) for call in calls]
    shapes = [{n: (rows, *(wide[:1] if n.endswith("lse") else wide)) for n in server.returns} for rows in rows_of]
    exact = [[{n: np.zeros(shape) for n, shape in named.items()} for _ in case.ranks] for named in shapes]
    result = ServingExpectation(exact, deepcopy(exact), [[(0, 0)] * rows for rows in rows_of])
    for number, slot, rows, tokens in case.requests():
        call, positions = calls[number], np.arange(calls[number].before[slot], len(tokens))
        result.places[number][rows] = [(slot, int(position)) for position in positions]
        new, dout = tokens[len(tokens) - len(positions) :], np.zeros((1, len(positions), *wide))
        inputs = q[None, new], k[None, tokens], v[None, tokens], dout, None, Pattern.dense(causal=True), call.scale
        arithmetic = arithmetic_of(server, case, len(tokens))
        merged = evaluate(Inputs(*inputs, positions), arithmetic)
        for rank in case.ranks:
            owned = np.array([[call.owns(p, rank) for p in range(len(tokens))]] * case.kv_heads)
            whole = case.replicated or "partial_out" not in server.returns
            own = merged if whole else evaluate(Inputs(*inputs, positions, owned), arithmetic)
            for name in server.returns:
                x = own if name.startswith("partial") else merged
                for into, named in ((result.exact, x.exact), (result.bound, x.bound)):
                    into[number][rank][name][rows] = named["lse"][0].T if name.endswith("lse") else named["out"][0]
    return result
