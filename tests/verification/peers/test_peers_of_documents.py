"""Peers under packed documents: what is claimed of them, and one that does not look at them is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Pattern
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from verification.case import Case
from verification.draw.cases import cases
from verification.failures import WrongResult
from verification.peers import claims
from verification.peers.adapters.ring_flash_attn_varlen import lengths
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer_experiment import claimed, experiment
from verification.run.backends import GlooBackend

EXAMPLES = "tests.support.peer_examples"
VARLEN = [name for name in KNOWN if name.endswith("-varlen")]


def packed(world: int, *documents: int) -> Case:
    return plain(world, tokens=sum(documents), pattern=Pattern.dense(True, documents))


@pytest.mark.parametrize(
    ("documents", "chunks", "wanted"),
    (
        ((2, 4), 1, (2, 4)),
        ((3, 5), 1, (2, 6)),  # the edge at 3 goes to 2
        ((5,), 1, (6,)),
        ((1, 1, 1), 1, (2, 2)),  # edges 0, 2 and the end at 4: nothing is left of the first
        ((0, 3, 0, 5, 0), 1, (0, 2, 0, 6, 0)),  # those that were drawn empty stay
        ((3, 5), 2, (8,)),
        ((4, 0, 8), 2, (4, 0, 8)),
    ),
)
def test_parts_of_documents(documents: tuple[int, ...], chunks: int, wanted: tuple[int, ...]) -> None:
    order = "zigzag by document" if chunks == 2 else "contiguous by document"
    found = claims.even_parts(packed(2, *documents), order, chunks)
    assert found.pattern.documents == wanted and found.tokens == sum(wanted) and found.cuts is None
    assert claims.even_parts(found, order, chunks) == found
    assert len(set(found.shards().counts)) == 1


@pytest.mark.parametrize("name", VARLEN)
@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_each_rank_has_as_much_of_each_document(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from((2, 3, 4)))))
    found = claimed(KNOWN[name], case)
    assert found is not None and found.batch == 1
    if name == "ring-flash-attn/llama3-varlen":  # documents are as drawn, but for the last, which ends the last shard
        before, after = case.pattern.documents, found.pattern.documents
        assert before == after or (before is not None and after is not None and before[:-1] == after[:-1])
        return
    unit = len(found.ranks) * (2 if found.order == "zigzag by document" else 1)
    edges, longest = lengths(found, len(found.ranks))
    for document in found.pattern.documents or (found.tokens,):
        assert document % unit == 0
    assert edges[-1] == found.shards().counts[0] and edges.diff().max() == longest


@pytest.mark.parametrize("name", VARLEN)
def test_what_is_drawn_has_documents_of_every_kind(name: str) -> None:
    reached: Counter[str] = Counter()
    for case in draw_many(cases(2), 200):
        found = claimed(KNOWN[name], case)
        assert found is not None
        documents = found.pattern.documents or (found.tokens,)
        reached["several"] += sum(length > 0 for length in documents) > 1
        reached["empty"] += 0 in documents
        reached["of other lengths"] += any(length % 2 for length in documents)
    assert reached["several"] >= 40 and reached["empty"] >= 20, reached
    assert (reached["of other lengths"] >= 20) == (name == "ring-flash-attn/llama3-varlen"), reached


def test_the_lengths_that_a_function_is_given() -> None:
    edges, longest = lengths(packed(2, 4, 0, 8), 2)
    assert (edges.tolist(), longest) == ([0, 2, 2, 6], 4)
    edges, longest = lengths(packed(2, 4, 0, 8))
    assert (edges.tolist(), longest) == ([0, 4, 4, 12], 8)
    without = lengths(plain(2, tokens=6), 2)
    assert (without[0].tolist(), without[1]) == ([0, 3], 3)


@pytest.mark.ranks
def test_a_peer_that_does_not_look_at_documents_is_found() -> None:
    backend = GlooBackend()
    backend.start(1)
    try:
        case = claimed(load(f"{EXAMPLES}:packed"), packed(1, 3, 0, 4))
        assert case is not None and case.pattern.documents == (3, 0, 4)
        ratios = experiment(f"{EXAMPLES}:packed").check(backend, case)
        assert 0 < ratios["output and lse"] < 1 and 0 < ratios["gradients"] < 1
        with pytest.raises(WrongResult, match="values: out is"):
            experiment(f"{EXAMPLES}:unpacked").check(backend, case)
        alone = replace(case, pattern=Pattern.dense(True))
        experiment(f"{EXAMPLES}:unpacked").check(backend, alone)
    finally:
        backend.close()
