"""Which kernel a call on a CPU takes, by what is documented of `kernel`, and how `picked_kernels` counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring import Branch, Layout, Pattern, picked_kernels, ring_attention
from ring.comm.transport import SoloTransport

VECTOR = 16  # keys: of fewer the fused kernel of CPUs takes none
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern | None = None, **settings: Any
) -> Any:  # fmt: skip
    layout = Layout.contiguous(q.shape[1], 1)
    return ring_attention(q, k, v, pattern or Pattern.dense(), layout, group=SoloTransport(), **settings)


@given(
    st.sampled_from(("auto", "flash", "math")), st.sampled_from((None, 0.5, 1e-3, 0, 0.0, -0.0, -1.0)),
    st.integers(1, VECTOR) | st.integers(VECTOR, 3 * VECTOR), st.integers(1, 3), st.booleans(),
    st.sampled_from(((1, 1), (4, 2), (3, 1))), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_a_tile_goes_to_the_fused_kernel_where_that_can_take_it(
    kernel: str, scale: float | None, keys: int, folds: int, causal: bool, heads: tuple[int, int], dtype: torch.dtype,
    through_lse: bool, seed: int,
) -> None:  # fmt: skip
    """Segments of a tile are folds of it, with their keys each for themselves. No gradient goes through lse."""
    through_lse = through_lse and kernel != "flash"  # which is refused
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, keys * folds, n, 8, generator=generator).to(dtype).requires_grad_() for n in (*heads, heads[1])
    )
    with picked_kernels() as picked:
        pattern = Pattern((Branch(keys),), causal)
        found = call(q, k, v, pattern, kernel=kernel, scale=scale, return_lse=through_lse)
        results = found if isinstance(found, tuple) else (found,)
        grads = torch.autograd.grad([x.sum() for x in results], (q, k, v))
    fused = kernel != "math" and (scale is None or scale > 0) and keys >= VECTOR
    assert picked == Counter(("flash" if fused else "math", "flash" if fused and not through_lse else "math"))
    assert all(bool(x.isfinite().all()) for x in (*results, *grads))


def test_blocks_within_each_other_count_alike() -> None:
    x = torch.ones(1, 2, 1, 1, requires_grad=True)
    with picked_kernels() as both:
        with picked_kernels() as there:
            out = call(x, x, x)
        with picked_kernels() as back:
            torch.autograd.grad(out.sum(), x)
    assert there == back == Counter(["math"]) and both == there + back


@pytest.mark.parametrize("kernel", ("math", "flash"))
def test_a_block_that_has_ended_counts_no_more(kernel: str) -> None:
    x = torch.ones(1, 64, 1, 8)
    with pytest.raises(KeyError), picked_kernels() as ended:
        raise KeyError
    with picked_kernels() as first:
        call(x, x, x, kernel=kernel)
    call(x, x, x, kernel=kernel)
    assert dict(ended) == {} and dict(first) == {kernel: 1}
