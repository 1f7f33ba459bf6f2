"""Wrong calls of ring_attention, by name: what a rank, or every rank, does wrong, and what the error must name.

The names are saved with counter-examples: do not change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ring import Transport, ring_attention
from ring.compiled import traced
from verification.case import Case
from verification.run.given_group import bare, mesh_of_two_dimensions
from verification.run.layouts import layout_of
from verification.run.rank import shards, whole_tensors
from verification.run.wrong_documents import one_moved, over, some_documents, without_documents, without_the_last
from verification.run.wrong_layouts import (
    late_difference,
    longer_elsewhere,
    other_cuts_elsewhere,
    other_layout,
    own_tokens_alone,
    right_on_one_rank_more,
    second_half_first,
    shuffled_layout,
)
from verification.run.wrong_patterns import other_pattern, other_window, too_many_heads
from verification.run.wrong_tensors import as_array, differentiable, in_another_dtype, longer, placed, shorter
from verification.run.wrong_types import WRONG_TYPES

Arguments = dict[str, Any]  # of ring_attention, by name
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """One way to call ring_attention wrongly.

    argument   what the error must name
    spoil      changes the arguments of a rank that is called wrongly
    alone      whether the call is wrong whatever other ranks do, so that all ranks can make the mistake
    together   whether all ranks have to make it
    possible   whether it can be made with a Case
    everyone   changes the arguments of all ranks before
    call       what a rank that is called wrongly does with its arguments, by `ring_attention` or what stands for it
    traced     whether the operator of a compiled graph refuses it as well, though it is wrong alone. What differs
               between ranks it always does
    error      the type of the error, if torch raises it: its text then names the shapes of this rank. None: the ring
               raises it, and it is the same on all ranks
    """

    argument: str
    spoil: Callable[[Arguments, Case], None]
    alone: bool = True
    together: bool = False
    possible: Callable[[Case], bool] = lambda case: True
    everyone: Callable[[Arguments, Case], None] = lambda arguments, case: None
    call: Callable[[Arguments, Attention], object] = lambda arguments, attention: attention(**arguments)
    traced: bool = False
    error: str | None = None

    @property
    def in_graphs(self) -> bool:
        """Whether a compiled graph can make it, and has to refuse it."""
        return self.traced or not self.alone


def _set(name: str, value: Any) -> Callable[[Arguments, Case], None]:
    def spoil(arguments: Arguments, case: Case) -> None:
        arguments[name] = value

    return spoil


def _change(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments, Case], None]:
    def spoil(arguments: Arguments, case: Case) -> None:
        arguments[name] = change(arguments[name])

    return spoil


def _heads_that_do_not_divide(arguments: Arguments, case: Case) -> None:
    k = arguments["k"]
    arguments["k"] = arguments["v"] = k.new_zeros(k.shape[0], k.shape[1], case.heads + 1, k.shape[3])


def _other_exchange(arguments: Arguments, case: Case) -> None:
    arguments["exchange"] = "gather" if case.exchange != "gather" else "ring"


def _all_in(dtype: torch.dtype) -> Callable[[Arguments, Case], None]:
    def spoil(arguments: Arguments, case: Case) -> None:
        other = torch.float16 if case.torch_dtype == dtype else dtype
        arguments.update({name: arguments[name].to(other) for name in "qkv"})

    return spoil


def _other_bucket(arguments: Arguments, case: Case) -> None:
    arguments["bucket"] = 1 if case.bucket is None else case.bucket + 1


def _more(axis: int) -> Callable[[Arguments, Case], None]:
    """Batch, heads or head dim: twice as much of q, k and v."""

    def spoil(arguments: Arguments, case: Case) -> None:
        arguments.update({name: torch.cat((arguments[name],) * 2, axis) for name in "qkv"})

    return spoil


def _more_of_k_and_v(axis: int) -> Callable[[Arguments, Case], None]:
    """Batch or head dim: twice as much of k and v as of q."""

    def spoil(arguments: Arguments, case: Case) -> None:
        arguments.update({name: torch.cat((arguments[name],) * 2, axis) for name in "kv"})

    return spoil


def _no_batch(arguments: Arguments, case: Case) -> None:
    arguments.update({name: arguments[name][:0] for name in "qkv"})


def _more_query_heads(arguments: Arguments, case: Case) -> None:
    arguments["q"] = torch.cat((arguments["q"],) * 2, 2)


def _more_key_value_heads(arguments: Arguments, case: Case) -> None:
    """As many as there are query heads."""
    share = case.heads // case.kv_heads
    arguments.update({name: arguments[name].repeat_interleave(share, 2) for name in "kv"})


def _two_dimensions(arguments: Arguments, case: Case) -> None:
    arguments["group"] = mesh_of_two_dimensions(case)


def _called_before(arguments: Arguments, case: Case) -> None:
    """A right call of all ranks: what follows equals it, and is wrong by its type alone."""
    ring_attention(**arguments)


def _nothing(arguments: Arguments, case: Case) -> None:
    """The arguments are right; what is done with them is not."""


def _differentiate_twice(arguments: Arguments, attention: Attention) -> None:
    q = arguments["q"].detach().requires_grad_()
    result = attention(**arguments | {"q": q})
    out = result[0] if isinstance(result, tuple) else result
    (once,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    torch.autograd.grad(once.sum(), q)


def _require_gradients(arguments: Arguments, case: Case) -> None:
    arguments.update({name: differentiable(arguments[name]) for name in "qkv"})


def _require_none(arguments: Arguments, case: Case) -> None:
    arguments.update({name: arguments[name].detach() for name in "qkv"})


def _integers(arguments: Arguments, case: Case) -> None:
    arguments.update({name: arguments[name].long() for name in "qkv"})


def _under_autocast(arguments: Arguments, attention: Attention) -> None:
    with torch.autocast(arguments["v"].device.type, torch.bfloat16):
        attention(**arguments)


def _without_grad(arguments: Arguments, attention: Attention) -> None:
    with torch.no_grad():
        attention(**arguments)


def _fused_with_lse(arguments: Arguments, case: Case) -> None:
    """A gradient may come in through lse, which fused kernels have no way for."""
    _require_gradients(arguments, case)
    arguments.update(kernel="flash", return_lse=True)


def _change_in_place(name: str) -> Callable[[Arguments, Attention], None]:
    """Forward, a change of an input or a result, backward: gradients from the changed numbers would be wrong."""

    def call(arguments: Arguments, attention: Attention) -> None:
        tensors = {x: differentiable(arguments[x]) for x in "qkv"}
        options = {"return_lse": True, "kernel": "math"} if name == "lse" else {"return_lse": False}
        result = attention(**arguments | tensors | options)
        out, *lse = result if isinstance(result, tuple) else (result,)
        changed = lse[0] if name == "lse" else out if name == "out" else tensors[name]
        with torch.no_grad():
            changed.zero_()
        torch.autograd.grad(out.sum(), [tensors[x] for x in "qkv"])

    return call


MISTAKES: dict[str, Mistake] = {
    "one token too many in q": Mistake("q", _change("q", longer)),
    "one token too many in k and v": Mistake("k", lambda a, case: a.update(k=longer(a["k"]), v=longer(a["v"]))),
    "one token too few in q": Mistake(
        "q", _change("q", shorter), possible=lambda case: min(layout_of(case).counts) > 0
    ),
    "one token too few in k and v": Mistake(
        "k",
        lambda a, case: a.update(k=shorter(a["k"]), v=shorter(a["v"])),
        possible=lambda case: min(layout_of(case).counts) > 0,
    ),
    "k longer than v": Mistake("k", _change("k", longer)),
    "q without heads": Mistake("q", _change("q", lambda x: x[:, :, 0])),
    "k in another dtype": Mistake("k", _change("k", in_another_dtype)),
    "v in another dtype": Mistake("v", _change("v", in_another_dtype)),
    "integers": Mistake("dtype", _integers),
    "integers under autocast": Mistake("dtype", _integers, call=_under_autocast),
    "k and v of another batch than q": Mistake("q's batch", _more_of_k_and_v(0)),
    "k and v of another head dim than q": Mistake("head dim", _more_of_k_and_v(3)),
    "a batch of nothing": Mistake("batch", _no_batch),
    "sparse q": Mistake("q must be a dense", _change("q", lambda x: x.to_sparse())),
    "a DTensor in place of its shard": Mistake("q must be a", _change("q", placed)),
    "an array in place of k": Mistake("k", _change("k", as_array)),
    "an array in place of q under autocast": Mistake("q", _change("q", as_array), call=_under_autocast),
    "heads that do not divide": Mistake("heads", _heads_that_do_not_divide),
    "a pattern for more heads": Mistake("heads", too_many_heads),
    "no pattern": Mistake("pattern", _set("pattern", None)),
    "layout for one rank more": Mistake("layout", other_layout),
    "layout of one rank": Mistake(
        "layout",
        own_tokens_alone,
        possible=lambda case: len(case.ranks) > 1 and min(layout_of(case).counts) > 0,
    ),
    "a layout that was right on a group of one rank more": Mistake("layout", right_on_one_rank_more),
    "no layout": Mistake("layout", _set("layout", None)),
    "something that is no group": Mistake("group", _set("group", "everyone"), together=True),
    "a mesh of two dimensions": Mistake("group", _two_dimensions, together=True),
    "unknown exchange": Mistake("exchange", _set("exchange", "teleport")),
    "unknown kernel": Mistake("kernel", _set("kernel", "magic")),
    "bucket of 0": Mistake("bucket", _set("bucket", 0)),
    "negative bucket": Mistake("bucket", _set("bucket", -3)),
    "bucket that is no number": Mistake("bucket", _set("bucket", "all")),
    "bucket that is a flag": Mistake("bucket", _set("bucket", True)),
    "scale that is NaN": Mistake("scale", _set("scale", math.nan)),
    "infinite scale": Mistake("scale", _set("scale", -math.inf)),
    "scale that is no number": Mistake("scale", _set("scale", "large")),
    "return_lse that is no flag": Mistake("return_lse", _set("return_lse", "yes")),
    "return_lse that equals that of the call before, but is no flag": Mistake(
        "return_lse", _change("return_lse", int), everyone=_called_before
    ),
    "bucket that equals that of the call before, but is no integer": Mistake(
        "bucket", _change("bucket", float), possible=lambda case: case.bucket is not None, everyone=_called_before
    ),
    "scale that equals that of the call before, but is a flag": Mistake(
        "scale", _change("scale", bool), possible=lambda case: case.scale in (0.0, 1.0), everyone=_called_before
    ),
    "name that is no string": Mistake("name", _set("name", 3)),
    "lse of a fused kernel that is to have gradients": Mistake("kernel 'flash'", _fused_with_lse, traced=True),
    "another name than the others": Mistake("'another one'", _set("name", "another one"), alone=False),
    "another name than the others, not of ASCII": Mistake("'größte ∞'", _set("name", "größte ∞"), alone=False),
    "another exchange than the others": Mistake("exchange", _other_exchange, alone=False),
    "another bucket than the others": Mistake("bucket", _other_bucket, alone=False),
    "another layout than the others": Mistake(
        "layout", shuffled_layout, alone=False, possible=lambda case: case.tokens > 1
    ),
    "a layout that differs from the others' at its end": Mistake(
        "layout", late_difference, alone=False, possible=lambda case: case.tokens > 1
    ),
    "a listing that differs from the others' at its end": Mistake(
        "layout", late_difference, alone=False, possible=lambda case: case.tokens > 1, everyone=shuffled_layout
    ),
    "runs that differ from the others' at their end": Mistake(
        "layout", late_difference, alone=False, possible=lambda case: case.tokens > 1, everyone=second_half_first
    ),
    "a layout that differs from the others' in their cuts": Mistake(
        "layout",
        other_cuts_elsewhere,
        alone=False,
        possible=lambda case: len(case.ranks) > 2 and max(layout_of(case).counts) < case.tokens,
    ),
    "a layout with a token more on another rank": Mistake(
        "layout", longer_elsewhere, alone=False, everyone=without_documents
    ),
    "another scale than the others": Mistake(
        "scale", _change("scale", lambda x: 3.0 if x is None else x + 1), alone=False
    ),
    "a scale of 0, unlike the others, who have none": Mistake(
        "scale", _set("scale", 0.0), alone=False, everyone=_set("scale", None)
    ),
    "another kernel than the others": Mistake(
        "kernel", _change("kernel", lambda x: "math" if x != "math" else "auto"), alone=False
    ),
    "another return_lse than the others": Mistake("return_lse", _change("return_lse", lambda x: not x), alone=False),
    "requires gradients, unlike the others": Mistake("requires_grad", _change("q", differentiable), alone=False),
    "k alone requires gradients, unlike the others": Mistake(
        "requires_grad", _change("k", differentiable), alone=False
    ),
    "v alone requires gradients, unlike the others": Mistake(
        "requires_grad", _change("v", differentiable), alone=False
    ),
    "requires no gradients, unlike the others": Mistake(
        "requires_grad", _require_none, alone=False, everyone=_require_gradients
    ),
    "no_grad, unlike the others": Mistake(
        "requires_grad", _nothing, alone=False, everyone=_require_gradients, call=_without_grad
    ),
    "another dtype than the others": Mistake("dtype", _all_in(torch.float64), alone=False),
    "another pattern than the others": Mistake("pattern", other_pattern, alone=False),
    "another window than the others": Mistake("pattern", other_window, alone=False),
    "documents of a token too many": Mistake("documents", over(lambda lengths: (lengths[0] + 1, *lengths[1:]))),
    "documents without the last": Mistake("documents", over(without_the_last)),
    "documents in another order than the others'": Mistake(
        "documents", over(lambda lengths: lengths[::-1]), alone=False, everyone=some_documents
    ),
    "documents of which one has a token of another, unlike the others'": Mistake(
        "documents", over(one_moved), alone=False, everyone=some_documents
    ),
    "no documents, unlike the others": Mistake("documents", without_documents, alone=False, everyone=some_documents),
    "one document, unlike the others, who have none": Mistake(
        "documents", over(lambda lengths: lengths), alone=False, everyone=without_documents
    ),
    "an empty document more than the others": Mistake(
        "documents", over(lambda lengths: (*lengths, 0)), alone=False, everyone=some_documents
    ),
    "another batch size than the others": Mistake("batch", _more(0), alone=False),
    "another head dim than the others": Mistake("head dim", _more(3), alone=False),
    "other heads than the others": Mistake("heads", _more(2), alone=False),
    "other key/value heads than the others": Mistake(
        "key/value heads", _more_key_value_heads, alone=False, possible=lambda case: case.kv_heads < case.heads
    ),
    "other query heads than the others": Mistake("heads", _more_query_heads, alone=False),
    "a gradient of a gradient": Mistake("double backward", _nothing, together=True, call=_differentiate_twice),
}
MISTAKES |= {
    f"{name} changed in place before the backward": Mistake(
        "inplace operation", _nothing, together=True, call=_change_in_place(name), error="RuntimeError"
    )
    for name in ("q", "k", "v", "out", "lse")
}
MISTAKES |= {
    name: Mistake(wrong.argument, wrong.spoil, together=wrong.together, everyone=wrong.everyone)
    for name, wrong in WRONG_TYPES.items()
}


def applicable(case: Case) -> tuple[str, ...]:
    """The mistakes that can be made with a Case. A rank alone cannot differ from others."""
    others = len(case.ranks) > 1
    return tuple(name for name, mistake in MISTAKES.items() if (mistake.alone or others) and mistake.possible(case))


def call(
    transport: Transport, case: Case, mistake: str, culprit: int | None, compiled: bool = False
) -> tuple[str, str] | None:
    """Call ring_attention, wrongly on the rank at index `culprit`, or on every rank (None). The error as (type,
    message); None if there was none. compiled: by the operator that a compiled graph calls, where there is a group that
    a graph can name, and the mistake is one of those that graphs can make.
    """
    q, k, v, *_ = shards(case, transport.rank, whole_tensors(case))
    arguments: Arguments = {
        "q": q, "k": k, "v": v, "pattern": case.pattern, "layout": layout_of(case), "exchange": case.exchange,
        "bucket": case.bucket, "kernel": case.kernel, "scale": case.scale, "return_lse": case.lse != "unused",
        "group": transport,
    }  # fmt: skip
    made = MISTAKES[mistake]
    made.everyone(arguments, case)
    wrong = culprit is None or transport.rank == culprit
    if wrong:
        made.spoil(arguments, case)
    attention: Attention = ring_attention
    if compiled and made.in_graphs and not isinstance(bare(transport), Transport):
        attention = partial(traced, check=True)
        arguments = {"name": None} | arguments | {"group": bare(transport)}
    try:
        if wrong:
            made.call(arguments, attention)
        else:
            attention(**arguments)
    except Exception as error:  # of any type: the law checks which it is
        return type(error).__name__, str(error)
    return None
