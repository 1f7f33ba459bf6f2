"""Wrong calls of ring_attention that concern several ranks: arguments that differ between them, and wrong groups.

Calls with one wrong argument are in `tests/ring/nn/test_refusals.py` and `tests/ring/test_attention_call.py`; a few are
repeated here, since the other ranks must raise as well. The names are saved with counter-examples: do not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring import Layout, Transport, ring_attention
from ring.torch_compile import traced
from verification.case import Case
from verification.run.group_argument import mesh_of_two_dimensions, user_group
from verification.run.layouts import key_layout_of, layout_of
from verification.run.rank import shards, whole_tensors

Arguments = dict[str, Any]  # of ring_attention, by name
Change = Callable[[Arguments, Case], Arguments]  # returns the arguments that change


@dataclass(frozen=True)
class Mistake:
    """One way to call ring_attention wrongly.

    argument   text that the error must contain
    spoil      changes the arguments on a rank that is called wrongly
    who        "one": one rank differs from the others. "any": wrong whatever the others do. "all": all ranks make it
    possible   True if the mistake can be made with a Case
    everyone   changes the arguments of all ranks first
    no_grad    True if the wrong rank calls under torch.no_grad
    traced     True if compiled graphs must refuse it as well; they always refuse differences between ranks
    """

    argument: str
    spoil: Change
    who: str = "one"
    possible: Callable[[Case], bool] = lambda case: True
    everyone: Change = lambda a, case: {}
    no_grad: bool = False
    traced: bool = False


# --- tensors ----------------------------------------------------------------------------------------------------------


def _twice(names: str, axis: int) -> Change:
    return lambda a, case: {name: torch.cat((a[name],) * 2, axis) for name in names}


def _twice_the_heads(a: Arguments, case: Case) -> Arguments:
    sinks = a["sinks"]
    return {"q": torch.cat((a["q"],) * 2, 2), "sinks": None if sinks is None else torch.cat((sinks, sinks))}


def _sinks(value: float) -> Change:
    return lambda a, case: {"sinks": a["q"].new_full((case.heads,), value)}


def _differentiable(names: str) -> Change:
    return lambda a, case: {name: a[name].detach().requires_grad_() for name in names}


def _longer(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(x.shape[0], 1, *x.shape[2:])), 1)


def _another_dtype(a: Arguments, case: Case) -> Arguments:
    return {name: a[name].to(torch.float16 if case.dtype == "float64" else torch.float64) for name in "qkv"}


def _all_heads(a: Arguments, case: Case) -> Arguments:
    return {name: a[name].repeat_interleave(case.heads // case.kv_heads, 2) for name in "kv"}


# --- patterns ---------------------------------------------------------------------------------------------------------


def _documents(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Change:
    return lambda a, case: {
        "pattern": replace(a["pattern"], documents=change(a["pattern"].documents or (case.tokens,)))
    }


def _asymmetric(a: Arguments, case: Case) -> Arguments:
    """Return the Case's documents if their reverse differs, else documents of 1, n - 1 and 0 tokens."""
    own = case.pattern.documents or ()
    return {"pattern": replace(case.pattern, documents=own if own != own[::-1] else (1, case.tokens - 1, 0))}


def _one_token_moved(documents: tuple[int, ...]) -> tuple[int, ...]:
    giver = next(i for i, length in enumerate(documents) if length)
    taker = (giver + 1) % len(documents)
    return tuple(length - (i == giver) + (i == taker) for i, length in enumerate(documents))


# --- layouts ----------------------------------------------------------------------------------------------------------


def _reordered(change: Callable[[Tensor], Tensor], name: str = "layout") -> Change:
    """Return a change of a layout that keeps the number of tokens on each rank."""

    def reordered(layout: Layout) -> Layout:
        return Layout.from_cuts(change(torch.cat([*map(layout.positions, range(layout.world_size))])), layout.cuts)

    return lambda a, case: {name: reordered(a[name])}


def _own_tokens_alone(a: Arguments, case: Case) -> Arguments:
    """Return the layout of a single rank; group=None if the group is all ranks."""
    return {
        "layout": Layout.contiguous(a["q"].shape[1], 1),
        "key_layout": Layout.contiguous(a["k"].shape[1], 1),
        "group": user_group(a["group"]),
    }


# --- the cases --------------------------------------------------------------------------------------------------------


def _no_empty_shard(case: Case) -> bool:
    return min(*layout_of(case).counts, *key_layout_of(case).counts) > 0


