"""The modules of `ring.nn` computed densely in one process, in fp64, from their parameters, without their code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, rms_norm

from reference import Pattern
from tests.support import dense_scores
from tests.support.nn_ranks import TOKENS, context_of, drawn, far, grad_of
from verification.models.formulas import oracle_attention, rotated

Weights = Mapping[str, Tensor]  # by the names of the module's parameters


def self_attention(
    x: Tensor, w: Weights, pattern: Pattern, head_dim: int, theta: float | None = 10000.0, *,
    value_head_dim: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """x (B, n, dim) of the whole sequence; the other options are read off the weights' names."""
    dims = head_dim, head_dim, head_dim if value_head_dim is None else value_head_dim
    q, k, v = (
        linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias")).unflatten(-1, (-1, dim))
        for name, dim in zip("qkv", dims, strict=True)
    )
    if "q_norm.weight" in w:
        q, k = (rms_norm(y, (head_dim,), w[f"{name}_norm.weight"], 1e-6) for name, y in (("q", q), ("k", k)))
    if theta is not None:
        q, k = (rotated(y, torch.arange(x.shape[1]), theta) for y in (q, k))
    if "sinks" in w or softcap is not None or value_head_dim is not None:
        attended, _ = dense_scores.dense(q, k, v, pattern, softcap=softcap, sinks=w.get("sinks"))
    else:
        attended, _ = oracle_attention(q, k, v, pattern)
    out = _normed(attended.flatten(2), w, "inner_norm")
    return linear(out, w["o_proj.weight"], w.get("o_proj.bias"))


def longnet_block(x: Tensor, w: Weights, pattern: Pattern, head_dim: int, theta: float | None = 10000.0) -> Tensor:
    """x (B, n, dim) of the whole sequence."""
    inner = {name.removeprefix("attention."): y for name, y in w.items() if name.startswith("attention.")}
    x = x + self_attention(_normed(x, w, "attention_norm"), inner, pattern, head_dim, theta)
    hidden = gelu(linear(_normed(x, w, "ffn_norm"), w["fc1.weight"], w["fc1.bias"]))
    return x + linear(_normed(hidden, w, "ffn_inner_norm"), w["fc2.weight"], w["fc2.bias"])


def _normed(x: Tensor, w: Weights, name: str) -> Tensor:
    return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5) if f"{name}.weight" in w else x


def module_error(module: nn.Module, shards: str, dense: Callable[[Tensor, Weights], Tensor]) -> float:
    """The greatest error, on this rank of four, of a module's output, of the gradient of its input (2, n, 16), and of
    the sum over the ranks of the gradients of its parameters. A rank without tokens has gradients of zeros."""
    context = context_of(shards)
    x, weight = drawn(1, 2, TOKENS, 16), drawn(2, 2, TOKENS, 16)
    mine = context.shard(x).requires_grad_()
    found = module(mine, context)
    (found * context.shard(weight)).sum().backward()

    x.requires_grad_()
    weights = {name: y.detach().clone().requires_grad_() for name, y in module.named_parameters()}
    wanted = dense(x, weights)
    (wanted * weight).sum().backward()
    grads = [grad_of(y) for y in module.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    exact = [context.shard(wanted), context.shard(grad_of(x)), *(y.grad for y in weights.values())]
    return far([found, mine.grad, *grads], exact)
