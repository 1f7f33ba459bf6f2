"""`ring_attention`, the public function, under autograd. `ring.execute` runs it after consensus."""

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
from ring.consensus import agree, agree_backward
from ring.dispatcher_op import as_one_operator
from ring.execute import Execution, backward, execution_of, forward, select_transport
from ring.layout import Layout
from ring.settings import Settings
from ring.torch_compile import traced
from ring.validation import Call, wants_gradients, warn_of_heads_first

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NULL_CONTEXT = nullcontext()
# Evaluated at import, since torch 2.11 cannot compile `is_autocast_available`.
_HAVE_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    layout: Layout,
    *,
    key_layout: Layout | None = None,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
    exchange: str = "ring",
    bucket: int | None = None,
    kernel: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    same_bits: int | None = None,
    check: bool = True,
    name: str | None = None,
    **unknown: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Dilated attention over a sequence that is sharded across the ranks of a group. Every rank of the group calls it.

    Args:
        q: (batch, local tokens, query heads, head dim) in fp64, fp32, bf16 or fp16, any strides. Where q, k and v have
            as many heads as tokens, heads first are taken for tokens; strides of heads first give a warning.
            Under autocast q, k and v are cast to its dtype, as by torch's own attention, unless they are fp64.
        k: (batch, local tokens, key/value heads, head dim); query head h reads head h // (query / key/value heads).
        v: (batch, local tokens, key/value heads, value head dim), like k but for the head dim.
        pattern: the attention mask, by global position (LongNet, arXiv 2307.02486). For a packed sequence it has the
            lengths of the documents, which must add up to the layout's tokens; no document sees another.
        layout: the positions of each rank's local tokens, for as many ranks as the group has.
        key_layout: for cross-attention, the layout of k and v, whose sequence may have another length; None: `layout`.
            Both sequences begin at position 0, so with a causal pattern query i sees keys up to position i, unlike in
            kernels that align the ends. Segments, dilation, offsets and windows go by these positions too. Documents
            must add up to the tokens of both.
        group: a process group, a `DeviceMesh` of one dimension, a `Transport`, or None: the default group, or no group
            for a layout of one rank. Only one thread may call on a group. Errors in `group` are raised on their own
            rank, since ranks communicate through it; errors in other arguments are raised on every rank.
        exchange: "ring" (keys from neighbour to neighbour), "direct" (needed keys, from their owner), "direct-kept"
            (the same, kept for the backward: O(n) memory where all keys are needed), "gather" (all keys, O(n) memory),
            "all-to-all" (each rank computes some heads of the whole sequence), "all-to-all-kept" (the same; rows of its
            heads and their results are kept for the backward), or two: in
            "all-to-all:4+ring" 4 neighbours divide the heads of their rows, and keys go round rings of the ranks with
            the same heads; in "ring+all-to-all:4" rings are of neighbours. By "ring:8+direct" a key goes to each group
            of 8 neighbours once, such as the ranks of a host, and is passed round inside. Without a number, as
            "all-to-all+ring", the first exchange is among the ranks of a host and the second between hosts. Across
            hosts speed was never measured. "auto" takes the one that `ring.estimate.choose` predicts to be the fastest,
            by rates of the device type; all ranks must be on one host.
        bucket: maximum key/value tokens per receive buffer and kernel call; None: chosen by a memory budget.
        kernel: "auto", "math", "flash" or, on GPUs, "cudnn" and "fa4". "flash" and "cudnn" are torch's fused kernels,
            "fa4" is FlashAttention-4, if it is installed; tiles that they do not support use "math". "auto" takes the
            one that was measured to be the fastest (`ring.compute.gpu.kernel_times`). cuDNN's backward sums gradients
            in no fixed order, so "auto" uses others under `torch.use_deterministic_algorithms`. A score of -inf has no
            weight, but a softcap t makes it -t. Fused GPU kernels may return NaN for a row whose scores in a call are
            all -inf, and for gradients of keys that contain -inf: use "math" there.
        scale: factor of the scores; None: head dim ** -0.5.
        softcap: t from 1e-30 to 1e30, for scores t tanh(scale q . k / t) (Gemma 2, arXiv 2408.00118); None: no bound.
        sinks: (query heads,), in the dtype of q or of lse, on its device: for each head the score of one more key, of
            value 0, that every row sees (gpt-oss, arXiv 2508.10925). -inf: none for this head. Neither scale nor
            softcap apply to it. Its gradient is the sum over this rank's rows. All ranks pass the same numbers, less
            than +inf: with `check` they are compared, except on GPUs, where the host would have to wait for them.
        return_lse: also return lse, the log-sum-exp of each row's scores, (batch, query heads, local tokens), in fp32
            (fp64 for fp64). Gradients flow through it.
        same_bits: tokens of a chunk, a multiple of 16, on GPUs of 128. Then results and gradients of q, k, v have the
            same bits on any number of ranks, in any layout of whole chunks (`Layout.whole_chunks`), by any exchange and
            bucket, whatever else is in the batch: see ring/SAME_BITS.md. None: no such promise.
        check: compare the ranks' arguments and their positions in the sequence of calls before any tensor moves,
            forward and backward. Without it a wrong call, or a different order of calls on one rank, may cause a hang
            or wrong results.
        name: label of this call in errors, as "layer 3". The ranks compare it too: calls with equal arguments made in
            different orders can only be distinguished by it.

    Returns:
        The output, (batch, local tokens, query heads, value head dim) in q's dtype; with `return_lse` also lse. A row
        that no branch selects, or whose scores are all -inf, has output 0, lse -inf (or its sink) and zero gradients.
        (But where a key's component is infinite, the gradient of q is 0 times infinity: NaN.)

    Raises:
        ValueError, NotImplementedError: an argument is wrong on some rank, the ranks' arguments differ, or the ranks
            are in different calls or directions; the error names both. Every rank raises the same error, and the group
            remains usable. Double backward also raises NotImplementedError.
        RuntimeError: a rank, which the error names, did not come within the timeout, or its call was interrupted. The
            group is then unusable.
    """
    settings = Settings(exchange, bucket, kernel, scale, softcap, return_lse, same_bits, check, name)
    if torch.compiler.is_compiling() and not unknown:
        q, k, v = in_autocast_type(q, k, v)
        return traced(q, k, v, pattern, layout, key_layout=key_layout, group=group, sinks=sinks, **settings.named())
    warn_of_heads_first(q, k, v)
    transport = transport_over(group, layout.world_size if isinstance(layout, Layout) else 1)
    with _on_device_of(q), transport.calls.lock(), _outside_transforms():
        numbered = transport.calls.begin(name, transport.world_size)
        q, k, v = in_autocast_type(q, k, v)
        call = Call(
            q, k, v, pattern, layout, layout if key_layout is None else key_layout, sinks, settings,
            wants_gradients(q, k, v, sinks), sinks is not None and wants_gradients(sinks), (*unknown,),
        )  # fmt: skip
        setting = agree(call, numbered, transport)
        # Selecting symmetric memory is collective: only after consensus do all ranks have GPU tensors.
        if transport is not group:
            transport = select_transport(q, transport)
        execution = execution_of(call, setting, numbered, transport)
        out, lse = _RingAttention.apply(q, k, v, sinks, execution)
    return (out, lse) if return_lse else out


def attend_packed(
    packed: Pattern | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, layout: Layout,
    **settings: Any,
) -> torch.Tensor:  # fmt: skip
    """`ring_attention` with the documents of the pattern `packed` in place of those of `pattern`, unless it is None.
    With slices, `packed` replaces the whole pattern. settings: the other arguments, except return_lse.
    """
    if packed is not None and packed.has_slices and isinstance(pattern, Pattern):
        pattern = packed
    if packed is not None and torch.compiler.is_compiling():  # a graph cannot create patterns
        q, k, v = in_autocast_type(q, k, v)
        out = traced(q, k, v, pattern, layout, packed=packed.number, **settings)
    else:
        if packed is not None and isinstance(pattern, Pattern):
            pattern = _with_documents(pattern, packed.packed)
        out = ring_attention(q, k, v, pattern, layout, **settings)
    assert isinstance(out, torch.Tensor)
    return out


@lru_cache(maxsize=64)
def _with_documents(pattern: Pattern, documents: Documents | None) -> Pattern:
    """Replace a pattern's documents. Cached, so that all layers and calls share one object."""
    return replace(pattern, documents=documents)


def _on_device_of(q: object) -> AbstractContextManager[object]:
    """Make the device of q current: streams, kernels and symmetric memory depend on it."""
    return torch.cuda.device_of(q) if isinstance(q, torch.Tensor) and q.is_cuda else _NULL_CONTEXT


def _outside_transforms() -> AbstractContextManager[object]:
    """Suspend the transforms of `torch.func`, so that ranks can agree on refusing them: tensors made within have no
    memory to send.
    """
    return torch._C._DisableFuncTorch() if torch._C._are_functorch_transforms_active() else _NULL_CONTEXT


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """Disable autocast, so that sums keep the accumulator's dtype."""
    device = x.device.type
    on = device in _HAVE_AUTOCAST and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else _NULL_CONTEXT


def _backward_context(x: torch.Tensor) -> AbstractContextManager[object]:
    """Disable autocast and, under `create_graph=True`, gradients."""
    if not torch.is_grad_enabled():
        return _without_autocast(x)
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(_without_autocast(x))
    return stack


def in_autocast_type(q: Any, k: Any, v: Any) -> tuple[torch.Tensor, ...]:
    """Cast the tensors to autocast's dtype if it is enabled, as for torch's 16-bit operators: not from fp64."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return q, k, v  # `ring.validation` refuses them
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
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, execution: Execution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _without_autocast(q):
            out, lse, kept = as_one_operator(partial(forward, execution), q, k, v, sinks)
        ctx.execution = execution
        ctx.save_for_backward(q, k, v, sinks, out, lse, *kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        # Reading the saved tensors first makes checkpointing recompute now: its calls precede this backward.
        with ctx.execution.transport.calls.lock(), _backward_context(q), _outside_transforms():
            agree_backward(ctx.execution.numbered, ctx.execution.transport, ctx.execution.check, dout, dlse)
            dout_or_zeros = torch.zeros_like(out) if dout is None else dout
            differentiated = sinks if ctx.needs_input_grad[3] else None
            grads = backward(ctx.execution, q, k, v, out, lse, dout_or_zeros, dlse, differentiated, kept=kept)
        if torch.is_grad_enabled():  # create_graph=True: gradients may be used, but not differentiated
            sources = [x for x in (q, k, v, sinks, dout, dlse) if x is not None]
            grads = _NoDoubleBackward.apply(len(grads), *grads, *sources)
        return (*grads, None) if differentiated is not None else (*grads, None, None)


class _NoDoubleBackward(torch.autograd.Function):
    """Gradients that cannot be differentiated: raises before any message is posted, so that no rank hangs."""

    @staticmethod
    def forward(ctx: Any, count: int, *grads_and_sources: torch.Tensor) -> Any:
        return tuple(grad.clone() for grad in grads_and_sources[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "ring_attention: double backward is not supported; got a second derivative, only first ones are allowed"
        )
