"""The kernel that writes rows of a tensor into buffers, here three on one GPU.

python -m pytest tests/ring/comm/test_put_kernel.py
"""

from __future__ import annotations

import pytest
import torch

from ring.comm.put_table import entries
from ring.comm.transport import Put, Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS, HEADS = 150, 6
TARGETS = (
    (range(100), range(2), 6, 2),
    (range(1, ROWS, 3), range(1, HEADS), 0, HEADS + 2),
    (range(100, ROWS), range(HEADS - 1, HEADS), 5, 1),
)  # rows, heads, first slot and slots of a row, by rank


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(
    ("batch", "dim", "dtype"), [(1, 128, torch.bfloat16), (2, 5, torch.float64), (3, 1, torch.float32)]
)
def test_rows_arrive_at_their_places(batch: int, dim: int, dtype: torch.dtype, transposed: bool) -> None:
    """Also with strides, and starts, that 16-byte words do not divide."""
    from ring.comm.put_kernel import Putter

    shape = (batch, HEADS, ROWS, dim) if transposed else (batch, ROWS, HEADS, dim)
    x = torch.randn(shape, device="cuda").to(dtype)
    x = x.transpose(1, 2) if transposed else x
    memory = torch.zeros(3, 20 * ROWS, batch * dim, dtype=dtype, device="cuda")
    wanted = memory.cpu()
    for buffer, (rows, heads, first, step) in zip(wanted, TARGETS, strict=True):
        for number, row in enumerate(rows):
            slots = x[:, row, heads.start : heads.stop].cpu().transpose(0, 1).reshape(len(heads), -1)
            buffer[first + number * step :][: len(heads)] = slots
    put = Put("x", x, tuple(Target(peer, *target) for peer, target in enumerate(TARGETS)), memory[0])
    found = entries(
        put.targets, 0, lambda peer: (memory[peer].data_ptr() - memory.data_ptr()) // x.itemsize, batch * dim
    )
    Putter(found, memory.view(-1))(x, put.own)
    assert torch.equal(memory.cpu(), wanted)
