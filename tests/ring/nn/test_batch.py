"""Tensors along the sequence are sharded together and reassembled; labels are shifted before that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from reference.pattern import Branch, Pattern, multiplicity
from reference.slices import EVERYTHING
from ring import Layout
from ring.nn import IGNORED, ContextParallel, SelfAttention, gather, next_tokens, shard_batch
from tests.support.nn_ranks import TOKENS, context_of, data_index, drawn, layout_of, mesh_of, whole_tokens
from tests.support.ranks import Ranks
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

REALS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*REALS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def _sharded_and_gathered(shards: str, mesh: str, rows: int | None) -> None:
    """rows: of the positions that are given; None: (n,)."""
    context = context_of(shards, mesh_of(mesh)["context"])
    tokens = whole_tokens(data_index(mesh), torch.int32)
    given: dict[str, Any] = {
        "tokens": tokens, "labels": next_tokens(tokens), "weights": drawn(0, 2, TOKENS, 3, 2), "mask": tokens > 3,
        "halves": tokens.bfloat16(),
    }  # fmt: skip
    positions = torch.arange(TOKENS) if rows is None else torch.arange(TOKENS).int().expand(rows, TOKENS)
    batch = shard_batch(context, **given, positions=positions)
    assert batch.context is context and batch.positions is context.positions_on(tokens.device)
    assert batch.labels is not None
    mine = context.layout.positions(context.rank)
    found = {"tokens": batch.tokens, "labels": batch.labels} | batch.others
    assert torch.equal(batch.positions, mine) and list(found) == list(given)
    for name, x in found.items():
        assert torch.equal(x, given[name][:, mine]) and x.dtype == given[name].dtype, name
        assert torch.equal(gather(context, x), given[name]), name
    bare = shard_batch(context, tokens)
    assert bare.labels is None and bare.others == {}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shards", "mesh", "rows"), [("uneven", "2x2", 1), ("empty", "2x2 apart", 2), ("one", "1x4", None)]
)
def test_shards_and_the_whole(ranks: Ranks, shards: str, mesh: str, rows: int | None) -> None:
    ranks(4).run(_sharded_and_gathered, shards, mesh, rows)


def _gathered() -> None:
    """Gather every dtype, from a tensor that has other strides, and one that requires gradients; also no entries."""
    context = context_of("empty")
    for dtype, size, dim in product(DTYPES, (4, 0), (0, 1, -1)):
        shape = [3, 2, size]
        shape[dim] = TOKENS
        whole = (5 * drawn(1, *shape)).to(dtype)
        x = context.shard(whole.transpose(0, 1).contiguous().transpose(0, 1), dim)
        x.requires_grad_(dtype in REALS)
        before = x.detach().clone()
        found = gather(context, x, dim)
        assert torch.equal(found, whole) and found.dtype == dtype and found.requires_grad == (dtype in REALS)
        found.detach().zero_()
        assert torch.equal(x, before), "what was gathered has memory of its own"


@pytest.mark.ranks
def test_any_tensor_is_gathered(ranks: Ranks) -> None:
    ranks(4).run(_gathered)


def _without_agreement() -> None:
    """Each rank has other data, as nobody notices."""
    context = ContextParallel(layout_of((4, 3, 3, 3)), check=False)
    tokens = whole_tokens(dist.get_rank())
    assert torch.equal(shard_batch(context, tokens).tokens, context.shard(tokens))
    whole = torch.arange(2 * TOKENS).view(2, TOKENS)
    assert torch.equal(gather(context, context.shard(whole)), whole)
    with pytest.raises(ValueError, match="^tokens must have the layout's 13 tokens"):
        shard_batch(context, tokens[:, :3])
    with pytest.raises(ValueError, match="^x must be"):
        gather(context, torch.zeros(1, 13))


@pytest.mark.ranks
def test_without_check_ranks_do_not_compare(ranks: Ranks) -> None:
    ranks(4).run(_without_agreement)


DOCUMENTS, WITHIN = (4, 0, 1, 5, 3), torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1, 2])


@pytest.mark.parametrize(
    ("pattern", "seen"),
    [
        (Pattern.prefix([3, 2], (6, 7)), [0, 1, 6]),
        (Pattern.spans([(2, 5), (9, 11)], window=1), [2, 3, 9]),
        (Pattern.frames([4, 1, 8]), [0, 1, 2, *range(5, 12)]),
        (Pattern.slices([((0, 13), (0, 13), (-12, 0)), ((1, 4), (4, 8), "full")]), [3]),
        (Pattern((Branch(4, 2, slices=(EVERYTHING,)),)), []),
    ],
)
def test_a_token_that_sees_the_next_has_no_label(pattern: Pattern, seen: list[int]) -> None:
    context, tokens = ContextParallel(Layout.contiguous(TOKENS, 1)), torch.arange(100, 100 + TOKENS)[None]
    wanted = next_tokens(tokens, documents=pattern.documents)
    wanted[:, seen] = IGNORED
    batch = shard_batch(context, tokens, next_tokens(tokens, documents=pattern.documents), pattern=pattern)
    assert batch.labels is not None and torch.equal(batch.labels, wanted)
    others = tokens + 100  # labels that are not the next tokens
    batch = shard_batch(context, tokens, others, pattern=replace(pattern, documents=None))
    assert batch.labels is not None and torch.equal(batch.labels, others)
    later = next_tokens(tokens, ahead=2, documents=pattern.documents)
    places = torch.arange(TOKENS)
    leaks = multiplicity(pattern, places, places, 1)[0].diagonal(2) > 0
    assert torch.equal(pattern.sees_ahead(TOKENS, 2)[:-2], leaks)
    if leaks.any():
        with pytest.raises(ValueError, match="later must not .* the tokens 2 ahead.* that a token sees"):
            shard_batch(context, tokens, pattern=pattern, later=later)
    shard_batch(context, tokens, pattern=pattern, later=later.masked_fill(pattern.sees_ahead(TOKENS, 2), IGNORED))


@pytest.mark.parametrize("whose", ("the batch's", "the context's", "the batch's before the context's"))
def test_batches_have_positions_and_labels_by_document(whose: str) -> None:
    tokens = torch.arange(100, 100 + 2 * TOKENS).reshape(2, TOKENS)
    labels = next_tokens(tokens)
    wanted = labels.clone()
    wanted[:, [3, 4, 9, 12]] = IGNORED

    def step(transport: SimulatedTransport) -> tuple[Tensor, ...]:
        context, given = ContextParallel(Layout.zigzag(TOKENS, 3), transport), dict[str, Any](documents=DOCUMENTS)
        if whose == "the context's":
            context, given = context.with_documents(DOCUMENTS), {}
        elif "before" in whose:
            context = context.with_documents((TOKENS,))
        batch = shard_batch(context, tokens, labels, positions=WITHIN, **given)
        assert batch.context.documents == DOCUMENTS and batch.labels is not None
        assert (batch.context is context) == (whose == "the context's")
        assert batch.positions is batch.context.positions_on(tokens.device)
        return gather(context, batch.tokens), gather(context, batch.labels), gather(context, batch.positions, dim=0)

    for found in Simulation(3, 0).run(step):
        assert all(torch.equal(x, y) for x, y in zip(found, (tokens, wanted, WITHIN), strict=True))
    assert torch.equal(labels, next_tokens(tokens))


def test_whole_positions_beside_documents_are_refused() -> None:
    context = ContextParallel(Layout.contiguous(TOKENS, 1)).with_documents(DOCUMENTS)
    with pytest.raises(ValueError, match="positions must be None or 0, 1, ... in each document"):
        shard_batch(context, torch.arange(TOKENS)[None], positions=torch.arange(TOKENS))
    with pytest.raises(
        ValueError, match=r"positions must be .* positions within each document: at \(4,\) it is 0, got 4"
    ):
        SelfAttention(8, 2, Pattern.dense())(torch.randn(1, TOKENS, 8), context, torch.arange(TOKENS))


@pytest.mark.parametrize(("ignored", "dtype"), [(IGNORED, torch.int64), (5, torch.int32)])
def test_next_tokens(ignored: int, dtype: torch.dtype) -> None:
    tokens = torch.tensor([[5, 6, 7], [1, 2, 3]], dtype=dtype)
    for n in range(4):
        wanted = torch.cat((tokens[:, 1:n].long(), torch.full((2, min(n, 1)), ignored)), 1)
        found = next_tokens(tokens[:, :n], ignored)
        assert torch.equal(found, wanted) and found.dtype is torch.int64
    assert next_tokens(tokens)[0, 2] == IGNORED


PACKED = (5, 1, 0, 7, 3)


@pytest.mark.parametrize("ahead", [1, 2, 3, 7, 20])
def test_labels_ahead_stay_in_their_document(ahead: int) -> None:
    tokens = torch.arange(100, 132).view(2, 16)
    wanted = [
        functional.pad(part[:, ahead:], (0, min(ahead, part.shape[1])), value=IGNORED)
        for part in tokens.split(PACKED, 1)
    ]
    labels = next_tokens(tokens, ahead=ahead, documents=PACKED)
    assert torch.equal(labels, torch.cat(wanted, 1))
    alone = functional.pad(tokens[:, ahead:], (0, min(ahead, 16)), value=IGNORED)
    assert torch.equal(next_tokens(tokens, ahead=ahead), alone)
    context = ContextParallel(Layout.contiguous(16, 1))
    batch = shard_batch(context, tokens, labels, documents=PACKED, further=labels)
    assert (
        batch.labels is not None and torch.equal(batch.labels, labels) and torch.equal(batch.others["further"], labels)
    )


@pytest.mark.parametrize(
    ("ahead", "made", "mended"),
    [
        (1, next_tokens, True),
        (2, lambda x: next_tokens(x, ahead=2), False),
        (2, lambda x: next_tokens(next_tokens(x)).int(), False),
        (2, lambda x: next_tokens(next_tokens(x, documents=PACKED)), True),
        (3, lambda x: x.roll(-3, 1), False),
        (3, lambda x: next_tokens(x, 0, ahead=3).masked_fill(x % 3 == 0, IGNORED), False),
    ],
)
def test_labels_of_another_document(ahead: int, made: Callable[[Tensor], Tensor], mended: bool) -> None:
    """Refuse them under any name. mended: only the last of a document is one, which `shard_batch` ignores in labels."""
    tokens = torch.arange(100, 132).view(2, 16)
    context = ContextParallel(Layout.contiguous(16, 1), documents=PACKED)
    words = f"must not cross the ends of documents, got the tokens {ahead} ahead, also .*ahead={ahead}, documents=len"
    with pytest.raises(ValueError, match=f"further {words}"):
        shard_batch(context, tokens, further=made(tokens))
    with nullcontext() if mended else pytest.raises(ValueError, match=f"labels {words}"):
        labels = shard_batch(context, tokens, made(tokens)).labels
        assert labels is not None and torch.equal(labels, next_tokens(tokens, ahead=ahead, documents=PACKED))


@pytest.mark.parametrize("call", ["next_tokens", "shard_batch"])
@pytest.mark.parametrize(
    ("documents", "words"),
    [
        (
            [[2, 2], [1, 3]],
            "documents must be one list of lengths, for all rows, got 2 lists: .* one long row; write tok",
        ),
        (torch.tensor([[2, 2], [1, 3]]), "for all rows, got 2 lists: .* one long row; write tok"),
        ((torch.tensor([4]),), "documents must be one list of lengths, for all rows, got 1 lists"),
        ((), "documents must add up to the 4 tokens"),
        ((3, 2), "documents must add up to the 4 tokens"),
    ],
)
def test_documents_that_are_refused(call: str, documents: Any, words: str) -> None:
    tokens = torch.arange(8).view(2, 4)
    with pytest.raises(ValueError, match=words):
        if call == "next_tokens":
            next_tokens(tokens, documents=documents)
        else:
            shard_batch(four(), tokens, documents=documents)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"documents": (2, 2, 1, 3)}, "documents must add up to the 4 tokens of each row, got all rows': rows"),
        ({"positions": torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])}, "positions must be None or .* in each row: rows"),
    ],
)
def test_rows_of_different_documents_are_told_to_be_one(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words} that are packed from different documents are one long row; write"):
        shard_batch(four(), torch.arange(8).view(2, 4), **given)


@pytest.mark.parametrize("ahead", [0, -1, True, 1.0])
def test_a_distance_that_is_none_is_refused(ahead: Any) -> None:
    with pytest.raises(ValueError, match=f"ahead must be an integer >= 1, got {ahead}"):
        next_tokens(torch.arange(8).view(2, 4), ahead=ahead)


def _unshifted() -> None:
    """Classes of the tokens themselves that happen to be the tokens two ahead."""
    tokens = torch.arange(100, 132).view(2, 16)
    classes = tokens.roll(-2, 1)
    context = ContextParallel(Layout.zigzag(16, 4), documents=PACKED)
    given: dict[str, Any] = {"classes": classes, "mask": classes.clone()}
    with pytest.raises(ValueError, match="mask must not cross the ends of documents, got the tokens 2 ahead"):
        shard_batch(context, tokens, unshifted=["classes"], **given)
    batch = shard_batch(context, tokens, unshifted=("classes", "mask"), **given)
    assert all(torch.equal(x, context.shard(classes)) for x in batch.others.values()) and len(batch.others) == 2


@pytest.mark.ranks
def test_labels_at_their_own_token_are_no_leak(ranks: Ranks) -> None:
    ranks(4).run(_unshifted)


def test_equal_tokens_are_no_leak() -> None:
    """Labels two ahead within documents are also the next tokens, and the tokens, if all tokens are equal."""
    tokens = torch.full((1, 16), 7)
    context = ContextParallel(Layout.contiguous(16, 1), documents=PACKED)
    labels = next_tokens(tokens, ahead=2, documents=PACKED)
    batch = shard_batch(context, tokens, labels, further=labels, same=tokens)
    assert batch.labels is not None and torch.equal(batch.labels, labels)


@pytest.mark.parametrize("tokens", [torch.zeros(3).long(), torch.zeros(2, 3), torch.zeros(2, 3).short(), [[1, 2]]])
def test_next_tokens_of_nothing_else(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be a \\(batch, tokens\\) int64 or int32 tensor, got"):
        next_tokens(tokens)


def four() -> ContextParallel:
    return ContextParallel(Layout.contiguous(4, 1))


@pytest.mark.parametrize(
    "tokens, labels, noticed",
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], True),
        ([1, 2, 3, 4], [IGNORED, 2, 3, IGNORED], True),
        ([1, 2, 3, 4], [2, 3, 4, IGNORED], False),
        ([1, 2, 3, 4], [IGNORED] * 4, False),
        ([7, 7, 7, 7], [7, 7, 7, IGNORED], False),  # the next tokens are the tokens
        ([7, 7, 7, 3], [7, 7, 7, 3], True),
        ([1, 7, 7, 4], [IGNORED, 7, IGNORED, IGNORED], False),
        ([1, 2, 3, 4], [1, IGNORED, IGNORED, IGNORED], False),  # one label alone may be anything
        ([1, 2, 3, 4], [1, 2, 3, 5], False),
    ],
)
def test_labels_that_were_not_shifted_are_refused(tokens: list[int], labels: list[int], noticed: bool) -> None:
    given = torch.tensor([tokens]), torch.tensor([labels])
    words = "labels must be the next tokens, shifted before they are sharded"
    with pytest.raises(ValueError, match=words) if noticed else nullcontext():
        assert torch.equal(shard_batch(four(), *given).tokens, given[0])


def test_one_process() -> None:
    x = torch.randn(2, 4, 3)
    assert shard_batch(four(), torch.zeros(2, 4).long(), call=x).others["call"].equal(gather(four(), x))
    none = ContextParallel(Layout.contiguous(0, 1))
    assert shard_batch(none, torch.zeros(2, 0, dtype=torch.int64)).tokens.shape == (2, 0)
