"""The stand-ins of the adapters for kernels that need a GPU, against the oracle; how yunchang's ranks are divided."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from reference import Pattern, attention, gradients
from tests.support.plain_case import plain
from verification.peers.adapters import flash_attn_shim, plain_attention, yunchang


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
@pytest.mark.parametrize("window", (None, 0, 2, 9))
def test_the_stand_in_for_flash_attn(causal: bool, kv_heads: int, window: int | None) -> None:
    """Against the oracle, the rows cut in two: masks are aligned to the last query and the last key."""
    generator = torch.Generator().manual_seed(kv_heads)
    q, dout = (torch.randn(2, 7, 4, 3, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 7, kv_heads, 3, generator=generator) for _ in range(2))
    pattern, scale = Pattern.dense(causal, window=window), 0.7
    exact, exact_lse = attention(q, k, v, pattern, scale=scale)
    wanted = gradients(q, k, v, pattern, dout, scale=scale)
    found = [torch.zeros(7, dtype=torch.float32).new_zeros(x.shape) for x in (q, k, v)]
    for rows in (slice(0, 3), slice(3, 7)):
        keys = slice(0, rows.stop if causal else 7 if window is None else min(7, rows.stop + window))
        behind = keys.stop - rows.stop  # keys, by which a window is shifted
        sides = (-1, -1) if window is None else (window + behind, window - behind)
        how = 0.0, scale, causal, *sides
        out, lse, _, _ = flash_attn_shim.forward(q[:, rows], k[:, keys], v[:, keys], *how)
        torch.testing.assert_close(out, exact[:, rows].float())
        torch.testing.assert_close(lse, exact_lse[:, :, rows].float())
        dq, dk, dv = torch.empty_like(q[:, rows]), torch.empty_like(k[:, keys]), torch.empty_like(v[:, keys])
        arguments = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out, lse, dq, dk, dv
        flash_attn_shim.backward(*arguments, *how)
        found[0][:, rows] += dq
        found[1][:, keys] += dk
        found[2][:, keys] += dv
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y.float())


DOCUMENTS = (3, 0, 4, 2)
# Rows that a rank may have, the keys that they see, and the edges of the documents among both.
PARTS = {
    False: (((0, 5), (0, 7), [0, 3, 3, 5], [0, 3, 3, 7]), ((5, 9), (3, 9), [0, 2, 4], [0, 4, 6])),
    True: (((0, 5), (0, 5), [0, 3, 3, 5], [0, 3, 3, 5]), ((5, 9), (3, 9), [0, 2, 4], [0, 4, 6])),
}


@pytest.mark.parametrize("causal", PARTS)
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_the_stand_in_for_flash_attn_of_varying_lengths(causal: bool, kv_heads: int) -> None:
    """Against the oracle, the rows cut in two, within a document."""
    generator = torch.Generator().manual_seed(kv_heads)
    q, dout = (torch.randn(1, 9, 4, 3, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 9, kv_heads, 3, generator=generator) for _ in range(2))
    pattern, scale = Pattern.dense(causal, DOCUMENTS), 0.7
    exact, exact_lse = attention(q, k, v, pattern, scale=scale)
    wanted = gradients(q, k, v, pattern, dout, scale=scale)
    found = [torch.zeros(x.shape[1:]) for x in (q, k, v)]
    for own, seen, *edges in PARTS[causal]:
        rows, keys = slice(*own), slice(*seen)
        how: Any = *(torch.tensor(x, dtype=torch.int32) for x in edges), 4, 4, 0.0, scale, causal
        given = q[0, rows], k[0, keys], v[0, keys]
        out, lse, _, _ = flash_attn_shim.varlen_forward(*given, *how)
        torch.testing.assert_close(out, exact[0, rows].float())
        torch.testing.assert_close(lse, exact_lse[0, :, rows].float())
        parts: Any = [torch.full_like(x, math.nan) for x in given]
        flash_attn_shim.varlen_backward(dout[0, rows], *given, out, lse, *parts, *how)
        for whole, part, where in zip(found, parts, (rows, keys, keys), strict=True):
            whole[where] += part
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y[0].float())


@pytest.mark.parametrize(
    ("edges", "longest", "said"),
    (
        ([0, 2], 2, r"cu_seqlens must ascend from 0 to 3 in int32, got \[0, 2\]"),
        ([1, 3], 2, "must ascend from 0"),
        ([0, 2, 1, 3], 3, "must ascend from 0"),
        ([0, 1, 3], 1, "max_seqlen must be at least the longest sequence, 2, got 1"),
    ),
)
def test_lengths_that_a_kernel_would_take_on_trust_are_checked(edges: list[int], longest: int, said: str) -> None:
    q, sound = torch.ones(3, 1, 1), torch.tensor([0, 3], dtype=torch.int32)
    wrong = torch.tensor(edges, dtype=torch.int32)
    for at in ((wrong, sound, longest, 3), (sound, wrong, 3, longest)):
        how: Any = *at, 0.0, 1.0, False
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_forward(q, q, q, *how)
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_backward(q, q, q, q, q, q[:, 0].T, q, q, q, *how)
    with pytest.raises(ValueError, match=r"in torch.int64"):
        flash_attn_shim.varlen_forward(q, q, q, sound.long(), sound, 3, 3, 0.0, 1.0, False)
    with pytest.raises(NotImplementedError, match="no keys in pages"):
        flash_attn_shim.varlen_forward(q, q, q, sound, sound, 3, 3, 0.0, 1.0, False, block_table=sound)
    with pytest.raises(NotImplementedError, match="returns no probabilities, got return_softmax=True"):
        flash_attn_shim.varlen_forward(q, q, q, sound, sound, 3, 3, 0.0, 1.0, False, return_softmax=True)


def test_the_stand_ins_compute_under_autocast_as_without_it() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4).bfloat16() for _ in range(3))

    def both() -> tuple[torch.Tensor, ...]:
        return *flash_attn_shim.forward(q, k, v, 0.0, 0.5, True)[:2], *plain_attention.attention(q, k, v, 0.5, True)

    without = both()
    with torch.autocast("cpu", torch.bfloat16):
        under = both()
    for x, y in zip(without, under, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_the_stand_in_has_no_more_than_it_says() -> None:
    q = torch.ones(1, 2, 1, 1)
    out, lse, _, _ = flash_attn_shim.forward(q, q[:, :1], q[:, :1], 0.0, 1.0, True)  # the first row sees nothing
    assert out[0, 0, 0, 0] == 0 and lse[0, 0, 0] == math.inf and lse[0, 0, 1] == 1
    for unusual in ({"dropout_p": 0.1}, {"softcap": 1.0}, {"alibi_slopes": q}):
        arguments: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": 1.0, "causal": False} | unusual
        with pytest.raises(NotImplementedError, match="no dropout, soft cap or ALiBi"):
            flash_attn_shim.forward(q, q, q, **arguments)
    with pytest.raises(NotImplementedError, match="returns no probabilities, got return_softmax=True"):
        flash_attn_shim.forward(q, q, q, 0.0, 1.0, False, return_softmax=True)
    with pytest.raises(NotImplementedError):
        flash_attn_shim.refused(q)


@pytest.mark.parametrize("causal", (False, True))
def test_plain_attention(causal: bool) -> None:
    q, k, v = (torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse = plain_attention.attention(q, k, v, 0.3, causal)
    exact, exact_lse = attention(q.detach(), k.detach(), v.detach(), Pattern.dense(causal), scale=0.3)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    assert plain_attention.attention(q[:, :0], k[:, :0], v[:, :0], 0.3, causal)[0].shape == (2, 0, 3, 4)


@pytest.mark.parametrize(
    ("world", "kv_heads", "wanted"), ((2, 1, 1), (2, 2, 1), (3, 3, 1), (4, 1, 1), (4, 2, 2), (4, 4, 2), (4, 3, 1))
)
def test_yunchang_joins_as_many_ranks_as_leave_a_ring(world: int, kv_heads: int, wanted: int) -> None:
    case = plain(world, heads=kv_heads, kv_heads=kv_heads)
    assert yunchang.all_to_all_ranks(case) == wanted
