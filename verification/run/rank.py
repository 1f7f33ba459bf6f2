"""The work of one rank on a Case: rebuild the tensors, take the shard, run forward and backward, return an Observation.

Tasks are functions of (transport, case, ...) for a `verification.run.backends.Backend`. They use the public interface
of `ring`, its recording transport, buffer meter and default bucket, nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from reference.head_groups import KEPT
from reference.pattern import Pattern
from ring import Layout, Transport, ring_attention
from ring.comm.buffer_meter import measure
from ring.comm.transport import one_sided
from ring.default_bucket import default_bucket
from ring.torch_compile import traced
from verification.case import Case
from verification.run import second_run
from verification.run.equivalent_arguments import rewritten
from verification.run.group_argument import Group, bare_or_mesh
from verification.run.layouts import key_layout_of, layout_of, strided_copy
from verification.run.memory_meter import Meter, Workspace
from verification.run.observation import LONGER, Floats, LayoutAnswers, Observation, to_numpy
from verification.run.recording_transport import RecordingTransport

# Drawn strides may be those of heads first. A user's module that passes such tensors is warned.
warnings.filterwarnings("ignore", r"q, k and v must be \(batch", UserWarning, r"verification\.(run|check)\.")
Tensors = tuple[Tensor, ...]  # q, k, v, dout, dlse and, with sinks, these
Result = TypeVar("Result")


@dataclass(frozen=True)
class InputEdit:
    """A change to a Case's tensors, for laws: the same on every rank, and in the parent.

    change    replace q of the tokens `order`, and k and v of the tokens `positions`, by other numbers
    rows      leave the tokens `positions` of a sequence of `number` tokens; dout and dlse are 0 for those at `order`
    poison    put NaN (`number` even) or inf into the tensor `name` at the token `positions[0]`, head 0, dimension 0
    permute   reorder the batch by `order`, the query heads by `head_order`, the key/value heads by `kv_order`
    hide      in dimension 0, set the keys at tokens `positions`, heads `kv_order`, to -inf, all other keys to 0, and
              the queries to `number`
    shift     add `number` to v, so that the outputs stay away from 0
    equal     give every token the v of the first one; if `number` is not 0, its k too
    alone     leave entry `order[0]` of a batch of `number`
    """

    kind: str
    number: int = 0
    positions: tuple[int, ...] = ()
    name: str = "v"
    order: tuple[int, ...] = ()
    head_order: tuple[int, ...] = ()
    kv_order: tuple[int, ...] = ()

    def apply(self, tensors: Tensors) -> Tensors:
        """Return new tensors for the whole sequence, as `Case.tensors`."""
        q, k, v, dout, dlse, *sinks = tensors
        if self.kind == "change":
            q, k, v = q.clone(), k.clone(), v.clone()
            for x, tokens in ((q, self.order), (k, self.positions), (v, self.positions)):
                x[:, tokens] = -x[:, tokens].flip(1)  # so that no token keeps its old numbers
        elif self.kind == "rows":
            q, k, v, dout = (x[:, self.positions] for x in (q, k, v, dout))
            dlse = dlse[:, :, self.positions]
            dout[:, self.order], dlse[:, :, self.order] = 0.0, 0.0
        elif self.kind == "poison":
            q, k, v = q.clone(), k.clone(), v.clone()
            target = {"q": q, "k": k, "v": v}[self.name]
            target[0, self.positions[0], 0, 0] = float("inf") if self.number % 2 else float("nan")
        elif self.kind == "permute":
            batch, heads, kv_heads = list(self.order), list(self.head_order), list(self.kv_order)
            q, dout = q[batch][:, :, heads], dout[batch][:, :, heads]
            k, v = k[batch][:, :, kv_heads], v[batch][:, :, kv_heads]
            dlse, sinks = dlse[batch][:, heads], [x[heads] for x in sinks]
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
        elif self.kind == "alone":
            q, k, v, dout, dlse = (x[list(self.order)] for x in (q, k, v, dout, dlse))
        else:
            raise ValueError(
                f"kind is {self.kind!r}; it must be one of change, rows, poison, permute, hide, shift, equal, alone"
            )
        return q, k, v, dout, dlse, *sinks


def whole_tensors(case: Case, edit: InputEdit | None = None) -> Tensors:
    """Return the tensors of the whole sequence, edited."""
    if edit is None:
        return case.tensors()
    if edit.kind == "rows":
        case = replace(case, tokens=edit.number, pattern=Pattern.dense(), cuts=None)
    if edit.kind == "alone":
        case = replace(case, batch=edit.number)
    return edit.apply(case.tensors())


def rank_device() -> torch.device:
    """Device of this rank's tensors: its GPU under NCCL, otherwise the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shards(case: Case, index: int, tensors: Tensors) -> Tensors:
    """Return the shards of the rank at that index of the group, and the sinks, of which each rank has all; not
    contiguous if the Case is strided."""
    layout, keys = layout_of(case), key_layout_of(case)
    device = torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")
    layouts = layout, keys, keys, layout, layout, layout  # of q, k, v, dout, dlse; sinks have none
    own = tuple(
        (on.shard(x, index, dim=_TOKENS[x.dim()]) if x.dim() > 1 else x).to(device)
        for x, on in zip(tensors, layouts, strict=False)
    )
    if not case.strided:
        return own
    other = 2 if case.seed % 2 else -1
    return tuple(
        strided_copy(x[..., :1], other).expand_as(x) if _is_flat(case, x) else strided_copy(x, other) for x in own
    )


