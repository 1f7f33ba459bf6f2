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
    """Return the pattern of a torchscale configuration. Branch i has segments of segment_length[i] tokens, where each
    head selects every dilated_ratio[i]-th one.

    Lists, or strings of lists as in torchscale's configurations: "[2048,4096]". offsets: rule for the first position of
    each head, as for `Pattern.longnet`; the default is torchscale's, h // ceil(heads / ratio).

    Raises ValueError for anything else, and for lists of unequal lengths.
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
    """A layer of LongNet over a sharded sequence.

    dim                            of x
    heads, kv_heads                as for `SelfAttention`
    segment_length, dilated_ratio  as for `longnet_pattern`
    ffn_dim                        inner dimension of the feed-forward; None: 4 dim
    causal                         True for a decoder
    subln                          if True, LayerNorm before the last projection of attention and feed-forward
    rotary_theta                   None: no positions
    norm_eps                       of all LayerNorms
    name                           name of this layer in errors, as "layer 3"

    Parameters have the defaults of their modules. For torchscale's depth-dependent scale of subln multiply v_proj,
    o_proj, fc1 and fc2 by sqrt(log(2 layers)).
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
        """x (B, N, dim) with this rank's N tokens -> (B, N, dim). positions, errors: as for `SelfAttention`."""
        check_input(x, self.dim, context, positions, self.name)
        with errors_on_every_rank(x, context, self.name):
            normed = self.attention_norm(x)
        x = x + self.attention(normed, context)
        inner = gelu(self.fc1(self.ffn_norm(x)))  # (B, N, ffn_dim)
        return x + self.fc2(inner if self.ffn_inner_norm is None else self.ffn_inner_norm(inner))
