"""LongNet's block (arXiv 2307.02486) under the names of torchscale's configuration: `segment_length`, `dilated_ratio`.

    x + attention(norm(x)), then x + feed-forward(norm(x)), with torchscale's option subln (arXiv 2210.06423): one more
    norm before the last projection of each.

What differs from torchscale: positions are rotary, and gradients also flow through the weights of the branches, which
torchscale takes for constants. There is no dropout.
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
from ring.nn.self_attention import SelfAttention, check_input, check_sizes, errors_told


def longnet_pattern(
    segment_length: Sequence[int] | str,
    dilated_ratio: Sequence[int] | str,
    heads: int,
    causal: bool = True,
    *,
    offsets: str = "torchscale",
) -> Pattern:
    """The pattern of a configuration of torchscale: branch i has segments of segment_length[i] tokens, of which each
    head takes every dilated_ratio[i]-th.

    Lists, or strings of lists as torchscale's configurations hold them: "[2048,4096]". offsets: where a head begins, as
    for `Pattern.longnet`; by default as torchscale has it, heads h // ceil(heads / ratio).

    Raises ValueError for anything else, and for lists of different lengths.
    """
    lengths, ratios = _integers("segment_length", segment_length), _integers("dilated_ratio", dilated_ratio)
    if len(lengths) != len(ratios):
        raise ValueError(f"dilated_ratio must have one entry for each of segment_length, {lengths}, got {ratios}")
    return Pattern.longnet(lengths, ratios, heads, causal, offsets)


def _integers(name: str, given: Sequence[int] | str) -> list[int]:
    refusal = ValueError(f'{name} must be integers >= 1, as [2048, 4096] or "[2048,4096]", got {given!r}')
    found: object = given
    if isinstance(given, str):
        try:
            found = ast.literal_eval(given.strip())
        except (ValueError, SyntaxError) as error:
            raise refusal from error
    if not isinstance(found, (list, tuple)) or not found:
        raise refusal
    for x in found:
        if not isinstance(x, int) or isinstance(x, bool) or x < 1:
            raise refusal
    return list(found)


class LongNetBlock(nn.Module):
    """A layer of LongNet over a sequence of which each rank holds a shard.

    dim                            of x
    heads, kv_heads                as for `SelfAttention`
    segment_length, dilated_ratio  as for `longnet_pattern`
    ffn_dim                        inner dimension of the feed-forward; None: 4 dim
    causal                         True for a decoder
    subln                          LayerNorm before the last projection of attention and feed-forward
    rotary_theta                   None: no positions
    norm_eps                       of all LayerNorms
    name                           what errors call this layer, as "layer 3"

    Parameters have the defaults of their modules. For the depth-dependent scale that subln has in torchscale multiply
    v_proj, o_proj, fc1 and fc2 by sqrt(log(2 layers)).
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
        """x (B, N, dim), N being this rank's tokens -> (B, N, dim). positions, errors: as for `SelfAttention`."""
        check_input(x, self.dim, context, positions, self.name)
        with errors_told(x, context, self.name):
            normed = self.attention_norm(x)
        x = x + self.attention(normed, context)
        inner = gelu(self.fc1(self.ffn_norm(x)))  # (B, N, ffn_dim)
        return x + self.fc2(inner if self.ffn_inner_norm is None else self.ffn_inner_norm(inner))
