"""Ring attention in one file: dense causal attention over gloo, forward and backward, compared with the oracle.

    torchrun --nproc-per-node=4 scripts/minimal_ring.py

Each rank holds n/p queries, keys and values. Keys and values travel once round the ring; each rank merges what its
queries see of every block by log-sum-exp. Where `ring/` differs is marked at each place.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from reference import Pattern, attention, gradients


def shift(*blocks: Tensor) -> list[Tensor]:
    """Send each block to the next rank and return what the previous rank sent.

    ring/plan/schedule.py sends each row only to ranks that need it; ring/comm/exchange.py overlaps it with computing.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(block.shape) for block in blocks]  # contiguous, which empty_like of a view is not
    sends = [dist.P2POp(dist.isend, block.contiguous(), (rank + 1) % world) for block in blocks]
    receives = [dist.P2POp(dist.irecv, block, (rank - 1) % world) for block in received]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return received


def scores(q: Tensor, k: Tensor, owner: int) -> Tensor:
    """Return (H, Nq, Nk) scaled scores of this rank's queries and `owner`'s keys, -inf where a key lies ahead.

    ring/layout.py has layouts that share a causal mask's work evenly; ring/plan/ skips blocks that are all -inf.
    """
    rows = torch.arange(q.shape[1])
    ahead = owner * k.shape[1] + rows[None, :] > dist.get_rank() * q.shape[1] + rows[:, None]  # (Nq, Nk)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(ahead, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (H, Nq, D) and log-sum-exp (H, Nq, 1) of this rank's queries."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), torch.full((*q.shape[:2], 1), -torch.inf)
    for step in range(world):
        s = scores(q, k, (rank - step) % world)
        block_lse = s.logsumexp(-1, keepdim=True)
        total = torch.logaddexp(lse, block_lse)
        safe = total.masked_fill(total == -torch.inf, 0.0)  # a row that has seen nothing: exp(-inf - 0) = 0, not NaN
        out = (lse - safe).exp() * out + (s - safe).exp() @ v  # ring/compute/accumulator.py, in fp32 for 16 bits
        lse = total
        k, v = shift(k, v)
    return out, lse


def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of this rank; dk and dv travel with their block and are home after p steps.

    FlashAttention-2 (https://arxiv.org/abs/2307.08691), algorithm 2: ds = p (dout v^T - rowsum(dout out)).
    """
    rank, world, scale = dist.get_rank(), dist.get_world_size(), q.shape[-1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(-1, keepdim=True)  # (H, Nq, 1)
    for step in range(world):
        p = (scores(q, k, (rank - step) % world) - lse).exp()  # a causal row sees itself, so its lse is finite
        ds = p * (dout @ v.mT - delta) * scale
        dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dout
        k, v, dk, dv = shift(k, v, dk, dv)
    return dq, dk, dv


def main() -> None:
    """Compare each rank's shard with the fp64 oracle of the whole sequence."""
    dist.init_process_group("gloo")
    rank, world, heads, head_dim = dist.get_rank(), dist.get_world_size(), 4, 32
    torch.manual_seed(0)  # the same whole sequence on every rank: (1, N, H, D)
    all_q, all_k, all_v, all_dout = (torch.randn(1, 64 * world, heads, head_dim) for _ in range(4))
    q, k, v, dout = (x[0].chunk(world)[rank].transpose(0, 1) for x in (all_q, all_k, all_v, all_dout))
    out, lse = forward(q, k, v)
    shards = (out, *backward(q, k, v, out, lse, dout))
    pattern = Pattern.dense(causal=True)
    exact = (attention(all_q, all_k, all_v, pattern)[0], *gradients(all_q, all_k, all_v, pattern, all_dout))
    for name, shard, whole in zip(("out", "dq", "dk", "dv"), shards, exact, strict=True):
        error = (shard.transpose(0, 1) - whole[0].chunk(world)[rank]).abs().max()
        print(f"rank {rank}: largest error of {name:3} {error:.0e}\n", end="")
        assert error < 1e-4, f"{name} of rank {rank} is off by {error}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
