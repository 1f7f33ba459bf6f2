"""What laws were given for defects that others had planted: each shows on one small subject, and holds without them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.laws.equal_values import check_equal_values
from verification.check.laws.isolation import check_left
from verification.check.laws.mistakes import check_refused
from verification.failures import VerificationFailure
from verification.mutants.catalogue import by_name
from verification.mutants.plant import preparation
from verification.run.backends import Backend, GlooBackend, SimBackend
from verification.runner import check_case

pytestmark = pytest.mark.ranks

DEALT = plain(2, order="dealt", pattern=Pattern((Branch(6),)))
HALVES = plain(2, heads=4, kv_heads=4, pattern=Pattern((Branch(None, 2, (0, 0, 1, 0)),)))
LARGE = plain(2, score_scale=1024.0, head_dim=16)


def by_graphs(mistake: str, culprit: int | None) -> dict[str, Any]:
    return {"mistakes": [[mistake, culprit]], "compiled": True}


def examples(backend: Backend, case: Case, how: Any) -> float:
    return max(check_case(backend, case).values())


SHOWN = [
    ("a-tile-of-as-many-rows-is-everything", examples, DEALT, {}, "out is"),
    ("summands-of-listed-heads-are-lost", examples, HALVES, {}, "dq is 0.0"),
    ("merge-weights-from-the-rounded-lse", check_equal_values, LARGE, {"keys_too": True}, "all values of that head"),
    ("measured-by-rank-and-world-size", check_left, plain(2), {}, "the measure of another transport"),
    (
        "operator-asks-its-own-tensors-for-gradients", check_refused, plain(2, seed=1),
        by_graphs("no_grad, unlike the others", 1), "raised nothing",
    ),
    (
        "operator-asks-its-own-tensors-for-gradients", check_refused, plain(2, seed=1),
        by_graphs("lse of a fused kernel that is to have gradients", None), "raised nothing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "check", "case", "how", "said"), SHOWN)
def test_it_shows(name: str, check: Any, case: Case, how: dict[str, Any], said: str) -> None:
    defect = by_name(name)
    kind = GlooBackend if defect.backend == "gloo" else SimBackend
    with closing(kind(10.0)) as sound, closing(kind(10.0, preparation(defect))) as spoilt:
        sound.start(2)
        assert check(sound, case, how) < 1.0
        spoilt.start(2)
        with pytest.raises(VerificationFailure, match=said):
            check(spoilt, case, how)
