"""The law that plans compute the pattern: it holds, and tells defects of which few whole calls show anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.laws.plans import check_plans
from verification.failures import WrongResult
from verification.mutants.catalogue import by_name
from verification.mutants.plant import preparation
from verification.run.backends import SimBackend

pytestmark = pytest.mark.ranks

UNEVEN_HEADS = replace(
    plain(1, tokens=1, heads=8, kv_heads=2, pattern=Pattern((Branch(None, 2, (1, 1, 0, 0, 0, 1, 1, 0)),))), bucket=1
)
SOME_HEADS = replace(plain(2, tokens=5, heads=3, kv_heads=3, pattern=Pattern((Branch(None, 2, (1, 0, 0)),))), bucket=1)
LISTED_KEYS = replace(plain(3, tokens=17, pattern=Pattern.dense(causal=True)), bucket=11)
PLANTED = [
    ("heads-are-compared-along-the-margins", UNEVEN_HEADS, "contiguous", "head 5 of query 0 takes key 0 1 times"),
    ("later-parts-of-received-keys-skip-too-few-slots", SOME_HEADS, "contiguous", "meet another key/value head"),
    ("key-positions-keep-the-old-order", LISTED_KEYS, "hilbert", "hilbert by direct .*not those of the rows"),
]


def follow(case: Case, order: str, backend: SimBackend) -> float:
    try:
        backend.start(1)
        return check_plans(backend, case, {"orders": [order], "buckets": [case.bucket]})
    finally:
        backend.close()


@pytest.mark.parametrize(("defect", "case", "order", "said"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_a_wrong_plan_is_told(defect: str, case: Case, order: str, said: str) -> None:
    assert follow(case, order, SimBackend(10.0)) == 0.0
    with pytest.raises(WrongResult, match=said):
        follow(case, order, SimBackend(10.0, preparation(by_name(defect))))
