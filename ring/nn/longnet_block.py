"""LongNet's block (arXiv 2307.02486), with the names of torchscale's configuration: `segment_length`, `dilated_ratio`.

    x + attention(norm(x)), then x + feed-forward(norm(x)), with torchscale's option subln (arXiv 2210.06423): one more
    norm before the last projection of each.

Differences from torchscale: positions are rotary, and gradients also flow through the weights of the branches, which
torchscale treats as constants. There is no dropout.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from reference.pattern import Pattern
from ring.nn.context import ContextParallel
from ring.nn.rotary import THETA
from ring.nn.self_attention import SelfAttention, check_input, check_sizes, errors_on_every_rank


def longnet_pattern(
    segment_length: Sequence[int] | str,
    dilated_ratio: Sequence[int] | str,
    heads: int,
    causal: bool = True,
    *,
    offsets: str = "torchscale",
) -> Pattern:
    """Return the pattern of a torchscale configuration, with one branch for each entry of the lists.

    Args:
        segment_length: tokens of each branch's segments: a list, or text as in the configurations, "[2048,4096]".
        dilated_ratio: of each branch; a head selects every dilated_ratio[i]-th token. A list, or text.
        heads: number of query heads.
        causal: True for a decoder.
        offsets: rule for the first position of each head in a segment: "torchscale", h // ceil(heads / ratio);
            "paper", h mod ratio; "fkodom", i mod ratio for all heads of branch i.

    Raises:
        ValueError: an entry is no integer >= 1, the lists have unequal lengths, or the rule is unknown.
    """
    lengths, ratios = _integers("segment_length", segment_length), _integers("dilated_ratio", dilated_ratio)
    if len(lengths) != len(ratios):
        raise ValueError(f"dilated_ratio must have one entry for each of segment_length, {lengths}, got {ratios}")
    return Pattern.longnet(lengths, ratios, heads, causal, offsets)


def _integers(name: str, value: Sequence[int] | str) -> list[int]:
    refusal = ValueError(f'{name} must be integers >= 1, as [2048, 4096] or "[2048,4096]", got {value!r}')
    entries: object = value
    if isinstance(value, str):
        try:
            entries = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError) as error:
            raise refusal from error
    if not isinstance(entries, (list, tuple)) or not entries:
        raise refusal
    for x in entries:
        if not isinstance(x, int) or isinstance(x, bool) or x < 1:
            raise refusal
    return list(entries)


class LongNetBlock(nn.Module):
    """A layer of LongNet (arXiv 2307.02486) over a sharded sequence.

    Parameters have the defaults of their modules. For torchscale's depth-dependent scale of subln multiply v_proj,
    o_proj, fc1 and fc2 by sqrt(log(2 layers)).

    Args:
        dim: of x.
        heads: number of query heads; dim must be a multiple.
        segment_length, dilated_ratio: of each branch, as lists or as text, "[2048,4096]": see `longnet_pattern`.
        ffn_dim: inner dimension of the feed-forward; None: 4 dim.
        kv_heads: number of key/value heads, which divides heads; None: as many as heads.
        causal: True for a decoder.
        subln: LayerNorm before the last projection of attention and feed-forward (arXiv 2210.06423).
        rotary_theta: base of the rotary positions; None: no positions.
        norm_eps: epsilon of all LayerNorms.
        name: of this layer in errors, as "layer 3"; the ranks compare it.
        device, dtype: of the parameters; None: torch's defaults.

    Raises:
        ValueError: sizes or lists do not fit each other.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        segment_length: Sequence[int] | str,
        dilated_ratio: Sequence[int] | str,
        *,
        ffn_dim: int | None = None,
        kv_heads: int | None = None,
        causal: bool = True,
        subln: bool = True,
        rotary_theta: float | None = THETA,
        norm_eps: float = 1e-5,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim)
        ffn_dim = 4 * dim if ffn_dim is None else ffn_dim
        check_sizes(ffn_dim=ffn_dim)
        pattern = longnet_pattern(segment_length, dilated_ratio, heads, causal)
        self.dim, self.name = dim, name
        self.attention_norm = nn.LayerNorm(dim, norm_eps, device=device, dtype=dtype)
        self.attention = SelfAttention(
            dim, heads, pattern, kv_heads=kv_heads, bias=True, rotary_theta=rotary_theta,
            inner_norm_eps=norm_eps if subln else None, name=name, device=device, dtype=dtype,
        )  # fmt: skip
        self.ffn_norm = nn.LayerNorm(dim, norm_eps, device=device, dtype=dtype)
        self.fc1 = nn.Linear(dim, ffn_dim, device=device, dtype=dtype)
        self.ffn_inner_norm = nn.LayerNorm(ffn_dim, norm_eps, device=device, dtype=dtype) if subln else None
        self.fc2 = nn.Linear(ffn_dim, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: ContextParallel, positions: Tensor | None = None) -> Tensor:
        """Return the layer's output, (B, N, dim): y + feed-forward(norm(y)), y = x + attention(norm(x)).

        Args:
            x: (B, N, dim) with this rank's N tokens, in the parameters' dtype.
            context: handle of the sharded sequence.
            positions: None, or the context's, (N,) or (B, N), int64 or int32, on x's device.

        Raises:
            ValueError, NotImplementedError: on every rank for a wrong argument on one; on this alone without a context.
        """
        check_input(x, self.dim, context, positions, self.name)
        with errors_on_every_rank(x, context, self.name):
            normed = self.attention_norm(x)
        x = x + self.attention(normed, context)
        inner = gelu(self.fc1(self.ffn_norm(x)))  # (B, N, ffn_dim)
        return x + self.fc2(inner if self.ffn_inner_norm is None else self.ffn_inner_norm(inner))
