"""Keys whose scores are -inf have no weight: everything is as if they were not selected.

Users hide padding this way: one component of the keys is -inf, the same one of the queries a number. A row whose scores
are all -inf counts as a row that sees nothing; other people's attention is given no such row. The gradient of that
component of the queries is 0 times infinity: it may be anything, and is not compared. A softcap makes such a score
finite, -t, so there is none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from reference.fast_oracle import multiplicity
from verification.case import Case
from verification.check import checks
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.expectation import inputs_of
from verification.check.laws.law import TAME, How, Law, ascending, without_overflow
from verification.run.rank import InputEdit
from verification.strategies.cases import cases, fused

_CHECKS = ("layout", "answers", "messages", "finite", "unseen", "values", "gradients")  # NaN, the usual mistake, first


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = without_overflow(draw(cases(world)))
    if draw(st.sampled_from((False, True, True))):  # fused kernels treat such rows in their own way
        case = fused(draw, replace(case, kernel="auto"))
    if case.scale == 0.0:  # 0 times -inf is NaN
        case = replace(case, scale=None)
    case = replace(case, softcap=None)
    case = claimed(claims, case)
    by_rank = [list(map(int, positions)) for positions in case.key_shards().positions]
    tokens = list(range(case.key_tokens))
    kind = draw(st.sampled_from(("some", "shard", "first", "all but one", "all")))
    if kind == "some":
        hidden = [token for token in tokens if draw(st.booleans())]
    elif kind == "shard":
        hidden = draw(st.sampled_from(by_rank))
    elif kind == "first":  # in causal patterns, some rows of a tile then see nothing
        hidden = tokens[: draw(st.integers(1, len(tokens)))]
    else:
        visible = draw(st.sampled_from(tokens)) if kind == "all but one" else None
        hidden = [token for token in tokens if token != visible]
    heads = [head for head in range(case.kv_heads) if draw(st.booleans())] or [0]
    if claims is not any_case:  # what a row without a key gives is a convention, and gradients through it are often NaN
        while (deprived := _deprived(case, hidden, heads)) is not None:
            hidden = [token for token in hidden if token != deprived]
    return case, {"hidden": sorted(hidden), "heads": heads}


def _deprived(case: Case, hidden: list[int], heads: list[int]) -> int | None:
    """Return the last key of the first row all of whose keys are hidden; None if each row keeps one."""
    share = case.heads // case.kv_heads
    sees = multiplicity(case.pattern, case.heads, case.tokens, case.key_tokens) > 0  # (H, rows, keys)
    sees = sees[[head * share + member for head in heads for member in range(share)]]
    keeps = np.delete(sees, hidden, axis=2).any(2)
    rows = np.argwhere(sees.any(2) & ~keeps)
    return int(np.flatnonzero(sees[tuple(rows[0])])[-1]) if len(rows) else None


def _keep_a_key(claims: Claims, case: Case, how: How) -> None:
    if (key := _deprived(case, how["hidden"], how["heads"])) is not None:
        raise ValueError(f"hidden of how has token {key} and others, all that a row sees; each row must keep a key")


def check_no_weight(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Results and gradients are those of the visible keys, within their bounds."""
    if case.device == "cuda":
        case = replace(case, kernel="math")  # torch's fused GPU kernels do not promise it
    sign = 1 if case.softmax_scale > 0 else -1
    edit = InputEdit("hide", sign, positions=tuple(how["hidden"]), kv_order=tuple(how["heads"]))
    counted = np.ones((case.kv_heads, case.key_tokens), bool)
    counted[np.ix_(how["heads"], how["hidden"])] = False
    unhidden = InputEdit("hide", sign).apply(case.tensors())  # finite: no key is hidden
    expectation = ranks.evaluate(case, replace(inputs_of(case, unhidden), counted=counted))
    observations = [replace(rank, dq=None if rank.dq is None else rank.dq.copy()) for rank in ranks.observe(case, edit)]
    for dq in (expectation.exact["dq"], expectation.bound["dq"], *(rank.dq for rank in observations)):
        if dq is not None:
            dq[..., 0] = 0.0
    by_check = [checks.CHECKS[name](case, expectation, observations) for name in _CHECKS]
    return max((ratio for ratios in by_check for ratio in ratios.values()), default=0.0)


NO_SCORE_NO_WEIGHT = Law(
    "scores of -inf have no weight", _draw, check_no_weight, share=0.1,
    how={
        "hidden": lambda case, name, value: ascending(name, value, case.key_tokens),
        "heads": lambda case, name, value: ascending(name, value, case.kv_heads),
    },
    cases=TAME
    | {
        "a scale other than 0, since 0 times -inf is NaN": lambda case: case.scale != 0.0,
        "no softcap, which makes -inf finite": lambda case: case.softcap is None,
    },
    of_any="the claim has no scale but 0", of_others=_keep_a_key,
)  # fmt: skip
