"""Validates the arguments of one call of `ring_attention` on one rank. `ring.consensus` compares them across ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reference.pattern import Pattern, check_pattern
from ring.comm.transport import Transport
from ring.compute.kernel_choice import make_kernel_setting
from ring.compute.kernels import FUSED, KERNELS
from ring.compute.kernels.kernel import Scores
from ring.layout import Layout
from ring.plan.exchange import parse
from ring.plan.head_shares import head_shares, shares_keys
from ring.plan.whole_chunks import STEP_ON_GPUS, cut_chunk
from ring.precision import accumulator_dtype
from ring.settings import Settings

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_REPLACEMENTS = {  # for arguments of other attention functions
    "attn_mask": "masks are patterns, as Pattern.dense(causal=True), one with documents=, or Pattern.slices([...])",
    "is_causal": "write Pattern.dense(causal=True)",
    "causal": "write Pattern.dense(causal=True)",
    "dropout_p": "dropout of attention is not supported, leave it out",
    "window_size": "write Pattern.dense(window=w), for (w, 0) with causal=True",
    "window": "write Pattern.dense(causal=True, window=w)",
    "documents": "write Pattern.dense(causal=True, documents=lengths)",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "s_aux": "write sinks=s_aux",
}


NO_TRANSFORMS = (
    "ring_attention does not work within torch.func's vmap, grad, vjp, jvp and jacrev, nor with is_grads_batched: "
    "write a larger batch in place of vmap, and torch.autograd.grad in place of the others"
)


@dataclass(eq=False)
class Call:
    """The arguments of one call of `ring_attention` on one rank, not yet validated."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pattern: Pattern
    layout: Layout
    key_layout: Layout  # of k and v
    sinks: torch.Tensor | None
    settings: Settings
    differentiated: bool  # see `wants_gradients`
    sinks_differentiated: bool
    unknown: tuple[str, ...] = ()  # names of unsupported arguments

    def key(self) -> tuple[object, ...]:
        """Key of a call's validity and plan."""
        gradients = self.differentiated, self.sinks_differentiated
        sinks = None if self.sinks is None else _kind(self.sinks)
        layouts = _identity(self.layout)
        if self.key_layout is not self.layout:
            layouts = layouts, _identity(self.key_layout)
        return _kind(self.q), _kind(self.k), _kind(self.v), sinks, self.pattern, layouts, self.settings.key, gradients

    @property
    def scoring(self) -> Scores:
        scale, softcap = self.settings.scale, self.settings.softcap
        scale = self.q.shape[3] ** -0.5 if scale is None else float(scale)
        return Scores(scale, None if softcap is None else float(softcap))


def _kind(x: object) -> tuple[object, ...]:
    return (type(x), x.shape, x.dtype, x.device, x.layout) if isinstance(x, torch.Tensor) else (type(x),)


def _identity(layout: object) -> object:
    """Return what tells a layout from others, without the order that it may list."""
    return layout.digest if isinstance(layout, Layout) else layout


