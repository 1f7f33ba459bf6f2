"""Causal ring attention by a running maximum; autograd sends the gradients of keys and values back."""

import torch
import torch.distributed as dist
from torch import Tensor


def exchanged(block: Tensor, step: int, group: dist.ProcessGroup) -> Tensor:
    """Send a block so many ranks ahead, and return the one that comes."""
    block, received = block.contiguous(), torch.empty_like(block, memory_format=torch.contiguous_format)
    to, source = (group.rank() + step) % group.size(), (group.rank() - step) % group.size()
    sends = dist.P2POp(dist.isend, block, group=group, group_peer=to)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, group=group, group_peer=source)]):
        work.wait()
    return received


class Pass(torch.autograd.Function):
    """Pass a block to the next rank; its gradient goes back."""

    @staticmethod
    def forward(ctx, block: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchanged(block, 1, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return exchanged(grad, -1, ctx.group), None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the output of this rank's queries, like them (batch, heads, tokens, head dim)."""
    length, places = q.shape[2], torch.arange(q.shape[2], device=q.device)
    rows = group.rank() * length + places
    top, total, out = q.new_full((*q.shape[:3], 1), -torch.inf), 0.0, 0.0
    block = torch.stack([k, v])
    for step in range(group.size()):
        columns = (group.rank() - step) % group.size() * length + places
        scores = (q @ block[0].mT * q.shape[-1] ** -0.5).masked_fill(columns > rows[:, None], -torch.inf)
        new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        weights, kept = (scores - new).exp(), (top - new).exp()
        out, total, top = kept * out + weights @ block[1], kept * total + weights.sum(-1, keepdim=True), new
        if step < group.size() - 1:
            block = Pass.apply(block, group)
    return out / total
