"""The modules of `ring.nn` computed densely in one process, in fp64, from their parameters, without their code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, rms_norm

from reference import Branch, Pattern
from tests.support.nn_ranks import TOKENS, context_of, drawn, far, grad_of, summed
from verification.training.dense.oracle_attention import oracle_attention

Weights = Mapping[str, Tensor]  # by the names of the module's parameters


def torchscale_pattern(segment_length: list[int], dilated_ratio: list[int], heads: int, causal: bool) -> Pattern:
    """Torchscale deals heads out in groups of ceil(heads / ratio), and each group begins one token later."""
    branches = []
    for length, ratio in zip(segment_length, dilated_ratio, strict=True):
        group = (heads + ratio - 1) // ratio
        branches.append(Branch(length, ratio, tuple(head // group for head in range(heads))))
    return Pattern(tuple(branches), causal)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def llama_rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x (B, N, H, D) as transformers' Llama turns it: cos and sin of D entries, each frequency twice."""
    dim = x.shape[-1]
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2).double() / dim))
    frequencies = positions.double().unsqueeze(-1) @ inverse.unsqueeze(0)  # (N, D / 2)
    both = torch.cat((frequencies, frequencies), -1).unsqueeze(-2)  # (N, 1, D)
    return x * both.cos() + rotate_half(x) * both.sin()


def self_attention(x: Tensor, w: Weights, pattern: Pattern, head_dim: int, theta: float | None) -> Tensor:
    """x (B, n, dim) of the whole sequence; the options are read off the weights' names."""
    q, k, v = (
        linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias")).unflatten(-1, (-1, head_dim)) for name in "qkv"
    )
    if "q_norm.weight" in w:
        q, k = (rms_norm(y, (head_dim,), w[f"{name}_norm.weight"], 1e-6) for name, y in (("q", q), ("k", k)))
    if theta is not None:
        positions = torch.arange(x.shape[1])
        q, k = llama_rotary(q, positions, theta), llama_rotary(k, positions, theta)
    out = oracle_attention(q, k, v, pattern).flatten(2)
    if "inner_norm.weight" in w:
        out = layer_norm(out, out.shape[-1:], w["inner_norm.weight"], w["inner_norm.bias"], 1e-5)
    return linear(out, w["o_proj.weight"], w.get("o_proj.bias"))


def longnet_block(x: Tensor, w: Weights, pattern: Pattern, head_dim: int, theta: float | None) -> Tensor:
    """x (B, n, dim) of the whole sequence."""

    def normed(y: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in w:
            return y
        return layer_norm(y, y.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    inner = {name.removeprefix("attention."): y for name, y in w.items() if name.startswith("attention.")}
    x = x + self_attention(normed(x, "attention_norm"), inner, pattern, head_dim, theta)
    hidden = gelu(linear(normed(x, "ffn_norm"), w["fc1.weight"], w["fc1.bias"]))
    return x + linear(normed(hidden, "ffn_inner_norm"), w["fc2.weight"], w["fc2.bias"])


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
    grads = [summed(grad_of(y)) for y in module.parameters()]
    exact = [context.shard(wanted), context.shard(grad_of(x)), *(y.grad for y in weights.values())]
    return far([found, mine.grad, *grads], exact)
