"""Ranks whose arguments hold the same numbers in another order, as after another shuffle, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring.nn import average_gradients, shard_batch
from verification.training.rank.other_calls import CallPlace, OtherCall, refused

KINDS = (torch.float64, torch.bfloat16, torch.uint8, torch.int16)
TRIED = 8
Change = Callable[[Tensor], Tensor]


def _exchanged(x: Tensor) -> Tensor:
    """The first number and the last one."""
    found = x.clone()
    found.view(-1)[0], found.view(-1)[-1] = x.view(-1)[-1].clone(), x.view(-1)[0].clone()
    return found


def _bytes_turned(x: Tensor) -> Tensor:
    """The bytes of the last number the other way round: it is not 0, and less than 256."""
    found = x.clone()
    last = found.view(-1)[-1:].view(torch.uint8)
    last.copy_(last.flip(0))
    return found


def _changes(n: int) -> list[tuple[str, Change]]:
    """Of tensors (2, n, ...) whose numbers all differ."""
    found: list[tuple[str, Change]] = [
        ("rows exchanged", lambda x: x.flip(0)), ("its first and last number exchanged", _exchanged),
    ]  # fmt: skip
    if n > 1:
        found += [
            ("tokens permuted", lambda x: x.roll(1, 1)),
            ("tokens of one row permuted", lambda x: torch.cat((x[:1], x[1:].flip(1)))),
        ]
    return found


def _batch_in_another_order(s: CallPlace) -> str:
    """Of one argument of a batch at a time; the others are those of all ranks."""
    draws, n, said = s.draws(), s.case.tokens, []
    if s.place("context")[1] == 1:
        return ""
    numbers = torch.arange(1, 2 * n + 1).view(2, n)
    tokens = numbers[:, torch.from_numpy(draws.permutation(n))].to(
        s.device, (torch.int64, torch.int32)[draws.integers(2)]
    )
    kind = KINDS[draws.integers(len(KINDS))]
    given: dict[str, Any] = {
        "tokens": tokens, "labels": tokens.long() + 2 * n, "weights": tokens[..., None, None].to(kind),
        "pairs": torch.stack((tokens, -tokens), 2),
    }  # fmt: skip
    wrong = [(name, what, change) for name in given for what, change in _changes(n)]
    wrong += [(name, "its last number's bytes turned", _bytes_turned) for name in ("tokens", "labels")]
    wrong.append(("pairs", "the numbers of a token exchanged", lambda x: x.flip(2)))
    for turn, at in enumerate(draws.permutation(len(wrong))[:TRIED]):
        name, _, change = wrong[at]
        other = s.at(turn).is_other("context")
        mine = given | ({name: change(given[name])} if other else {})
        said.append(refused((f"{name} must be the same on every rank",), partial(shard_batch, s.context, **mine)))
    said.append(_documents_in_another_order(s, given))
    return "; ".join(said)


def _documents_in_another_order(s: CallPlace, given: dict[str, Any]) -> str:
    lengths = (0, s.case.tokens) if s.is_other("context") else (s.case.tokens, 0)
    words = ("documents must be the same on every rank",)
    return refused(words, partial(shard_batch, s.context, **given, documents=lengths))


def _parameters_in_another_order(s: CallPlace) -> str:
    """Of shapes, or of types, that are those of the other ranks in another order."""
    draws, said = s.draws(), []
    if s.place("mesh")[1] == 1:
        return ""
    types = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    shapes = (((2, 3), (3, 2)), ((1, 4), (4, 1)), ((2,), (3,)), ((), (1,)), ((6,), (2, 3)))
    first, second = draws.permutation(4)[:2]
    alike = [(*shapes[i], types[first], types[first]) for i in range(len(shapes))]
    for turn, (one, two, kind, other_kind) in enumerate([*alike, ((2,), (2,), types[first], types[second])]):
        given = [nn.Parameter(torch.ones(one, dtype=kind, device=s.device))]
        given.append(nn.Parameter(torch.ones(two, dtype=other_kind, device=s.device)))
        for x in given:
            x.grad = torch.ones_like(x)
        mine = given[::-1] if s.at(turn).is_other("mesh") else given
        said.append(refused(("parameters must be the same on every rank",), partial(average_gradients, mine, s.mesh)))
    return "; ".join(said)


ORDER_MISTAKES: dict[str, OtherCall] = {
    "a batch in another order than the others'": OtherCall(_batch_in_another_order, "context"),
    "parameters in another order than the others'": OtherCall(_parameters_in_another_order, "mesh"),
}
