"""The attention as a module: what `scaled_dot_product_attention` computes, over a sharded sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from reference import Pattern, attention, gradients
from ring import Layout
from ring.nn import ContextParallel, RingAttention
from tests.support.nn_ranks import TOKENS, context_of, drawn, far
from tests.support.ranks import Ranks


def _error(shards: str, kv_heads: int, within: bool) -> float:
    """The handle is the module's (within), or that of the call; the pattern's documents give way to the handle's."""
    documents = (4, 0, 9)
    pattern = Pattern.longnet((4, None), (1, 2), 4, causal=True)
    held = Pattern(pattern.branches, True, documents)
    context = context_of(shards).with_documents(documents)
    other = context_of(shards).with_documents((TOKENS,))
    module = RingAttention(Pattern(pattern.branches, True, (TOKENS,)), context if within else other, "inner")
    whole = [drawn(seed, 2, heads, TOKENS, 6) for seed, heads in enumerate((4, kv_heads, kv_heads, 4))]
    mine = [context.shard(x, 2).requires_grad_() for x in whole[:3]]
    given: dict[str, Any] = {} if within else {"context": context}
    out = module(*mine, None, 0.0, True, 0.3, enable_gqa=kv_heads != 4, **given)
    found = [out, *torch.autograd.grad(out, mine, context.shard(whole[3], 2))]

    q, k, v, dout = (x.transpose(1, 2) for x in whole)
    exact = (attention(q, k, v, held, scale=0.3)[0], *gradients(q, k, v, held, dout, scale=0.3))
    return far(found, [context.shard(x.transpose(1, 2), 2) for x in exact])


@pytest.mark.ranks
@pytest.mark.parametrize("shards, kv_heads, within", [("empty", 4, True), ("even", 2, False)])
def test_output_and_gradients(ranks: Ranks, shards: str, kv_heads: int, within: bool) -> None:
    assert max(ranks(4).run(_error, shards, kv_heads, within)) < 1e-12


@pytest.mark.parametrize("causal, kv_heads", [(True, 2), (False, 4)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"is_causal": None}], ids=str)
def test_it_is_torchs(causal: bool, kv_heads: int, options: dict[str, Any]) -> None:
    q, k, v = (drawn(seed, 2, heads, 9, 6) for seed, heads in enumerate((4, kv_heads, kv_heads)))
    given = {"is_causal": causal, "enable_gqa": kv_heads != 4} | options
    module = RingAttention(Pattern.dense(causal), ContextParallel(Layout.contiguous(9, 1)))
    wanted = scaled_dot_product_attention(q, k, v, **(given | {"is_causal": causal}))
    torch.testing.assert_close(module(q, k, v, None, 0.0, **given), wanted, rtol=0.0, atol=1e-13)


def test_a_context_is_needed() -> None:
    q, dense = drawn(0, 1, 1, 9, 4), Pattern.dense()
    given: Any
    for given in (None, "mesh"):
        with pytest.raises(ValueError, match="context must be a ContextParallel"):
            RingAttention(dense)(q, q, q, context=given)
    with pytest.raises(ValueError, match="context must be a ContextParallel, .* got 'mesh'"):
        RingAttention(dense, given)
    with pytest.raises(ValueError, match="pattern must be a Pattern, got 'mesh'"):
        RingAttention(given)
    unchecked = ContextParallel(Layout.contiguous(9, 1), check=False)
    with pytest.raises(NotImplementedError, match="^dropout_p must be 0.0, got 0.5"):
        RingAttention(dense, unchecked)(q, q, q, dropout_p=0.5)