def wants_gradients(*tensors: torch.Tensor | None) -> bool:
    """Return True if autograd records operations on these tensors. Inside an operator this cannot be seen."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def refuse_unknown(unknown: tuple[str, ...]) -> None:
    """Raise ValueError for the first unknown argument of `ring_attention`, and say what to write instead."""
    for name in unknown:
        instead = _REPLACEMENTS.get(name, "help(ring_attention) lists the arguments")
        raise ValueError(f"{name} is no argument of ring_attention: {instead}")


def refuse_transforms(*gradients: torch.Tensor | None) -> None:
    """Raise NotImplementedError within a transform of `torch.func`, or for gradients of one, which have no memory."""
    if torch._C._are_functorch_transforms_active() or any(
        x is not None and not torch._C._has_storage(x) for x in gradients
    ):
        raise NotImplementedError(NO_TRANSFORMS)


def warn_of_heads_first(q: object, k: object, v: object) -> None:
    """Warn where dimension 1 of all three may be the heads: they are as many as tokens, and lie side by side in memory,
    as in the transpose of a (batch, tokens, heads, head dim) tensor. No error: tokens may be stored so, too.
    """
    if _looks_heads_first(q) and _looks_heads_first(k) and _looks_heads_first(v):
        warnings.warn(
            "q, k and v must be (batch, local tokens, heads, head dim), got as many heads as tokens with strides "
            "of heads first: write q.transpose(1, 2) if so, else q.contiguous() avoids this warning",
            stacklevel=3,
        )


def _looks_heads_first(x: object) -> bool:
    if not isinstance(x, torch.Tensor) or x.dim() != 4:
        return False
    _, tokens, heads, dim = x.shape
    return tokens == heads > 1 and x.stride(1) == dim < x.stride(2)


def validate(call: Call, transport: Transport) -> None:
    """Raise ValueError or NotImplementedError that names the argument, its value and the allowed ones."""
    check_pattern(call.pattern)
    layouts = {"layout": call.layout, "key_layout": call.key_layout}
    for name, layout in layouts.items():
        if not isinstance(layout, Layout):
            raise ValueError(f"{name} must be a Layout, as Layout.zigzag(n, p), got {layout!r}")
    call.settings.validate()
    for name, layout in layouts.items():
        if layout.world_size != transport.world_size:
            raise ValueError(
                f"{name} must be for the {transport.world_size} ranks of the group, got one for {layout.world_size}"
            )
    parse(call.settings.exchange, transport.world_size)
    packed, tokens, key_tokens = call.pattern.packed, call.layout.n, call.key_layout.n
    if packed is not None and packed.tokens == tokens != key_tokens:
        raise ValueError(
            f"key_layout must have the {tokens} tokens of the pattern's documents, got {key_tokens}; without documents "
            "it may have any number"
        )
    call.pattern.validate_tokens(tokens, key_tokens)
    _validate_tensors(call, call.layout.counts[transport.rank], call.key_layout.counts[transport.rank])
    call.pattern.validate(call.q.shape[2])
    if call.sinks is not None:
        _validate_sinks(call.sinks, call.q)
    if call.settings.same_bits is not None:
        _validate_same_bits(call, call.settings.same_bits, transport.world_size)


def _validate_same_bits(call: Call, chunk: int, ranks: int) -> None:
    """Refuse what could change bits from one number of ranks to another (ring/SAME_BITS.md)."""
    settings, q = call.settings, call.q
    if q.is_cuda and chunk % STEP_ON_GPUS:
        raise ValueError(f"same_bits must be a multiple of {STEP_ON_GPUS} tokens on GPUs, got {chunk}")
    if settings.bucket is not None and settings.bucket < chunk:
        raise ValueError(f"bucket must be None or at least same_bits, {chunk} tokens, got {settings.bucket}")
    names = {kernel.name for kernel in KERNELS if kernel.fixed_bits and kernel.device in (None, q.device.type)}
    if settings.kernel not in ("auto", *names):
        raise NotImplementedError(
            f"kernel {settings.kernel!r} has no fixed bits on {q.device.type}, got same_bits={chunk}: use 'auto' or "
            f"{' or '.join(map(repr, sorted(names)))}"
        )
    degree, heads, kv_heads = parse(settings.exchange, ranks).degree, q.shape[2], call.k.shape[2]
    if shares_keys(head_shares(heads, kv_heads, degree, kv_heads)):
        raise NotImplementedError(
            f"exchange {settings.exchange!r} divides the query heads of a key/value head with same_bits={chunk}: got "
            f"{kv_heads} key/value heads for {degree} ranks that divide heads, which must divide them; write 'direct'"
        )
    for name, layout in (("layout", call.layout), ("key_layout", call.key_layout)):
        refuse_cut_chunks(name, layout, call.pattern.documents, chunk)


def refuse_cut_chunks(name: str, layout: Layout, documents: Sequence[int] | None, chunk: int) -> None:
    """Raise ValueError for a layout that does not hold the chunks of documents whole."""
    cut = cut_chunk(layout, documents, chunk)
    if cut is not None:
        numbers = f"{layout.n}, {layout.world_size}, {chunk}" + ("" if documents is None else ", documents")
        raise ValueError(
            f"{name} must hold chunks of same_bits={chunk} tokens whole and in order, but does not at position "
            f"{cut[1]} on rank {cut[0]}: write Layout.whole_chunks({numbers})"
        )


def _validate_tensors(call: Call, queries: int, keys: int) -> None:
    """queries, keys: tokens that the layouts give this rank."""
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    for name, x in tensors.items():
        refuse_dtensor(name, x)
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            actual = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(type(x))
            raise ValueError(f"{name} must be a (batch, local tokens, heads, head dim) tensor, got {actual}")
        if x.layout is not torch.strided or x.is_complex() or x.is_quantized:
            raise NotImplementedError(f"{name} must be a dense real tensor, got {x.layout}, {x.dtype}")
    q, k, v = call.q, call.k, call.v
    if k.shape[:3] != v.shape[:3]:
        shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"k and v must have one shape, except for the head dim of v, got {shapes}")
    if q.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {[str(d) for d in DTYPES]}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(
            f"k must have q's batch and head dim {(q.shape[0], q.shape[3])}, got {(k.shape[0], k.shape[3])}"
        )
    if min(q.shape[0], q.shape[2], q.shape[3], k.shape[2], v.shape[3]) < 1:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"batch, heads and head dim must be >= 1, got {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {q.shape[2]} and {k.shape[2]}")
    giver = "layout" if call.key_layout is call.layout else "key_layout"
    for (name, x), tokens, by in zip(tensors.items(), (queries, keys, keys), ("layout", giver, giver), strict=True):
        if x.shape[1] != tokens:
            got = f"{x.shape[1]}: heads first? Write {name}.transpose(1, 2)" if x.shape[2] == tokens else x.shape[1]
            other = "" if by == "key_layout" or name == "q" else "; keys of another sequence take key_layout="
            raise ValueError(f"{name} must have the {tokens} tokens that the {by} gives this rank, got {got}{other}")
    if call.settings.kernel != "auto":
        _validate_kernel(call)


def _validate_sinks(sinks: Any, q: torch.Tensor) -> None:
    """Raise ValueError or NotImplementedError unless sinks are one number for each query head. Values are no matter."""
    refuse_dtensor("sinks", sinks)
    heads, dtypes = q.shape[2], {q.dtype, accumulator_dtype(q.dtype)}
    if not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,) or sinks.layout is not torch.strided:
        got = f"{sinks.layout}, shape {tuple(sinks.shape)}" if isinstance(sinks, torch.Tensor) else repr(type(sinks))
        raise ValueError(f"sinks must be None or a dense ({heads},) tensor, a number for each query head, got {got}")
    if sinks.dtype not in dtypes:
        allowed = " or ".join(sorted(map(str, dtypes)))
        raise ValueError(f"sinks must have dtype {allowed} beside q of {q.dtype}, got {sinks.dtype}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")


def is_dtensor(x: object) -> bool:
    """Return True for a DTensor. Looks the class up without an import: whoever has a DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse_dtensor(name: str, x: Any) -> None:
    """Raise NotImplementedError for a DTensor in place of this rank's shard."""
    if is_dtensor(x):
        raise NotImplementedError(
            f"{name} must be a plain tensor, the shard of this rank, got a DTensor placed {x.placements}: give "
            f"{name}.to_local(), sharded as the layout says"
        )


