"""What a rank does with arguments left out, and with the documented values in their place: both must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reference import defaults
from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention
from ring.comm.buffer_memory import measure
from ring.comm.transport import RecordingTransport, SoloTransport, Transport
from verification.case import Case
from verification.run.layouts import layout_of
from verification.run.rank import Tensors, same_bits, shards

DIM, HEADS, TOKENS = 12, 3, 9  # of the modules that are compared
_SMALL = 0.01  # inputs of this size show which epsilon a norm has


def calls(transport: Transport, case: Case, left_out: Sequence[str], documented: defaults.Arguments) -> list[str]:
    """Task: `ring_attention` forward and backward without these arguments, and with the documented values in their
    place: in which of their results, messages and buffers the two differ.
    """
    given = {"exchange": case.exchange, "bucket": case.bucket, "kernel": case.kernel, "scale": case.scale}
    inputs = shards(case, transport.rank, case.tensors())
    without = _call(transport, case, inputs, {name: x for name, x in given.items() if name not in left_out})
    stated = _call(transport, case, inputs, given | {name: documented[name] for name in left_out})
    return [name for name in stated if not _same(without.get(name), stated[name])]


def _call(transport: Transport, case: Case, inputs: Tensors, arguments: defaults.Arguments) -> dict[str, Any]:
    """By name: all that can be seen of a call and its backward."""
    log = RecordingTransport(transport)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    with measure(log) as forward:
        out = ring_attention(q, k, v, case.pattern, layout_of(case), group=log, **arguments)
    if not isinstance(out, Tensor):
        return {"type of what is returned": type(out)}
    with measure(log) as backward:
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {
        "type of what is returned": type(out), "out": out, "dq": dq, "dk": dk, "dv": dv, "messages sent": log.sent,
        "messages received": log.received, "buffers": (forward.bytes, backward.bytes),
    }  # fmt: skip


def unlike_names(transport: Transport, case: Case) -> str:
    """Task: what a call without `check` says whose name is another one on every rank; "" if it goes through."""
    q, k, v = shards(case, transport.rank, case.tensors())[:3]
    try:
        ring_attention(q, k, v, case.pattern, layout_of(case), group=transport, name=f"layer {transport.rank}")
    except Exception as error:  # of any type: its name is part of what is said
        return f"{type(error).__name__}: {error}"
    return ""


def made(transport: Transport, case: Case) -> list[str]:
    """Task: what this rank makes without arguments that have defaults, and with their documented values: the names of
    those that differ.
    """
    return [name for name, without, stated in _pairs(transport, case) if not _same(without, stated)]


def _pairs(transport: Transport, case: Case) -> Iterator[tuple[str, Any, Any]]:
    """(name, what is made without the arguments, what is made with them)."""
    branch, lists = Branch(**defaults.BRANCH), ([4, 8], [1, 2])
    yield "Branch", Branch(), branch
    yield "Pattern", Pattern((branch,)), Pattern((branch,), **defaults.PATTERN)
    yield "Pattern.dense", Pattern.dense(), Pattern.dense(**defaults.DENSE)
    yield "Pattern.longnet", Pattern.longnet(*lists, HEADS), Pattern.longnet(*lists, HEADS, **defaults.LONGNET)
    grouped = Pattern.head_groups(*lists, HEADS), Pattern.head_groups(*lists, HEADS, **defaults.PATTERN)
    yield "Pattern.head_groups", *grouped
    layout, rows = layout_of(case), torch.arange(3 * case.tokens).reshape(1, case.tokens, 3)
    cut = layout.shard(rows, transport.rank, dim=1)
    yield "Layout.shard", layout.shard(rows, transport.rank), cut
    pieces = [layout.shard(rows, rank, dim=1) for rank in range(layout.world_size)]
    yield "Layout.unshard", layout.unshard(pieces), layout.unshard(pieces, dim=1)
    yield from _pairs_for_training(transport, layout)


def _pairs_for_training(transport: Transport, layout: Layout) -> Iterator[tuple[str, Any, Any]]:
    from ring import nn as training  # here, because few tasks need it

    context = training.ContextParallel(layout, transport)
    found = {name: getattr(context, name) for name in defaults.CONTEXT}
    yield "ContextParallel", found, defaults.CONTEXT
    lists, dense = ([4, 8], [1, 2]), Pattern.dense(causal=True)
    stated = Pattern.longnet(*lists, HEADS, **defaults.LONGNET_OF_TORCHSCALE)
    yield "longnet_pattern", training.longnet_pattern(*lists, HEADS), stated
    alone = training.ContextParallel(Layout.contiguous(TOKENS, 1), SoloTransport())
    kinds: dict[str, tuple[Callable[..., nn.Module], tuple[Any, ...], defaults.Arguments]] = {
        "SelfAttention": (training.SelfAttention, (DIM, HEADS, dense), defaults.self_attention(DIM, HEADS)),
        "LongNetBlock": (training.LongNetBlock, (DIM, HEADS, *lists), defaults.longnet_block(DIM, HEADS)),
    }
    for name, (kind, needed, arguments) in kinds.items():
        yield name, _module(kind(*needed), alone), _module(kind(*needed, **arguments), alone)
    tokens = torch.arange(TOKENS)[None]
    yield "next_tokens", training.next_tokens(tokens), training.next_tokens(tokens, ignored=defaults.IGNORED_LABEL)
    x, positions = _numbers((1, TOKENS, HEADS, 4)), torch.arange(TOKENS)
    yield "rotary", training.rotary(x, positions), training.rotary(x, positions, theta=defaults.ROTARY_THETA)


def _module(module: nn.Module, context: Any) -> dict[str, Any]:
    """Its parameters' shapes, and what it computes when these are filled with the same numbers whoever made them."""
    for parameter in module.parameters():
        parameter.data = _numbers(tuple(parameter.shape))
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    return {"shapes": shapes, "output": module(_SMALL * _numbers((1, TOKENS, DIM)), context).detach()}


def _numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _same(a: Any, b: Any) -> bool:
    """Tensors bit for bit, also where they stand in a dict."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b) if not a.is_floating_point() else same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(a == b)
