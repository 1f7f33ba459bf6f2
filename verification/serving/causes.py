"""The cause of wrong results of a server: a usual mistake that reproduces the numbers of every call, to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from verification.serving.serving_checks import Observations, deviation
from verification.serving.stores import Rules, Seen, mistakes, seen_by

MOST = 3  # mistakes that are named together
# Calls that tell mistakes apart: chunks, decodes, a slot without new tokens, a new request, one shorter than the ranks.
RICHER = (((5, 3), (1, 1), (2, 0), (-4, 1), (1, 1), (1, 1)), ((13, 1), (1, 2), (1, 2), (-1, 9), (6, 1)))
LN2 = math.log(2)
Run = Callable[[Backend, ServingCase], tuple[ServingExpectation, Observations]]
Claim = Callable[[ServingCase], ServingCase | None]
Pair = tuple[Array, Array]  # a result of one row, (H, Dv) or (H,), and its bound
Row = dict[str, Pair]
# (case, observed results of the rank's row, its rank, results of each rank's keys, row) changes the row
Change = Callable[[dict[str, Array], int, Sequence[Row], Row], None]


@dataclass(frozen=True)
class Candidate:
    """A mistake: words after "as if", rules of the store, a change of a row's results, inputs that are misread."""

    words: str
    rules: Rules = Rules()
    change: Change | None = None
    misread: tuple[int, ...] = ()  # of q, k and v


def candidates(case: ServingCase) -> Iterator[Candidate]:
    """Yield the mistakes that a case may show."""
    yield from (Candidate(words, rules) for words, rules in mistakes(case))
    if case.strided:
        words = "strided {} were taken for contiguous (sgl-project/sglang#27276)"
        for inputs, names in (((0,), "queries"), ((1, 2), "keys and values"), ((0, 1, 2), "inputs")):
            yield Candidate(words.format(names), misread=inputs)
    for lses in (("partial_lse",), ("lse",), ("lse", "partial_lse")):
        yield Candidate(f"{' and '.join(lses)} were in base 2", change=partial(_in_base_2, lses))
    if case.world > 1 and not case.replicated:
        for factor, words in (
            (LN2, "powers of 2 of natural logarithms"),
            (1 / LN2, "powers of e of logarithms in base 2"),
        ):
            for units in (0.0, 1.0, 1 / factor):
                change = partial(_merged, factor, units)
                yield Candidate(f"the outputs of ranks were merged by {words}", change=change)
        yield Candidate("the outputs of ranks were averaged", change=partial(_merged, 0.0, 0.0))
        words = "a rank without a key had weight in the merge: its lse is not -inf (vllm-project/vllm#34355)"
        yield Candidate(words, change=_empty_weighs)
        words = "0 times NaN were added: a rank without a key has weight 0, and output NaN (ROCm/ATOM#1832)"
        yield Candidate(words, change=partial(_nan_where, any))
        words = "-inf were taken from -inf in the merge of {} without a key"
        yield Candidate(words.format("two ranks"), change=partial(_nan_where, lambda empty: sum(empty) > 1))
        yield Candidate(words.format("the first rank"), change=partial(_nan_where, lambda empty: empty[0]))


def _in_base_2(names: tuple[str, ...], observed: dict[str, Array], rank: int, parts: Sequence[Row], row: Row) -> None:
    for name in names:
        exact, bound = row[name]
        with np.errstate(invalid="ignore"):
            rounding = np.nan_to_num(np.abs(exact), posinf=0.0) * 2 * np.finfo(np.float32).eps
        row[name] = exact / LN2, (bound + rounding) / LN2