_TOKENS = {3: 2, 4: 1}  # dimension of the tokens


def _is_flat(case: Case, x: Tensor) -> bool:
    """True if all components of each vector are equal; an InputEdit may have made them differ."""
    return case.values == "flat" and x.dim() == 4 and torch.equal(x, x[..., :1].expand_as(x))


@dataclass(frozen=True)
class CallResult:
    """One forward and backward on one rank. None stands for what was not requested, run, recorded or measured."""

    results: tuple[Tensor | None, ...]  # out, lse, dq, dk, dv, dsinks
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
    """The messages and memory of one forward, or of one backward."""

    sent: tuple[Any, ...] | None = None
    received: tuple[Any, ...] | None = None
    buffer: int | None = None
    workspace: Workspace | None = None


_WITH_OTHER_INPUTS = ("no_grad", "backward", "between", "pipelined")  # runs that also call with other numbers


def run_attention(
    transport: Transport, case: Case, inputs: Tensors, variant: str = "alike", meter: Meter | None = None,
    record: Callable[[Transport], RecordingTransport] = RecordingTransport,
) -> CallResult:  # fmt: skip
    """Run ring_attention forward and backward on this rank's tensors.

    variant: the kind of run, as a Case's `again`. record: makes the transport that records the messages."""
    group: Group = bare_or_mesh(transport, case) if variant == "group" else record(transport)
    incoming, others = inputs[3:5], negated(inputs) if variant in _WITH_OTHER_INPUTS else ()
    forward = partial(RankCall.forward, variant=variant, loss=case.loss_of(transport.rank))
    call, forward_costs = _metered(lambda: forward(group, case, inputs), group, meter)
    if variant == "no_grad":
        forward(transport, case, others)  # must not overwrite the results of the first call
        if case.exchange in KEPT:  # without gradients nothing is kept, so that buffers are others
            forward_costs = replace(forward_costs, buffer=None)
        return _call_result((call.out, call.lse, None, None, None, None), forward_costs, _Direction())
    if variant == "backward":
        call.backward(others[3:5], retain=True)
    if variant == "between":
        run_attention(transport, case, others)
    later = forward(transport, case, others) if variant == "pipelined" else None
    grads, backward_costs = _metered(lambda: call.backward(incoming), group, meter)
    if later is not None:
        later.backward(others[3:5])
    if variant == "between":  # once more: a later call must not overwrite earlier results
        run_attention(transport, case, others)
    return _call_result((call.out, call.lse, *map(grads.get, LEAVES)), forward_costs, backward_costs)


LEAVES = ("q", "k", "v", "sinks")


