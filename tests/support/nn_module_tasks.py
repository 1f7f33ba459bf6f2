"""What ranks of a pool are asked to do with the modules of `ring.nn`: importable functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from reference import Pattern
from ring.nn import ContextParallel, LongNetBlock, RingAttention, SelfAttention
from tests.support import nn_dense
from tests.support.nn_ranks import TOKENS, context_of, data_index, drawn, far, mesh_of, summed

Options = dict[str, Any]
DIM, HEADS, BATCH = 16, 4, 2


def patterns() -> dict[str, Pattern]:
    return {
        "dense": Pattern.dense(),
        "causal": Pattern.dense(causal=True),
        "longnet": Pattern.longnet((4, None), (1, 2), HEADS, causal=True),
        "groups": Pattern.head_groups((5, 13), (1, 3), HEADS),  # tokens that a head does not see
    }


def in_fp64(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same parameters on every rank, none of them 0 or 1 as norms and biases begin."""
    module = build().double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(0.4 * torch.randn(x.shape, dtype=torch.float64, generator=draw))
    return module


def self_attention_error(shards: str, pattern: str, options: Options) -> float:
    who = patterns()[pattern]
    module = in_fp64(lambda: SelfAttention(DIM, HEADS, who, **options))
    assert isinstance(module, SelfAttention)
    theta, head_dim = module.rotary_theta, module.head_dim
    return _error(module, shards, lambda x, w: nn_dense.self_attention(x, w, who, head_dim, theta))


def longnet_error(shards: str, lengths: list[int], ratios: list[int], options: Options) -> float:
    who = nn_dense.torchscale_pattern(lengths, ratios, HEADS, options.get("causal", True))
    module = in_fp64(lambda: LongNetBlock(DIM, HEADS, lengths, ratios, **options))
    theta = options.get("rotary_theta", 10000.0)
    return _error(module, shards, lambda x, w: nn_dense.longnet_block(x, w, who, DIM // HEADS, theta))


def _error(module: nn.Module, shards: str, dense: Callable[[Tensor, nn_dense.Weights], Tensor]) -> float:
    """The greatest error of this rank's output, of the gradient of its input and of the parameters' summed ones."""
    context = context_of(shards)
    x, weight = drawn(1, BATCH, TOKENS, DIM), drawn(2, BATCH, TOKENS, DIM)
    mine = context.shard(x).requires_grad_()
    found = module(mine, context)
    (found * context.shard(weight)).sum().backward()

    x.requires_grad_()
    weights = {name: y.detach().clone().requires_grad_() for name, y in module.named_parameters()}
    wanted = dense(x, weights)
    (wanted * weight).sum().backward()
    assert x.grad is not None
    exact: list[Tensor | None] = [context.shard(wanted), context.shard(x.grad)]
    return far(
        [found, mine.grad, *(summed(_grad(y)) for y in module.parameters())], exact + [y.grad for y in weights.values()]
    )


def _grad(x: Tensor) -> Tensor:
    """Of a parameter: a rank without tokens has one too, of zeros."""
    assert x.grad is not None
    return x.grad


def ring_attention_error(shards: str, kv_heads: int, within: bool) -> float:
    """`RingAttention` with heads first, as a model's inner attention calls it. within: the handle is the module's."""
    context, pattern = context_of(shards), patterns()["longnet"]
    module = RingAttention(pattern, context if within else None, "inner")
    whole = [drawn(seed, BATCH, heads, TOKENS, 6) for seed, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS))]
    mine = [context.shard(x, 2).requires_grad_() for x in whole[:3]]
    given: Options = {} if within else {"context": context}
    out = module(*mine, None, 0.0, True, 0.3, enable_gqa=kv_heads != HEADS, **given)
    found = [out, *torch.autograd.grad(out, mine, context.shard(whole[3], 2))]

    q, k, v, dout = (x.transpose(1, 2) for x in whole)
    exact = nn_dense.attention(q, k, v, pattern, scale=0.3)[0]
    grads = nn_dense.gradients(q, k, v, pattern, dout, scale=0.3)
    return far(found, [context.shard(x.transpose(1, 2), 2) for x in (exact, *grads)])