MISTAKES: dict[str, Mistake] = {
    # wrong groups
    "layout for one rank more": Mistake(
        "layout", lambda a, case: {"layout": Layout.contiguous(case.tokens, len(case.ranks) + 1)}, "any"),
    "layout of one rank": Mistake(
        "layout", _own_tokens_alone, "any", lambda case: len(case.ranks) > 1 and _no_empty_shard(case)),
    "something that is no group": Mistake("group", lambda a, case: {"group": "everyone"}, "all"),
    "a mesh of two dimensions": Mistake("group", lambda a, case: {"group": mesh_of_two_dimensions(case)}, "all"),
    # wrong on one rank: the others must raise as well
    "one token too many in q": Mistake("q", lambda a, case: {"q": _longer(a["q"])}, "any"),
    "one token too few in k and v": Mistake(
        "k", lambda a, case: {name: a[name][:, :-1] for name in "kv"}, "any", _no_empty_shard),
    "unknown exchange": Mistake("exchange", lambda a, case: {"exchange": "teleport"}, "any", traced=True),
    "documents of a token too many": Mistake(
        "documents", _documents(lambda lengths: (lengths[0] + 1, *lengths[1:])), "any"),
    # arguments that differ between ranks
    "another name than the others": Mistake("'another one'", lambda a, case: {"name": "another one"}),
    "another exchange than the others": Mistake(
        "exchange", lambda a, case: {"exchange": "gather" if case.exchange != "gather" else "ring"}),
    "another bucket than the others": Mistake(
        "bucket", lambda a, case: {"bucket": 1 if case.bucket is None else case.bucket + 1}),
    "another scale than the others": Mistake(
        "scale", lambda a, case: {"scale": 3.0 if case.scale is None else case.scale + 1}),
    "another softcap than the others": Mistake(
        "softcap", lambda a, case: {"softcap": 3.0 if case.softcap is None else case.softcap + 1}),
    "sinks, unlike the others": Mistake("sinks", _sinks(0.0), everyone=lambda a, case: {"sinks": None}),
    "other sinks than the others": Mistake(  # on GPUs they are not compared
        "sinks", _sinks(1.0), possible=lambda case: case.device == "cpu", everyone=_sinks(0.0)),
    "another kernel than the others": Mistake(
        "kernel", lambda a, case: {"kernel": "math" if case.kernel != "math" else "auto"}),
    "another return_lse than the others": Mistake("return_lse", lambda a, case: {"return_lse": not a["return_lse"]}),
    "requires gradients, unlike the others": Mistake("requires_grad", _differentiable("q")),
    "requires no gradients, unlike the others": Mistake(
        "requires_grad", lambda a, case: {name: a[name].detach() for name in "qkv"}, everyone=_differentiable("qkv")),
    "no_grad, unlike the others": Mistake(
        "requires_grad", lambda a, case: {}, everyone=_differentiable("qkv"), no_grad=True),
    "another dtype than the others": Mistake("dtype", _another_dtype),
    "another batch size than the others": Mistake("batch", _twice("qkv", 0)),
    "another head dim than the others": Mistake("head dim", _twice("qkv", 3)),
    "other query heads than the others": Mistake("heads", _twice_the_heads),
    "other key/value heads than the others": Mistake(
        "key/value heads", _all_heads, possible=lambda case: case.kv_heads < case.heads),
    "another pattern than the others": Mistake(
        "pattern", lambda a, case: {"pattern": replace(case.pattern, causal=not case.pattern.causal)}),
    "documents in another order than the others'": Mistake(
        "documents", _documents(lambda lengths: lengths[::-1]), everyone=_asymmetric),
    "documents of which one has a token of another, unlike the others'": Mistake(
        "documents", _documents(_one_token_moved), everyone=_asymmetric),
    "another layout than the others": Mistake(
        "layout", _reordered(lambda x: x.flip(0)), possible=lambda case: case.tokens > 1),
    "a layout that differs from the others' at its end": Mistake(
        "layout", _reordered(lambda x: torch.cat((x[:-2], x[-2:].flip(0)))), possible=lambda case: case.tokens > 1),
    "key_layout for one rank more": Mistake(
        "key_layout", lambda a, case: {"key_layout": Layout.contiguous(case.key_tokens, len(case.ranks) + 1)}, "any"),
    "another key_layout than the others": Mistake(
        "key_layout", _reordered(lambda x: x.flip(0), "key_layout"), possible=lambda case: case.key_tokens > 1),
}  # fmt: skip


def applicable(case: Case) -> tuple[str, ...]:
    """Return the mistakes that can be made with a Case. A single rank cannot differ from others."""
    others = len(case.ranks) > 1
    return tuple(
        name for name, mistake in MISTAKES.items() if (mistake.who != "one" or others) and mistake.possible(case)
    )


def call(
    transport: Transport, case: Case, mistake: str, culprit: int | None, compiled: bool = False
) -> tuple[str, str] | None:
    """Call ring_attention, wrongly on the rank at index `culprit`, or on all ranks (None). Return the error as (type,
    message), or None. compiled: call the operator of compiled graphs where it can express the group and the mistake.
    """
    q, k, v, _, _, *sinks = shards(case, transport.rank, whole_tensors(case))
    arguments: Arguments = {
        "q": q, "k": k, "v": v, "pattern": case.pattern, "layout": layout_of(case), "key_layout": key_layout_of(case),
        "exchange": case.exchange,
        "bucket": case.bucket, "kernel": case.kernel, "scale": case.scale, "return_lse": case.lse != "unused",
        "group": transport, "softcap": case.softcap, "sinks": sinks[0] if sinks else None,
    }  # fmt: skip
    definition = MISTAKES[mistake]
    arguments |= definition.everyone(arguments, case)
    wrong = culprit is None or transport.rank == culprit
    if wrong:
        arguments |= definition.spoil(arguments, case)
    attention: Callable[..., Any] = ring_attention
    if compiled and (definition.traced or definition.who == "one") and not isinstance(user_group(transport), Transport):
        attention = partial(traced, check=True)
        arguments = {"name": None} | arguments | {"group": user_group(transport)}
    try:
        with torch.set_grad_enabled(not (wrong and definition.no_grad)):
            attention(**arguments)
    except Exception as error:  # the law checks its type
        return type(error).__name__, str(error)
    return None
