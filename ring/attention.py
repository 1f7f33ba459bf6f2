"""Ring dilated attention as users call it, under autograd. `ring.execute` runs it once the ranks have agreed."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Never

import torch
import torch.distributed as dist

from reference.documents import Documents
from reference.pattern import Pattern
from ring.comm.group import transport_over
from ring.comm.transport import Transport
from ring.compile_ops import traced
from ring.consensus import agree, agree_backward
from ring.custom_op import as_one_operator
from ring.execute import Execution, backward, forward, select_transport, execution_of
from ring.layout import Layout
from ring.validation import Call, wants_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NULL_CONTEXT = nullcontext()
# Asked here, since torch 2.11 cannot compile the question.
_HAVE_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    layout: Layout,
    *,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
    exchange: str = "ring",
    bucket: int | None = None,
    kernel: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
    check: bool = True,
    name: str | None = None,
    **unknown: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Dilated attention over a sequence that is sharded across the ranks of a group. Every rank of the group calls it.

    Args:
        q: (batch, local tokens, query heads, head dim) in fp64, fp32, bf16 or fp16, any strides. Under autocast q, k
            and v are taken in its type, as torch's own attention does, unless they are fp64.
        k, v: (batch, local tokens, key/value heads, head dim); query head h reads head h // (query / key/value heads).
        pattern: who sees whom, by global position (LongNet, arXiv 2307.02486). Of a sequence that is packed from
            documents it has their lengths, which must add up to the layout's tokens; none of them sees another.
        layout: which positions this rank's local tokens have; made for as many ranks as the group has.
        group: a process group, a `DeviceMesh` of one dimension, a `Transport`, or None: the default group, or no group
            at all for a layout of one rank. One thread calls on a group. Each rank checks `group` by itself, since the
            ranks find each other through it; errors in all other arguments are raised on every rank.
        exchange: "ring" (neighbour to neighbour), "direct" (from the owner, only what is needed) or "gather" (all,
            O(n)).
        bucket: the most key/value tokens in a receive buffer and in a kernel call; None: chosen by a memory budget.
        kernel: "auto", "math", "flash" or, on GPUs, "cudnn". "flash" and "cudnn" are torch's fused kernels; tiles that
            they cannot take go to "math". The backward of cuDNN sums gradients in any order, so with
            `torch.use_deterministic_algorithms` "auto" takes "flash" there, and for packed documents of several
            lengths in one call. A score of -inf has no weight; but on GPUs both fused kernels may make NaN of a row
            whose scores in a call are all -inf, and of gradients of keys that hold -inf: take "math" for these.
        scale: factor of the scores; None: head dim ** -0.5.
        return_lse: also return lse = log sum exp of a row's scores, (batch, query heads, local tokens), in fp32 (fp64
            for fp64). Gradients flow through it.
        check: whether the ranks compare, before any tensor moves, their arguments and in which call of the group they
            are, forward and backward. Without it a wrong call, or another order of calls on one rank, may leave the
            other ranks waiting or give wrong numbers.
        name: what errors call this call, as "layer 3". The ranks compare it too: only by it can calls that are alike in
            all else be told apart, where one rank makes them in another order.

    Returns:
        The output, with the shape and dtype of q; with `return_lse` also lse. A row that no branch selects, or whose
        scores are all -inf, has output 0, lse -inf and zero gradients. (Of a score of -inf the gradient in a component
        of q whose key is infinite is 0 times infinity: NaN.)

    Raises:
        ValueError, NotImplementedError: an argument is wrong on some rank, or the ranks' arguments differ. Every rank
            raises the same error, and the group can be used again. The same where ranks are in different calls, in
            forward or in backward: the error names both. A derivative of a gradient also raises NotImplementedError.
        RuntimeError: a rank did not come to the call within the group's timeout; the error names it. The group is then
            of no use any more.
    """
    q, k, v = in_autocast_type(q, k, v)
    if torch.compiler.is_compiling() and not unknown:
        return traced(
            q, k, v, pattern, layout, group=group, return_lse=return_lse, exchange=exchange, bucket=bucket,
            kernel=kernel, scale=scale, check=check, name=name,
        )  # fmt: skip
    transport = transport_over(group, layout.world_size if isinstance(layout, Layout) else 1)
    with _on_device_of(q), transport.calls.lock():
        numbered = transport.calls.begin(name)
        differentiated = wants_gradients(q, k, v)
        call = Call(q, k, v, pattern, layout, exchange, bucket, kernel, scale, return_lse, differentiated, (*unknown,))
        setting = agree(call, numbered, transport, check)
        # GPUs of one host meet in their memory, now that all ranks are known to have tensors there.
        execution = execution_of(
            call, setting, numbered, transport if transport is group else select_transport(q, transport), check
        )
        out, lse = _RingAttention.apply(q, k, v, execution)
    return (out, lse) if return_lse else out


