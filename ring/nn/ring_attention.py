"""Ring attention as a module without parameters, which replaces a model's inner attention.

RingAttention(Pattern.dense(causal=True))(query, key, value, context=context)    # each (B, heads, local tokens, D)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference.pattern import Pattern, check_pattern
from ring.nn.context import ContextParallel, checked_context

SHAPE = ("batch", "heads", "local tokens", "head dim")


class RingAttention(nn.Module):
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention` on a sharded sequence (no mask, no dropout).

    Args:
        pattern: replaces the mask.
        context: handle of the sharded sequence; the context argument of forward overrides it.
        name: of this module in errors, as "layer 3"; the ranks compare it.

    Raises:
        ValueError: pattern is no `Pattern`, or context no `ContextParallel`.
    """

    def __init__(self, pattern: Pattern, context: ContextParallel | None = None, name: str | None = None) -> None:
        super().__init__()
        check_pattern(pattern)
        if context is not None:
            checked_context(context)
        self.pattern, self.context, self.name = pattern, context, name

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        context: ContextParallel | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries to all keys that they see: (B, H, N, Dv), in query's dtype.

        Args:
            query: (B, H, N, D) with this rank's N tokens, in fp64, fp32, bf16 or fp16. Where N is H, tokens first would
                be taken for heads.
            key: (B, Hk, N, D), in query's dtype.
            value: (B, Hk, N, Dv), in query's dtype.
            attn_mask, dropout_p: must be None and 0; they exist for the signature.
            is_causal: None, or the pattern's.
            scale: factor of the scores; None: D ** -0.5.
            enable_gqa: True if H may be a multiple of Hk.
            softcap: bound t of the scores, t tanh(score / t); None: no bound.
            sinks: (H,), a score of each head that every row sees, with value 0; None: none.
            context: handle of the sharded sequence; None: the module's.

        Raises:
            ValueError, NotImplementedError: on every rank for a wrong argument on one; on this alone without a context.
        """
        context = checked_context(self.context if context is None else context)
        try:
            self._check(attn_mask, dropout_p, is_causal)
            for name, x in (("query", query), ("key", key), ("value", value)):
                context.check_local(name, x, SHAPE, 2)
            _check_heads(query.shape[1], key.shape[1], enable_gqa)
        except Exception as error:  # of any type: the other ranks must raise it too
            context.raise_everywhere(error, self.name)
        q, k, v = map(tokens_first, (query, key, value))
        out = context.attention(q, k, v, self.pattern, scale=scale, softcap=softcap, sinks=sinks, name=self.name)
        return out.transpose(1, 2)

    def _check(self, attn_mask: Tensor | None, dropout_p: float, is_causal: bool | None) -> None:
        if attn_mask is not None:
            raise NotImplementedError(
                f"attn_mask must be None, got {type(attn_mask).__name__}: the pattern is the mask"
            )
        if isinstance(dropout_p, bool) or dropout_p != 0:
            raise NotImplementedError(f"dropout_p must be 0.0, got {dropout_p!r}: there is no dropout of attention")
        if is_causal is not None and is_causal is not self.pattern.causal:
            raise ValueError(f"is_causal must be None or the pattern's, {self.pattern.causal}, got {is_causal!r}")

    def extra_repr(self) -> str:
        return f"{self.pattern}, name={self.name!r}"


def tokens_first(x: Tensor) -> Tensor:
    """Return x (B, H, N, D) as (B, N, H, D): a copy where N is H, whose strides would give a warning."""
    x = x.transpose(1, 2)
    return x.contiguous() if not torch.compiler.is_compiling() and x.shape[1] == x.shape[2] else x


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if not isinstance(enable_gqa, bool):
        raise ValueError(f"enable_gqa must be True or False, got {enable_gqa!r}")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(f"key must have query's {heads} heads unless enable_gqa=True, got {kv_heads}")