def _validate_kernel(call: Call) -> None:
    """Refuse a kernel, requested by name, that supports no tile of the call."""
    name, q = call.settings.kernel, call.q
    named = {kernel.device: kernel for kernel in KERNELS if kernel.name == name}
    kernel = named.get(q.device.type, named.get(None))
    if kernel is None:
        kinds = " and ".join(map(str, named))
        raise NotImplementedError(f"kernel {name!r} takes {kinds} tensors, got {q.device}; 'auto' and 'math' take any")
    if (missing := kernel.missing()) is not None:
        raise NotImplementedError(f"kernel {name!r} cannot be called: {missing}; 'auto' takes other kernels")
    if (softcap := call.settings.softcap) is not None and not kernel.softcap:
        others = " or ".join(repr(other.name) for other in FUSED if other.softcap)
        raise NotImplementedError(
            f"kernel {name!r} has no softcap, got softcap={softcap}: use kernel 'auto', 'math' or, on GPUs, {others}"
        )
    setting = make_kernel_setting(name, q, call.k, call.v, call.scoring)
    if not kernel.takes(setting._replace(scoring=call.scoring._replace(scale=1.0))):
        dims = f"head dim {q.shape[3]}, of values {call.v.shape[3]}, and {setting.share} query heads per key/value head"
        raise NotImplementedError(
            f"kernel {name!r} takes {kernel.limits}, got dtype {q.dtype}, {dims}; 'auto' and 'math' take any"
        )
