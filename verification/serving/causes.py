"""The cause of wrong results of a server: a usual mistake that reproduces the numbers of every call, to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from reference.bounds import Array
from reference.fast_oracle import Inputs, evaluate
from reference.pattern import Pattern
from verification.failures import RankFailure, WrongResult
from verification.run.backends import Backend
from verification.serving.expected import ServingExpectation, arithmetic_of
from verification.serving.server import Server
from verification.serving.serving_case import ServingCase
from verification.serving.serving_checks import Observations, deviation, in_order
from verification.serving.stores import Rules, Seen, mistakes, seen_by

# Calls that tell mistakes apart: chunks, decodes, a slot without new tokens, a new request, one shorter than the ranks.
TELLING = (((5, 3), (1, 1), (2, 0), (-4, 1), (1, 1), (1, 1)), ((13, 1), (1, 2), (1, 2), (-1, 9), (6, 1)))
Run = Callable[[Backend, ServingCase], tuple[ServingExpectation, Observations]]
Claim = Callable[[ServingCase], ServingCase | None]
Results = tuple[Array, Array, Array, Array]  # of one query: out (H, Dv) and lse (H,), and their bounds
Attend = Callable[[int, Seen], Results]  # (token of the query, keys that it sees)


@dataclass(frozen=True)
class Candidate:
    """A mistake. words: that follow "as if"."""

    words: str
    rules: Rules = Rules()
    misread: tuple[int, ...] = ()  # those of q, k and v whose views are taken for contiguous
    base_2: tuple[str, ...] = ()  # results
    factor: float = 1.0  # of each lse in the merge; another one leaves the merged lse open
    empty: str = "right"  # results of a rank without a key: also "returned", as the server did, and "NaN" outputs


def candidates(case: ServingCase) -> Iterator[Candidate]:
    """Yield the mistakes that a case may show."""
    yield from (Candidate(words, rules) for words, rules in mistakes(case))
    if case.strided:
        for inputs, names in (((0,), "queries"), ((1, 2), "keys and values"), ((0, 1, 2), "inputs")):
            yield Candidate(f"strided {names} were taken for contiguous (sgl-project/sglang#27276)", misread=inputs)
    for lses in (("partial_lse",), ("lse",), ("lse", "partial_lse")):
        yield Candidate(f"{' and '.join(lses)} were in base 2", base_2=lses)
    yield Candidate("partial_lse were in base 2", base_2=("partial_lse",), factor=1 / math.log(2))
    if case.world > 1 and not case.replicated:
        yield Candidate("ranks were merged by powers of 2 of natural lse", factor=math.log(2))
        yield Candidate("ranks were merged by powers of e of lse in base 2", factor=1 / math.log(2))
        words = "a rank without a key had weight in the merge: its lse is not -inf (vllm-project/vllm#34355)"
        yield Candidate(words, empty="returned")
        words = "0 times NaN were added: a rank without a key has weight 0, and output NaN (ROCm/ATOM#1832)"
        yield Candidate(words, empty="NaN")


def queries_of(server: Server, case: ServingCase, misread: tuple[int, ...]) -> Attend:
    """Return a function that gives the results of a query, computed once for all mistakes. misread: of a Candidate."""
    tensors = [[_misread(x) if i in misread else x for i, x in enumerate(xs)] for xs in case.tensors()]
    q, *kv = (np.asarray(torch.cat(xs).double()) for xs in zip(*tensors, strict=True))
    k, v = (np.concatenate([x, np.zeros((1, *x.shape[1:]))]) for x in kv)  # the last one is `stores.UNWRITTEN`
    zeros, lse, scale = np.zeros((case.heads, case.value_dim)), np.zeros(case.heads), case.scale

    @cache
    def attend(token: int, seen: Seen) -> Results:
        if not seen:
            return zeros, lse - np.inf, zeros, lse
        inputs = q[None, [token]], k[None, list(seen)], v[None, list(seen)], zeros[None, None], None, Pattern.dense()
        x = evaluate(Inputs(*inputs, scale, np.array([0])), arithmetic_of(server, case, len(seen)))
        return x.exact["out"][0, 0], x.exact["lse"][0, :, 0], x.bound["out"][0, 0], x.bound["lse"][0, :, 0]

    return attend


def _misread(x: Tensor) -> Tensor:
    """Return what code reads that takes a view for contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def predict(
    case: ServingCase, attend: Attend, mistake: Candidate, expectation: ServingExpectation, observed: Observations
) -> ServingExpectation:
    """Return the results of a server with a mistake, in the form of an expectation."""
    seen, token = seen_by(case, mistake.rules), -1
    predicted = ServingExpectation(deepcopy(expectation.exact), deepcopy(expectation.bound), expectation.places)
    for number, places in enumerate(expectation.places):
        for row in range(len(places)):
            token += 1
            keys = [seen[number, row, rank] for rank in case.ranks]
            returned = [{name: x[row] for name, x in one[number].items()} for one in observed]
            union = tuple(key for one in keys for key in one)
            parts = [_part(mistake, attend(token, one), x) for one, x in zip(keys, returned, strict=True)]
            merged = attend(token, union)
            if mistake.factor != 1.0 or mistake.empty != "right":
                merged = _merged(mistake.factor, parts, merged, returned[0].get("lse", merged[1]))
            if not union and np.isnan(returned[0]["out"]).all():  # no right merge meets a query without a key
                merged = returned[0]["out"], *merged[1:]
            for rank, named in enumerate(predicted.exact[number]):
                for name in named:
                    whole = parts[rank] if case.replicated or name.startswith("partial") else merged
                    exact, bound = whole[name.endswith("lse") :: 2]
                    if name in mistake.base_2:
                        rounding = 4 * np.finfo(np.float32).eps * np.abs(np.where(np.isinf(exact), 0.0, exact))
                        exact, bound = exact / math.log(2), bound / math.log(2) + rounding
                    named[name][row], predicted.bound[number][rank][name][row] = exact, bound
    return predicted


