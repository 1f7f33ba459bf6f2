"""The stand-in for flash_attn on CPUs."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import Pattern, attention, gradients
from verification.peers.adapters import flash_attn_shim

SCALE, TOKENS = 0.7, 9


def inputs_of(kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    draw = torch.Generator().manual_seed(kv_heads)
    return [torch.randn(1, TOKENS, heads, 3, generator=draw) for heads in (4, kv_heads, kv_heads, 4)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
@pytest.mark.parametrize("window", (None, 0, 2, 9))
def test_the_stand_in_for_flash_attn(causal: bool, kv_heads: int, window: int | None) -> None:
    """The rows are cut in two: masks are aligned to the last query and the last key, by which a window is shifted."""
    q, k, v, dout = inputs_of(kv_heads)
    pattern = Pattern.dense(causal, window=window)
    exact, exact_lse = attention(q, k, v, pattern, scale=SCALE)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in (slice(0, 3), slice(3, TOKENS)):
        keys = slice(0, rows.stop if causal else TOKENS if window is None else min(TOKENS, rows.stop + window))
        behind = keys.stop - rows.stop
        sides = (-1, -1) if window is None else (window + behind, window - behind)
        inputs: Any = q[:, rows], k[:, keys], v[:, keys]
        how: Any = 0.0, SCALE, causal, *sides
        out, lse, _, _ = flash_attn_shim.forward(*inputs, *how)
        torch.testing.assert_close((out, lse), (exact[:, rows].float(), exact_lse[:, :, rows].float()))
        grads: Any = [torch.full_like(x, math.nan) for x in inputs]
        given: Any = dout[:, rows], *inputs, out, lse, *grads, *how
        flash_attn_shim.backward(*given)
        for total, part, where in zip(sums, grads, (rows, keys, keys), strict=True):
            total[:, where] += part
    wanted = gradients(q, k, v, pattern, dout, scale=SCALE)
    torch.testing.assert_close(sums, [x.float() for x in wanted])


@pytest.mark.parametrize("causal", (False, True))
def test_the_stand_in_for_flash_attn_of_varying_lengths(causal: bool) -> None:
    q, k, v, dout = inputs_of(2)
    pattern, edges = Pattern.dense(causal, (3, 0, 4, 2)), torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32)
    how: Any = edges, edges, 4, 4, 0.0, SCALE, causal
    inputs = q[0], k[0], v[0]
    out, lse, _, _ = flash_attn_shim.varlen_forward(*inputs, *how)
    exact = attention(q, k, v, pattern, scale=SCALE)
    torch.testing.assert_close((out, lse), tuple(x[0].float() for x in exact))
    grads: Any = [torch.full_like(x, math.nan) for x in inputs]
    flash_attn_shim.varlen_backward(dout[0], *inputs, out, lse, *grads, *how)
    torch.testing.assert_close(grads, [x[0].float() for x in gradients(q, k, v, pattern, dout, scale=SCALE)])


@pytest.mark.parametrize(
    "edges, longest, said",
    [
        ([1, 3], 2, r"cu_seqlens must ascend from 0 to 3 in int32, got \[1, 3\]"),
        ([0, 2], 2, "must ascend from 0"),
        ([0, 2, 1, 3], 3, "must ascend from 0"),
        ([0, 1, 3], 1, "max_seqlen must be at least the longest sequence, 2, got 1"),
    ],
)
def test_lengths_are_checked(edges: list[int], longest: int, said: str) -> None:
    q, sound, wrong = torch.ones(3, 1, 1), torch.tensor([0, 3]).int(), torch.tensor(edges).int()
    for at in ((wrong, sound, longest, 3), (sound, wrong, 3, longest)):
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_forward(q, q, q, *at, 0.0, 1.0, False)
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_backward(q, q, q, q, q, q[:, 0].T, q, q, q, *at, 0.0, 1.0, False)
    with pytest.raises(ValueError, match=r"in torch.int64"):
        flash_attn_shim.varlen_forward(q, q, q, sound.long(), sound, 3, 3, 0.0, 1.0, False)


def test_stand_in_is_found_as_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    flash_attn_shim.install()
    assert importlib.util.find_spec("flash_attn") is not None  # as transformers does


def test_missing_features_of_the_stand_in_are_refused() -> None:
    q, edges = torch.ones(1, 2, 1, 1), torch.tensor([0, 2]).int()
    unusual = {"dropout_p": 0.1, "softcap": 1.0, "alibi_slopes": torch.ones(1), "return_softmax": True}
    for name, value in (*unusual.items(), ("block_table", edges)):
        options: Any = {"dropout_p": 0.0, "softmax_scale": 1.0, "causal": False} | {name: value}
        with pytest.raises(NotImplementedError, match=f"has no dropout, soft cap, ALiBi, .* or keys in pages.*{name}="):
            flash_attn_shim.varlen_forward(q[0], q[0], q[0], edges, edges, 2, 2, **options)
        if name in unusual:
            with pytest.raises(NotImplementedError, match=f"{name}="):
                flash_attn_shim.forward(q, q, q, **options)
    with pytest.raises(NotImplementedError):
        flash_attn_shim.refused(q)


def test_stand_in_takes_blind_rows_and_autocast() -> None:
    q = torch.ones(1, 2, 1, 1)
    out, lse, _, _ = flash_attn_shim.forward(q, q[:, :1], q[:, :1], 0.0, 1.0, True)
    assert out[0, 0, 0, 0] == 0 and lse[0, 0, 0] == math.inf and lse[0, 0, 1] == 1
    given: Any = *(x.bfloat16() for x in inputs_of(4)[:3]), 0.5, True
    with torch.autocast("cpu", torch.bfloat16):
        under = flash_attn_shim.attention(*given)
    torch.testing.assert_close(under, flash_attn_shim.attention(*given), rtol=0, atol=0)
