"""A call of `ring_attention` on one rank: what comes back, what it needs, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference.oracle import attention
from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention
from ring.comm.transport import SoloTransport
from tests.support.attention_cases import call, inputs, plain


def test_results_have_documented_shapes_and_types() -> None:
    q, k, v, *_ = inputs(dtype=torch.float16)
    layout = Layout.contiguous(17, 1)
    alone = plain(q, k, v, Pattern.dense(), layout)
    out, lse = call(q, k, v, Pattern.dense(), layout)
    assert alone.equal(out) and alone.equal(plain(q, k, v, Pattern.dense(), layout, check=False))
    assert out.dtype is torch.float16 and lse.dtype is torch.float32 and lse.shape == (2, 4, 17)


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
    wanted = plain(q, k, v, Pattern.dense(), layout, group=SoloTransport())
    for group in (None, dist.group.WORLD):
        assert plain(q, k, v, Pattern.dense(), layout, group=group).equal(wanted)
    with pytest.raises(ValueError, match="layout must be for the 1 ranks of the group, got one for 2"):
        ring_attention(q, k, v, Pattern.dense(), TWO)


def arguments_with(**changes: Any) -> dict[str, Any]:
    q, k, v, *_ = inputs()
    return {"q": q, "k": k, "v": v, "pattern": Pattern.dense(), "layout": Layout.contiguous(17, 1)} | changes


Q, K, *_ = inputs()
TWO = Layout.contiguous(17, 2)
SINKS = torch.zeros(4, dtype=torch.float64)
Bad = tuple[str, dict[str, Any]]
BAD: list[Bad] = [
    ("pattern must be a Pattern", {"pattern": "dense"}),
    ("must be one for the 4 query heads", {"pattern": Pattern((Branch(heads=range(2, 6)),))}),
    ("for the 4 query heads, got one that was made for 6, .*heads=4", {"pattern": Pattern.longnet([8], [2], 6)}),
    ("layout must be a Layout", {"layout": 17}),
    ("group must be given, or .* for a layout of 2 ranks", {"layout": TWO}),
    ("q must have the 18 tokens", {"layout": Layout.contiguous(18, 1)}),
    ("exchange must be one of", {"exchange": "scatter"}),
    ("exchange must be one of", {"exchange": "all-to-all:2+scatter"}),
    ("exchange must divide the 1 ranks", {"exchange": "ring+all-to-all:2"}),
    ("kernel must be one of", {"kernel": "cutlass"}),
    *(("bucket must be", {"bucket": bucket}) for bucket in (0, 1.5, True)),
    *(("scale must be", {"scale": scale}) for scale in ("1", True, torch.tensor(1.0))),
    *(("softcap must be None or a number from", {"softcap": t}) for t in ("1", True, torch.tensor(1.0), 0, -2.0, 1e31)),
    *((r"sinks must be None or a dense \(4,\) tensor, .* got", {"sinks": x}) for x in (0.5, [0.0] * 4, SINKS[:2])),
    (r"sinks must be None or a dense \(4,\) tensor.*got torch.sparse_coo, shape \(4,\)", {"sinks": SINKS.to_sparse()}),
    ("sinks must have dtype torch.float64 beside q of torch.float64, got torch.float32", {"sinks": SINKS.float()}),
    (
        "sinks must have dtype torch.bfloat16 or torch.float32 beside q of torch.bfloat16, got torch.float16",
        {"q": Q.bfloat16(), "k": K.bfloat16(), "v": K.bfloat16(), "sinks": SINKS.half()},
    ),
    ("sinks must be on q's device cpu, got meta", {"sinks": SINKS.to("meta")}),
    *(
        (f"sinks must be finite, .* got {x} for query head 3", {"sinks": SINKS.new_tensor([0, 0, 0, x])})
        for x in (math.inf, math.nan)
    ),
    ("return_lse must be", {"return_lse": 1}),
    *(("q must be", {"q": q}) for q in ([1.0], Q[0])),
    ("k must be", {"k": K[None]}),
    ("v must be", {"v": None}),
    *(("k and v must have one shape", {name: K[:, :, :1]}) for name in "kv"),
    ("dtype must be one of", {"q": Q.long(), "k": K.long(), "v": K.long()}),
    ("k must have q's dtype", {"k": K.float()}),
    ("v must have q's dtype", {"v": K.half()}),
    ("k must be on q's device", {"k": K.to("meta"), "v": K.to("meta")}),
    *(("k must have q's batch", {"k": k, "v": k}) for k in (K[:1], torch.cat((K, K)), K[..., :3])),
    *(("multiple of key/value heads", {"q": q}) for q in (Q[:, :, :3], Q[:, :, :1])),
    ("must be >= 1", {"k": K[:, :, :0], "v": K[:, :, :0]}),
    ("batch, heads and head dim must be >= 1", {"q": Q[:, :, :0]}),
    ("must be >= 1", {"q": Q[..., :0], "k": K[..., :0], "v": K[..., :0]}),
    ("must be >= 1", {"q": Q[:0], "k": K[:0], "v": K[:0]}),
    ("must be >= 1", {"v": K[..., :0]}),
    ("q must have the 17 tokens", {"q": Q[:, :16]}),
    ("k must have the 17 tokens", {"k": K[:, :16], "v": K[:, :16]}),
    (
        r"q must have the 17 tokens .* 4: heads first\? Write q.transpose\(1, 2\)",
        {name: x.transpose(1, 2) for name, x in (("q", Q), ("k", K), ("v", K))},
    ),
    ("dropout_p is no .*: dropout of attention is not supported", {"dropout_p": 0.1}),
    (r"is_causal is no .*: write Pattern.dense\(causal=True\)", {"is_causal": True}),
    (r"attn_mask is no .*: masks are patterns, as Pattern.dense\(", {"attn_mask": Q}),
    (r"window_size is no .*: write Pattern.dense\(window=w\)", {"window_size": (4, 0)}),
    (r"window is no .*: write Pattern.dense\(causal=True, window=w\)", {"window": -1}),
    (r"documents is no .*: write Pattern.dense\(causal=True, documents=lengths\)", {"documents": (8, 8)}),
    ("s_aux is no .*: write sinks=s_aux", {"s_aux": SINKS}),
    (r"buket is no .*: help\(ring_attention\) lists the arguments", {"buket": 4}),
]
MISSING: list[Bad] = [  # what is right, and not there
    ("kernel 'cudnn' takes cuda tensors, got cpu", {"kernel": "cudnn"}),
    ("q must be a dense real tensor", {"q": Q.to_sparse()}),
    ("k must be a dense real tensor", {"k": K.to(torch.complex128)}),
]


@pytest.mark.parametrize("check", (True, False))
@pytest.mark.parametrize(
    ("bad", "error"), [*((b, ValueError) for b in BAD), *((b, NotImplementedError) for b in MISSING)]
)
def test_refusals_leave_the_next_call_alone(bad: Bad, error: type[Exception], check: bool) -> None:
    with pytest.raises(error, match=bad[0]):
        ring_attention(**arguments_with(**bad[1]), check=check)
    right = arguments_with()
    wanted, _ = attention(right["q"], right["k"], right["v"], right["pattern"])
    torch.testing.assert_close(plain(**right), wanted, rtol=1e-9, atol=1e-9)