def _part(mistake: Candidate, right: Results, returned: dict[str, Array]) -> Results:
    """Return the results of a rank's keys, with what the mistake makes of those of a rank without a key."""
    out, lse, *bounds = right
    if np.isneginf(lse).all() and mistake.empty == "NaN":
        out = np.full_like(out, np.nan)
    its_lse = returned.get("partial_lse", 0 * bounds[1])
    if np.isneginf(lse).all() and mistake.empty == "returned" and np.isfinite(its_lse).all():
        out, lse = returned.get("partial_out", out), its_lse
    return out, lse, bounds[0], bounds[1]


def _merged(factor: float, parts: list[Results], right: Results, returned: Array) -> Results:
    """Merge by weights e^(factor * lse); a rank's error of lse counts in each weight twice, also in their sum."""
    outs, lses, bounds, lse_bounds = map(np.stack, zip(*parts, strict=True))
    top = (factor * lses).max(0)
    weights = np.exp(factor * lses - top)
    total = weights.sum(0)
    weights = (weights / total)[..., None]
    size, error = (weights * np.abs(outs)).sum(0), factor * lse_bounds.max(0)
    bound = (weights * bounds).sum(0) + 2 * error[:, None] * size + right[2]
    lse = top + np.log(total) if factor == 1.0 else returned
    return (weights * outs).sum(0), lse, bound, right[3] + error


def explains(case: ServingCase, predicted: ServingExpectation, observations: Observations) -> bool:
    """Return True if all results are within the bounds of a prediction."""
    for number, rank, name, actual in in_order(observations):
        both_nan = np.isnan(predicted.exact[number][rank][name]) & np.isnan(actual)
        if not ((deviation(case, predicted, number, rank, name, actual) <= 1.0) | both_nan).all():
            return False
    return True


def find_cause(server: Server, run: Run, claim: Claim, backend: Backend, minimal: ServingCase) -> str | None:
    """Return a sentence: the mistake that explains a minimal case and telling ones; else None. Up to three mistakes
    between which no case decides are named together."""
    left: list[Candidate] | None = None
    for case in (*telling_cases(minimal, claim), minimal):
        try:
            expectation, observed = run(backend, case)
        except (WrongResult, RankFailure):  # a malformed result
            return None
        queries, possible = cache(partial(queries_of, server, case)), candidates(case) if left is None else left
        left = [
            x for x in possible if explains(case, predict(case, queries(x.misread), x, expectation, observed), observed)
        ]
    sentences = list(dict.fromkeys(candidate.words for candidate in left or ()))
    if not 0 < len(sentences) <= 3 or "nothing were wrong" in sentences:
        return None
    return f"cause: results are, to rounding, as if {'; or as if '.join(sentences)}"


def telling_cases(case: ServingCase, claim: Claim) -> Iterator[ServingCase]:
    """Yield cases like a minimal one, with calls that tell mistakes apart, as the claim has them."""
    for number, calls in enumerate(TELLING):
        larger = replace(case, calls=calls, block=max(case.block, number + 1), heads=2, kv_heads=1, head_dim=4)
        with suppress(ValueError):
            if nearest := claim(replace(larger, value_dim=3, seed=number, scale=0.5, dtype="float32")):
                yield nearest
