"""What one rank does with a Case: it rebuilds the tensors, takes its shard, runs forward and backward, and returns what
it saw.

Tasks are functions of (transport, case, ...) for a `verification.run.backends.Backend`. They know the public face of
`ring`, its recording transport and its counter of buffers, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ring import Layout, Transport, ring_attention
from ring.comm.buffer_meter import measure
from ring.comm.transport import RecordingTransport
from ring.default_bucket import default_bucket
from verification.case import Case
from verification.run import second_run
from verification.run.equivalent_arguments import rewritten
from verification.run.group_argument import Group, bare_or_mesh
from verification.run.layouts import layout_of, strided_copy
from verification.run.memory_meter import Meter, Workspace
from verification.run.observation import LONGER, Division, Observation, carry

Tensors = tuple[Tensor, ...]  # q, k, v, dout, dlse
Result = TypeVar("Result")


@dataclass(frozen=True)
class InputEdit:
    """A change to a Case's tensors, for laws: the same on every rank, and in the parent.

    after     replace q, k, v of all tokens beyond position `number` by other numbers
    poison    put NaN (`number` even) or inf into the tensor `name` at the token `positions[0]`, head 0, dimension 0
    permute   `order` of the batch, and `head_order` of the query heads with `kv_order` of the key/value heads
    hide      -inf in dimension 0 of the keys at the tokens `positions`, heads `kv_order`, 0 in that of all others, and
              `number` in that of the queries
    shift     add `number` to v, so that the outputs stay away from 0
    equal     v of every token is that of the first one; with `number` k, too
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
            after = self.number + 1  # none of the others in its old place with its old sign
            q, k, v = (torch.cat((x[:, :after], -x[:, after:].flip(1)), 1) for x in (q, k, v))
        elif self.kind == "poison":
            q, k, v = q.clone(), k.clone(), v.clone()
            spoiled = {"q": q, "k": k, "v": v}[self.name]
            spoiled[0, self.positions[0], 0, 0] = float("inf") if self.number % 2 else float("nan")
        elif self.kind == "permute":
            batch, heads, kv_heads = list(self.order), list(self.head_order), list(self.kv_order)
            q, dout = q[batch][:, :, heads], dout[batch][:, :, heads]
            k, v = k[batch][:, :, kv_heads], v[batch][:, :, kv_heads]
            dlse = dlse[batch][:, heads]
        elif self.kind == "hide":
            q, k = q.clone(), k.clone()
            q[..., 0], k[..., 0] = self.number, 0.0
            for head in self.kv_order:
                k[:, list(self.positions), head, 0] = -torch.inf
        elif self.kind == "shift":
            v = v + self.number
        elif self.kind == "equal":
            v = v[:, :1].expand_as(v).clone()
            k = k[:, :1].expand_as(k).clone() if self.number else k
        else:
            raise ValueError(f"kind is {self.kind!r}; it must be one of after, poison, permute, hide, shift, equal")
        return q, k, v, dout, dlse


def whole_tensors(case: Case, edit: InputEdit | None = None) -> Tensors:
    tensors = case.tensors()
    return tensors if edit is None else edit.apply(tensors)