def _merged(factor: float, units: float, observed: dict[str, Array], rank: int, parts: Sequence[Row], row: Row) -> None:
    """Merge by weights e^(factor * lse). units: of the lse that results, as a factor; 0: lse is right."""
    outs, lses, bounds, lse_bounds = (
        np.stack([part[name][at] for part in parts]) for at in range(2) for name in ("partial_out", "partial_lse")
    )
    scaled = factor * np.where(lses > -np.inf, lses, 0.0)
    scaled = scaled if factor == 0.0 else np.where(lses > -np.inf, scaled, -np.inf)
    top = scaled.max(0)
    weights = np.exp(scaled - top)
    total = weights.sum(0)
    weights = (weights / total)[..., None]
    out, size = (weights * outs).sum(0), (weights * np.abs(outs)).sum(0)
    bound = (weights * bounds).sum(0) + 2 * factor * lse_bounds.max(0)[:, None] * size + row["out"][1]
    row["out"] = out, bound
    if units:
        row["lse"] = units * (top + np.log(total)), max(1.0, units) * (row["lse"][1] + factor * lse_bounds.max(0))


def _empty_weighs(observed: dict[str, Array], rank: int, parts: Sequence[Row], row: Row) -> None:
    """Merge with the lse that ranks without a key return; where none is returned, with the weight that is left."""
    empty = [bool(np.isneginf(part["partial_lse"][0]).all()) for part in parts]
    if any(empty) and "partial_lse" not in observed:
        (out, bound), (lse, lse_bound) = row["out"], row["lse"]
        with np.errstate(invalid="ignore", divide="ignore"):
            weight = np.clip((observed["out"] * out).sum(-1) / (out * out).sum(-1), 0.0, 1.0)
            if np.isnan(weight).any():
                return
            row |= {"out": (weight[:, None] * out, bound), "lse": (lse - np.log(weight), lse_bound)}
        return
    names, returned = ("partial_out", "partial_lse"), []
    for part, nothing in zip(parts, empty, strict=True):
        weighs = nothing and np.isfinite(part["returned partial_lse"][0]).all()
        returned.append({name: (part[f"returned {name}" if weighs else name][0], part[name][1]) for name in names})
    _merged(1.0, 1.0, observed, rank, returned, row)
    row |= returned[rank]


def _nan_where(
    test: Callable[[list[bool]], bool], observed: dict[str, Array], rank: int, parts: Sequence[Row], row: Row
) -> None:
    """Make the merged output NaN where ranks without a key are as `test` has them."""
    empty = [bool(np.isneginf(part["partial_lse"][0]).all()) for part in parts]
    if test(empty):
        row["out"] = np.full_like(row["out"][0], np.nan), row["out"][1]
        if np.isnan(observed.get("lse", np.zeros(1))).all():
            row["lse"] = np.full_like(row["lse"][0], np.nan), row["lse"][1]
    if empty[rank] and np.isnan(observed.get("partial_out", np.zeros(1))).all():
        row["partial_out"] = observed["partial_out"], row["partial_out"][1]


class Rows:
    """Results of single queries of a case, computed once for all mistakes. misread: inputs taken for contiguous."""

    def __init__(self, server: Server, case: ServingCase, misread: tuple[int, ...] = ()) -> None:
        self.server, self.case = server, case
        tensors = [[_misread(x) if i in misread else x for i, x in enumerate(xs)] for xs in case.tensors()]
        self.q, *kv = (np.asarray(torch.cat(xs).double()) for xs in zip(*tensors, strict=True))
        # The last one is `stores.UNWRITTEN`.
        self.k, self.v = (np.concatenate([x, np.zeros((1, *x.shape[1:]))]) for x in kv)
        self.shapes = {"out": (case.heads, case.dim_of_values), "lse": (case.heads,)}
        self._known: dict[tuple[int, Seen], Row] = {}

    def attend(self, token: int, seen: Seen) -> Row:
        """Return out and lse of a query over these keys."""
        if (token, seen) not in self._known:
            self._known[token, seen] = self._attend(token, list(seen))
        return self._known[token, seen]

    def _attend(self, token: int, keys: list[int]) -> Row:
        if not keys:
            fill = {"out": 0.0, "lse": -np.inf}
            return {name: (np.full(shape, fill[name]), np.zeros(shape)) for name, shape in self.shapes.items()}
        dout, scale = np.zeros((1, 1, *self.shapes["out"])), self.case.calls_of(0)[0].scale
        inputs = self.q[None, [token]], self.k[None, keys], self.v[None, keys]
        problem = Inputs(*inputs, dout, None, Pattern.dense(), scale, np.array([0]))
        x = evaluate(problem, arithmetic_of(self.server, self.case, len(keys)))
        return {
            name: (x.exact[name].reshape(shape), x.bound[name].reshape(shape)) for name, shape in self.shapes.items()
        }