def over_a_mesh(name: str) -> float:
    """Data x context: each context group has a sequence of its own, on a dimension of the mesh."""
    mesh = mesh_of(name)
    context = context_of("even", mesh["context"])
    module = in_fp64(lambda: SelfAttention(DIM, HEADS, patterns()["causal"]))
    x = drawn(10 + data_index(name), BATCH, TOKENS, DIM)
    weights = dict(module.named_parameters())
    wanted = nn_dense.self_attention(x, weights, patterns()["causal"], DIM // HEADS, 10000.0)
    return far([module(context.shard(x), context)], [context.shard(wanted)])


# --- recomputation ----------------------------------------------------------------------------------------------------


def _reentrant(module: nn.Module, x: Tensor, context: ContextParallel) -> Tensor:
    found: Tensor = checkpoint(module, x, context, context.positions_on(x.device), use_reentrant=True)
    return found


def _again(module: nn.Module, x: Tensor, context: ContextParallel) -> Tensor:
    found: Tensor = checkpoint(module, x, context=context, positions=context.positions, use_reentrant=False)
    return found


def _selective(module: nn.Module, x: Tensor, context: ContextParallel) -> Tensor:
    def kept() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.ring.attention.default])

    found: Tensor = checkpoint(module, x, context, use_reentrant=False, context_fn=kept)
    return found


WAYS = {"reentrant": _reentrant, "non-reentrant": _again, "selective": _selective}


def recomputation_error(way: str) -> float:
    """Two sequences under two layouts, through the same layers; the first one's backward comes last.

    A layer that is computed again must meet its own sequence's layout. Returns by how much the gradients differ from
    those without checkpointing.
    """
    contexts = [context_of("uneven"), context_of("empty")]
    layers = [in_fp64(lambda: LongNetBlock(DIM, HEADS, [4, 13], [1, 2]), seed) for seed in range(2)]

    def gradients(run: Callable[[nn.Module, Tensor, ContextParallel], Tensor]) -> list[Tensor]:
        inputs = [context.shard(drawn(3, BATCH, TOKENS, DIM)).requires_grad_() for context in contexts]
        outs = []
        for x, context in zip(inputs, contexts, strict=True):
            y = x
            for layer in layers:
                y = run(layer, y, context)
            outs.append(y)
        for layer in layers:
            layer.zero_grad()
        for out in reversed(outs):
            out.square().sum().backward()
        return [_grad(x).clone() for x in (*inputs, *layers[0].parameters(), *layers[1].parameters())]

    return far(gradients(WAYS[way]), gradients(lambda layer, x, context: layer(x, context)))


def in_bf16_autocast() -> tuple[str, float]:
    """The output's type, and how far a model of fp32 parameters goes from its own result in fp32."""
    context = context_of("uneven")
    torch.manual_seed(0)
    module = SelfAttention(DIM, HEADS, patterns()["causal"], qk_norm=True)
    x = context.shard(drawn(1, BATCH, TOKENS, DIM).float())
    wanted = module(x, context)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, context)
    return str(found.dtype), far([found.float()], [wanted])


def train_without_tokens() -> list[float]:
    """Some steps where one rank has no token: the parameters of all ranks, which stay equal."""
    context = context_of("one")
    module = in_fp64(lambda: LongNetBlock(DIM, HEADS, [4, 13], [1, 2]))
    optimizer = torch.optim.SGD(module.parameters(), 1e-5)
    x = context.shard(drawn(5, BATCH, TOKENS, DIM))
    losses = []
    for _ in range(3):
        loss = module(x, context).square().sum()
        loss.backward()
        for y in module.parameters():
            dist.all_reduce(_grad(y))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(summed(loss.detach())))
    return losses