def attend_packed(
    packed: Pattern | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, layout: Layout,
    **settings: Any,
) -> torch.Tensor:  # fmt: skip
    """`ring_attention` over the documents of the pattern `packed`, in place of those of `pattern`; None: over these.
    settings: its other arguments, without return_lse.
    """
    if packed is not None and torch.compiler.is_compiling():  # a graph makes no patterns
        q, k, v = in_autocast_type(q, k, v)
        out = traced(q, k, v, pattern, layout, packed=packed.number, return_lse=False, **settings)
    else:
        if packed is not None and isinstance(pattern, Pattern):
            pattern = _with_documents(pattern, packed.packed)
        out = ring_attention(q, k, v, pattern, layout, **settings)
    assert isinstance(out, torch.Tensor)
    return out


@lru_cache(maxsize=64)
def _with_documents(pattern: Pattern, documents: Documents | None) -> Pattern:
    """One object for all layers of a model, and for all calls of a layer."""
    return replace(pattern, documents=documents)


def _on_device_of(q: object) -> AbstractContextManager[object]:
    """Its device is the current one inside: streams, kernels and symmetric memory go by that."""
    return torch.cuda.device_of(q) if isinstance(q, torch.Tensor) and q.is_cuda else _NULL_CONTEXT


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """For all that is computed inside: sums keep the accumulator's type."""
    device = x.device.type
    on = device in _HAVE_AUTOCAST and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else _NULL_CONTEXT


def _backward_context(x: torch.Tensor) -> AbstractContextManager[object]:
    """For a backward: without autocast and, where it is itself differentiated, without gradients."""
    if not torch.is_grad_enabled():
        return _without_autocast(x)
    both = ExitStack()
    both.enter_context(torch.no_grad())
    both.enter_context(_without_autocast(x))
    return both


def in_autocast_type(q: Any, k: Any, v: Any) -> tuple[torch.Tensor, ...]:
    """Where autocast is on, the tensors in its type, as for operators that torch lists for 16 bits: fp64 stays."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return q, k, v  # for the agreement to refuse
    device = q.device.type
    if device not in _HAVE_AUTOCAST or not torch.is_autocast_enabled(device):
        return q, k, v
    kind = torch.get_autocast_dtype(device)
    return tuple(
        x.to(kind) if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device else x
        for x in (q, k, v)
    )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, execution: Execution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _without_autocast(q):
            out, lse = as_one_operator(partial(forward, execution), q, k, v)
        ctx.execution = execution
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # Whatever checkpointing computes again, it has computed when the tensors are there: its calls come before this.
        with ctx.execution.transport.calls.lock(), _backward_context(q):
            agree_backward(ctx.execution.numbered, ctx.execution.transport, ctx.execution.check)
            given = torch.zeros_like(out) if dout is None else dout
            grads = backward(ctx.execution, q, k, v, out, lse, given, dlse)
        if torch.is_grad_enabled():  # create_graph=True: the gradients may be used, not differentiated
            sources = [x for x in (q, k, v, dout, dlse) if x is not None]
            grads = _NoDoubleBackward.apply(*grads, *sources)
        return (*grads, None)


class _NoDoubleBackward(torch.autograd.Function):
    """Gradients that cannot be differentiated: the error says so, and no message is posted for which others wait."""

    @staticmethod
    def forward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *sources: torch.Tensor) -> Any:
        return dq.clone(), dk.clone(), dv.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "ring_attention: double backward is not supported; got a derivative of its gradient, allowed are first ones"
        )
