"""LongNet's block against an independent dense computation, and the configurations of torchscale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference import Pattern
from ring import Layout
from ring.nn import ContextParallel, LongNetBlock, longnet_pattern
from tests.support import nn_dense
from tests.support.nn_ranks import UNEVEN, in_fp64
from tests.support.ranks import Ranks

DIM, HEADS = 16, 4


def _error(shards: str, lengths: list[int], ratios: list[int], options: dict[str, Any]) -> float:
    who = nn_dense.torchscale_pattern(lengths, ratios, HEADS, options.get("causal", True))
    module = in_fp64(lambda: LongNetBlock(DIM, HEADS, lengths, ratios, **options))
    theta = options.get("rotary_theta", 10000.0)
    return nn_dense.module_error(
        module, shards, lambda x, w: nn_dense.longnet_block(x, w, who, DIM // HEADS, theta)
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shards", "lengths", "ratios", "options"),
    [
        *((shards, [4, 13], [1, 2], {}) for shards in UNEVEN),
        ("uneven", [5], [3], {"causal": False}),
        ("uneven", [2, 4, 20], [1, 2, 4], {"kv_heads": 2, "ffn_dim": 10}),
        ("uneven", [4, 8], [1, 6], {"subln": False, "rotary_theta": None}),
    ],
)
def test_output_and_gradients(
    ranks: Ranks, shards: str, lengths: list[int], ratios: list[int], options: dict[str, Any]
) -> None:
    errors = ranks(4).run(_error, shards, lengths, ratios, options)
    assert max(errors) < 1e-12  # fp64, outputs and gradients of the order of 1 to 100


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_the_pattern_is_torchscales(heads: int) -> None:
    lengths, ratios = [2048, 4096, 8192], [1, 2, 4]
    for causal in (True, False):
        wanted = nn_dense.torchscale_pattern(lengths, ratios, heads, causal)
        assert longnet_pattern(lengths, ratios, heads, causal) == wanted
        assert longnet_pattern("[2048,4096,8192]", "[1, 2, 4]", heads, causal) == wanted
        assert longnet_pattern(" (2048, 4096, 8192) ", (1, 2, 4), heads, causal) == wanted
    assert longnet_pattern(lengths, ratios, heads, offsets="paper") == Pattern.longnet(lengths, ratios, heads, True)


@pytest.mark.parametrize(
    "lengths, ratios, message",
    [
        ("", "[1]", "segment_length must be integers >= 1, .* got ''"),
        ("[2048", "[1]", "segment_length must be integers >= 1, .* got '\\[2048'"),
        ("__import__('os')", "[1]", "segment_length must be integers >= 1"),
        ([], [], "segment_length must be integers >= 1"),
        (2048, [1], "segment_length must be integers >= 1, .* got 2048"),
        ([2048, 0], [1, 2], "segment_length must be integers >= 1"),
        ([2048], [True], "dilated_ratio must be integers >= 1"),
        ([2048], [1.0], "dilated_ratio must be integers >= 1"),
        ([2048], "[1,2]", "dilated_ratio must have one entry for each of segment_length, \\[2048\\], got \\[1, 2\\]"),
        (None, [1], "segment_length must be integers >= 1, .* got None"),
    ],
)
def test_wrong_configurations_are_refused(lengths: Any, ratios: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongNetBlock(16, 4, lengths, ratios)


@pytest.mark.parametrize("sizes", [{"dim": 0}, {"ffn_dim": 0}, {"heads": 3}])
def test_wrong_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LongNetBlock(**{"dim": 16, "heads": 4, "segment_length": [4], "dilated_ratio": [1]} | sizes)  # type: ignore[arg-type]


def test_half_precision() -> None:
    torch.manual_seed(0)
    block = LongNetBlock(16, 4, [4, 9], [1, 2])
    x, context = torch.randn(2, 9, 16), ContextParallel(Layout.contiguous(9, 1))
    wanted = block(x, context)
    found = block.bfloat16()(x.bfloat16(), context)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.0, atol=0.1)  # bf16 has 8 bits; outputs up to 4
