"""What the operators of compiled graphs do, without compiling one: the same as a call, and what they have promised.

`torch.compile` traces a graph with tensors that have no numbers: of each operator it believes the shapes, the types and
the strides that are promised for its results. Where they come otherwise, a compiled program fails, or is wrong.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from reference.pattern import Pattern
from ring import Layout, Transport, ring_attention
from ring.comm.transport import SoloTransport
from ring.compiled import traced
from verification.case import Case
from verification.run.given_group import bare_or_mesh
from verification.run.layouts import layout_of
from verification.run.rank import Tensors, same_bits, shards

Results = dict[str, Tensor]
_COPIES: tuple[Callable[[Any], Any], ...] = (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), copy.copy)


def unlike(transport: Transport, case: Case) -> list[str]:
    """Task: in what the operators differ from calls. A graph names its group: where ranks have none that has a name,
    the first computes the whole sequence by itself.
    """
    group, index = bare_or_mesh(transport, case), transport.rank
    if isinstance(group, Transport):
        if transport.rank:
            return []
        case, group, index = replace(case, world=1, group=None, cuts=None), SoloTransport(), 0
    inputs = shards(case, index, case.tensors())
    called = _run(ring_attention, case, case.pattern, group, inputs)
    made = _run(traced, case, case.pattern, group, inputs, copies=True)
    wrong = [name for name, x in called.items() if name not in made or not same_bits(x, made[name])]
    with _Watcher() as watcher:
        _run(ring_attention, case, case.pattern, group, inputs)
    if watcher.times != 1:
        wrong.append(f"who watches operators sees {watcher.times} of a call's forward, must see one")
    wrong += _broken(_promised(case, group, inputs), made)
    if not isinstance(group, SoloTransport):  # simulated ranks are threads, where torch 2.11 crashes as it traces
        wrong += _left_out(case, group, inputs)
    # Offsets for one head alone are refused, unless there is just one.
    alone = _of_one_head(case.pattern)
    refused = [_error(attention, case, alone, group, inputs) for attention in (ring_attention, traced)]
    return wrong if refused[0] == refused[1] else [*wrong, f"a call raises {refused[0]}, its operator {refused[1]}"]


def _left_out(case: Case, group: Any, inputs: Tensors) -> list[str]:
    """What a graph leaves out where nobody reads the results: nothing, since other ranks wait for this one."""

    def forward(*given: Tensor) -> Tensor:
        _call(traced, case, case.pattern, layout_of(case), group, given[:3])
        return given[0] + 1

    def backward(*given: Tensor) -> Tensor:
        _run(traced, case, case.pattern, group, given)
        return given[0] + 1

    wrong = []
    for unread, wanted in ((forward, ["attention_forward"]), (backward, ["attention_forward", "attention_backward"])):
        graph = make_fx(unread, tracing_mode="fake")(*inputs).graph
        graph.eliminate_dead_code()
        kept = [str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("ring.")]
        if kept != wanted:
            wrong.append(f"a graph in which nobody reads the results keeps {kept}, must keep {wanted}")
    return wrong


class _Watcher(TorchDispatchMode):
    """Counts the forwards of calls, as selective checkpointing finds what it is to save."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func is torch.ops.ring.attention.default
        return func(*args, **(kwargs or {}))


def _of_one_head(pattern: Pattern) -> Pattern:
    first = pattern.branches[0]
    offset = first.offset if isinstance(first.offset, tuple) else (first.offset,)
    return replace(pattern, branches=(replace(first, offset=offset[:1], heads=None),))


def _error(attention: Callable[..., Any], case: Case, pattern: Pattern, group: Any, inputs: Tensors) -> str:
    try:
        _run(attention, case, pattern, group, inputs)
    except Exception as error:  # of any type: both have to be the same
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _run(
    attention: Callable[..., Any], case: Case, pattern: Pattern, group: Any, inputs: Tensors, copies: bool = False
) -> Results:
    """copies: give copies of pattern and layout, equal ones, which nobody holds any more when the backward comes."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    layout = layout_of(case)
    if copies:
        way = _COPIES[case.seed % len(_COPIES)]
        pattern, layout = way(pattern), way(layout)
    result = _call(attention, case, pattern, layout, group, leaves)
    del pattern, layout
    out, *lse = result if isinstance(result, tuple) else (result,)
    outputs, given = ([out, *lse], list(inputs[3:])) if case.through_lse else ([out], [inputs[3]])
    gradients = torch.autograd.grad(outputs, leaves, given)
    found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {"out": out} | ({"lse": lse[0]} if lse else {}) | found


def _call(
    attention: Callable[..., Any], case: Case, pattern: Pattern, layout: Layout, group: Any, given: Sequence[Tensor]
) -> Any:
    return attention(
        *given, pattern, layout, group=group, exchange=case.exchange, bucket=case.bucket, kernel=case.kernel,
        scale=case.scale, return_lse=case.lse != "unused", check=True, name=None,
    )  # fmt: skip


def _promised(case: Case, group: Any, inputs: Tensors) -> Results:
    """What a graph is told that the operators return, of tensors without numbers."""
    return _run(traced, case, case.pattern, group, tuple(x.to("meta") for x in inputs))


def _broken(promised: Results, made: Results) -> list[str]:
    return [
        f"what was promised of {name}: {_kind(promised[name])}, and not {_kind(x)}"
        for name, x in made.items()
        if _kind(promised[name]) != _kind(x)
    ]


def _kind(x: Tensor) -> tuple[object, ...]:
    """Strides of dimensions of one entry, or of none at all, say nothing."""
    strides = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]
    return str(x.dtype), tuple(x.shape), tuple(strides)
