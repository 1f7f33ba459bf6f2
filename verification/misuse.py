"""Wrong calls of ring_attention, by name: what a rank, or every rank, does wrong, and what the error must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reference.pattern import Branch, Pattern
from ring import Layout, Transport, ring_attention
from verification.case import Case
from verification.execute import shards, whole_tensors

Arguments = dict[str, Any]  # of ring_attention, by name


@dataclass(frozen=True)
class Mistake:
    """`spoil` changes the arguments of a rank that is called wrongly. `alone`: wrong on its own, whatever others do, so
    that all ranks can make it. `together`: all ranks have to. `call`: what is then done with the arguments.
    """

    argument: str
    spoil: Callable[[Arguments, Case], None]
    alone: bool = True
    together: bool = False
    call: Callable[[Arguments], object] = lambda arguments: ring_attention(**arguments)


def _set(name: str, value: Any) -> Callable[[Arguments, Case], None]:
    def spoil(arguments: Arguments, case: Case) -> None:
        arguments[name] = value

    return spoil


def _change(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments, Case], None]:
    def spoil(arguments: Arguments, case: Case) -> None:
        arguments[name] = change(arguments[name])

    return spoil


def _longer(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x.new_zeros(x.shape[0], 1, *x.shape[2:])), 1)


def _differentiable(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype == torch.float64 else torch.float64)


def _other_layout(arguments: Arguments, case: Case) -> None:
    arguments["layout"] = Layout.contiguous(case.tokens, len(case.ranks) + 1)


def _heads_that_do_not_divide(arguments: Arguments, case: Case) -> None:
    k = arguments["k"]
    arguments["k"] = arguments["v"] = k.new_zeros(k.shape[0], k.shape[1], case.heads + 1, k.shape[3])


def _too_many_heads(arguments: Arguments, case: Case) -> None:
    arguments["pattern"] = Pattern((Branch(heads=range(case.heads, case.heads + 1)),))


def _other_exchange(arguments: Arguments, case: Case) -> None:
    arguments["exchange"] = "gather" if case.exchange != "gather" else "ring"


def _shuffled_layout(arguments: Arguments, case: Case) -> None:
    """As many tokens on every rank, other ones."""
    layout = arguments["layout"]
    order = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    arguments["layout"] = Layout.from_cuts(order.flip(0), layout.cuts)


def _all_in(dtype: torch.dtype) -> Callable[[Arguments, Case], None]:
    def spoil(arguments: Arguments, case: Case) -> None:
        other = torch.float16 if case.torch_dtype == dtype else dtype
        arguments.update({name: arguments[name].to(other) for name in "qkv"})

    return spoil


def _other_bucket(arguments: Arguments, case: Case) -> None:
    arguments["bucket"] = 1 if case.bucket is None else case.bucket + 1


def _other_pattern(arguments: Arguments, case: Case) -> None:
    arguments["pattern"] = Pattern(case.pattern.branches, not case.pattern.causal)


def _more(axis: int) -> Callable[[Arguments, Case], None]:
    """Batch, heads or head dim: twice as much of q, k and v."""

    def spoil(arguments: Arguments, case: Case) -> None:
        arguments.update({name: torch.cat((arguments[name],) * 2, axis) for name in "qkv"})

    return spoil


def _more_query_heads(arguments: Arguments, case: Case) -> None:
    arguments["q"] = torch.cat((arguments["q"],) * 2, 2)


def _nothing(arguments: Arguments, case: Case) -> None:
    """The arguments are right; what is done with them is not."""


def _differentiate_twice(arguments: Arguments) -> None:
    q = arguments["q"].detach().requires_grad_()
    result = ring_attention(**arguments | {"q": q})
    out = result[0] if isinstance(result, tuple) else result
    (once,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    torch.autograd.grad(once.sum(), q)


MISTAKES: dict[str, Mistake] = {
    "one token too many in q": Mistake("q", _change("q", _longer)),
    "one token too many in k and v": Mistake("k", lambda a, case: a.update(k=_longer(a["k"]), v=_longer(a["v"]))),
    "k longer than v": Mistake("k", _change("k", _longer)),
    "q without heads": Mistake("q", _change("q", lambda x: x[:, :, 0])),
    "k in another dtype": Mistake("k", _change("k", _other_dtype)),
    "v in another dtype": Mistake("v", _change("v", _other_dtype)),
    "integers": Mistake("dtype", lambda a, case: a.update({name: a[name].long() for name in "qkv"})),
    "heads that do not divide": Mistake("heads", _heads_that_do_not_divide),
    "a pattern for more heads": Mistake("heads", _too_many_heads),
    "no pattern": Mistake("pattern", _set("pattern", None)),
    "layout for one rank more": Mistake("layout", _other_layout),
    "no layout": Mistake("layout", _set("layout", None)),
    "unknown exchange": Mistake("exchange", _set("exchange", "teleport")),
    "unknown kernel": Mistake("kernel", _set("kernel", "magic")),
    "bucket of 0": Mistake("bucket", _set("bucket", 0)),
    "negative bucket": Mistake("bucket", _set("bucket", -3)),
    "bucket that is no number": Mistake("bucket", _set("bucket", "all")),
    "scale that is no number": Mistake("scale", _set("scale", "large")),
    "return_lse that is no flag": Mistake("return_lse", _set("return_lse", "yes")),
    "another exchange than the others": Mistake("exchange", _other_exchange, alone=False),
    "another bucket than the others": Mistake("bucket", _other_bucket, alone=False),
    "another layout than the others": Mistake("layout", _shuffled_layout, alone=False),
    "another scale than the others": Mistake(
        "scale", _change("scale", lambda x: 3.0 if x is None else x + 1), alone=False
    ),
    "another kernel than the others": Mistake(
        "kernel", _change("kernel", lambda x: "math" if x != "math" else "auto"), alone=False
    ),
    "another return_lse than the others": Mistake("return_lse", _change("return_lse", lambda x: not x), alone=False),
    "requires gradients, unlike the others": Mistake("requires_grad", _change("q", _differentiable), alone=False),
    "another dtype than the others": Mistake("dtype", _all_in(torch.float64), alone=False),
    "another pattern than the others": Mistake("pattern", _other_pattern, alone=False),
    "another batch size than the others": Mistake("batch", _more(0), alone=False),
    "another head dim than the others": Mistake("head dim", _more(3), alone=False),
    "other heads than the others": Mistake("heads", _more(2), alone=False),
    "other query heads than the others": Mistake("heads", _more_query_heads, alone=False),
    "a gradient of a gradient": Mistake("double backward", _nothing, together=True, call=_differentiate_twice),
}


def applicable(case: Case) -> tuple[str, ...]:
    """The mistakes that can be made with a Case: to differ from the others takes others."""
    possible = [name for name, mistake in MISTAKES.items() if mistake.alone or len(case.ranks) > 1]
    return tuple(name for name in possible if MISTAKES[name].spoil is not _shuffled_layout or case.tokens > 1)


def call(transport: Transport, case: Case, mistake: str, culprit: int | None) -> tuple[str, str] | None:
    """Call ring_attention, wrongly on the rank at index `culprit`, or on every rank (None). The error as (type,
    message); None if there was none.
    """
    q, k, v, *_ = shards(case, transport.rank, whole_tensors(case))
    arguments: Arguments = {
        "q": q, "k": k, "v": v, "pattern": case.pattern, "layout": case.layout(), "exchange": case.exchange,
        "bucket": case.bucket, "kernel": case.kernel, "scale": case.scale, "return_lse": case.lse != "unused",
        "group": transport,
    }  # fmt: skip
    made = MISTAKES[mistake]
    if culprit is None or transport.rank == culprit:
        made.spoil(arguments, case)
    try:
        made.call(arguments)
    except Exception as error:  # of any type: which it is, is what the law is about
        return type(error).__name__, str(error)
    return None
