"""Claims: what is kept of a drawn Case, its documents and its windows, and which claims are no claims."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from tests.support import peer_examples
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from verification.draw.cases import cases
from verification.peers import Peer, claims
from verification.peers.adapters import with_windows
from verification.peers.adapters.over_flash_attn import window_size
from verification.peers.adapters.ring_flash_attn_varlen import lengths
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer_experiment import claimed
from verification.search.experiment import ToolError

WINDOWED = {name: peer for name, peer in vars(with_windows).items() if isinstance(peer, Peer)}
LLAMA3 = "ring-flash-attn/llama3-varlen"


@pytest.mark.parametrize("peer", [*KNOWN.values(), *WINDOWED.values()], ids=lambda peer: peer.name)
@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_a_claim_is_settled_and_keeps_what_the_implementation_takes(peer: Peer, data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(peer.worlds))))
    found = claimed(peer, case)
    assert found is not None and found.world == case.world and claimed(peer, found) == found
    assert (found.kernel, found.again, found.measured) == ("math", "alike", False)
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
    else:
        assert window is None or (peer.name == LLAMA3 and found.pattern.causal)
    if "-varlen" not in peer.name:
        assert after is None
    elif "llama3" in peer.name:  # documents are as drawn, but for the last, which ends the last shard
        assert before == after or (before is not None and after is not None and before[:-1] == after[:-1])
    else:
        edges, longest = lengths(found, len(found.ranks))
        unit = len(found.ranks) * (2 if found.order == "zigzag by document" else 1)
        assert found.batch == 1 and all(length % unit == 0 for length in after or (found.tokens,))
        assert edges[-1] == found.shards().counts[0] and edges.diff().max() == longest


@pytest.mark.parametrize("name", [name for name in KNOWN if name.endswith("-varlen")])
def test_what_is_drawn_has_documents_and_windows_of_every_kind(name: str) -> None:
    found = [case for drawn in draw_many(cases(2), 200) if (case := claimed(KNOWN[name], drawn))]
    documents = [case.pattern.documents or (case.tokens,) for case in found]
    assert sum(sum(length > 0 for length in x) > 1 for x in documents) >= 40 and sum(0 in x for x in documents) >= 20
    uneven = sum(any(length % 2 for length in x) for x in documents)
    windows = sum(claims.window(case) is not None for case in found)
    assert (uneven >= 20) == (windows >= 10) == (name == LLAMA3)


@pytest.mark.parametrize(
    "documents, chunks, wanted",
    [
        ((3, 5), 1, (2, 6)),  # the edge at 3 goes to 2
        ((5,), 1, (6,)),
        ((1, 1, 1), 1, (2, 2)),  # edges 0, 2 and the end at 4: nothing is left of the first
        ((0, 3, 0, 5, 0), 1, (0, 2, 0, 6, 0)),  # those that were drawn empty stay
        ((3, 5), 2, (8,)),
        ((4, 0, 8), 2, (4, 0, 8)),
    ],
)
def test_parts_of_documents(documents: tuple[int, ...], chunks: int, wanted: tuple[int, ...]) -> None:
    order = "zigzag by document" if chunks == 2 else "contiguous by document"
    found = claims.even_parts(plain(2, tokens=sum(documents), pattern=Pattern.dense(True, documents)), order, chunks)
    assert found.pattern.documents == wanted and found.tokens == sum(wanted) and found.cuts is None
    assert claims.even_parts(found, order, chunks) == found and len(set(found.shards().counts)) == 1


@pytest.mark.parametrize(
    "documents, parts, edges", [((4, 0, 8), 2, [0, 2, 2, 6]), ((4, 0, 8), 1, [0, 4, 4, 12]), (None, 2, [0, 6])]
)
def test_the_lengths_that_a_function_is_given(documents: Any, parts: int, edges: list[int]) -> None:
    found, longest = lengths(plain(2, tokens=12, pattern=Pattern.dense(True, documents)), parts)
    assert found.tolist() == edges and longest == found.diff().max()


def test_the_window_of_a_case_is_that_of_the_first_branch_that_has_one() -> None:
    case = plain(2, pattern=Pattern((Branch(4), Branch(window=3), Branch(window=5)), True, (5, 7)))
    assert claims.window(case) == 3 and window_size(case) == (3, 3)
    assert claims.dense(case).pattern == Pattern.dense(True)
    assert claims.dense(case, False, windows=True).pattern == Pattern.dense(False, window=3)
    assert claims.packed(case).pattern == Pattern.dense(True, (5, 7))
    assert claims.packed(case, windows=True).pattern == Pattern.dense(True, (5, 7), 3)
    assert claims.window(plain(2)) is None and window_size(plain(2)) == (-1, -1)


def test_windows_are_claimed_by_llama3_if_causal_and_by_others_under_another_name() -> None:
    for causal in (False, True):
        found = claimed(KNOWN[LLAMA3], plain(2, pattern=Pattern.dense(causal, (5, 7), 3), dtype="float16"))
        assert found is not None and claims.window(found) == (3 if causal else None)
    assert len(WINDOWED) == 9
    for name, peer in WINDOWED.items():
        assert load(f"{with_windows.__name__}:{name}") is peer and peer.name not in KNOWN


@pytest.mark.parametrize(
    "name, said",
    [
        ("claims_raise", "claims of mine raised ZeroDivisionError"),
        ("claims_other_world", "it must be a Case with world 1, or None"),
        ("claims_unsettled", "does not support what it made itself"),
    ],
)
def test_a_claim_that_is_none_is_the_adapters_fault(name: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        claimed(getattr(peer_examples, name), plain(1))
