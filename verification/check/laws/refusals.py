"""What is no pattern, no layout and no list of documents: a ValueError that names the argument must refuse it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.pattern import Branch, Pattern
from ring.layout import Layout

# By name: what makes it, and the argument that the refusal must name.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "segment of nothing": (lambda: Branch(0), "segment_length"),
    "segment of half a token": (lambda: Branch(1.5), "segment_length"),  # type: ignore[arg-type]
    "segment True": (lambda: Branch(True), "segment_length"),
    "rate 0": (lambda: Branch(4, 0), "dilation_rate"),
    "rate of text": (lambda: Branch(4, "2"), "dilation_rate"),  # type: ignore[arg-type]
    "offset at the rate": (lambda: Branch(4, 2, 2), "offset"),
    "negative offset": (lambda: Branch(4, 2, -1), "offset"),
    "one offset at the rate": (lambda: Branch(4, 2, (0, 2)), "offset"),
    "no offsets": (lambda: Branch(4, 2, ()), "offset"),
    "an offset too many": (lambda: Branch(4, 2, (0, 1), range(1)), "offset"),
    "an offset too few": (lambda: Branch(4, 2, (0, 1), range(3)), "offset"),
    "heads of a list": (lambda: Branch(4, 2, 0, [0, 1]), "heads"),  # type: ignore[arg-type]
    "no heads": (lambda: Branch(4, 2, 0, range(2, 2)), "heads"),
    "every other head": (lambda: Branch(4, 2, 0, range(0, 4, 2)), "heads"),
    "heads below 0": (lambda: Branch(4, 2, 0, range(-1, 2)), "heads"),
    "window below 0": (lambda: Branch(window=-1), "window"),
    "window of half a token": (lambda: Branch(window=1.5), "window"),  # type: ignore[arg-type]
    "window True": (lambda: Branch(window=True), "window"),
    "window of both sides": (lambda: Branch(window=(1, 1)), "window"),  # type: ignore[arg-type]
    "dense: window below 0": (lambda: Pattern.dense(window=-1), "window"),
    "no branch": (lambda: Pattern(()), "branches"),
    "a branch that is none": (lambda: Pattern((4,)), "branches"),  # type: ignore[arg-type]
    "causal 1": (lambda: Pattern((Branch(),), 1), "causal"),  # type: ignore[arg-type]
    "documents of a number": (lambda: Pattern((Branch(),), documents=4), "documents"),  # type: ignore[arg-type]
    "a document below nothing": (lambda: Pattern((Branch(),), documents=(2, -1)), "documents"),
    "half a document": (lambda: Pattern((Branch(),), documents=(2, 1.5)), "documents"),  # type: ignore[arg-type]
    "a document True": (lambda: Pattern((Branch(),), documents=(True, 1)), "documents"),
    "documents of an array": (lambda: Pattern((Branch(),), documents=np.ones(2, int)), "documents"),  # type: ignore[arg-type]
    "documents of a token too few": (lambda: Pattern.dense(documents=(2, 1)).validate_tokens(4), "documents"),
    "documents of a token too many": (lambda: Pattern.dense(documents=(2, 3)).validate_tokens(4), "documents"),
    "heads beyond those there are": (lambda: Pattern((Branch(heads=range(3)),)).validate(2), "heads"),
    "offsets for fewer heads": (lambda: Pattern((Branch(4, 2, (0, 1)),)).validate(3), "offset"),
    "longnet: lengths that disagree": (lambda: Pattern.longnet([4, 8], [1], 2), "segment_lengths"),
    "longnet: nothing": (lambda: Pattern.longnet([], [], 2), "segment_lengths"),
    "longnet: rate 0": (lambda: Pattern.longnet([4], [0], 2), "dilation_rates"),
    "longnet: no heads": (lambda: Pattern.longnet([4], [1], 0), "heads"),
    "longnet: another rule": (lambda: Pattern.longnet([4], [1], 2, offsets="mine"), "offsets"),
    "groups: fewer heads than groups": (lambda: Pattern.head_groups([4, 8], [1, 2], 1), "heads"),
    "groups: lengths that disagree": (lambda: Pattern.head_groups([4, 8], [1], 2), "segment_lengths"),
    "layout: negative tokens": (lambda: Layout.contiguous(-1, 2), "n must"),
    "layout: no ranks": (lambda: Layout.zigzag(4, 0), "p must"),
    "layout: half a token": (lambda: Layout.striped(4.5, 2), "n must"),  # type: ignore[arg-type]
    "layout: a token twice": (lambda: Layout.from_cuts([0, 1, 1, 3], (0, 2, 4)), "order"),
    "layout: a token beyond": (lambda: Layout.from_cuts([0, 1, 2, 4], (0, 2, 4)), "order"),
    "layout: a token below 0": (lambda: Layout.from_cuts([0, 1, 2, -1], (0, 2, 4)), "order"),
    "layout: two dimensions": (lambda: Layout.from_cuts(np.arange(4).reshape(2, 2), (0, 2, 4)), "order"),
    "layout: falling cuts": (lambda: Layout.from_cuts(range(4), (0, 3, 2, 4)), "cuts"),
    "layout: cuts that begin later": (lambda: Layout.from_cuts(range(4), (1, 4)), "cuts"),
    "layout: cuts that end before": (lambda: Layout.from_cuts(range(4), (0, 3)), "cuts"),
    "layout: a single cut": (lambda: Layout.from_cuts((), (0,)), "cuts"),
    "layout: half a cut": (lambda: Layout.from_cuts(range(4), (0, 1.5, 4)), "cuts"),  # type: ignore[arg-type]
    "layout: shards of other lengths": (
        lambda: Layout.contiguous(4, 2).unshard([torch.zeros(1, 1), torch.zeros(1, 3)]),
        "shards",
    ),
    "layout: a shard too few": (lambda: Layout.contiguous(4, 2).unshard([torch.zeros(1, 4)]), "shards"),
    "layout: a token too many": (lambda: Layout.contiguous(4, 2).shard(torch.zeros(1, 5), 0), "x must"),
    "layout: zigzag of other documents": (lambda: Layout.zigzag(4, 2, documents=(2, 1)), "documents"),
    "layout: balanced for other documents": (
        lambda: Layout.balanced(Pattern.dense(documents=(2, 1)), 4, 2),
        "documents",
    ),
    "layout: balanced for other heads": (lambda: Layout.balanced(Pattern((Branch(4, 2, (0, 1)),)), 4, 2, 3), "offset"),
    "documents that end too early": (lambda: documents_from_cu_seqlens([0, 2], 3), "cu_seqlens"),
    "documents that go back": (lambda: documents_from_cu_seqlens([0, 2, 1, 3], 3), "cu_seqlens"),
    "documents that go back, unsigned": (
        lambda: documents_from_cu_seqlens(np.array([0, 2, 1, 3], np.uint32), 3),
        "cu_seqlens",
    ),
    "documents of positions that jump": (lambda: documents_from_positions([0, 2]), "positions"),
    "layout: a rank too many": (lambda: Layout.contiguous(4, 2).positions(2), "rank"),
    "layout: a rank below 0": (lambda: Layout.contiguous(4, 2).shard(torch.zeros(1, 4), -1), "rank"),
    "branches of a generator": (lambda: Pattern(iter((Branch(),))), "branches"),  # type: ignore[arg-type]
    "a branch as JSON has it": (lambda: Pattern((Pattern.dense().to_dict()["branches"][0],)), "branches"),
    "causal of text": (lambda: Pattern((Branch(),), "yes"), "causal"),  # type: ignore[arg-type]
    "dense: causal 0": (lambda: Pattern.dense(0), "causal"),  # type: ignore[arg-type]
    "longnet: causal 1": (lambda: Pattern.longnet([4], [1], 2, 1), "causal"),  # type: ignore[arg-type]
    "longnet: a document below nothing": (lambda: Pattern.longnet([4], [1], 2, documents=(5, -1)), "documents"),
    "groups: a document below nothing": (lambda: Pattern.head_groups([4], [1], 2, documents=(5, -1)), "documents"),
    "dense: a document below nothing": (lambda: Pattern.dense(documents=(5, -1)), "documents"),
    "offsets as a range": (lambda: Branch(4, 2, range(2)), "offset"),  # type: ignore[arg-type]
    "heads from behind": (lambda: Branch(4, 2, 0, range(2, 0, -1)), "heads"),
    "saved: no mapping": (lambda: Pattern.from_dict([]), "pattern"),  # type: ignore[arg-type]
    "saved: a field too many": (lambda: Pattern.from_dict(Pattern.dense().to_dict() | {"mask": 1}), "mask"),
    "saved: no branches": (lambda: Pattern.from_dict({"causal": True}), "branches"),
    "saved: no causal": (lambda: Pattern.from_dict({"branches": _saved()["branches"]}), "causal"),
    "saved: causal 1": (lambda: Pattern.from_dict(_saved() | {"causal": 1}), "causal"),
    "saved: branches of text": (lambda: Pattern.from_dict(_saved() | {"branches": "all"}), "branches"),
    "saved: no branch in branches": (lambda: Pattern.from_dict(_saved() | {"branches": []}), "branches"),
    "saved: a branch with a field too many": (lambda: Pattern.from_dict(_saved(width=1)), "width"),
    "saved: a branch without a field": (
        lambda: Pattern.from_dict({"branches": [{"segment_length": 4}], "causal": True}),
        "dilation_rate",
    ),
    "saved: a branch that is none": (lambda: Pattern.from_dict(_saved() | {"branches": [4]}), "branch"),
    "saved: heads of one number": (lambda: Pattern.from_dict(_saved(heads=[2])), "heads"),
    "saved: heads of three numbers": (lambda: Pattern.from_dict(_saved(heads=[0, 4, 2])), "heads"),
    "saved: no heads in heads": (lambda: Pattern.from_dict(_saved(heads=[2, 2])), "heads"),
    "saved: documents of a number": (lambda: Pattern.from_dict(_saved() | {"documents": 4}), "documents"),
    "layout: tokens beyond 2**40": (lambda: Layout.contiguous(2**40 + 1, 2), "n must"),
    "layout: a range of tokens beyond 2**40": (
        lambda: Layout.from_cuts(range(2**40 + 1), (0, 2**40 + 1)),
        "n must",
    ),
    "layout: balanced beyond 2**28": (lambda: Layout.balanced(Pattern.dense(), 2**28 + 1, 2), "n must"),
    "layout: balanced for no heads": (lambda: Layout.balanced(Pattern.dense(), 4, 2, 0), "heads"),
    "layout: balanced for fewer heads": (lambda: Layout.balanced(Pattern((Branch(heads=range(3)),)), 4, 2, 2), "heads"),
    "layout: zigzag of too many documents": (lambda: Layout.zigzag(4, 2, documents=(2, 1, 2)), "documents"),
    "layout: zigzag of a document below nothing": (lambda: Layout.zigzag(4, 2, documents=(5, -1)), "documents"),
    "layout: zigzag of no documents": (lambda: Layout.zigzag(4, 2, documents=()), "documents"),
    "layout: an order of halves": (lambda: Layout.from_cuts(np.arange(4) / 1, (0, 2, 4)), "order"),
    "layout: an order of flags": (lambda: Layout.from_cuts([False, True], (0, 1, 2)), "order"),
    "layout: an order of a number": (lambda: Layout.from_cuts(np.array(0), (0, 1)), "order"),
    "layout: a range that begins later": (lambda: Layout.from_cuts(range(1, 5), (0, 2, 4)), "order"),
    "layout: every other of a range": (lambda: Layout.from_cuts(range(0, 8, 2), (0, 2, 4)), "order"),
    "layout: cuts beyond the end": (lambda: Layout.from_cuts(range(4), (0, 5, 4)), "cuts"),
    "layout: cuts that end behind": (lambda: Layout.from_cuts(range(4), (0, 2, 5)), "cuts"),
    "layout: cuts from below 0": (lambda: Layout.from_cuts(range(4), (-1, 2, 4)), "cuts"),
    "layout: no cuts": (lambda: Layout.from_cuts((), ()), "cuts"),
    "layout: shards too many": (lambda: Layout.contiguous(4, 2).unshard([torch.zeros(1, 2)] * 3), "shards"),
    "documents that begin later": (lambda: documents_from_cu_seqlens([1, 3], 3), "cu_seqlens"),
    "documents that end too late": (lambda: documents_from_cu_seqlens([0, 4], 3), "cu_seqlens"),
    "no ends of documents": (lambda: documents_from_cu_seqlens([], 0), "cu_seqlens"),
    "documents that end in halves": (lambda: documents_from_cu_seqlens([0.0, 3.0], 3), "cu_seqlens"),  # type: ignore[list-item]
    "documents that end in two rows": (lambda: documents_from_cu_seqlens(np.array([[0, 3]]), 3), "cu_seqlens"),
    "documents that end by flags": (lambda: documents_from_cu_seqlens([False, True], 1), "cu_seqlens"),
    "documents of positions that begin later": (lambda: documents_from_positions([1, 2, 0]), "positions"),
    "documents of positions that stay": (lambda: documents_from_positions([0, 1, 1]), "positions"),
    "documents of positions that go back": (lambda: documents_from_positions([0, 1, 2, 1]), "positions"),
    "documents of positions below 0": (lambda: documents_from_positions([-1, 0]), "positions"),
    "documents of positions of two rows": (
        lambda: documents_from_positions(torch.zeros(2, 3, dtype=torch.int64)),
        "pos",
    ),
    "documents of halves of positions": (lambda: documents_from_positions(torch.zeros(2)), "positions"),
    "documents of positions by flags": (lambda: documents_from_positions([False, False]), "positions"),
}

# What takes an integer, by name: made with one, and the argument that the refusal must name.
INTEGERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a segment": (Branch, "segment_length"),
    "a rate": (lambda x: Branch(4, x), "dilation_rate"),
    "an offset": (lambda x: Branch(4, 2, x), "offset"),
    "one of several offsets": (lambda x: Branch(4, 2, (0, x)), "offset"),
    "a window": (lambda x: Branch(window=x), "window"),
    "a window of dense": (lambda x: Pattern.dense(window=x), "window"),
    "a document": (lambda x: Pattern.dense(documents=(2, x)), "documents"),
    "heads of longnet": (lambda x: Pattern.longnet([4], [1], x), "heads"),
    "heads of groups": (lambda x: Pattern.head_groups([4], [1], x), "heads"),
    "heads to fit": (lambda x: Pattern.dense().validate(x), "num_heads"),
    "a segment of longnet": (lambda x: Pattern.longnet([x], [1], 2), "segment_length"),
    "a rate of longnet": (lambda x: Pattern.longnet([4], [x], 2), "dilation_rate"),
    "a segment of groups": (lambda x: Pattern.head_groups([x], [1], 2), "segment_length"),
    "a rate of groups": (lambda x: Pattern.head_groups([4], [x], 2), "dilation_rate"),
    "a saved segment": (lambda x: Pattern.from_dict(_saved(segment_length=x)), "segment_length"),
    "a saved rate": (lambda x: Pattern.from_dict(_saved(dilation_rate=x)), "dilation_rate"),
    "a saved offset": (lambda x: Pattern.from_dict(_saved(dilation_rate=2, offset=x)), "offset"),
    "a saved offset of several": (lambda x: Pattern.from_dict(_saved(dilation_rate=2, offset=[x, 0])), "offset"),
    "a saved first head": (lambda x: Pattern.from_dict(_saved(heads=[x, 2])), "heads"),
    "a saved end of heads": (lambda x: Pattern.from_dict(_saved(heads=[0, x])), "heads"),
    "a saved window": (lambda x: Pattern.from_dict(_saved(window=x)), "window"),
    "a saved document": (lambda x: Pattern.from_dict(Pattern.dense().to_dict() | {"documents": [x]}), "documents"),
    **{
        f"{what} of {name}": made
        for name in ("contiguous", "zigzag", "striped", "hilbert")
        for what, made in (
            ("tokens", (lambda x, name=name: getattr(Layout, name)(x, 2), "n must")),
            ("ranks", (lambda x, name=name: getattr(Layout, name)(4, x), "p must")),
        )
    },
    "tokens of balanced": (lambda x: Layout.balanced(Pattern.dense(), x, 2), "n must"),
    "ranks of balanced": (lambda x: Layout.balanced(Pattern.dense(), 4, x), "p must"),
}
NO_INTEGERS = (True, 1.0, 1.5, -1, "1", np.int64(1), np.float64(1), [[1]], torch.ones((), dtype=torch.int64))


def _saved(**fields: Any) -> dict[str, Any]:
    """A pattern of one branch as JSON has it, with these fields in place of its own."""
    plain = Pattern.dense().to_dict()
    return plain | {"branches": [plain["branches"][0] | fields]}


def not_refused() -> str | None:
    """What is wrong with the first refusal that is not as it should be."""
    every = [(name, make, argument) for name, (make, argument) in REFUSED.items()]
    every += [
        (f"{name} of {wrong!r}", partial(make, wrong), argument)
        for name, (make, argument) in INTEGERS.items()
        for wrong in NO_INTEGERS
    ]
    return next((wrong for one in every if (wrong := _not_as_wanted(*one))), None)


def _not_as_wanted(name: str, make: Callable[[], object], argument: str) -> str | None:
    try:
        made = make()
    except ValueError as error:
        return None if argument in str(error) else f"{name}: the refusal must name {argument!r}, got {error}"
    except Exception as error:  # of any type: it is told which
        return f"{name}: must be refused as ValueError, got {type(error).__name__}: {error}"
    return f"{name}: must be refused as ValueError, got {made!r}"
