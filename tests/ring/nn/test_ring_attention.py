"""The attention as a module: what `scaled_dot_product_attention` computes, over a sharded sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from reference import Pattern, attention, gradients
from ring import Layout
from ring.nn import ContextParallel, RingAttention
from tests.support.attention_cases import plain
from tests.support.dense_scores import results
from tests.support.nn_ranks import drawn


@pytest.mark.parametrize("within", [False, True])
def test_context_and_documents_of_the_call_win(within: bool) -> None:
    """within: the handle is the module's own."""
    pattern, made = Pattern.longnet((4, None), (1, 2), 4, causal=True), ContextParallel(Layout.contiguous(13, 1))
    held, context = replace(pattern, documents=(4, 0, 9)), made.with_documents((4, 0, 9))
    module = RingAttention(replace(pattern, documents=(13,)), context if within else made.with_documents((13,)))
    q, k, v, dout = (drawn(seed, 2, 4, 13, 6) for seed in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(*leaves, None, 0.0, True, 0.3, **({} if within else {"context": context}))
    q, k, v, dout_by_token = (x.detach().transpose(1, 2) for x in (q, k, v, dout))
    exact = (attention(q, k, v, held, scale=0.3)[0], *gradients(q, k, v, held, dout_by_token, scale=0.3))
    for x, y in zip([out, *torch.autograd.grad(out, leaves, dout)], exact, strict=True):
        torch.testing.assert_close(x, y.transpose(1, 2), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("causal, kv_heads", [(True, 2), (False, 4)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"is_causal": None}], ids=str)
def test_equals_torchs_attention(causal: bool, kv_heads: int, options: dict[str, Any]) -> None:
    q, k, v = (drawn(seed, 2, heads, 9, 6) for seed, heads in enumerate((4, kv_heads, kv_heads)))
    given = {"is_causal": causal, "enable_gqa": kv_heads != 4} | options
    module = RingAttention(Pattern.dense(causal), ContextParallel(Layout.contiguous(9, 1)))
    wanted = scaled_dot_product_attention(q, k, v, **(given | {"is_causal": causal}))
    torch.testing.assert_close(module(q, k, v, None, 0.0, **given), wanted, rtol=0.0, atol=1e-13)


def test_heads_first_is_told_from_as_many_tokens() -> None:
    layout, pattern = Layout.contiguous(5, 1), Pattern.dense(causal=True)
    q, k, v = (drawn(seed, 2, 5, 5, 6) for seed in range(3))
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(RingAttention(pattern, ContextParallel(layout))(q, k, v), wanted)
    tokens_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    torch.testing.assert_close(plain(*tokens_first, pattern, layout).transpose(1, 2), wanted)
    with pytest.warns(match=r"got as many heads as tokens .* write q.transpose\(1, 2\)"):
        plain(*(x.transpose(1, 2) for x in tokens_first), pattern, layout)


def test_sinks_softcap_and_value_dims_are_passed_on() -> None:
    q, k, v, dout = (
        drawn(seed, 2, heads, 9, dim) for seed, (heads, dim) in enumerate(((4, 6), (2, 6), (2, 3), (4, 3)))
    )
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -1.0], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    module = RingAttention(Pattern.dense(True), ContextParallel(Layout.contiguous(9, 1)))
    out = module(*leaves[:3], enable_gqa=True, sinks=sinks, softcap=0.8)
    by_token = [x.detach().transpose(1, 2) for x in (q, k, v)]
    exact = results([*by_token, sinks, dout.transpose(1, 2), None], Pattern.dense(True), softcap=0.8)
    del exact["lse"]
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    for x, (name, y) in zip(found, exact.items(), strict=True):
        torch.testing.assert_close(x, y if name == "dsinks" else y.transpose(1, 2), rtol=0.0, atol=1e-12)


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
