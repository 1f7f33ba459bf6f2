"""Wrong calls of what `ring.nn` has, made on one rank of a pool while the others call rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from reference import Pattern
from ring import Layout
from ring.nn import (
    ContextParallel,
    LongNetBlock,
    RingAttention,
    SelfAttention,
    average_gradients,
    clip_grad_norm,
    count_labels,
    cross_entropy,
    gather,
    next_tokens,
    shard_batch,
    token_mean,
)
from tests.support.nn_ranks import TOKENS, context_of, data_index, drawn, layout_of, mesh_of, said

Arguments = dict[str, Any]
DIM, VOCABULARY = 16, 7
SUM = "the sum of parts"  # stands for a DTensor that is one


def refused(what: str, changes: Arguments, on_rank: int, mesh: str = "1x4") -> str:
    """What one rank's wrong call says on this rank. Afterwards all ranks call rightly, which must go well."""
    call, right = CALLS[what](mesh)
    wrong = right | ({name: _made(value) for name, value in changes.items()} if dist.get_rank() == on_rank else {})
    answer = said(lambda: call(**wrong))
    call(**right)
    return answer


def _made(value: Any) -> Any:
    """What cannot travel to a rank is made there."""
    if value == "DTensor":
        return DTensor.from_local(torch.zeros(2, 6, DIM), mesh_of("1x4")["context"], [Shard(1)])
    if value == "sparse":
        return torch.zeros(2, TOKENS, dtype=torch.int64).to_sparse()
    return value


def _context(mesh: str) -> ContextParallel:
    return context_of("uneven", mesh_of(mesh)["context"])


def whole_tokens(seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, TOKENS), generator=draw).to(dtype)


def _self_attention(mesh: str) -> tuple[Callable[..., object], Arguments]:
    context = _context(mesh)
    module = SelfAttention(DIM, 4, Pattern.dense(causal=True), name="inner")
    return module, {"x": context.shard(drawn(1, 2, TOKENS, DIM).float()), "context": context}


def _longnet(mesh: str) -> tuple[Callable[..., object], Arguments]:
    context = _context(mesh)
    module = LongNetBlock(DIM, 4, [4], [2], name="inner")
    return module, {"x": context.shard(drawn(1, 2, TOKENS, DIM).float()), "context": context}


def _ring_attention(mesh: str) -> tuple[Callable[..., object], Arguments]:
    context = _context(mesh)
    q, k, v = (context.shard(drawn(seed, 2, 4, TOKENS, 6), 2) for seed in range(3))
    return RingAttention(Pattern.dense(causal=True)), {"query": q, "key": k, "value": v, "context": context}


def _shard_batch(mesh: str) -> tuple[Callable[..., object], Arguments]:
    tokens = whole_tokens()
    return shard_batch, {"context": _context(mesh), "tokens": tokens, "labels": next_tokens(tokens)}


def _gather(mesh: str) -> tuple[Callable[..., object], Arguments]:
    context = _context(mesh)
    return gather, {"context": context, "x": context.shard(drawn(1, 2, TOKENS, 3))}


def _local(mesh: str) -> tuple[Tensor, Tensor]:
    """logits, labels"""
    context = _context(mesh)
    labels = next_tokens(whole_tokens(data_index(mesh)))
    return context.shard(drawn(1, 2, TOKENS, VOCABULARY)), context.shard(labels)


def _cross_entropy(mesh: str) -> tuple[Callable[..., object], Arguments]:
    logits, labels = _local(mesh)
    return cross_entropy, {"logits": logits, "labels": labels, "over": mesh_of(mesh)}


def _token_mean(mesh: str) -> tuple[Callable[..., object], Arguments]:
    logits, labels = _local(mesh)
    return token_mean, {"losses": logits.sum(-1), "labels": labels, "over": mesh_of(mesh)}


def _count_labels(mesh: str) -> tuple[Callable[..., object], Arguments]:
    return count_labels, {"labels": [_local(mesh)[1]] * 2, "over": mesh_of(mesh)}


def parameters(seed: int = 0) -> list[nn.Parameter]:
    found = []
    for number, shape in enumerate(((3, 2), (5,))):
        x = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        x.grad = drawn(seed + number, *shape)
        found.append(x)
    return found


def _average_gradients(mesh: str) -> tuple[Callable[..., object], Arguments]:
    return average_gradients, {"parameters": parameters(), "over": mesh_of(mesh)}


def _clip_grad_norm(mesh: str) -> tuple[Callable[..., object], Arguments]:
    return clip_grad_norm, {"parameters": parameters(), "max_norm": 1.0, "over": mesh_of(mesh)}


CALLS: dict[str, Callable[[str], tuple[Callable[..., object], Arguments]]] = {
    "self-attention": _self_attention,
    "longnet": _longnet,
    "ring attention": _ring_attention,
    "shard_batch": _shard_batch,
    "gather": _gather,
    "cross_entropy": _cross_entropy,
    "token_mean": _token_mean,
    "count_labels": _count_labels,
    "average_gradients": _average_gradients,
    "clip_grad_norm": _clip_grad_norm,
}


# --- wrong on every rank, or before the ranks have found each other ---------------------------------------------------


def handles() -> list[str]:
    """What is said of handles that cannot be: on every rank the same, without a message."""
    four = Layout.contiguous(TOKENS, 4)
    return [
        said(lambda: ContextParallel(four, mesh_of("2x2"))),
        said(lambda: ContextParallel(four, mesh_of("2x2")["context"])),
        said(lambda: ContextParallel(Layout.contiguous(TOKENS, 5))),
        said(lambda: ContextParallel("contiguous")),  # type: ignore[arg-type]
        said(lambda: ContextParallel(four, "world")),  # type: ignore[arg-type]
    ]


def other_layouts() -> str:
    """Each rank shards by a layout of its own."""
    tokens = whole_tokens()
    answer = said(lambda: shard_batch(ContextParallel(layout_of((4, 3, 3, 3), seed=dist.get_rank() // 3)), tokens))
    shard_batch(context_of(), tokens)
    return answer


def other_data() -> str:
    """A sampler that knows of data ranks only gives rank 2 other tokens."""
    answer = said(lambda: shard_batch(context_of(), whole_tokens(int(dist.get_rank() == 2))))
    shard_batch(context_of(), whole_tokens())
    return answer


def other_names() -> str:
    others: dict[str, Any] = {"weights": drawn(0, 2, TOKENS)} if dist.get_rank() == 1 else {"segments": whole_tokens()}
    answer = said(lambda: shard_batch(context_of(), whole_tokens(), **others))
    shard_batch(context_of(), whole_tokens())
    return answer


def another_call() -> str:
    """One rank gathers while the others are in the attention."""
    call, right = _ring_attention("1x4")
    answer = said(lambda: _gather_there() if dist.get_rank() == 3 else call(**right))
    call(**right)
    return answer


def _gather_there() -> None:
    call, right = _gather("1x4")
    call(**right)


def a_loss_and_an_attention() -> tuple[str, str]:
    """One rank in a loss, the others in an attention over the same group; then all in an attention."""
    mesh = mesh_of("1x4")
    attend, arguments = CALLS["self-attention"]("1x4")
    count, labels = CALLS["count_labels"]("1x4")
    labels["over"] = mesh["context"]
    first = said(lambda: count(**labels) if dist.get_rank() == 1 else attend(**arguments))
    return first, said(lambda: attend(**arguments))
