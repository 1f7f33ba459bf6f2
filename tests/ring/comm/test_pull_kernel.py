"""The kernel that reads messages from the memory of other ranks, here of two on one GPU.

python -m pytest tests/ring/comm/test_pull_kernel.py
"""

from __future__ import annotations

import pytest
import torch

from ring.comm import signals
from ring.comm.copy_batch import SHARES, Flags, Lane

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FRONT = 2**12  # bytes of flags


def warm_up(sizes: tuple[tuple[int, int, int], ...]) -> None:
    """Load every kernel: CUDA may wait for all that run before it loads one, here for one that waits for another."""
    from ring.comm.pull_kernel import Puller, Waiter

    memory, done = torch.zeros(2**22, dtype=torch.uint8, device="cuda"), torch.full((1,), SHARES, device="cuda").int()
    for lane in (Lane(copies=sizes), Lane()):
        Puller([lane], memory)(memory.fill_(1).clone())
    Waiter([done.data_ptr()], done.device)()
    assert not done.any()


@pytest.mark.parametrize("sizes", [((0, 40, 16),), ((16, 0, 2**20), (2**20 + 16, 2**20 + 64, 7)), ((3, 5, 12345),)])
@pytest.mark.parametrize("readers", [(True, True), (True, False)])
def test_messages_arrive_and_flags_return_to_zero(
    sizes: tuple[tuple[int, int, int], ...], readers: tuple[bool, bool]
) -> None:
    """sizes: (source, to, bytes), also where words of 16 bytes do not divide them. Every round has other values, so a
    rank that does not wait for "ready", or for "done", reads those of another.
    """
    from ring.comm.pull_kernel import Puller, Waiter

    warm_up(sizes)
    memory = torch.zeros(2, FRONT + 2**22, dtype=torch.uint8, device="cuda")
    begins = [x.data_ptr() for x in memory]
    shared = [x[FRONT:] for x in memory]
    received = [torch.zeros(2**22 - 2, dtype=torch.uint8, device="cuda") for _ in range(2)]  # no whole words at the end
    streams, ranks = [torch.cuda.Stream() for _ in range(2)], []
    for rank, other in ((0, 1), (1, 0)):
        flags = Flags(rank, begins)
        ready = flags.share(other, rank) if readers[other] else 0
        copies = [(shared[other].data_ptr() - shared[rank].data_ptr() + source, to, size) for source, to, size in sizes]
        lane = Lane(ready, flags.share(rank, other), flags.done(other, rank), copies) if readers[rank] else Lane(ready)
        done = [flags.done(rank, other)] if readers[other] else []
        ranks.append((Puller([lane], shared[rank]), Waiter(done, memory.device)))
    assert flags.share(1, 1) + SHARES * signals.BYTES <= begins[1] + FRONT
    torch.cuda.synchronize()
    rounds, seen = 20, []
    for number in range(1, rounds + 1):
        for rank, (pull, wait) in enumerate(ranks):
            with torch.cuda.stream(streams[rank]):
                shared[rank].fill_(2 * number + rank)
                pull(received[rank] if readers[rank] else None)
                wait()
                seen.append(received[rank].clone())
    torch.cuda.synchronize()
    for place, found in enumerate(seen):
        number, rank = place // 2 + 1, place % 2
        wanted = torch.zeros_like(found)
        for _, to, size in sizes if readers[rank] else ():
            wanted[to : to + size] = 2 * number + 1 - rank
        assert torch.equal(found, wanted), (number, rank)
    assert not memory[:, :FRONT].any(), "flags"
