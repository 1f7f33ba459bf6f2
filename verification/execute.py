"""What one rank does with a Case: rebuild the tensors, take its shard, run forward and backward, say what it
saw.

Tasks: functions of (transport, case, ...) for a `verification.backends.Backend`. They know the public face of
`ring`, its recording transport and its counter of buffers, nothing else; where the transport comes from is
the backend's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring import Transport, ring_attention
from ring.exchange import measure
from ring.transport import RecordingTransport
from verification.case import Case, strided_copy
from verification.checks import Observation, carry, dtype_name

Tensors = tuple[Tensor, ...]  # q, k, v, dout, dlse


@dataclass(frozen=True)
class Edit:
    """A change to a Case's tensors, for laws: the same on every rank, and in the parent.

    after     replace q, k, v of all tokens beyond position `number` by other numbers
    poison    put NaN (`number` even) or inf into the tensor `name` at the token `positions[0]`, head 0, dimension 0
    permute   `order` of the batch, and `head_order` of the query heads with `kv_order` of the key/value heads
    shift     add `number` to v, so that the outputs stay away from 0
    """

    kind: str
    number: int = 0
    positions: tuple[int, ...] = ()
    name: str = "v"
    order: tuple[int, ...] = ()
    head_order: tuple[int, ...] = ()
    kv_order: tuple[int, ...] = ()

    def apply(self, tensors: Tensors) -> Tensors:
        """New tensors for the whole sequence: q, dout (B, n, H, D), k, v (B, n, Hk, D), dlse (B, H, n)."""
        q, k, v, dout, dlse = tensors
        if self.kind == "after":
            q, k, v = (torch.cat((x[:, : self.number + 1], _others(x[:, self.number + 1 :])), 1) for x in (q, k, v))
        elif self.kind == "poison":
            q, k, v = q.clone(), k.clone(), v.clone()
            spoiled = {"q": q, "k": k, "v": v}[self.name]
            spoiled[0, self.positions[0], 0, 0] = float("inf") if self.number % 2 else float("nan")
        elif self.kind == "permute":
            batch, heads, kv_heads = list(self.order), list(self.head_order), list(self.kv_order)
            q, dout = q[batch][:, :, heads], dout[batch][:, :, heads]
            k, v = k[batch][:, :, kv_heads], v[batch][:, :, kv_heads]
            dlse = dlse[batch][:, heads]
        elif self.kind == "shift":
            v = v + self.number
        else:
            raise ValueError(f"kind is {self.kind!r}; it must be one of after, poison, permute, shift")
        return q, k, v, dout, dlse


def _others(x: Tensor) -> Tensor:
    """Other numbers of the same kind and size, none of them in its old place with its old sign."""
    return -x.flip(1)


def whole_tensors(case: Case, edit: Edit | None = None) -> Tensors:
    tensors = case.tensors()
    return tensors if edit is None else edit.apply(tensors)


def shards(case: Case, index: int, tensors: Tensors) -> Tensors:
    """The share of the rank at that index of the group; non-contiguous where the Case says so."""
    layout = case.layout()
    taken = tuple(layout.shard(x, index, dim=2 if x.dim() == 3 else 1) for x in tensors)
    if not case.strided:
        return taken
    return tuple(strided_copy(x, 2 if case.seed % 2 else -1) for x in taken)


@dataclass
class Pass:
    """One run forward and backward on one rank."""

    results: tuple[Tensor | None, ...]  # out, lse, dq, dk, dv
    sent_forward: tuple[Any, ...]
    received_forward: tuple[Any, ...]
    sent_backward: tuple[Any, ...]
    received_backward: tuple[Any, ...]
    buffer_forward: int
    buffer_backward: int


def attend(transport: Transport, case: Case, inputs: Tensors) -> Pass:
    """ring_attention forward and backward on this rank's share of q, k, v, dout, dlse."""
    *leaves, dout, dlse = inputs
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    recorder = RecordingTransport(transport)
    with measure() as forward:
        result = ring_attention(
            q, k, v, case.pattern, case.layout(), group=recorder, exchange=case.exchange, bucket=case.bucket,
            kernel=case.kernel, scale=case.scale, return_lse=case.lse != "unused",
        )  # fmt: skip
    out, lse = result if isinstance(result, tuple) else (result, None)
    sent, received = len(recorder.sent), len(recorder.received)
    with measure() as backward:
        if lse is not None and case.lse == "differentiated":
            gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        else:
            gradients = torch.autograd.grad(out, (q, k, v), dout)
    return Pass(
        (out, lse, *gradients),
        tuple(recorder.sent[:sent]),
        tuple(recorder.received[:received]),
        tuple(recorder.sent[sent:]),
        tuple(recorder.received[received:]),
        forward.bytes,
        backward.bytes,
    )


def observe(transport: Transport, case: Case, edit: Edit | None = None, repeat: bool = True) -> Observation:
    """Forward and backward, twice if `repeat`; what this rank saw, for `verification.checks`."""
    inputs = shards(case, transport.rank, whole_tensors(case, edit))
    kept = [x.clone() for x in inputs]
    run = attend(transport, case, inputs)
    again = attend(transport, case, inputs) if repeat else run
    return observation_of(inputs, kept, run, again)


def observation_of(inputs: Tensors, kept: Sequence[Tensor], run: Pass, again: Pass) -> Observation:
    """What a pass and its repetition showed; `kept` are copies of the inputs from before."""
    out, lse, dq, dk, dv = run.results
    assert out is not None and dq is not None and dk is not None and dv is not None
    return Observation(
        out=carry(out),
        lse=None if lse is None else carry(lse),
        dq=carry(dq),
        dk=carry(dk),
        dv=carry(dv),
        dtypes=tuple(dtype_name(out if x is None else x) for x in run.results),
        sent_forward=run.sent_forward,
        received_forward=run.received_forward,
        sent_backward=run.sent_backward,
        received_backward=run.received_backward,
        buffer_forward=run.buffer_forward,
        buffer_backward=run.buffer_backward,
        inputs_unchanged=all(same_bits(x, y) for x, y in zip(inputs, kept, strict=True)),
        repeat_equal=all(
            x is y or (x is not None and y is not None and same_bits(x, y))
            for x, y in zip(run.results, again.results, strict=True)
        ),
    )


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, and 0 does not equal -0."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.contiguous().view(integers), y.contiguous().view(integers))
