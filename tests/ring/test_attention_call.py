"""A call of `ring_attention` on one rank: what comes back, what it needs, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference.oracle import attention
from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention
from ring.comm.buffer_memory import measure
from ring.comm.transport import RecordingTransport, SoloTransport
from tests.support.attention_cases import PATTERNS, call, inputs, plain


def test_what_comes_back() -> None:
    q, k, v, *_ = inputs(dtype=torch.float16)
    layout = Layout.contiguous(17, 1)
    alone = ring_attention(q, k, v, Pattern.dense(), layout)
    out, lse = call(q, k, v, Pattern.dense(), layout)
    assert isinstance(alone, torch.Tensor) and alone.equal(out)
    assert out.dtype is torch.float16 and lse.dtype is torch.float32 and lse.shape == (2, 4, 17)
    again = ring_attention(q, k, v, Pattern.dense(), layout, check=False)
    assert isinstance(again, torch.Tensor) and again.equal(alone)


@pytest.fixture
def alone() -> Iterator[None]:
    """A default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_without_a_group_the_default_group_is_taken() -> None:
    q, k, v, *_ = inputs()
    layout = Layout.contiguous(17, 1)
    wanted = ring_attention(q, k, v, Pattern.dense(), layout, group=SoloTransport())
    assert isinstance(wanted, torch.Tensor)
    for group in (None, dist.group.WORLD):
        found = ring_attention(q, k, v, Pattern.dense(), layout, group=group)
        assert isinstance(found, torch.Tensor) and found.equal(wanted)
    with pytest.raises(ValueError, match="layout must be for the 1 ranks of the group, got one for 2"):
        ring_attention(q, k, v, Pattern.dense(), TWO)


def test_one_rank_sends_and_holds_nothing() -> None:
    q, k, v, dout, _ = inputs()
    for exchange in ("ring", "direct", "gather"):
        transport = RecordingTransport(SoloTransport())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with measure() as found:
            out = plain(*leaves, PATTERNS["longnet"], Layout.contiguous(17, 1), group=transport, exchange=exchange)
            torch.autograd.grad(out, leaves, dout)
        assert found.bytes == 0 and transport.sent == [] == transport.received


def arguments_with(**changes: Any) -> dict[str, Any]:
    q, k, v, *_ = inputs()
    return {"q": q, "k": k, "v": v, "pattern": Pattern.dense(), "layout": Layout.contiguous(17, 1)} | changes


