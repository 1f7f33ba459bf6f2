"""Definitions of what `ring` and `ring.nn` compute, which take their place in the one process of a comparison.

A model of `ring.nn` calls them in one process too. A mistake there would be on both sides, and cancel out. So that
process replaces them before it imports the user's module: attention by the oracle, positions, blocks, sums along the
sequence, losses and labels by their formulas. Compiled functions run eagerly. Refusals are for the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import ring.nn
from reference.pattern import Pattern
from ring import Layout
from ring.nn import IGNORED, ContextParallel, LongNetBlock, RingAttention, SelfAttention
from ring.nn.context import checked_context
from verification.models.formulas import oracle_attention, rotated


def replace_ring() -> None:
    """Replace the functions and methods of `ring` in this process, wherever a module has imported them."""
    originals = {id(getattr(ring.nn, name)): x for name, x in FUNCTIONS.items()} | {id(ring.ring_attention): attend}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
    for owner, name, definition in METHODS:
        setattr(owner, name, definition)
    torch.compiler.set_stance("force_eager")


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, layout: Layout, *, key_layout: Layout | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    **_: object,
) -> Any:  # fmt: skip
    """Return what `ring_attention` does. The options that are left out do not change it."""
    places = {"q_positions": layout.positions(0), "k_positions": (key_layout or layout).positions(0)}
    out, lse = oracle_attention(q, k, v, pattern, sinks, scale=scale, softcap=softcap, **places)
    out, lse = out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))
    return (out, lse) if return_lse else out


def _attention(context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **settings: Any) -> Any:
    pattern = pattern if context.documents is None else replace(pattern, documents=context.documents)
    return attend(q, k, v, pattern, context.layout, **settings)


def _self_attention(self: SelfAttention, x: Tensor, context: ContextParallel, positions: object = None) -> Tensor:
    q, k, v = self._project(x, checked_context(context))
    out = context.attention(q, k, v, self.pattern, softcap=self.softcap, sinks=self.sinks).flatten(2)
    return self.o_proj(out if self.inner_norm is None else self.inner_norm(out))


def _projected(self: SelfAttention, x: Tensor, context: ContextParallel) -> tuple[Tensor, ...]:
    projections = (self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads)
    q, k, v = (projection(x).unflatten(2, (heads, -1)) for projection, heads in projections)
    if self.q_norm is not None and self.k_norm is not None:
        q, k = self.q_norm(q), self.k_norm(k)
    if self.rotary_theta is not None:
        q, k = (rotated(y, context.positions, self.rotary_theta) for y in (q, k))
    return q, k, v


def _ring_attention(
    self: RingAttention, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool | None = None, scale: float | None = None, enable_gqa: bool = False, *,
    context: ContextParallel | None = None, **scores: Any,
) -> Tensor:  # fmt: skip
    self._check(attn_mask, dropout_p, is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    context = checked_context(self.context if context is None else context)
    return context.attention(q, k, v, self.pattern, scale=scale, **scores).transpose(1, 2)


def _longnet_block(self: LongNetBlock, x: Tensor, context: ContextParallel, positions: object = None) -> Tensor:
    x = x + self.attention(self.attention_norm(x), context)
    inner = functional.gelu(self.fc1(self.ffn_norm(x)))
    return x + self.fc2(inner if self.ffn_inner_norm is None else self.ffn_inner_norm(inner))


def _lengths(context: ContextParallel) -> list[int]:
    return [context.layout.n] if context.documents is None else list(context.documents)


def _positions(context: ContextParallel) -> Tensor:
    return torch.cat([torch.arange(length) for length in _lengths(context)])[context.layout.positions(0)]


def _gather(context: ContextParallel, x: Tensor, dim: int = 1) -> Tensor:
    return x.index_select(dim, context.layout.positions(0).argsort())


def _sum(
    context: ContextParallel, x: Tensor, dim: int = 1, *, mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    counts = torch.ones_like(x) if mask is None else mask.bool().view(*mask.shape, *[1] * (x.dim() - mask.dim()))
    counted = torch.where(counts.bool(), x, 0), counts.expand(x.shape)
    sums, numbers = (_per_document(context, _gather(context, y, dim), dim) for y in counted)
    return sums / numbers.clamp(min=1) if mean else sums


def _per_document(context: ContextParallel, x: Tensor, dim: int) -> Tensor:
    values = [part.sum(dim) for part in x.split(_lengths(context), dim)]
    return values[0] if context.documents is None else torch.stack(values, dim)


def _per_token(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    flat = logits.flatten(0, 1), labels.flatten().long()
    return functional.cross_entropy(*flat, ignore_index=ignored, reduction="none").view_as(labels)


def _token_mean(
    losses: Tensor, labels: Tensor | None, over: object = None, *, labelled: int | None = None,
    averaged_over: float | None = None, ignored: int = IGNORED,
) -> Tensor:  # fmt: skip
    """Return the mean. averaged_over: factor of its gradient, by which a wrapper divides."""
    flat = losses.flatten(0, 1)
    flat = flat if labels is None else flat[labels.flatten() != ignored]
    mean = flat.sum(0) / max(1, len(flat) if labelled is None else labelled)
    return mean.detach() + (averaged_over or 1) * (mean - mean.detach())


def _next_tokens(tokens: Tensor, ignored: int = IGNORED, *, ahead: int = 1, documents: Any = None) -> Tensor:
    parts = tokens.long().split(list(documents or (tokens.shape[1],)), 1)
    return torch.cat([functional.pad(part, (0, ahead), value=ignored)[:, ahead:] for part in parts], 1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rotary": lambda x, positions, theta=10000.0: rotated(x, positions, theta),
    "gather": _gather,
    "sequence_sum": _sum,
    "sequence_mean": lambda context, x, dim=1, mask=None: _sum(context, x, dim, mask=mask, mean=True),
    "sequence_logprobs": lambda x, labels, context, ignored=IGNORED: _sum(context, -_per_token(x, labels, ignored)),
    "cross_entropy": lambda x, labels, over=None, ignored=IGNORED, **others: _token_mean(
        _per_token(x, labels, ignored), labels, ignored=ignored, **others
    ),
    "token_mean": _token_mean,
    "batch_mean": lambda losses, context, over=None, counted=None, averaged_over=None: _token_mean(
        losses.reshape(1, -1), None, labelled=counted, averaged_over=averaged_over
    ),
    "next_tokens": _next_tokens,
}
METHODS: tuple[tuple[type, str, Any], ...] = (
    (ContextParallel, "attention", _attention), (ContextParallel, "positions", property(_positions)),
    (SelfAttention, "_project", _projected), (SelfAttention, "forward", _self_attention),
    (RingAttention, "forward", _ring_attention), (LongNetBlock, "forward", _longnet_block),
)  # fmt: skip
