"""The ring on two ranks, on drawn Cases, within derived bounds."""

import torch
import torch.distributed as dist
from ci.adapter import nearest
from hypothesis import given, settings
from their_ring import ring_attention

from verification.testing import assert_attention, cases


def on_rank(case):
    here = torch.tensor(case.shards().positions[dist.get_rank()])
    *leaves, dout = (x[:, here].transpose(1, 2) for x in case.tensors()[:4])
    leaves = [x.requires_grad_() for x in leaves]
    out = ring_attention(*leaves, dist.group.WORLD)
    return [x.detach().transpose(1, 2) for x in (out, *torch.autograd.grad(out, leaves, dout))]


@given(case=cases(world=2, claims=nearest))
@settings(max_examples=20, deadline=None)
def test_the_ring_is_exact(attention_ranks, case):
    q, k, v, dout, _ = case.tensors()
    out, *grads = (torch.cat(shards, 1) for shards in zip(*attention_ranks(2).run(on_rank, case), strict=True))
    assert_attention(out, q, k, v, case.pattern, grads=grads, dout=dout, partials=2)
