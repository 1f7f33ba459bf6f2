"""Claims of adapters: settled, and with all that the implementation takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Branch, Pattern
from reference.slices import Slice
from tests.support import peer_examples
from tests.support.plain_case import plain
from verification.case import Case, Keys
from verification.peers import Peer, claims
from verification.peers.adapters import transformer_engine, with_windows
from verification.peers.adapters.over_flash_attn import window_size
from verification.peers.adapters.ring_flash_attn_varlen import lengths
from verification.peers.claims import Claim
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer_experiment import nearest_claimed
from verification.peers.peer_rank import RUNS
from verification.search.experiment import ToolError
from verification.strategies.cases import cases

WINDOWED = {name: peer for name, peer in vars(with_windows).items() if isinstance(peer, Peer)}
ENGINE = [peer for peer in vars(transformer_engine).values() if isinstance(peer, Peer)]
LLAMA3 = "ring-flash-attn/llama3-varlen"
WITH_WINDOWS = {"ringmaster/ring-varlen", "ringmaster/ulysses-varlen", "ringmaster/usp-varlen", LLAMA3}  # if causal


@pytest.mark.parametrize("peer", [*KNOWN.values(), *WINDOWED.values(), *ENGINE], ids=lambda peer: peer.name)
@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_claims_keep_supported_settings(peer: Peer, data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(peer.worlds))))
    found = nearest_claimed(peer, case)
    assert found is not None and found.world == case.world and nearest_claimed(peer, found) == found
    assert (found.kernel, found.measured) == ("math", False)
    assert found.again == (case.again if case.again in RUNS else "alike")
    if not found.order.startswith("contiguous"):
        assert found.pattern.causal
    if peer.worlds == (1,):
        assert found.order == "contiguous" and found.cuts is None and found.heads == found.kv_heads
        return
    assert len(set(found.shards().counts)) == 1 and found.tokens > 0
    before, after, window = case.pattern.documents, found.pattern.documents, claims.window(found)
    assert found.pattern == Pattern.dense(found.pattern.causal, after, window)
    if peer.name.endswith(" with windows"):
        assert window == claims.window(with_windows.with_a_window(case)) is not None
    elif peer.name == "diffusers/ulysses-flash":
        assert not found.pattern.causal
    else:
        assert window is None or (peer.name in WITH_WINDOWS and found.pattern.causal)
    if "-varlen" not in peer.name:
        assert after is None
    elif not found.order.endswith("by document"):  # they are as drawn, but for the last, which ends the last shard
        assert before == after or (before is not None and after is not None and before[:-1] == after[:-1])
    else:
        edges, longest = lengths(found, len(found.ranks))
        unit = len(found.ranks) * (2 if found.order == "zigzag by document" else 1)
        assert found.batch == 1 and all(length % unit == 0 for length in after or (found.tokens,))
        assert edges[-1] == found.shards().counts[0] and edges.diff().max() == longest


SLICES = Slice(0, 12, 0, 9, high=0), Slice(2, 5, 2, 5, low=1)
SCORED = plain(
    1,
    order="chunks",
    same_bits=16,
    sinks="normal",
    softcap=2.0,
    value_dim=8,
    keys=Keys(9, "chunks"),
    pattern=Pattern((Branch(slices=SLICES),)),
)


@pytest.mark.parametrize("taken", ((), ("sinks",), ("softcap", "value_dim"), ("slices",), claims.TAKEN))
def test_claims_get_their_scores_and_values(taken: tuple[str, ...]) -> None:
    given = list[Case]()

    def nearest(case: Case) -> Case:
        given.append(case)
        return case

    peer = replace(peer_examples.with_scores, claims=claims.takes(*taken)(nearest) if taken else nearest)
    found = nearest_claimed(peer, SCORED)
    for case in (*given, found):
        assert case is not None
        assert {name for name in claims.OPTIONAL if getattr(case, name) is not None} == set(taken) - {"slices"}
        assert claims.slices(case) == (claims.slices(SCORED) if "slices" in taken else None)


def test_window_of_a_case_is_its_first_branches() -> None:
    case = plain(2, pattern=Pattern((Branch(4), Branch(window=3), Branch(window=5)), True, (5, 7)))
    assert claims.window(case) == 3 and window_size(case) == (3, 3)
    assert claims.dense(case).pattern == Pattern.dense(True)
    assert claims.dense(case, False, windows=True).pattern == Pattern.dense(False, window=3)
    assert claims.packed(case).pattern == Pattern.dense(True, (5, 7))
    assert claims.packed(case, windows=True).pattern == Pattern.dense(True, (5, 7), 3)
    assert claims.window(plain(2)) is None and window_size(plain(2)) == (-1, -1)
    for causal in (False, True):
        found = nearest_claimed(KNOWN[LLAMA3], replace(case, pattern=Pattern.dense(causal, (5, 7), 3), dtype="float16"))
        assert found is not None and claims.window(found) == (3 if causal else None)
    for name, peer in WINDOWED.items():
        assert load(f"{with_windows.__name__}:{name}") is peer and peer.name not in KNOWN


@pytest.mark.parametrize(
    "claim, case",
    [
        (claims.packed, plain(1, batch=3)),
        (claims.all_ranks, plain(2, tokens=9, cuts=(0, 2, 9), keys=Keys(5, cuts=(0, 4, 5)))),
        (claims.all_ranks, plain(2, hosts=2)),
        (lambda case: nearest_claimed(peer_examples.forward_only, case), plain(1, backward=False, again="between")),
    ],
)
def test_a_claim_narrows_no_more_than_its_name(claim: Claim, case: Case) -> None:
    assert claim(case) == case


def test_malformed_claims_are_faults_of_the_adapter() -> None:
    raised = r"claims of mine raised ZeroDivisionError: .*\.py, line \d+, in <lambda>\), given Case\(world=1, group="
    with pytest.raises(ToolError, match=raised):
        nearest_claimed(peer_examples.claims_raise, plain(1))
    with pytest.raises(ToolError, match="it must be a Case with world 1, or None"):
        nearest_claimed(peer_examples.claims_other_world, plain(1))
    with pytest.raises(ToolError, match=r"gave \[Case.*; it must be a Case .*; it was given Case\(world=1"):
        nearest_claimed(replace(peer_examples.sound, claims=lambda case: [case]), plain(1))  # type: ignore[arg-type, return-value]
    with pytest.raises(ToolError, match="changes its own result"):
        nearest_claimed(peer_examples.claims_unsettled, plain(1))
