"""Calls of `ring.nn` that are right and that steps seldom make, by name: what each gives is known beforehand.

The names are saved with counter-examples: do not change them."""

from __future__ import annotations

import torch
from torch import nn

from reference.pattern import Pattern
from ring.nn import IGNORED, ContextParallel, SelfAttention, average_gradients, count_labels, gather, token_mean
from verification.training.rank.other_calls import CallPlace, OtherCall, Unlike, must_be

_ROUNDINGS = 4 * 2.0**-24  # of a mean in fp32


def _mean_of_16_bits(s: CallPlace) -> str:
    """Losses of two tokens in 16 bits: the mean is in fp32, the gradient in 16 bits, and both count all ranks."""
    world, dtype = s.case.world, torch.float16 if s.case.seed % 2 else torch.bfloat16
    losses = torch.tensor([[s.rank + 1.0, 0.25]], dtype=dtype, device=s.device, requires_grad=True)
    labels = torch.tensor([[1, IGNORED if s.rank else 1]], device=s.device)
    found = token_mean(losses, labels, s.mesh)
    exact = (sum(range(1, world + 1)) + 0.25) / (world + 1)
    if found.dtype != torch.float32 or not abs(found.item() - exact) <= _ROUNDINGS * exact:
        raise Unlike(f"the mean of losses in {dtype} must be {exact} in fp32, got {found.dtype} {found.item()!r}")
    (grad,) = torch.autograd.grad(found, losses)
    each = world / (world + 1)
    must_be("its gradient", grad, torch.tensor([[each, 0.0 if s.rank else each]], dtype=dtype))
    return repr(found.item())


def _count_of_micro_batches(s: CallPlace) -> str:
    """In both types of labels, with another one to ignore."""
    dtype = torch.int32 if s.case.seed % 2 else torch.int64
    given = [
        torch.full((1, s.rank + 1), 3, dtype=dtype, device=s.device),
        torch.zeros(1, 1, dtype=dtype, device=s.device),
    ]
    found, wanted = count_labels(given, s.mesh, 0), s.case.world * (s.case.world + 1) // 2
    if type(found) is not int or found != wanted:
        raise Unlike(f"count_labels must be {wanted}, got {found!r}")
    return str(found)


def _whole_of_any_type(s: CallPlace) -> str:
    """A tensor of some type and shape, along another dimension than the usual one; also of no entries at all."""
    n, seed = s.case.tokens, s.case.seed
    shape, dim = (((n, 0), 0), ((2, n), -1), ((n,), 0), ((1, 2, n, 3), 2))[seed % 4]
    dtype = (torch.bool, torch.uint8, torch.int16, torch.float64, torch.float16)[seed % 5]
    entries = torch.Size(shape).numel()
    whole = (torch.arange(entries, device=s.device) % 3).view(shape).to(dtype)
    must_be(f"gather along {dim}", gather(s.context, s.context.shard(whole, dim), dim), whole)
    return ""


def _angles_of_two_types(s: CallPlace) -> str:
    """A layer in fp64 gives the same bits whether or not one in fp32 was there before it, on the same handle."""
    layer = SelfAttention(4, 1, Pattern.dense(causal=True), rotary_theta=100.0).to(s.device)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.linspace(-1.0, 1.0, weight.numel()).view(weight.shape))
    x = torch.linspace(-1.0, 1.0, 4 * s.context.tokens, dtype=torch.float64, device=s.device).view(1, -1, 4)
    layer(x.float(), s.context)
    found = layer.double()(x, s.context).detach()
    must_be("a layer in fp64", found, layer(x, ContextParallel(s.context.layout, s.context.group)).detach())
    return ""


def _gradients_as_they_lie(s: CallPlace) -> str:
    """Of a transposed gradient, of one that some rank lacks, and of a parameter that is listed twice."""
    world = s.case.world
    across, lacking, nowhere = (nn.Parameter(torch.zeros(2, 3, device=s.device)) for _ in range(3))
    entries = torch.arange(6.0, device=s.device)
    across.grad = (entries.view(3, 2) + s.rank).t()
    lacking.grad = None if world > 1 and s.is_other("mesh") else torch.ones_like(lacking)
    average_gradients([across, lacking, nowhere, across], s.mesh)
    assert across.grad is not None and lacking.grad is not None
    must_be("the average of transposed gradients", across.grad, entries.view(3, 2).t() + (world - 1) / 2)
    must_be("the average where a rank has none", lacking.grad, torch.full((2, 3), max(world - 1, 1) / world))
    if nowhere.grad is not None:
        raise Unlike(f"a gradient that no rank has must stay None, got {nowhere.grad}")
    return ""


RARE_CALLS: dict[str, OtherCall] = {
    "the mean of losses in 16 bits": OtherCall(_mean_of_16_bits, "mesh"),
    "labels of micro-batches, counted": OtherCall(_count_of_micro_batches, "mesh"),
    "a tensor of any type, gathered": OtherCall(_whole_of_any_type, ""),
    "layers of two types on one handle": OtherCall(_angles_of_two_types, ""),
    "gradients averaged as they lie": OtherCall(_gradients_as_they_lie, ""),
}
