"""Which torch operations a kernel asks for: how large what it makes is, and the strides that it hands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring.compute import kernels
from ring.compute.math_kernel import SavedRows
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile
from ring.strided_view import batched


class Operations(TorchDispatchMode):
    """The most numbers of a tensor that an operation gave back, and the arguments of fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.fused: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention" in str(func):
            self.fused += [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 4]
        found = func(*args, **kwargs or {})
        made = [x for x in (found if isinstance(found, tuple | list) else [found]) if isinstance(x, torch.Tensor)]
        self.most = max([self.most, *(x.numel() for x in made)])
        return found


def watched(name: str, q: torch.Tensor, k: torch.Tensor, dout: torch.Tensor) -> Operations:
    """Forward and backward of a full tile with values like its keys."""
    heads = Heads.of((tuple(range(q.shape[3])),))
    tile = Tile(Rows(0, 1, q.shape[4]), Rows(0, 1, k.shape[4]), heads, heads, Mask.FULL)
    with Operations() as seen:
        out, lse = kernels.forward(name, q, k, k, tile, 0.5)
        kernels.backward(name, q, k, k, SavedRows(dout, out, lse, (dout * out).sum(-1)), tile, 0.5)
    return seen


SIZES = [  # folds, batch, groups, share, queries, keys, dim
    (2, 1, 3, 3, 64, 256, 16), (2, 1, 3, 1, 1, 1000, 8), (2, 1, 3, 1, 40, 8, 40), (40, 1, 1, 1, 64, 64, 4),
    (1, 40, 1, 1, 64, 64, 4),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_the_math_kernels_scores_are_no_larger_than_its_operands(size: tuple[int, ...]) -> None:
    """But for 8 query rows, which it takes at least at a time."""
    folds, batch, groups, share, queries, keys, dim = size
    q, k = torch.randn(folds, batch, groups, share, queries, dim), torch.randn(folds, batch, groups, 1, keys, dim)
    least = folds * batch * groups * share * min(8, queries) * keys
    assert watched("math", q, k, torch.ones_like(q)).most == max(q.numel(), k.numel(), least)


def apart(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x with its numbers elsewhere in memory, and one like it that has the same number all along the head dim."""
    wide = x.repeat_interleave(2, -1)
    return {
        "as it is": x,
        "every other number": wide[..., ::2],
        "rows innermost": x.mT.contiguous().mT,
        "one number in all": x[..., :1].expand(x.shape),
    }


@pytest.mark.parametrize("dim", (1, 8))
@pytest.mark.parametrize("how", apart(torch.zeros(1, 1)))
def test_fused_kernels_on_cpus_are_given_head_dims_without_gaps(how: str, dim: int) -> None:
    """torch 2.11 takes them to have none, without looking. What has none is not copied."""
    q, k, dout = (apart(torch.randn(2, 1, 3, 1, 20, dim))[how] for _ in range(3))
    seen = watched("flash", q, k, dout)
    assert len(seen.fused) == 3 + 5  # q, k, v; dout, q, k, v, out
    assert dim == 1 or all(x.stride(3) == 1 for x in seen.fused)
    assert how != "as it is" or seen.fused[0].data_ptr() == q.data_ptr()


STRIDED = {  # of (batch, head, row), and where it begins, in numbers of 2 bytes; strides of what is given, None: a copy
    "rows of a shard": ((2, 3, 5), (120, 8, 24), 0, (120, 8, 24)),
    "heads of a shard apart": ((2, 3, 5), (256, 16, 48), 8, (256, 16, 48)),
    "begins elsewhere": ((2, 3, 5), (120, 8, 24), 4, None),
    "batches elsewhere": ((2, 3, 5), (124, 8, 24), 0, None),
    "heads elsewhere": ((2, 3, 5), (160, 12, 32), 0, None),
    "rows elsewhere": ((2, 3, 5), (160, 8, 28), 0, None),
    "one batch, wherever the next would be": ((1, 3, 5), (7, 8, 24), 0, (120, 8, 24)),
    "one head, wherever the next would be": ((2, 1, 5), (120, 3, 24), 0, (120, 120, 24)),
    "one row, wherever the next would be": ((2, 3, 1), (120, 8, 5), 0, (120, 8, 8)),
    "one of each": ((1, 1, 1), (3, 5, 7), 0, (8, 8, 8)),
    "every row the same": ((2, 3, 5), (24, 8, 0), 0, (24, 8, 0)),
}


@pytest.mark.parametrize(("sizes", "strides", "begin", "wanted"), STRIDED.values(), ids=STRIDED)
def test_rows_for_gpus_begin_at_multiples_of_16_bytes(
    sizes: tuple[int, ...], strides: tuple[int, ...], begin: int, wanted: tuple[int, ...] | None
) -> None:
    """And where there is one batch, head or row, its stride is what it would be were the rest contiguous."""
    x = torch.arange(512, dtype=torch.bfloat16).as_strided((*sizes, 8), (*strides, 1), begin)
    found = batched(x[None, :, :, None])
    assert torch.equal(found, x) and (found.data_ptr() == x.data_ptr()) is (wanted is not None)
    assert found.is_contiguous() if wanted is None else found.stride() == (*wanted, 1)


def test_rows_for_gpus_have_their_numbers_side_by_side() -> None:
    x = torch.arange(2048, dtype=torch.bfloat16).view(2, 32, 4, 8).transpose(1, 3)[None, :, :, None]
    found = batched(x)
    assert torch.equal(found, x.reshape(found.shape)) and found.is_contiguous()