def predict(
    rows: Rows, candidate: Candidate, expectation: ServingExpectation, observations: Observations
) -> ServingExpectation:
    """Return the results of a server with a mistake, in the form of an expectation."""
    case, token = rows.case, -1
    seen = seen_by(case, candidate.rules)
    exact, bound = (
        [[{n: np.zeros_like(x) for n, x in named.items()} for named in ranks] for ranks in expectation.exact]
        for _ in range(2)
    )
    for number, places in enumerate(expectation.places):
        for row in range(len(places)):
            token += 1
            by_rank = [seen[number, row, rank] for rank in case.ranks]
            observed = [{n: x[row] for n, x in one.results[number].items()} for one in observations]
            parts = []
            for keys, one in zip(by_rank, observed, strict=True):
                part = {f"partial_{name}": pair for name, pair in rows.attend(token, keys).items()}
                parts.append(part | {f"returned {n}": (x, np.zeros_like(x)) for n, x in one.items()})
            for rank in case.ranks:
                union = by_rank[rank] if case.replicated else tuple(key for keys in by_rank for key in keys)
                results = parts[rank] | rows.attend(token, union)
                if not union and np.isnan(observed[rank]["out"]).all():  # no right merge meets that
                    results["out"] = observed[rank]["out"], results["out"][1]
                if candidate.change is not None:
                    candidate.change(observed[rank], rank, parts, results)
                for name in exact[number][rank]:
                    exact[number][rank][name][row], bound[number][rank][name][row] = results[name]
    return ServingExpectation(exact, bound, expectation.places)


def _misread(x: Tensor) -> Tensor:
    """Return what code reads that takes a view for contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def explains(case: ServingCase, predicted: ServingExpectation, observations: Observations) -> bool:
    """Return True if all results are within the bounds of a prediction."""
    for rank, observation in enumerate(observations):
        for number, results in enumerate(observation.results):
            for name, actual in results.items():
                ratio = deviation(case, predicted, number, rank, name, actual)
                both_nan = np.isnan(predicted.exact[number][rank][name]) & np.isnan(actual)
                if not ((ratio <= 1.0) | both_nan).all():
                    return False
    return True


def find_cause(server: Server, run: Run, claim: Claim, backend: Backend, minimal: ServingCase) -> str | None:
    """Return a sentence: the mistake that explains a minimal case and richer ones; else None. Up to MOST mistakes
    between which no case decides are named together."""
    left: list[Candidate] | None = None
    for case in (*richer_cases(minimal, claim), minimal):
        try:
            expectation, observations = run(backend, case)
        except (WrongResult, RankFailure):  # a malformed result
            return None
        rows, remaining = cache(partial(Rows, server, case)), []
        for candidate in candidates(case) if left is None else left:
            predicted = predict(rows(candidate.misread), candidate, expectation, observations)
            remaining += [candidate] if explains(case, predicted, observations) else []
        left = remaining
    sentences = list(dict.fromkeys(candidate.words for candidate in left or ()))
    if not 0 < len(sentences) <= MOST or "nothing were wrong" in sentences:
        return None
    return f"cause: results are, to rounding, as if {'; or as if '.join(sentences)}"


def richer_cases(case: ServingCase, claim: Claim) -> Iterator[ServingCase]:
    """Yield cases like a minimal one that tell mistakes apart, as the claim has them."""
    for number, calls in enumerate(RICHER):
        with suppress(ValueError):
            block = max(case.block, number + 1)
            richer = replace(case, calls=calls, block=block, heads=2, kv_heads=1, head_dim=4, value_dim=3, seed=number)
            nearest = claim(replace(richer, scale=None, dtype="float32"))
            if nearest is not None:
                yield nearest