def rank_device() -> torch.device:
    """Where this rank's tensors live: on its GPU if NCCL joins it to the others."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shards(case: Case, index: int, tensors: Tensors) -> Tensors:
    """The share of the rank at that index of the group; non-contiguous where the Case says so."""
    layout = layout_of(case)
    taken = tuple(layout.shard(x, index, dim=2 if x.dim() == 3 else 1).to(rank_device()) for x in tensors)
    if not case.strided:
        return taken
    other = 2 if case.seed % 2 else -1
    return tuple(
        strided_copy(x[..., :1], other).expand_as(x) if _is_flat(case, x) else strided_copy(x, other) for x in taken
    )


def _is_flat(case: Case, x: Tensor) -> bool:
    """Whether one component of each vector says them all; an edit may have made them differ."""
    return case.values == "flat" and x.dim() == 4 and torch.equal(x, x[..., :1].expand_as(x))


@dataclass(frozen=True)
class RunResult:
    """One run forward and backward on one rank. None: not asked for, not run, not recorded or not measured."""

    results: tuple[Tensor | None, ...]  # out, lse, dq, dk, dv
    sent_forward: tuple[Any, ...] | None
    received_forward: tuple[Any, ...] | None
    sent_backward: tuple[Any, ...] | None
    received_backward: tuple[Any, ...] | None
    buffer_forward: int | None
    buffer_backward: int | None
    workspace_forward: Workspace | None = None
    workspace_backward: Workspace | None = None


@dataclass(frozen=True)
class _Direction:
    """Forward or backward of a pass."""

    sent: tuple[Any, ...] | None = None
    received: tuple[Any, ...] | None = None
    buffer: int | None = None
    workspace: Workspace | None = None


_WITH_ANOTHER = ("no_grad", "backward", "between", "pipelined")  # runs that take other numbers as well


def attend(
    transport: Transport, case: Case, inputs: Tensors, how: str = "alike", meter: Meter | None = None,
    record: Callable[[Transport], RecordingTransport] = RecordingTransport,
) -> RunResult:  # fmt: skip
    """ring_attention forward and backward on this rank's share of q, k, v, dout, dlse, watched by the meter if there is
    one. how: as a Case's `again`. record: makes what keeps the record of messages."""
    group: Group = bare_or_mesh(transport, case) if how == "group" else record(transport)
    incoming, others = inputs[3:], _negated(inputs) if how in _WITH_ANOTHER else ()
    forward = partial(RankCall.forward, how=how, loss=case.loss_of(transport.rank))
    call, there = _watched(lambda: forward(group, case, inputs), group, meter)
    if how == "no_grad":
        forward(transport, case, others)  # what the earlier call gave must stay as it was
        return _pass((call.out, call.lse, None, None, None), there, _Direction())
    if how == "backward":
        call.backward(others[3:], retain=True)
    if how == "between":
        attend(transport, case, others)
    later = forward(transport, case, others) if how == "pipelined" else None
    found, back = _watched(lambda: call.backward(incoming), group, meter)
    if later is not None:
        later.backward(others[3:])
    if how == "between":  # and after it: what earlier calls gave must stay as it was
        attend(transport, case, others)
    return _pass((call.out, call.lse, *map(found.get, "qkv")), there, back)


