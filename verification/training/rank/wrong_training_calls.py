"""Wrong calls of `ring.nn`, by name: one rank makes a mistake, or all do, and every rank must say so.

The names are saved with counter-examples: do not change them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from reference.pattern import Pattern
from ring.nn import (
    IGNORED,
    RingAttention,
    average_gradients,
    clip_grad_norm,
    count_labels,
    cross_entropy,
    gather,
    rotary,
    shard_batch,
    token_mean,
)
from ring.nn.frameworks import checkpoint, fsdp
from verification.training.rank.meshes import reversed_mesh_of
from verification.training.rank.other_calls import CallPlace, OtherCall, refused
from verification.training.rank.resuming import shared_folder
from verification.training.training_case import VOCABULARY

Mistake = Callable[[CallPlace, bool], object]  # the call; whether this rank makes it wrongly


def _alone(word: str, call: Mistake, within: str = "mesh") -> OtherCall:
    """Wrong whatever other ranks do: made by one of the ranks, or by all."""
    return OtherCall(lambda s: refused((word,), lambda: call(s, s.is_wrong(within))), within)


def _beside(word: str, call: Mistake, within: str = "mesh") -> OtherCall:
    """Wrong because one rank differs from the others; nothing where it has none beside it."""

    def make(s: CallPlace) -> str:
        return refused((word,), lambda: call(s, s.is_other(within))) if s.place(within)[1] > 1 else ""

    return OtherCall(make, within)


def _everywhere(word: str, call: Callable[[CallPlace], object]) -> OtherCall:
    """Made by all ranks."""
    return OtherCall(lambda s: refused((word,), lambda: call(s)), "mesh")


# --- losses -----------------------------------------------------------------------------------------------------------


def _scores(s: CallPlace) -> tuple[Tensor, Tensor]:
    """logits (1, 2, V), labels (1, 2), both labelled."""
    labels = torch.ones(1, 2, dtype=torch.int64, device=s.device)
    return torch.zeros(1, 2, VOCABULARY, device=s.device), labels


def _labels(s: CallPlace, wrong: bool, change: Callable[[Tensor], Tensor]) -> Tensor:
    logits, labels = _scores(s)
    return cross_entropy(logits, change(labels) if wrong else labels, s.mesh)


def _options(s: CallPlace, wrong: bool, **options: Any) -> Tensor:
    return cross_entropy(*_scores(s), s.mesh, **options if wrong else {})


def _flat_logits(s: CallPlace, wrong: bool) -> Tensor:
    logits, labels = _scores(s)
    return cross_entropy(logits[0] if wrong else logits, labels, s.mesh)


def _losses_of_logits(s: CallPlace, wrong: bool) -> Tensor:
    logits, labels = _scores(s)
    return token_mean(logits if wrong else logits[:, :, 0], labels, s.mesh)


def _one_labelled_less(s: CallPlace) -> Tensor:
    """Fewer than those of all ranks, more than those of one."""
    return cross_entropy(*_scores(s), s.mesh, labelled=2 * s.case.world - 1)


def _micro_batches(s: CallPlace, other: bool) -> int:
    return count_labels([_scores(s)[1]] * (1 if other else 2), s.mesh)


def _over_reversed_ranks(s: CallPlace) -> str:
    """Ranks go by their numbers in the mesh, and the first that is wrong is named."""
    mesh, culprit = reversed_mesh_of(s.case), s.culprit("mesh")
    named = f"rank {0 if culprit is None else s.case.world - 1 - culprit}:"
    logits, labels = _scores(s)
    given = labels.float() if s.is_wrong("mesh") else labels
    return refused((named, "labels"), lambda: cross_entropy(logits, given, mesh))


# --- gradients --------------------------------------------------------------------------------------------------------


def _parameter(s: CallPlace, size: int = 2) -> nn.Parameter:
    found = nn.Parameter(torch.zeros(size, device=s.device))
    found.grad = torch.ones_like(found)
    return found


def _average_unlike(s: CallPlace, other: bool) -> None:
    average_gradients([_parameter(s, 3 if other else 2)], s.mesh)


def _average_sparse(s: CallPlace, wrong: bool) -> None:
    given = _parameter(s)
    if wrong:
        given.grad = torch.ones(2, device=s.device).to_sparse()
    average_gradients([given], s.mesh)


def _average_nothing(s: CallPlace, wrong: bool) -> None:
    average_gradients(iter(()) if wrong else [_parameter(s)], s.mesh)


def _clip(s: CallPlace, wrong: bool, most: float) -> Tensor:
    return clip_grad_norm([_parameter(s)], most if wrong else 1.0, s.mesh)


def _clip_unlike(s: CallPlace, other: bool) -> Tensor:
    given = _parameter(s)
    assert given.grad is not None
    given.grad *= 2e-9 if other else 1e-9  # small: squares that differ by no more than a rounding of 1
    return clip_grad_norm([given], 1.0, s.mesh)


# --- attention, batches -----------------------------------------------------------------------------------------------


def _attend(s: CallPlace, wrong: bool, kv_heads: int = 2, more: int = 0, **options: Any) -> Tensor:
    """The wrong one has so many tokens more, key/value heads or options."""
    shape = (1, 2, s.context.tokens + (more if wrong else 0), 4)  # (B, H, N, D)
    q = torch.zeros(shape, device=s.device)
    k = q[:, : kv_heads if wrong else 2]
    return RingAttention(Pattern.dense(causal=True))(q, k, k, context=s.context, **options if wrong else {})


def _gather_more(s: CallPlace, wrong: bool) -> Tensor:
    return gather(s.context, torch.zeros(1, s.context.tokens + wrong, device=s.device))


def _gather_unlike(s: CallPlace, other: bool, change: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.zeros(1, s.context.tokens, 2, device=s.device)
    return gather(s.context, change(x) if other else x)


def _sequences(s: CallPlace) -> Tensor:
    return torch.arange(s.case.tokens, device=s.device)[None]  # (1, n)


def _shard_unlike(s: CallPlace, other: bool) -> object:
    tokens = _sequences(s)
    return shard_batch(s.context, tokens + 1 if other else tokens)


def _shard_labels(s: CallPlace, wrong: bool) -> object:
    tokens = _sequences(s)
    return shard_batch(s.context, tokens, tokens[:, :-1] if wrong else tokens.roll(-1, 1))


def _shard_documents(s: CallPlace, wrong: bool) -> object:
    return shard_batch(s.context, _sequences(s), documents=(s.case.tokens, 1) if wrong else None)


# --- frameworks -------------------------------------------------------------------------------------------------------


def _policy_without_sums(s: CallPlace, dtype: torch.dtype) -> object:
    model = nn.Sequential(nn.Linear(2, 2, device=s.device))
    return fsdp.shard(model, s.mesh, nn.Linear, policy=MixedPrecisionPolicy(dtype))


def _layers_that_are_not_there(s: CallPlace) -> object:
    return fsdp.shard(nn.Sequential(nn.Linear(2, 2, device=s.device)), s.mesh, nn.Conv1d)


def _another_model(s: CallPlace, more: bool) -> str:
    """more: the checkpoint has a buffer that the model lacks; else the model has one that the checkpoint lacks."""
    small, large = (nn.Sequential(nn.Linear(2, 2, device=s.device)) for _ in range(2))
    large.register_buffer("steps", torch.zeros(1, device=s.device))
    saved, loaded = (large, small) if more else (small, large)
    error: Exception | None = None
    with shared_folder() as folder:
        checkpoint.save(folder, saved, _new_optimiser(saved))
        try:
            checkpoint.load(folder, loaded, _new_optimiser(loaded))
        except (ValueError, NotImplementedError) as found:  # looked at behind the block, at whose end all ranks meet
            error = found
    return refused(("model", "steps"), partial(_raised, error))


def _raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def _new_optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _odd_heads(s: CallPlace) -> Tensor:
    return rotary(torch.zeros(1, 2, 1, 3, device=s.device), torch.arange(2, device=s.device))


def _positions_of_others(s: CallPlace) -> Tensor:
    return rotary(torch.zeros(1, 2, 1, 4, device=s.device), torch.arange(3, device=s.device))


WRONG_CALLS: dict[str, OtherCall] = {
    "twice as many labels": _alone("labels", partial(_labels, change=lambda x: torch.cat((x, x), 1))),
    "labels that are real": _alone("labels", partial(_labels, change=torch.Tensor.float)),
    "logits of two dimensions": _alone("logits", _flat_logits),
    "losses of three dimensions": _alone("losses", _losses_of_logits),
    "averaged over nothing": _alone("averaged_over", partial(_options, averaged_over=0.0)),
    "labelled that is a flag": _alone("labelled", partial(_options, labelled=True)),
    "fewer labelled than there are": _everywhere("labelled", _one_labelled_less),
    "another label to ignore than the others": _beside("ignored", partial(_options, ignored=IGNORED - 1)),
    "another number of labelled than the others": _beside("labelled", partial(_options, labelled=99)),
    "a micro-batch less to count than the others": _beside("micro-batches", _micro_batches),
    "labels that are real, over ranks in reverse order": OtherCall(_over_reversed_ranks, "mesh"),
    "a parameter of another shape than the others": _beside("parameters", _average_unlike),
    "a sparse gradient": _alone("gradients", _average_sparse),
    "an iterator at its end": _alone("parameters", _average_nothing),
    "a norm of at most 0": _alone("max_norm", partial(_clip, most=0.0)),
    "another norm at most than the others": _beside("max_norm", partial(_clip, most=2.0)),
    "gradients that were not averaged": _beside("gradients", _clip_unlike),
    "a mask": _alone("attn_mask", partial(_attend, attn_mask=torch.ones(1)), "context"),
    "dropout": _alone("dropout_p", partial(_attend, dropout_p=0.5), "context"),
    "is_causal unlike the pattern": _alone("is_causal", partial(_attend, is_causal=False), "context"),
    "fewer heads of keys without enable_gqa": _alone("key must have", partial(_attend, kv_heads=1), "context"),
    "queries of a token more": _alone("query", partial(_attend, more=1), "context"),
    "a shard of a token more, to gather": _alone("x must", _gather_more, "context"),
    "another type than the others, to gather": _beside("dtype", partial(_gather_unlike, change=Tensor.int), "context"),
    "another size than the others, to gather": _beside(
        "other dimensions", partial(_gather_unlike, change=lambda x: x[:, :, :1]), "context"
    ),
    "other tokens than the others": _beside("tokens", _shard_unlike, "context"),
    "labels of a token less than tokens": _alone("labels", _shard_labels, "context"),
    "documents of a token too many": _alone("documents", _shard_documents, "context"),
    "a policy of bf16 that does not say in what to sum": _everywhere(
        "reduce_dtype", partial(_policy_without_sums, dtype=torch.bfloat16)
    ),
    "a policy of fp16 that does not say in what to sum": _everywhere(
        "reduce_dtype", partial(_policy_without_sums, dtype=torch.float16)
    ),
    "layers that are not there": _everywhere("layers", _layers_that_are_not_there),
    "a checkpoint with a buffer more": OtherCall(partial(_another_model, more=True), "mesh"),
    "a checkpoint with a buffer less": OtherCall(partial(_another_model, more=False), "mesh"),
    "rotary positions of an odd head dim": _everywhere("head_dim", _odd_heads),
    "rotary positions of other tokens": _everywhere("positions", _positions_of_others),
}