@dataclass(frozen=True)
class RankCall:
    """One call of ring_attention: its results, and the leaves of its graph by name. loss: as `Case.loss_of`."""

    case: Case
    variant: str
    loss: str
    out: Tensor
    lse: Tensor | None
    leaves: dict[str, Tensor]

    @classmethod
    def forward(
        cls, group: Group, case: Case, inputs: Tensors, variant: str = "alike", name: str | None = None,
        loss: str | None = None,
    ) -> RankCall:  # fmt: skip
        """Call it on this rank's shards. inputs: as of `shards`; loss: None for the Case's own."""
        qkv, differentiated = _in_one_storage(case, inputs[:3]) if variant == "shared" else inputs[:3], "qkv"
        to_sinks = not (set(variant) <= set(differentiated) and case.seed // 2 % 2)
        if set(variant) <= set(differentiated):
            differentiated = variant
        elif _casts(variant, case):
            qkv, differentiated = _to_be_cast(case, inputs[:3])
        q, k, v = (x.detach().requires_grad_(name in differentiated) for name, x in zip("qkv", qkv, strict=True))
        sinks = inputs[5].detach().requires_grad_(to_sinks) if case.sinks else None
        usual = variant != "written"
        keys = None if case.keys is None else key_layout_of(case)
        pattern, layout, scale = case.pattern, layout_of(case), case.scale
        chunk: dict[str, Any] = {} if case.same_bits is None else {"same_bits": case.same_bits}
        if not usual:  # also the keys' layout, where it is the queries'
            pattern, layout, keys, scale = rewritten(case)
        attention: Callable[..., Any] = ring_attention
        if variant == "group" and _by_operators(case, group):
            attention = traced
        with torch.set_grad_enabled(variant != "no_grad"), _run_context(variant, case):
            result = attention(
                q, k, v, pattern, layout, key_layout=keys, group=group, exchange=case.exchange, bucket=case.bucket,
                kernel=case.kernel, scale=scale, softcap=case.softcap, sinks=sinks, return_lse=case.lse != "unused",
                check=variant != "unchecked", name=name, **chunk,
            )  # fmt: skip
        out, lse = result if isinstance(result, tuple) else (result, None)
        leaves = {
            name: x for name, x in zip(LEAVES, (q, k, v, sinks), strict=True) if x is not None and x.requires_grad
        }
        return cls(case, variant, loss or case.lse, out, lse, leaves)

    def backward(self, incoming: Tensors, retain: bool = False) -> dict[str, Tensor]:
        """Return the gradients by the names of the leaves. incoming: dout, dlse."""
        outputs, grad_outputs = self._losses(incoming)
        graph = self.variant == "graph"
        if graph and self.loss != "neither":  # the gradient of "neither" does not reach the call
            grad_outputs = [x.detach().requires_grad_() for x in grad_outputs]
        with _run_context(self.variant, self.case):
            grads = torch.autograd.grad(
                outputs, list(self.leaves.values()), grad_outputs, retain_graph=retain or graph, create_graph=graph
            )
            if graph:
                sources = [*self.leaves.values(), *(x for x in grad_outputs if x.requires_grad)]
                second_run.must_not_be_differentiated(grads[0], sources)
        # Under autocast, gradients have the Case's precision in the wider type of the leaves: this cast is exact.
        named = zip(self.leaves, grads, strict=True)
        return {name: x if name == "sinks" else x.to(self.case.torch_dtype) for name, x in named}

    def _losses(self, incoming: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs to differentiate, and their incoming gradients."""
        if self.loss == "neither":
            return [second_run.without_gradient(self.out)], [incoming[0]]
        if self.lse is None or self.loss in ("unused", "returned"):
            return [self.out], [incoming[0]]
        return ([self.lse], [incoming[1]]) if self.loss == "alone" else ([self.out, self.lse], list(incoming))


def _by_operators(case: Case, group: Group) -> bool:
    """True if the call is made by the operators of a compiled graph, which find a group by its name."""
    return case.seed // 2 % 2 == 1 and not isinstance(group, Transport)


def _casts(variant: str, case: Case) -> bool:
    """True if the call runs under an autocast that casts its inputs."""
    return case.torch_dtype.itemsize == 2 and (variant == "autocast" or (variant == "graph" and case.seed % 2 == 1))


def _to_be_cast(case: Case, qkv: Tensors) -> tuple[Tensors, str]:
    """Return q, k, v in fp32 (odd seeds: only k, v), and the names of those that are to have gradients.

    The q of odd seeds is in the other 16-bit type if that loses nothing. It then gets no gradient, which would be
    rounded to that type.
    """
    first = case.seed % 2
    narrow, wide = qkv[:first], tuple(x.float() for x in qkv[first:])
    other = torch.float16 if case.torch_dtype == torch.bfloat16 else torch.bfloat16
    if narrow and all(torch.equal(x.to(other).to(x.dtype), x) for x in narrow):
        return (*(x.to(other) for x in narrow), *wide), "qkv"[first:]
    return (*narrow, *wide), "qkv"


@contextmanager
def _run_context(variant: str, case: Case) -> Iterator[None]:
    """Return the context of that kind of run. Enter it for one forward or backward only, not for other tensors."""
    with second_run.sums_in_fixed_order() if case.fixed_order else nullcontext(), _variant_context(variant, case):
        yield


def _variant_context(variant: str, case: Case) -> AbstractContextManager[None]:
    if variant == "autocast" or _casts(variant, case):
        dtype = case.torch_dtype if case.torch_dtype.itemsize == 2 else torch.bfloat16
        return torch.autocast(case.device, dtype, enabled=case.dtype != "float32")
    if variant == "dtype":
        return second_run.another_default_dtype(torch.float64 if case.dtype == "float32" else torch.bfloat16)
    return second_run.another_default_device() if variant == "meta" else nullcontext()


def _in_one_storage(case: Case, inputs: Tensors) -> Tensors:
    """Return q, k, v with k and v (odd seeds: all three) in one storage.

    Three seeds of four store them last to first, so that code that takes the first tensor for the keys is wrong."""
    shared = inputs if case.seed % 2 else inputs[1:]
    lay = second_run.in_one_storage
    views = lay(shared) if case.seed % 4 == 3 else lay(shared[::-1])[::-1]
    return (*inputs[: -len(shared)], *views)


def negated(inputs: Tensors) -> Tensors:
    """Return other numbers, which give other scores, results and gradients."""
    q, k, v, dout, dlse, *sinks = inputs
    return q, -k, -v, -dout, -dlse, *(x / 2 for x in sinks)


def _call_result(results: tuple[Tensor | None, ...], forward: _Direction, backward: _Direction) -> CallResult:
    return CallResult(
        results, forward.sent, forward.received, backward.sent, backward.received, forward.buffer, backward.buffer,
        forward.workspace, backward.workspace,
    )  # fmt: skip


def _metered(call: Callable[[], Result], group: Group, meter: Meter | None) -> tuple[Result, _Direction]:
    """Run a forward or backward; return its result, and its messages and memory."""
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
    """Task: run forward and backward, twice if `repeat`, and return the rank's Observation.

    record: makes the transport that records the messages of the first run."""
    inputs = shards(case, transport.rank, whole_tensors(case, edit))
    copies = [x.clone() for x in inputs]
    run = run_attention(transport, case, inputs, meter=Meter(*case.dims) if case.measured else None, record=record)
    again = run_attention(transport, case, inputs, case.second_run_of(transport.rank)) if repeat else run
    observation = observation_of(layout_answers(case, transport.rank), inputs, copies, run, again)
    return replace(observation, one_sided=one_sided(transport))


def layout_answers(case: Case, index: int) -> LayoutAnswers:
    """Return what the layout answers on the rank at that index of the group."""
    layout, tokens = layout_of(case), torch.arange(case.tokens)
    return LayoutAnswers(
        layout.positions(index).numpy(),
        layout.counts,
        layout.shard(tokens, index, dim=0).numpy(),
        layout.unshard(tokens.split(layout.counts), dim=0).numpy(),
        default_bucket(_uneven(), case.heads, case.kv_heads, case.torch_dtype, case.device),
    )


@cache
def _uneven() -> Layout:
    """Return a layout of two ranks: an empty shard, then one of LONGER tokens."""
    return Layout.from_cuts(range(LONGER), (0, 0, LONGER))


def observation_of(
    layout: LayoutAnswers, inputs: Tensors, copies: Sequence[Tensor], run: CallResult, again: CallResult
) -> Observation:
    """Return the Observation of a run and its repetition. copies: clones of the inputs, from before the run."""
    out, lse, dq, dk, dv, dsinks = run.results
    assert out is not None
    assert run.sent_forward is not None and run.received_forward is not None and run.buffer_forward is not None
    assert run.sent_backward is not None and run.received_backward is not None and run.buffer_backward is not None
    return Observation(
        layout, to_numpy(out), _optional(lse), _optional(dq), _optional(dk), _optional(dv),
        dtypes=tuple(str((out if x is None else x).dtype).removeprefix("torch.") for x in run.results),
        sent_forward=run.sent_forward, received_forward=run.received_forward,
        sent_backward=run.sent_backward, received_backward=run.received_backward,
        buffer_forward=run.buffer_forward, buffer_backward=run.buffer_backward, repeat_equal=repeats(run, again),
        inputs_unchanged=all(same_bits(x, y) for x, y in zip(inputs, copies, strict=True)),
        workspace_forward=run.workspace_forward, workspace_backward=run.workspace_backward, dsinks=_optional(dsinks),
    )  # fmt: skip


def _optional(x: Tensor | None) -> Floats | None:
    return None if x is None else to_numpy(x)


_LOGS = ("sent_forward", "received_forward", "sent_backward", "received_backward", "buffer_forward", "buffer_backward")


def repeats(run: CallResult, again: CallResult) -> bool:
    """True if the second run has the same results bit for bit, the same messages and the same buffers."""
    for x, y in zip(run.results, again.results, strict=True):
        if y is not None and (x is None or not same_bits(x, y)):
            return False
    return all(getattr(again, log) in (None, getattr(run, log)) for log in _LOGS)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """True if equal bit for bit: NaN equals itself, and 0 does not equal -0."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.contiguous().view(integers), y.contiguous().view(integers))
