"""Peers under windows: who claims them, and what those make of them that pass the argument on without a claim."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from verification.draw.cases import cases
from verification.failures import WrongResult
from verification.peers import Peer, claims
from verification.peers.adapters import with_windows
from verification.peers.adapters.over_flash_attn import window_size
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer_experiment import claimed, experiment
from verification.run.backends import GlooBackend

EXAMPLES = "tests.support.peer_examples"
UNCLAIMED = {name: found for name, found in vars(with_windows).items() if isinstance(found, Peer)}


def test_the_window_of_a_case_is_that_of_the_first_branch_that_has_one() -> None:
    case = plain(2, pattern=Pattern((Branch(4), Branch(window=3), Branch(window=5)), True, (5, 7)))
    assert claims.window(case) == 3 and window_size(case) == (3, 3)
    assert claims.dense(case).pattern == Pattern.dense(True)
    assert claims.dense(case, False, windows=True).pattern == Pattern.dense(False, window=3)
    assert claims.packed(case).pattern == Pattern.dense(True, (5, 7))
    kept = claims.packed(case, windows=True)
    assert kept.pattern == Pattern.dense(True, (5, 7), 3) and claims.packed(kept, windows=True) == kept
    without = plain(2)
    assert claims.window(without) is None and window_size(without) == (-1, -1)
    assert claims.dense(without, windows=True).pattern == Pattern.dense()


def test_llama3_claims_windows_if_causal() -> None:
    peer = KNOWN["ring-flash-attn/llama3-varlen"]
    assert "causal or not and then" not in peer.supported and "with windows if causal" in peer.supported
    for causal in (False, True):
        found = claimed(peer, plain(2, pattern=Pattern.dense(causal, (5, 7), 3), dtype="float16"))
        assert found is not None and claims.window(found) == (3 if causal else None)
    reached = 0

    @given(cases(2))
    @settings(max_examples=200, derandomize=True, deadline=None, database=None)
    def count(case: object) -> None:
        nonlocal reached
        found = claimed(peer, case)  # type: ignore[arg-type]
        assert found is not None
        reached += claims.window(found) is not None

    count()
    assert reached >= 10


@pytest.mark.parametrize("name", UNCLAIMED)
@given(data=st.data())
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
def test_others_are_given_windows_by_name_alone(name: str, data: st.DataObject) -> None:
    peer = UNCLAIMED[name]
    assert load(f"{with_windows.__name__}:{name}") is peer and "with windows" in peer.supported
    assert peer.name.endswith(" with windows") and peer.name not in KNOWN
    case = data.draw(cases(data.draw(st.sampled_from(peer.worlds))))
    found = claimed(peer, case)
    assert found is not None and claimed(peer, found) == found
    assert claims.window(found) == claims.window(with_windows.with_a_window(case)) is not None
    assert name != "llama3_varlen" or not found.pattern.causal


@pytest.mark.ranks
def test_a_peer_that_does_not_look_at_windows_is_found() -> None:
    backend = GlooBackend()
    backend.start(1)
    try:
        case = claimed(load(f"{EXAMPLES}:windowed"), plain(1, pattern=Pattern.dense(True, window=3)))
        assert case is not None and claims.window(case) == 3
        ratios = experiment(f"{EXAMPLES}:windowed").check(backend, case)
        assert 0 < ratios["output and lse"] < 1 and 0 < ratios["gradients"] < 1
        with pytest.raises(WrongResult, match="values: out is"):
            experiment(f"{EXAMPLES}:unwindowed").check(backend, case)
        experiment(f"{EXAMPLES}:unwindowed").check(backend, replace(case, pattern=Pattern.dense(True)))
    finally:
        backend.close()
