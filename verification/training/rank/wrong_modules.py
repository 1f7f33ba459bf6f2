"""Arguments that no module of `ring.nn` takes, made on one rank or on all, and modules that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reference.pattern import Pattern
from ring.nn import LongNetBlock, RingAttention, SelfAttention, longnet_pattern, rotary
from verification.training.rank.other_calls import CallPlace, OtherCall, refused
from verification.training.rank.wrong_arguments import Mistake, all_of, replicated, some, some_beside


def _attend(name: str, make: Callable[[CallPlace, Tensor], Any]) -> Mistake:
    """RingAttention with one wrong argument, made of the right query (1, 2, N, 4)."""

    def call(s: CallPlace, wrong: bool) -> object:
        x = torch.zeros(1, 2, s.context.tokens, 4, device=s.device)
        given: dict[str, Any] = {"query": x, "key": x, "value": x} | ({name: make(s, x)} if wrong else {})
        return RingAttention(Pattern.dense(), name="inner")(**given, context=s.context)

    return call


def _layer(make: Callable[[CallPlace, Tensor], dict[str, Any]], block: bool = False) -> Mistake:
    """A layer whose forward has wrong arguments, made of the right x (2, N, 4)."""

    def call(s: CallPlace, wrong: bool) -> object:
        given: dict[str, Any] = {"x": torch.zeros(2, s.context.tokens, 4, device=s.device)}
        given |= make(s, given["x"]) if wrong else {}
        made: nn.Module = LongNetBlock(4, 1, [2], [1]) if block else SelfAttention(4, 1, Pattern.dense())
        return made.to(s.device)(**given, context=s.context)

    return call


def _own(s: CallPlace) -> Tensor:
    return s.context.positions_on(s.device)


def _written_into(s: CallPlace, x: Tensor) -> dict[str, Any]:
    """The context's own positions, into which somebody wrote."""
    own = _own(s)
    return {"positions": own.add_(0)}


def _both(word: str, make: Callable[[CallPlace, Tensor], dict[str, Any]]) -> list[tuple[str, Mistake]]:
    return [(word, _layer(make)), (word, _layer(make, block=True))]


MODULES: list[tuple[str, Mistake]] = [
    ("enable_gqa", _attend("enable_gqa", lambda s, x: 1)), ("dropout_p", _attend("dropout_p", lambda s, x: False)),
    ("dropout_p", _attend("dropout_p", lambda s, x: 1e-9)), ("is_causal", _attend("is_causal", lambda s, x: 0)),
    ("is_causal", _attend("is_causal", lambda s, x: True)), ("scale", _attend("scale", lambda s, x: "1")),
    ("attn_mask", _attend("attn_mask", lambda s, x: [0])), ("query", _attend("query", lambda s, x: x[0])),
    ("value", _attend("value", lambda s, x: torch.cat((x, x[:, :, :1].new_zeros(1, 2, 1, 4)), 2))),
    ("key", _attend("key", lambda s, x: None)), ("key", _attend("key", replicated)),
    *_both("x must", lambda s, x: {"x": x[..., :3]}), *_both("x must", lambda s, x: {"x": x[0]}),
    *_both("x must", lambda s, x: {"x": x.double()}), *_both("x must", lambda s, x: {"x": x.long()}),
    *_both("x must", lambda s, x: {"x": torch.zeros(2, s.case.tokens + 1, 4, device=s.device)}),
    *_both("x must", lambda s, x: {"x": replicated(s, x)}), *_both("x must", lambda s, x: {"x": None}),
    *_both("positions", lambda s, x: {"positions": _own(s).double()}),
    *_both("positions", lambda s, x: {"positions": torch.cat((_own(s), _own(s), _own(s)[:0].new_zeros(1)))}),
    *_both("positions", lambda s, x: {"positions": _own(s).expand(3, -1)}),
    *_both("positions", lambda s, x: {"positions": "all"}), *_both("positions", _written_into),
]  # fmt: skip


def _positions_that_are_not_the_layouts(s: CallPlace) -> str:
    """One position of one rank that holds some is another than the layout gives."""
    made = _layer(lambda s, x: {"positions": (_own(s) + 1).expand(2, -1)})
    holding = [rank for rank, count in enumerate(s.context.layout.counts) if count]
    wrong = holding[s.case.seed % len(holding)] == s.context.rank
    return refused(("positions must be those that the layout gives",), lambda: made(s, wrong))