Q, K, *_ = inputs()
TWO = Layout.contiguous(17, 2)
BAD: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("pattern", ValueError, "pattern must be a Pattern", {"pattern": "dense"}),
    ("pattern of other heads", ValueError, "heads", {"pattern": Pattern((Branch(heads=range(2, 6)),))}),
    (
        "pattern made for other heads", ValueError, "for the 4 query heads, got one that was made for 6, .*heads=4",
        {"pattern": Pattern.longnet([8], [2], 6)},
    ),
    ("layout", ValueError, "layout must be a Layout", {"layout": 17}),
    ("layout of other ranks", ValueError, "group must be given, or .* for a layout of 2 ranks", {"layout": TWO}),
    ("layout of other tokens", ValueError, "q must have the 18 tokens", {"layout": Layout.contiguous(18, 1)}),
    ("exchange", ValueError, "exchange must be one of", {"exchange": "scatter"}),
    ("kernel", ValueError, "kernel must be one of", {"kernel": "cutlass"}),
    ("kernel", NotImplementedError, "kernel 'cudnn' takes cuda tensors, got cpu", {"kernel": "cudnn"}),
    ("no bucket", ValueError, "bucket must be", {"bucket": 0}),
    ("half a bucket", ValueError, "bucket must be", {"bucket": 1.5}),
    ("bucket as flag", ValueError, "bucket must be", {"bucket": True}),
    ("scale", ValueError, "scale must be", {"scale": "1"}),
    ("scale as flag", ValueError, "scale must be", {"scale": True}),
    ("scale as tensor", ValueError, "scale must be", {"scale": torch.tensor(1.0)}),
    ("return_lse", ValueError, "return_lse must be", {"return_lse": 1}),
    ("q as a list", ValueError, "q must be", {"q": [1.0]}),
    ("q of three dims", ValueError, "q must be", {"q": Q[0]}),
    ("k of five dims", ValueError, "k must be", {"k": K[None]}),
    ("v as None", ValueError, "v must be", {"v": None}),
    ("k unlike v", ValueError, "k and v must have one shape", {"k": K[:, :, :1]}),
    ("v unlike k", ValueError, "k and v must have one shape", {"v": K[:, :, :1]}),
    ("dtype", ValueError, "dtype must be one of", {"q": Q.long(), "k": K.long(), "v": K.long()}),
    ("dtype of k", ValueError, "k must have q's dtype", {"k": K.float()}),
    ("dtype of v", ValueError, "v must have q's dtype", {"v": K.half()}),
    ("device of k", ValueError, "k must be on q's device", {"k": K.to("meta"), "v": K.to("meta")}),
    ("batch", ValueError, "k must have q's batch", {"k": K[:1], "v": K[:1]}),
    ("more batches", ValueError, "k must have q's batch", {"k": torch.cat((K, K)), "v": torch.cat((K, K))}),
    ("head dim", ValueError, "k must have q's batch and head dim", {"k": K[..., :3], "v": K[..., :3]}),
    ("heads", ValueError, "multiple of key/value heads", {"q": Q[:, :, :3]}),
    ("fewer heads", ValueError, "multiple of key/value heads", {"q": Q[:, :, :1]}),
    ("no heads", ValueError, "must be >= 1", {"k": K[:, :, :0], "v": K[:, :, :0]}),
    ("no query heads", ValueError, "batch, heads and head dim must be >= 1", {"q": Q[:, :, :0]}),
    ("no dim", ValueError, "must be >= 1", {"q": Q[..., :0], "k": K[..., :0], "v": K[..., :0]}),
    ("no batch", ValueError, "must be >= 1", {"q": Q[:0], "k": K[:0], "v": K[:0]}),
    ("tokens", ValueError, "q must have the 17 tokens", {"q": Q[:, :16]}),
    ("key tokens", ValueError, "k must have the 17 tokens", {"k": K[:, :16], "v": K[:, :16]}),
    (
        "heads first", ValueError, r"q must have the 17 tokens .* 4: heads first\? Write q.transpose\(1, 2\)",
        {name: x.transpose(1, 2) for name, x in (("q", Q), ("k", K), ("v", K))},
    ),
    ("dropout", ValueError, "dropout_p is no .*: dropout of attention is not supported", {"dropout_p": 0.1}),
    ("causal", ValueError, r"is_causal is no .*: write Pattern.dense\(causal=True\)", {"is_causal": True}),
    ("mask", ValueError, r"attn_mask is no .*: masks are patterns, as Pattern.dense\(", {"attn_mask": Q}),
    ("window", ValueError, r"window_size is no .*: write Pattern.dense\(window=w\)", {"window_size": (4, 0)}),
    ("a misspelling", ValueError, r"buket is no .*: help\(ring_attention\) lists those", {"buket": 4}),
    ("sparse", NotImplementedError, "q must be a dense real tensor", {"q": Q.to_sparse()}),
    ("complex", NotImplementedError, "k must be a dense real tensor", {"k": K.to(torch.complex128)}),
]  # fmt: skip


@pytest.mark.parametrize("check", (True, False))
@pytest.mark.parametrize("error, message, changes", [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_wrong_arguments_are_refused_and_leave_the_next_call_alone(
    error: type[Exception], message: str, changes: dict[str, Any], check: bool
) -> None:
    with pytest.raises(error, match=message):
        ring_attention(**arguments_with(**changes), check=check)
    right = arguments_with()
    wanted, _ = attention(right["q"], right["k"], right["v"], right["pattern"])
    torch.testing.assert_close(plain(**right), wanted, rtol=1e-9, atol=1e-9)


def test_flash_refuses_a_gradient_through_lse() -> None:
    arguments = arguments_with(kernel="flash")
    arguments["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient through lse"):
        ring_attention(**arguments, return_lse=True)
    with torch.no_grad():
        call(**arguments)