@dataclass(frozen=True)
class RankCall:
    """One call of ring_attention: what it gave, and the leaves of its graph by their names. loss: what it takes, as
    `Case.loss_of`."""

    case: Case
    how: str
    loss: str
    out: Tensor
    lse: Tensor | None
    leaves: dict[str, Tensor]

    @classmethod
    def forward(
        cls, group: Group, case: Case, inputs: Tensors, how: str = "alike", name: str | None = None,
        loss: str | None = None,
    ) -> RankCall:  # fmt: skip
        """On this rank's share of q, k, v, which the inputs begin with. loss: None for what the Case has."""
        given, wanted = _together(case, inputs[:3]) if how == "shared" else inputs[:3], "qkv"
        if set(how) <= set(wanted):
            wanted = how
        elif _casts(how, case):
            given, wanted = _to_be_cast(case, inputs[:3])
        q, k, v = (x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", given, strict=True))
        pattern, layout, scale = rewritten(case) if how == "written" else (case.pattern, layout_of(case), case.scale)
        with torch.set_grad_enabled(how != "no_grad"), _circumstances(how, case):
            result = ring_attention(
                q, k, v, pattern, layout, group=group, exchange=case.exchange, bucket=case.bucket,
                kernel=case.kernel, scale=scale, return_lse=case.lse != "unused", check=how != "unchecked", name=name,
            )  # fmt: skip
        out, lse = result if isinstance(result, tuple) else (result, None)
        leaves = {name: x for name, x in zip("qkv", (q, k, v), strict=True) if name in wanted}
        return cls(case, how, loss or case.lse, out, lse, leaves)

    def backward(self, incoming: Tensors, retain: bool = False) -> dict[str, Tensor]:
        """The gradients by the names of the leaves; incoming: dout, dlse."""
        outputs, given = self._losses(incoming)
        again = self.how == "graph"
        if again and self.loss != "neither":  # whose gradient does not reach the call
            given = [x.detach().requires_grad_() for x in given]
        with _circumstances(self.how, self.case):
            found = torch.autograd.grad(
                outputs, list(self.leaves.values()), given, retain_graph=retain or again, create_graph=again
            )
            if again:
                sources = [*self.leaves.values(), *(x for x in given if x.requires_grad)]
                second_run.must_not_be_differentiated(found[0], sources)
        # Under autocast gradients are those of the case's type, in the type of what was given: nothing is lost here.
        return {name: x.to(self.case.torch_dtype) for name, x in zip(self.leaves, found, strict=True)}

    def _losses(self, incoming: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """What is differentiated, and the gradients of it."""
        if self.loss == "neither":
            return [second_run.without_gradient(self.out)], [incoming[0]]
        if self.lse is None or self.loss in ("unused", "returned"):
            return [self.out], [incoming[0]]
        return ([self.lse], [incoming[1]]) if self.loss == "alone" else ([self.out, self.lse], list(incoming))


def _casts(how: str, case: Case) -> bool:
    """Whether the call is under an autocast that casts what it is given."""
    return case.torch_dtype.itemsize == 2 and (how == "autocast" or (how == "graph" and case.seed % 2 == 1))


def _to_be_cast(case: Case, given: Tensors) -> tuple[Tensors, str]:
    """q, k, v in fp32, for every other seed only the last two; and those that are to have gradients.

    The others are in the other 16-bit type if that loses nothing. They get no gradient then, which would be rounded to
    that type.
    """
    first = case.seed % 2
    kept, wide = given[:first], tuple(x.float() for x in given[first:])
    other = torch.float16 if case.torch_dtype == torch.bfloat16 else torch.bfloat16
    if kept and all(torch.equal(x.to(other).to(x.dtype), x) for x in kept):
        return (*(x.to(other) for x in kept), *wide), "qkv"[first:]
    return (*kept, *wide), "qkv"


def _circumstances(how: str, case: Case) -> AbstractContextManager[None]:
    """Around nothing but a call's forward or backward: this program's own tensors are made as ever."""
    if how == "autocast" or _casts(how, case):
        dtype = case.torch_dtype if case.torch_dtype.itemsize == 2 else torch.bfloat16
        return torch.autocast(case.device, dtype, enabled=case.dtype != "float32")
    if how == "dtype":
        return second_run.another_default_dtype(torch.float64 if case.dtype == "float32" else torch.bfloat16)
    return second_run.another_default_device() if how == "meta" else nullcontext()


def _together(case: Case, inputs: Tensors) -> Tensors:
    """q, k and v; k and v in one storage or, for every other seed, all three. For three seeds of four the last comes
    first: who takes what lies first for the keys is then wrong."""
    shared = inputs if case.seed % 2 else inputs[1:]
    lay = second_run.in_one_storage
    found = lay(shared) if case.seed % 4 == 3 else lay(shared[::-1])[::-1]
    return (*inputs[: -len(shared)], *found)


def _negated(inputs: Tensors) -> Tensors:
    """Other numbers, with other scores, results and gradients."""
    q, k, v, dout, dlse = inputs
    return q, -k, -v, -dout, -dlse


def _pass(results: tuple[Tensor | None, ...], there: _Direction, back: _Direction) -> RunResult:
    return RunResult(
        results, there.sent, there.received, back.sent, back.received, there.buffer, back.buffer, there.workspace,
        back.workspace,
    )  # fmt: skip


def _watched(call: Callable[[], Result], group: Group, meter: Meter | None) -> tuple[Result, _Direction]:
    """What a leg gave, and what it took."""
    log = group if isinstance(group, RecordingTransport) else None
    sent, received = (len(log.sent), len(log.received)) if log else (0, 0)
    own = group if isinstance(group, Transport) else None
    with measure(own) as buffers, meter or nullcontext():
        result = call()
    workspace = meter.take() if meter else None
    if log is None:
        return result, _Direction(None, None, buffers.bytes, workspace)
    return result, _Direction(tuple(log.sent[sent:]), tuple(log.received[received:]), buffers.bytes, workspace)


def observe(
    transport: Transport, case: Case, edit: InputEdit | None = None, repeat: bool = True,
    record: Callable[[Transport], RecordingTransport] = RecordingTransport,
) -> Observation:  # fmt: skip
    """Forward and backward, twice if `repeat`; what this rank saw, for `verification.check.checks`. record: makes what
    keeps the record of the first run's messages.
    """
    inputs = shards(case, transport.rank, whole_tensors(case, edit))
    kept = [x.clone() for x in inputs]
    run = attend(transport, case, inputs, meter=Meter(case.head_dim) if case.measured else None, record=record)
    again = attend(transport, case, inputs, case.second_run_of(transport.rank)) if repeat else run
    return observation_of(division(case, transport.rank), inputs, kept, run, again)


def division(case: Case, index: int) -> Division:
    """What the layout says on the rank at that index of the group."""
    layout, everything = layout_of(case), torch.arange(case.tokens)
    return Division(
        layout.positions(index).numpy(),
        layout.counts,
        layout.shard(everything, index, dim=0).numpy(),
        layout.unshard(everything.split(layout.counts), dim=0).numpy(),
        default_bucket(_uneven(), case.heads, case.kv_heads, case.torch_dtype, case.device),
    )


@cache
def _uneven() -> Layout:
    """Of two ranks, the larger shard of LONGER tokens, behind one of none."""
    return Layout.from_cuts(range(LONGER), (0, 0, LONGER))


def observation_of(
    layout: Division, inputs: Tensors, kept: Sequence[Tensor], run: RunResult, again: RunResult
) -> Observation:
    """What a pass and its repetition showed; `kept` are copies of the inputs from before."""
    out, lse, dq, dk, dv = run.results
    assert out is not None and dq is not None and dk is not None and dv is not None
    assert run.sent_forward is not None and run.received_forward is not None and run.buffer_forward is not None
    assert run.sent_backward is not None and run.received_backward is not None and run.buffer_backward is not None
    return Observation(
        layout, carry(out), None if lse is None else carry(lse), carry(dq), carry(dk), carry(dv),
        dtypes=tuple(str((out if x is None else x).dtype).removeprefix("torch.") for x in run.results),
        sent_forward=run.sent_forward, received_forward=run.received_forward,
        sent_backward=run.sent_backward, received_backward=run.received_backward,
        buffer_forward=run.buffer_forward, buffer_backward=run.buffer_backward, repeat_equal=repeats(run, again),
        inputs_unchanged=all(same_bits(x, y) for x, y in zip(inputs, kept, strict=True)),
        workspace_forward=run.workspace_forward, workspace_backward=run.workspace_backward,
    )  # fmt: skip


_LOGS = ("sent_forward", "received_forward", "sent_backward", "received_backward", "buffer_forward", "buffer_backward")


def repeats(run: RunResult, again: RunResult) -> bool:
    """Whether all that the second run gave is the same, bit for bit, and so is what it sent and held."""
    for x, y in zip(run.results, again.results, strict=True):
        if y is not None and (x is None or not same_bits(x, y)):
            return False
    return all(getattr(again, log) in (None, getattr(run, log)) for log in _LOGS)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, and 0 does not equal -0."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.contiguous().view(integers), y.contiguous().view(integers))