def _another_name(s: CallPlace, other: bool) -> object:
    x = torch.zeros(1, s.context.tokens, 4, device=s.device)
    return SelfAttention(4, 1, Pattern.dense(), name="layer 1" if other else "layer 2").to(s.device)(x, s.context)


def _another_pattern(s: CallPlace, other: bool) -> object:
    x = torch.zeros(1, s.context.tokens, 4, device=s.device)
    return SelfAttention(4, 1, Pattern.dense(causal=other)).to(s.device)(x, s.context)


def _another_document(s: CallPlace, other: bool) -> object:
    x = torch.zeros(1, s.context.tokens, 4, device=s.device)
    handle = s.context.with_documents((s.case.tokens, 0) if other else (s.case.tokens,))
    return SelfAttention(4, 1, Pattern.dense()).to(s.device)(x, handle)


def _made(kind: type[nn.Module], *args: Any, **named: Any) -> Callable[[CallPlace], object]:
    return lambda s: kind(*args, **named)


DENSE, ANY = Pattern.dense(), torch.zeros(1, 2, 1, 4)
NOT_MADE: list[tuple[str, Callable[[CallPlace], object]]] = [
    ("dim must be", _made(SelfAttention, 0, 1, DENSE)), ("heads must be", _made(SelfAttention, 4, True, DENSE)),
    ("kv_heads must be", _made(SelfAttention, 4, 2, DENSE, kv_heads=0)),
    ("multiple of kv_heads", _made(SelfAttention, 4, 2, DENSE, kv_heads=4)),
    ("dim must be a multiple of heads", _made(SelfAttention, 4, 3, DENSE)),
    ("head_dim must be even", _made(SelfAttention, 3, 1, DENSE)),
    ("head_dim must be an", _made(SelfAttention, 4, 1, DENSE, head_dim=2.0)),
    ("theta", _made(SelfAttention, 4, 1, DENSE, rotary_theta=0.0)),
    ("theta", _made(SelfAttention, 4, 1, DENSE, rotary_theta=float("inf"))),
    ("pattern must be", _made(SelfAttention, 4, 1, "dense")), ("pattern must be", _made(RingAttention, None)),
    ("heads", _made(SelfAttention, 4, 1, Pattern.longnet([2], [2], 2))),
    ("context must be", _made(RingAttention, DENSE, "context")),
    ("ffn_dim", _made(LongNetBlock, 4, 1, [2], [1], ffn_dim=0)),
    ("dim", _made(LongNetBlock, True, 1, [2], [1])), ("head_dim must be even", _made(LongNetBlock, 3, 1, [2], [1])),
    ("context must be", lambda s: RingAttention(DENSE)(ANY, ANY, ANY)),
    ("context must be", lambda s: SelfAttention(4, 1, DENSE)(ANY[0], None)),
    *(
        ("segment_length must be", lambda s, x=x: longnet_pattern(x, [1], 2))
        for x in ([], [0], [True], [1.5], "2", "[1,", "[a]", None, "", [None])
    ),
    ("dilated_ratio must be", lambda s: longnet_pattern([2], "[0]", 2)),
    ("dilated_ratio must have", lambda s: longnet_pattern([2, 4], [1], 2)),
    ("offsets", lambda s: longnet_pattern([2], [1], 2, offsets="none")),
    *(
        (word, lambda s, x=x, at=at, theta=theta: rotary(x, at, theta))
        for word, x, at, theta in (
            ("x must", ANY[0], torch.arange(2), 1.0), ("x must", ANY.long(), torch.arange(2), 1.0),
            ("theta", ANY, torch.arange(2), -1.0), ("theta", ANY, torch.arange(2), True),
            ("theta", ANY, torch.arange(2), float("nan")), ("positions", ANY, torch.zeros(2), 1.0),
            ("positions", ANY, torch.zeros(2, 2, dtype=torch.int64), 1.0), ("positions", ANY, [0, 1], 1.0),
        )
    ),
]  # fmt: skip


MODULE_MISTAKES: dict[str, OtherCall] = {
    "arguments of modules": some(MODULES, "context"),
    "positions that are not the layout's": OtherCall(_positions_that_are_not_the_layouts, "context"),
    "modules unlike the others'": some_beside(
        [("layer 1", _another_name), ("pattern", _another_pattern), ("documents", _another_document)], "context"
    ),
    "modules that cannot be made": all_of(NOT_MADE),
}
