"""Published formulas of rings on CPUs: right ones hold on real ranks, a planted mistake in their merge is found."""

from __future__ import annotations

import pytest

from reference.pattern import Pattern
from tests.support.backends import shared
from tests.support.plain_case import plain
from verification.failures import WrongResult
from verification.peers.known_peers import load, selected
from verification.peers.peer_experiment import experiment, nearest_claimed
from verification.run.backends import GlooBackend

pytestmark = pytest.mark.ranks

backend = shared(GlooBackend, 3)
INVERTED = "tests.support.ring_with_mistakes:inverted_correction"


@pytest.mark.parametrize(
    "causal, dtype", [(True, "float32"), (False, "float32"), (True, "bfloat16"), (True, "float16")]
)
def test_formulas_hold_and_a_wrong_merge_does_not(backend: GlooBackend, causal: bool, dtype: str) -> None:
    small = {"pattern": Pattern.dense(causal), "heads": 4, "head_dim": 2, "lse": "returned", "dtype": dtype}
    for name, order in zip(selected("formula"), ("zigzag", "contiguous"), strict=True):
        assert load(name).package is None and load(name).supported.startswith("the published formula, not the package:")
        case = nearest_claimed(load(name), plain(3, **small))
        assert case is not None and case == plain(3, **small, order=order if causal else "contiguous")
        experiment(name).check(backend, case)
    with pytest.raises(WrongResult, match="out is"):
        experiment(INVERTED).check(backend, nearest_claimed(load(INVERTED), plain(3, **small)))
