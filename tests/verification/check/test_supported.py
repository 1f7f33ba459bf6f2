"""Cases on GPUs have kernels that take them, by limits that are independent of ring's and equal to them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from ring.compute.kernels import FLASH_CPU, MEASURED, NAMES
from ring.compute.kernels.kernel import HALF, HOPPER
from tests.support.plain_case import plain
from verification.case import GPU_KERNELS, KERNELS
from verification.check.expectation import bounding_kernel
from verification.check.supported import FUSED, check_supported, fused
from verification.search.experiment import on_device


@pytest.mark.parametrize(
    "changes, kernel",
    [
        ({"kernel": "math"}, "math"), ({"kernel": "flash"}, "auto"), ({"kernel": "flash", "dtype": "float16"}, "flash"),
        ({"kernel": "flash", "dtype": "float16", "head_dim": 12}, "auto"), ({"kernel": "auto", "softcap": 1.0}, "auto"),
    ],
)  # fmt: skip
def test_a_case_on_a_gpu_has_a_kernel_that_takes_it(changes: dict[str, Any], kernel: str) -> None:
    moved = on_device(plain(2, **{"head_dim": 8} | changes), "cuda")
    assert (moved.device, moved.kernel) == ("cuda", kernel)
    check_supported(moved)
    assert bounding_kernel(moved) == ("gpu" if moved.dtype == "float16" and moved.head_dim == 8 else "math")


@pytest.mark.parametrize(
    "changes, kernels",
    [
        ({"head_dim": 256}, {"flash", "cudnn", "fa4"}), ({"head_dim": 40}, {"flash", "cudnn"}), ({"head_dim": 264}, ()),
        ({"head_dim": 192, "value_dim": 128}, {"cudnn", "fa4"}), ({"head_dim": 128, "value_dim": 64}, {"cudnn"}),
        ({"head_dim": 192, "value_dim": 128, "kv_heads": 1}, {"cudnn"}), ({"head_dim": 64, "softcap": 1.0}, {"fa4"}),
        ({"head_dim": 64, "sinks": "normal", "kv_heads": 1}, {"flash", "cudnn", "fa4"}),
        ({"head_dim": 64, "dtype": "float32"}, ()),
    ],
)  # fmt: skip
def test_the_limits_of_kernels_of_gpus_are_those_of_ring(changes: dict[str, Any], kernels: set[str]) -> None:
    case = plain(1, **{"dtype": "bfloat16", "device": "cuda"} | changes)
    assert {kernel for kernel in FUSED if fused(case, kernel)} == set(kernels)
    limits = (HOPPER, *case.dims, case.heads // case.kv_heads)
    of_ring = {x.name for x in MEASURED if x.takes_dims(*limits) and x.softcap >= bool(case.softcap)}
    assert of_ring == set(kernels) or case.torch_dtype not in HALF


def test_the_kernels_of_cases_are_those_of_ring() -> None:
    assert (KERNELS, {FLASH_CPU.name, *GPU_KERNELS}) == (NAMES, {kernel.name for kernel in MEASURED})


@pytest.mark.parametrize(
    "changes, nearest",
    [
        ({"bucket": 8}, {"bucket": 16}), ({"kernel": "flash"}, {"kernel": "auto"}), ({"measured": True}, {}),
        ({"exchange": "auto"}, {"exchange": "direct"}), ({"exchange": "all-to-all+ring"}, {}),
        ({"exchange": "all-to-all", "heads": 4, "kv_heads": 1}, {"exchange": "direct"}),
        ({"exchange": "all-to-all:3+ring", "heads": 4}, {"exchange": "direct"}), ({"exchange": "all-to-all"}, {}),
    ],
)  # fmt: skip
def test_same_bits_rule_out_what_has_none(changes: dict[str, Any], nearest: dict[str, Any]) -> None:
    case = plain(3, **{"order": "chunks", "same_bits": 16} | changes)
    assert case.for_same_bits() == replace(case, **{"measured": False} | nearest)
    with (
        nullcontext() if case.for_same_bits() == case else pytest.raises(ValueError, match="same_bits is 16, bucket is")
    ):
        check_supported(case)
