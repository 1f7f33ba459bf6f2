"""Adapters: what their claims keep of a drawn Case, and their stand-ins for kernels that need a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Pattern, attention, gradients
from tests.support import peer_examples
from tests.support.plain_case import plain
from verification.draw.cases import cases
from verification.peers import Peer, claims
from verification.peers.adapters import flash_attn_shim, with_windows, yunchang
from verification.peers.adapters.over_flash_attn import window_size
from verification.peers.adapters.ring_flash_attn_varlen import lengths
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer_experiment import claimed
from verification.search.experiment import ToolError

WINDOWED = {name: peer for name, peer in vars(with_windows).items() if isinstance(peer, Peer)}
LLAMA3 = "ring-flash-attn/llama3-varlen"
SCALE, TOKENS = 0.7, 9


@pytest.mark.parametrize("peer", [*KNOWN.values(), *WINDOWED.values()], ids=lambda peer: peer.name)
@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_a_claim_is_settled_and_keeps_what_the_implementation_takes(peer: Peer, data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(peer.worlds))))
    found = claimed(peer, case)
    assert found is not None and found.world == case.world and claimed(peer, found) == found
    assert (found.kernel, found.again, found.measured) == ("math", "alike", False)
    if not found.order.startswith("contiguous"):
        assert found.pattern.causal
    if peer.worlds == (1,):
        assert found.order == "contiguous" and found.cuts is None and found.heads == found.kv_heads
        return
    assert len(set(found.shards().counts)) == 1 and found.tokens > 0
    before, after, window = case.pattern.documents, found.pattern.documents, claims.window(found)
    assert found.pattern == Pattern.dense(found.pattern.causal, after, window)
    if peer.name.endswith(" with windows"):
        assert window == claims.window(with_windows.with_a_window(case)) is not None
    else:
        assert window is None or (peer.name == LLAMA3 and found.pattern.causal)
    if "-varlen" not in peer.name:
        assert after is None
    elif "llama3" in peer.name:  # documents are as drawn, but for the last, which ends the last shard
        assert before == after or (before is not None and after is not None and before[:-1] == after[:-1])
    else:
        edges, longest = lengths(found, len(found.ranks))
        unit = len(found.ranks) * (2 if found.order == "zigzag by document" else 1)
        assert found.batch == 1 and all(length % unit == 0 for length in after or (found.tokens,))
        assert edges[-1] == found.shards().counts[0] and edges.diff().max() == longest


@pytest.mark.parametrize(
    "documents, chunks, wanted",
    [
        ((1, 1, 1), 1, (2, 2)),  # edges 0, 2 and the end at 4: nothing is left of the first
        ((0, 3, 0, 5, 0), 1, (0, 2, 0, 6, 0)),  # the edge at 3 goes to 2; those that were drawn empty stay
        ((3, 5), 2, (8,)),
        ((4, 0, 8), 2, (4, 0, 8)),
    ],
)
def test_parts_of_documents(documents: tuple[int, ...], chunks: int, wanted: tuple[int, ...]) -> None:
    order = "zigzag by document" if chunks == 2 else "contiguous by document"
    found = claims.even_parts(plain(2, tokens=sum(documents), pattern=Pattern.dense(True, documents)), order, chunks)
    assert found.pattern.documents == wanted and found.tokens == sum(wanted) and found.cuts is None
    assert claims.even_parts(found, order, chunks) == found and len(set(found.shards().counts)) == 1


def test_the_window_of_a_case_is_that_of_the_first_branch_that_has_one() -> None:
    case = plain(2, pattern=Pattern((Branch(4), Branch(window=3), Branch(window=5)), True, (5, 7)))
    assert claims.window(case) == 3 and window_size(case) == (3, 3)
    assert claims.dense(case).pattern == Pattern.dense(True)
    assert claims.dense(case, False, windows=True).pattern == Pattern.dense(False, window=3)
    assert claims.packed(case).pattern == Pattern.dense(True, (5, 7))
    assert claims.packed(case, windows=True).pattern == Pattern.dense(True, (5, 7), 3)
    assert claims.window(plain(2)) is None and window_size(plain(2)) == (-1, -1)
    for causal in (False, True):
        found = claimed(KNOWN[LLAMA3], replace(case, pattern=Pattern.dense(causal, (5, 7), 3), dtype="float16"))
        assert found is not None and claims.window(found) == (3 if causal else None)
    for name, peer in WINDOWED.items():
        assert load(f"{with_windows.__name__}:{name}") is peer and peer.name not in KNOWN


def test_a_claim_that_is_none_is_the_adapters_fault() -> None:
    with pytest.raises(ToolError, match="claims of mine raised ZeroDivisionError"):
        claimed(peer_examples.claims_raise, plain(1))
    with pytest.raises(ToolError, match="it must be a Case with world 1, or None"):
        claimed(peer_examples.claims_other_world, plain(1))
    with pytest.raises(ToolError, match="does not support what it made itself"):
        claimed(peer_examples.claims_unsettled, plain(1))


def test_yunchang_joins_as_many_ranks_as_leave_a_ring() -> None:
    for world, heads, wanted in ((2, 2, 1), (3, 3, 1), (4, 1, 1), (4, 2, 2), (4, 4, 2), (4, 3, 1)):
        assert yunchang.all_to_all_ranks(plain(world, heads=heads, kv_heads=heads)) == wanted


def drawn(kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    draw = torch.Generator().manual_seed(kv_heads)
    return [torch.randn(1, TOKENS, heads, 3, generator=draw) for heads in (4, kv_heads, kv_heads, 4)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
@pytest.mark.parametrize("window", (None, 0, 2, 9))
def test_the_stand_in_for_flash_attn(causal: bool, kv_heads: int, window: int | None) -> None:
    """The rows are cut in two: masks are aligned to the last query and the last key, by which a window is shifted."""
    q, k, v, dout = drawn(kv_heads)
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
        grads = [torch.full_like(x, math.nan) for x in inputs]
        flash_attn_shim.backward(dout[:, rows], *inputs, out, lse, *grads, *how)
        for total, part, where in zip(sums, grads, (rows, keys, keys), strict=True):
            total[:, where] += part
    wanted = gradients(q, k, v, pattern, dout, scale=SCALE)
    torch.testing.assert_close(sums, [x.float() for x in wanted])


@pytest.mark.parametrize("causal", (False, True))
def test_the_stand_in_for_flash_attn_of_varying_lengths(causal: bool) -> None:
    q, k, v, dout = drawn(2)
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
def test_lengths_that_a_kernel_would_take_on_trust_are_checked(edges: list[int], longest: int, said: str) -> None:
    q, sound, wrong = torch.ones(3, 1, 1), torch.tensor([0, 3]).int(), torch.tensor(edges).int()
    for at in ((wrong, sound, longest, 3), (sound, wrong, 3, longest)):
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_forward(q, q, q, *at, 0.0, 1.0, False)
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_backward(q, q, q, q, q, q[:, 0].T, q, q, q, *at, 0.0, 1.0, False)
    with pytest.raises(ValueError, match=r"in torch.int64"):
        flash_attn_shim.varlen_forward(q, q, q, sound.long(), sound, 3, 3, 0.0, 1.0, False)


def test_what_the_stand_in_does_not_have_is_refused() -> None:
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


def test_the_stand_in_on_rows_that_see_nothing_and_under_autocast() -> None:
    q = torch.ones(1, 2, 1, 1)
    out, lse, _, _ = flash_attn_shim.forward(q, q[:, :1], q[:, :1], 0.0, 1.0, True)
    assert out[0, 0, 0, 0] == 0 and lse[0, 0, 0] == math.inf and lse[0, 0, 1] == 1
    inputs = [x.bfloat16() for x in drawn(4)[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        under = flash_attn_shim.attention(*inputs, 0.5, True)
    torch.testing.assert_close(under, flash_attn_shim.attention(*inputs, 0.5, True), rtol=0, atol=0)
