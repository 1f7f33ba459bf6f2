"""Right results in a wrong place: on another rank, or in the order of another layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from reference import shards
from reference.shards import Ints
from verification.causes.example import Candidate, Example, Results, attention, phrase

# Quantities that are misplaced together.
TOGETHER = (
    ("dk", "dv"), ("dk",), ("dv",), ("dq",), ("dq", "dk", "dv"), ("out", "lse"), ("out",), ("lse",),
    ("out", "lse", "dq"), ("out", "lse", "dq", "dk", "dv"),
)  # fmt: skip


def misplaced(x: Example) -> Iterator[Candidate]:
    even = len(set(x.shards.counts)) == 1
    for name, step in (("the next rank", 1), ("the previous rank", -1)) if x.size > 1 and even else ():
        positions = [x.shards.positions[(rank + step) % x.size] for rank in range(x.size)]
        yield from moved(x, name, sources(x, positions), step)
    for order in ("contiguous", "zigzag", "striped"):
        other = shards.shards(order, x.case.tokens, x.size, None)
        if other.counts == x.shards.counts:
            yield from moved(x, f"the {order} order", sources(x, other.positions), 0)


def sources(x: Example, positions: Iterable[Ints]) -> Tensor:
    """Return, for each token, the token whose result is in its place if the ranks' shards have these positions."""
    source = torch.empty_like(x.place)
    for here, there in zip(x.shards.positions, positions, strict=True):
        source[torch.tensor(here)] = torch.tensor(there)
    return source


def moved(x: Example, where: str, source: Tensor, step: int) -> Iterator[Candidate]:
    """Yield results taken from `source`; of the forward also with the gradients that follow from that."""
    if torch.equal(source, torch.arange(x.case.tokens)):
        return

    def taken(names: tuple[str, ...]) -> Results:
        return {name: x.exact[name][:, :, source] for name in names}

    def misplaced_forward(names: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, x.weights)
        return out[:, :, source], lse[:, :, source] if "lse" in names else lse

    for names in TOGETHER:
        wrong = [name for name in names if name in x.wrong]
        if x.wrong and not wrong:
            continue
        forward, backward = (tuple(n for n in names if (n in ("out", "lse")) == first) for first in (True, False))
        title, sentence = f"{', '.join(names)} of {where}", _sentence(x, wrong, where, step)
        yield Candidate(title, sentence, partial(taken, forward), partial(taken, backward))
        if "out" in forward and not backward:
            follow, gradients = ", and the gradients follow", partial(x.autograd, partial(misplaced_forward, names))
            yield Candidate(title + follow, f"{sentence}{follow} from that", partial(taken, forward), gradients)


def _sentence(x: Example, wrong: list[str], where: str, step: int) -> str:
    wrong = wrong or ["out"]
    if not step:
        return f"{phrase(wrong)} in {where}; the layout is {x.case.order}"
    tokens = (x.wrong[name].movedim(2, 0).flatten(1).any(1) for name in wrong if name in x.wrong)
    first = min((int(x.holder[wrong_ones].min()) for wrong_ones in tokens), default=0)
    own, other = x.case.ranks[first], x.case.ranks[(first + step) % x.size]
    return f"{phrase(wrong, f' on rank {own}')} what rank {other} should hold"
