"""What losses and batches promise beside what a step asks of them: every type, every way to name the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring.nn import (
    Batch,
    ContextParallel,
    average_gradients,
    count_labels,
    cross_entropy,
    gather,
    next_tokens,
    shard_batch,
    token_mean,
)
from verification.training.material import IGNORED
from verification.training.rank.handle_calls import some_documents, within_documents
from verification.training.rank.meshes import reversed_mesh_of, small_mesh_of
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, must_be_near, refused
from verification.training.step_observation import Array

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Over = dist.ProcessGroup | DeviceMesh | None


def ways_to_name(s: CallPlace) -> Iterator[tuple[str, Over, list[int]]]:
    """Ranks that share a batch, as users may give them, with their numbers in the world. Of the last ones those that
    are not among them have nothing to call."""
    world = list(range(s.case.world))
    yield "the default group", None, world
    yield "a mesh of two dimensions", s.mesh, world
    yield "a mesh in reverse order", reversed_mesh_of(s.case), world
    group = s.mesh["context"].get_group()
    yield "a process group", group, dist.get_process_group_ranks(group)
    yield "a mesh of one dimension", s.mesh["data"], [int(x) for x in s.mesh["data"].mesh.flatten()]
    mesh = small_mesh_of(s.case, bool(s.case.seed % 2))
    yield "a mesh of some ranks", mesh, [int(x) for x in mesh.mesh.flatten()]


# --- losses -----------------------------------------------------------------------------------------------------------


def _by_the_formula(s: CallPlace) -> str:
    """Mean and gradient over ranks that are named in some way, of logits of some type, with labels of either."""
    draws, ways = s.draws(), list(ways_to_name(s))
    for number in draws.permutation(len(ways))[:3]:
        way, over, ranks = ways[number]
        dtype, kind = DTYPES[draws.integers(4)], (torch.int64, torch.int32)[draws.integers(2)]
        vocabulary, ignored = int(draws.integers(1, 6)), int(draws.choice((IGNORED, 0, 7)))
        given = [_scores(draws, vocabulary, ignored) for _ in range(s.case.world)]
        if not draws.integers(5):
            given = [(x, np.full_like(y, ignored)) for x, y in given]  # nothing is labelled
        labelled = sum(int((given[rank][1] != ignored).sum()) for rank in ranks)
        more = int(draws.integers(0, 3)) if draws.integers(2) else None
        averaged = (None, 1.0, 3)[draws.integers(3)]
        if s.rank not in ranks:
            refused(("over",), partial(count_labels, torch.zeros(1, dtype=torch.int64), over))
            continue
        logits = torch.from_numpy(given[s.rank][0]).to(s.device, dtype).requires_grad_()
        labels = torch.from_numpy(given[s.rank][1]).to(s.device, kind)
        found = cross_entropy(
            logits, labels, over, labelled=None if more is None else labelled + more, averaged_over=averaged,
            ignored=ignored,
        )  # fmt: skip
        what = f"over {way}, {ranks}, the mean cross entropy of logits in {dtype}"
        counted = max(1, labelled + (more or 0))
        exact = [_exact(torch.from_numpy(given[r][0]).to(dtype), given[r][1], ignored) for r in ranks]
        _check_mean(what, found, sum(float(each) for each, _ in exact) / counted, dtype, vocabulary)
        (grad,) = torch.autograd.grad(3.0 * found, logits)
        right = exact[ranks.index(s.rank)][1] * 3.0 * (len(ranks) if averaged is None else averaged) / counted
        must(grad.dtype == dtype, f"{what} must have a gradient in {dtype}, got {grad.dtype}")
        must_be_near(f"{what}, its gradient", grad, right, 3.0 * len(ranks) * 2 * _rounding(dtype, vocabulary, dtype))
        must(count_labels([labels, labels], over, ignored) == 2 * labelled, f"{what}: {2 * labelled} labels are there")
        _check_given(s, logits.detach(), labels, over, ignored, found.detach())
    return ""


def _scores(draws: np.random.Generator, vocabulary: int, ignored: int) -> tuple[Array, Array]:
    """logits (B, N, V) and labels (B, N), some without one."""
    shape = (int(draws.integers(1, 3)), int(draws.integers(0, 4)))
    labels = draws.integers(0, vocabulary, shape)
    return draws.uniform(-4.0, 4.0, (*shape, vocabulary)), np.where(draws.integers(0, 3, shape) == 0, ignored, labels)


def _exact(logits: Tensor, labels: Array, ignored: int) -> tuple[Tensor, Tensor]:
    """The sum of -log softmax at the labels, and its gradient, in fp64 of the rounded logits."""
    x, at = logits.double(), torch.from_numpy(labels)
    counts, chosen = at != ignored, at.clamp(0, x.shape[2] - 1)
    each = x.logsumexp(2) - x.gather(2, chosen[..., None])[..., 0]
    grad = x.softmax(2) - torch.nn.functional.one_hot(chosen, x.shape[2])
    return (each * counts).sum(), grad * counts[..., None]


def _rounding(dtype: torch.dtype, vocabulary: int, kept: torch.dtype) -> float:
    """Of numbers below 8: a softmax rounds each of V terms, the sum, the logarithm, and the result, which is kept in
    another type."""
    computed = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    return 8 * (vocabulary + 6) * computed + torch.finfo(kept).eps


def _check_mean(what: str, found: Tensor, exact: float, dtype: torch.dtype, vocabulary: int) -> None:
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    must(found.dtype == kind and found.shape == (), f"{what} must be a scalar in {kind}, got {found.dtype}")
    wanted = torch.tensor(exact, dtype=torch.float64)
    must_be_near(what, found.detach(), wanted, _rounding(dtype, vocabulary, kind) if exact else 0.0)


def _check_given(s: CallPlace, logits: Tensor, labels: Tensor, over: Over, ignored: int, mean: Tensor) -> None:
    """token_mean of losses of 2 where there is a label, and NaN elsewhere; the argument is left as it was."""
    losses = torch.full(labels.shape, 2.0, device=s.device).masked_fill(labels == ignored, torch.nan).requires_grad_()
    before = losses.detach().clone()
    found = token_mean(losses, labels, over, averaged_over=1, ignored=ignored)
    count = count_labels(labels, over, ignored)
    must_be("the mean of losses of 2", found.detach(), torch.tensor(2.0 if count else 0.0))
    (grad,) = torch.autograd.grad(found, losses)
    must_be("its gradient", grad, (labels != ignored).float() / max(1, count))
    must(torch.equal(losses.detach().nan_to_num(), before.nan_to_num()), "losses that are given must not change")


# --- batches ----------------------------------------------------------------------------------------------------------


def _next(s: CallPlace) -> str:
    draws = s.draws()
    for _ in range(4):
        batch, n, ignored = int(draws.integers(1, 3)), int(draws.integers(0, 4)), int(draws.choice((IGNORED, -1, 5)))
        kind = (torch.int64, torch.int32)[draws.integers(2)]
        tokens = torch.from_numpy(draws.integers(0, 9, (batch, n))).to(s.device, kind)
        wanted = [[*row[1:], ignored] if n else [] for row in tokens.tolist()]
        found = next_tokens(tokens, ignored) if ignored != IGNORED else next_tokens(tokens)
        must_be("the next tokens", found, torch.tensor(wanted, dtype=torch.int64).view(batch, n))
    integers = torch.zeros(1, 2, dtype=torch.int64)
    given: tuple[Any, ...] = (integers.double(), integers[0], [[1, 2]], integers.short())
    for wrong in given:
        refused(("tokens must be",), partial(next_tokens, wrong))
    return ""


def _sharded(s: CallPlace) -> str:
    """A batch of some types, whose documents stand in the place of those of the handle, and all else beside it."""
    draws, n, mine = s.draws(), s.case.tokens, s.shard()
    for _ in range(2):
        kinds = [(torch.int64, torch.int32)[x] for x in draws.integers(0, 2, 3)]
        batch = int(draws.integers(1, 3))
        handles, given = (None, some_documents(draws, n)), (None, some_documents(draws, n))
        of_handle, of_call = handles[draws.integers(2)], given[draws.integers(2)]
        documents = of_handle if of_call is None else of_call
        tokens = torch.from_numpy(draws.integers(0, 99, (batch, n))).to(s.device, kinds[0])
        labels = None if not draws.integers(4) else torch.full((batch, n), 100, device=s.device, dtype=kinds[1])
        counted = torch.arange(n) if documents is None else within_documents(documents)
        rows = (n,), (1, n), (batch, n)
        positions = counted.expand(rows[draws.integers(3)]).to(s.device, kinds[2]) if draws.integers(2) else None
        others = {
            "mask": tokens % 2 == 0, "weights": torch.from_numpy(draws.normal(size=(batch, n, 3, 2))).to(s.device),
            "halves": tokens.to(torch.bfloat16),
        }  # fmt: skip
        before = {name: x.clone() for name, x in others.items()}, tokens.clone(), None if labels is None else labels + 0
        handle = s.context.with_documents(of_handle)
        found = shard_batch(handle, tokens, labels, positions=positions, documents=of_call, **others)
        what = f"of a batch with documents {of_call} on a handle with {of_handle}"
        must_be(f"tokens {what}", found.tokens, before[1][:, mine])
        _check_labels(what, found, before[2], mine, documents)
        must_be(f"positions {what}", found.positions, counted[mine.cpu()])
        must(found.positions is found.context.positions_on(s.device), "positions of a batch must be its context's own")
        held = found.context.documents
        must((held if held is None else tuple(held)) == documents, f"the context {what} has documents {held}")
        must((of_call is not None) or found.context is handle, "without documents the context must be the one given")
        must(list(found.others) == list(others), f"others must be {list(others)}, got {list(found.others)}")
        for name, x in before[0].items():
            must_be(f"{name} {what}", found.others[name], x[:, mine])
        must(torch.equal(tokens, before[1]), "tokens that are given must not change")
        if labels is not None and before[2] is not None:
            must(torch.equal(labels, before[2]), "labels that are given must not change")
    return ""


def _check_labels(
    what: str, found: Batch, given: Tensor | None, mine: Tensor, documents: tuple[int, ...] | None
) -> None:
    if given is None:
        must(found.labels is None, f"labels {what} must be None, got {found.labels}")
        return
    wanted, at = given.clone(), 0
    for length in documents or ():
        at += length
        if length:
            wanted[:, at - 1] = IGNORED
    assert found.labels is not None
    must_be(f"labels {what}", found.labels, wanted[:, mine])


def _unchecked(s: CallPlace) -> str:
    """A handle with check=False: every rank has the tokens that it gives itself; results are put together likewise."""
    handle = ContextParallel(s.context.layout, s.context.group, check=False)
    tokens = torch.arange(s.case.tokens, device=s.device)[None] + s.rank
    found = shard_batch(handle, tokens)
    must_be("tokens that are not compared", found.tokens, tokens[:, s.shard()])
    whole = gather(handle, s.shard()[None])
    must_be("positions, gathered without a check", whole, torch.arange(s.case.tokens)[None])
    return ""


def _gathered(s: CallPlace) -> str:
    """Along any dimension, of shards that require gradients and lie anyhow: a tensor of its own, without gradient."""
    draws, n = s.draws(), s.case.tokens
    for _ in range(2):
        shape, dim = (((n, 2, 1), 0), ((2, 3, n), -1), ((2, n, 3), -2), ((1, 2, n), 2))[draws.integers(4)]
        whole = torch.from_numpy(draws.normal(size=shape)).to(s.device, DTYPES[draws.integers(4)])
        mine = whole.index_select(dim, s.shard())
        if draws.integers(2):
            mine = mine.transpose(0, 2).contiguous().transpose(0, 2)
        mine = mine.requires_grad_()
        before = mine.detach().clone()
        found = gather(s.context, mine, dim)
        must_be(f"gather along {dim}", found, whole)
        must(not found.requires_grad, "no gradient must flow through what was gathered")
        found.zero_()
        must(torch.equal(mine.detach(), before), "what was gathered must have memory of its own")
    return ""


# --- gradients --------------------------------------------------------------------------------------------------------


def _averaged_over_any_ranks(s: CallPlace) -> str:
    """The average over ranks that are named in some way; every rank of them has the same bits."""
    draws, ways = s.draws(), list(ways_to_name(s))
    for number in draws.permutation(len(ways))[:3]:
        way, over, ranks = ways[number]
        values, listed = draws.integers(-8, 8, (s.case.world, 3)), int(draws.integers(4))
        if s.rank not in ranks:
            continue
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device=s.device))
        parameter.grad = torch.from_numpy(values[s.rank].astype(np.float64)).to(s.device)
        average_gradients((parameter, [parameter], (parameter, parameter), iter([parameter]))[listed], over)
        wanted = torch.from_numpy(values[ranks].sum(0) / np.float64(len(ranks)))
        must_be(f"the average over {way}, {ranks},", parameter.grad, wanted)
    return ""


LOSS_CALLS: dict[str, OtherCall] = {
    "cross entropy by the formula": OtherCall(_by_the_formula, ""),
    "labels of the next tokens": OtherCall(_next, ""),
    "batches of any type": OtherCall(_sharded, ""),
    "batches that are not compared": OtherCall(_unchecked, ""),
    "shards that lie anyhow, gathered": OtherCall(_gathered, ""),
    "gradients averaged over any ranks": OtherCall(_averaged_over_any_ranks, ""),
}
