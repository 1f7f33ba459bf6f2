"""Right results in a wrong place: on another rank, or in the order of another layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from reference import shards
from verification.causes.example import Candidate, Example, phrase

# Quantities that are misplaced together; from the forward, the gradients are those of an autograd through the mistake
# or right ones.
TOGETHER = (
    ("dk", "dv"), ("dk",), ("dv",), ("dq",), ("dq", "dk", "dv"), ("out", "lse"), ("out",), ("lse",),
    ("out", "lse", "dq"), ("out", "dq"), ("out", "lse", "dq", "dk", "dv"), ("out", "dq", "dk", "dv"),
)  # fmt: skip


def misplaced(x: Example) -> Iterator[Candidate]:
    if x.size == 1:
        return
    for step in (1, x.size - 1)[: x.size - 1] if len(set(x.shards.counts)) == 1 else ():
        source = torch.empty_like(x.place)  # the token whose result each token has
        for rank, positions in enumerate(x.shards.positions):
            source[torch.tensor(positions)] = torch.tensor(x.shards.positions[(rank + step) % x.size])
        for name in ("the next rank",) * (step == 1) + ("the previous rank",) * (step == x.size - 1):
            yield from moved(x, name, source, step)
    for order in ("contiguous", "zigzag", "striped"):
        other = shards.shards(order, x.case.tokens, x.size, None)
        if order != x.case.order and other.counts == x.shards.counts:
            source = torch.empty_like(x.place)
            for here, there in zip(x.shards.positions, other.positions, strict=True):
                source[torch.tensor(here)] = torch.tensor(there)
            yield from moved(x, f"the {order} order", source, None)


def moved(x: Example, where: str, source: Tensor, step: int | None) -> Iterator[Candidate]:
    if torch.equal(source, torch.arange(x.case.tokens)):
        return

    def taken(names: list[str]) -> Mapping[str, Tensor]:
        return {name: x.exact[name][:, :, source] for name in names}

    for names in TOGETHER:
        wrong = [name for name in names if name in x.wrong]
        if x.wrong and not wrong:
            continue
        title = f"{', '.join(names)} of {where}"
        yield Candidate(title, sentence(x, wrong, where, step), *(
            lambda part=part: taken(part)  # type: ignore[misc]
            for part in ([n for n in names if n in ("out", "lse")], [n for n in names if n[0] == "d"])
        ))  # fmt: skip
        if names in (("out", "lse"), ("out",)):
            back = torch.argsort(source)
            dout, dlse = x.dout[:, :, back], x.dlse[:, :, back] if "lse" in names else x.dlse

            def autograd(dout: Tensor = dout, dlse: Tensor = dlse) -> dict[str, Tensor]:
                twin = x.with_incoming(dout, dlse)
                return twin.by_hand(x.weights, x.exact["lse"], twin.delta(x.exact["out"]))

            yield Candidate(f"{title}, and the gradients follow", f"{sentence(x, wrong, where, step)}, and the "
                            "gradients follow from that", lambda names=names: taken(list(names)), autograd)  # type: ignore[misc]  # fmt: skip


def sentence(x: Example, wrong: list[str], where: str, step: int | None) -> str:
    wrong = wrong or ["out"]
    if step is None:
        return f"{phrase(wrong)} in {where}; the layout is {x.case.order}"
    tokens = torch.cat(
        [x.wrong[name].movedim(2, 0).flatten(1).any(1).nonzero() for name in x.wrong if name in wrong] or [x.place[:0]]
    )
    first = int(x.holder[tokens].min()) if len(tokens) else 0
    own, other = x.case.ranks[first], x.case.ranks[(first + step) % x.size]
    return f"{phrase(wrong, f' on rank {own}')} what rank {other} should hold"
