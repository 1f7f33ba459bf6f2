"""Losses of whole sequences on ranks against one process in fp64: values on every rank, and averaged gradients."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ring.nn
from reference import Pattern
from ring import Layout
from ring.integrations.wrappers import ddp, fsdp
from ring.nn import (
    IGNORED,
    ContextParallel,
    SelfAttention,
    average_gradients,
    batch_mean,
    count_labels,
    cross_entropy,
    gather,
    next_tokens,
    sequence_logprobs,
    sequence_mean,
    sequence_sum,
    shard_batch,
    token_mean,
)
from tests.support.framework_example import mesh_of as mesh_of_ranks
from tests.support.framework_example import whole as without_wrapper
from tests.support.nn_ranks import MESHES, TOKENS, VOCABULARY, context_of, data_index, drawn, far, in_fp64, said
from tests.support.ranks import Ranks

EXACT = 1e-12
DOCUMENTS = (5, 0, 1, 7)
DIM, EXPERTS, MICRO_BATCHES, PADDING = 8, 3, 2, 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(DIM, 2, Pattern.dense(causal=True))
        self.router = nn.Linear(DIM, EXPERTS)

    def forward(self, x: Tensor, context: ContextParallel) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x, context)
        return x, self.router(x).softmax(-1)


class Model(nn.Module):
    """tokens (B, N) -> logits of what the loss is about, and the router's probabilities (B, N, experts, layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens: Tensor, context: ContextParallel, about: str) -> tuple[Tensor, Tensor]:
        x, routed = self.embedding(tokens), []
        for layer in self.layers:
            x, probabilities = layer(x, context)
            routed.append(probabilities)
        if about == "gathered":
            x = gather(context, x).square().mean(1)
        if about == "pooled":
            x = sequence_mean(context, x.square())
        if about == "pooled, padded":
            x = sequence_mean(context, x.square(), mask=tokens > PADDING)
        if about == "tokens beside their mean":
            x = x + sequence_mean(context, x.square())[:, None]
        return self.head(x), torch.stack(routed, -1)


class Whole(NamedTuple):
    """A micro-batch of one data rank: tokens (2, n), labels (2, n), classes of sequences (2,)."""

    tokens: Tensor
    labels: Tensor
    classes: Tensor


def whole(data_rank: int, micro_batch: int) -> Whole:
    draw = torch.Generator().manual_seed(10 * data_rank + micro_batch)
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=draw)
    labels = next_tokens(tokens).masked_fill(torch.rand(2, TOKENS, generator=draw) < 0.4, IGNORED)
    return Whole(tokens, labels, tokens[:, 0])


def sum_of_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Sums along the last dimension: (..., n, V) and (..., n) -> (...)."""
    each = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return -each.view(labels.shape).sum(-1)


def preference(logprobs: Tensor) -> Tensor:
    """A loss of pairs, as DPO's, that is not linear in the log-probabilities of sequences."""
    return -functional.logsigmoid(0.1 * (logprobs[0] - logprobs[1]))


def balancing(shares: Tensor, probabilities: Tensor) -> Tensor:
    """Mixtral's loss: means over all tokens, (experts, layers); then over layers."""
    return EXPERTS * (shares.mean(1) * probabilities.mean(1)).sum()


def chosen(probabilities: Tensor) -> Tensor:
    return functional.one_hot(probabilities.argmax(2), EXPERTS).movedim(-1, 2).to(probabilities.dtype)


def loss_of(logits: Tensor, probabilities: Tensor, x: Whole, loss: str) -> Tensor:
    """The loss of the whole batch in one process, by torch's own functions."""
    if loss in ("gathered", "pooled", "pooled, padded"):
        return functional.cross_entropy(logits, x.classes)
    if loss == "balancing":
        return balancing(*(y.mean((0, 1)) for y in (chosen(probabilities), probabilities)))
    if loss == "tokens beside their mean":
        return functional.cross_entropy(logits.flatten(0, 1), x.labels.flatten(), reduction="sum")
    pairs = zip(logits.view(-1, 2, *logits.shape[1:]), x.labels.view(-1, 2, TOKENS), strict=True)  # of a data rank
    if loss == "documents":
        ends = torch.tensor(DOCUMENTS).cumsum(0)
        last = [int(end) - 1 for length, end in zip(DOCUMENTS, ends, strict=True) if length]
        split = [
            torch.stack([sum_of_logprobs(*part) for part in zip(
                scores.split(DOCUMENTS, 1), labels.index_fill(1, torch.tensor(last), IGNORED).split(DOCUMENTS, 1),
                strict=True,
            )], 1)
            for scores, labels in pairs
        ]  # fmt: skip
        return torch.stack([preference(logprobs) for logprobs in split]).mean()
    return torch.stack([preference(sum_of_logprobs(*pair)) for pair in pairs]).mean()


def in_one_process(loss: str, data_ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole step."""
    model = in_fp64(Model)
    context = ContextParallel(Layout.contiguous(TOKENS, 1)).with_documents(DOCUMENTS if loss == "documents" else None)
    wholes = [
        Whole(*map(torch.cat, zip(*(whole(rank, number) for rank in range(data_ranks)), strict=True)))
        for number in range(MICRO_BATCHES)
    ]
    losses = []
    for x in wholes:
        logits, probabilities = model(x.tokens, context, loss)
        losses.append(loss_of(logits, probabilities, x, loss))
    if loss == "tokens beside their mean":
        value = torch.stack(losses).sum() / sum(int((x.labels != IGNORED).sum()) for x in wholes)
    else:
        value = torch.stack(losses).mean()
    value.backward()
    return value.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _on_ranks(loss: str, mesh_name: str, shards: str, wrapper: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step, as users write it."""
    mesh, inner = mesh_of_ranks(MESHES[mesh_name]), in_fp64(Model)  # not `mesh_of`: wrappers flatten it
    context, data_rank, data_ranks = context_of(shards, mesh["context"]), data_index(mesh_name), mesh["data"].size()
    model: Any = inner
    if wrapper == "ddp":
        model = ddp.wrap(inner, mesh, find_unused_parameters=True)
    if wrapper == "fsdp":
        model = fsdp.shard(inner, mesh, Layer)
    packed: dict[str, Any] = {"documents": DOCUMENTS} if loss == "documents" else {}
    wholes = [whole(data_rank, number) for number in range(MICRO_BATCHES)]
    batches = [shard_batch(context, x.tokens, x.labels, **packed) for x in wholes]
    labelled, value = count_labels([labels_of(batch) for batch in batches], mesh), torch.zeros(())
    for number, (batch, x) in enumerate(zip(batches, wholes, strict=True), 1):
        last = number == MICRO_BATCHES
        if wrapper == "fsdp":
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or wrapper != "ddp" else model.no_sync():
            logits, probabilities = model(batch.tokens, batch.context, loss)
            if loss in ("gathered", "pooled", "pooled, padded"):
                each = functional.cross_entropy(logits, x.classes, reduction="none")
                part = batch_mean(each, context, mesh, counted=2 * data_ranks * MICRO_BATCHES)
            elif loss == "balancing":
                means = [token_mean(y, None, mesh) for y in (chosen(probabilities), probabilities)]
                part = balancing(*means) / MICRO_BATCHES
            elif loss == "tokens beside their mean":
                part = cross_entropy(logits, labels_of(batch), mesh, labelled=labelled)
            else:
                each = preference(sequence_logprobs(logits, labels_of(batch), batch.context))
                part = batch_mean(each, context, mesh, counted=each.numel() * data_ranks * MICRO_BATCHES)
            part.backward()
        value = value + part.detach()
    if wrapper == "none":
        average_gradients(inner.parameters(), mesh)
    grads = {name: without_wrapper(x.grad) for name, x in inner.named_parameters() if x.grad is not None}
    return value, grads


def labels_of(batch: Any) -> Tensor:
    labels: Tensor = batch.labels
    return labels


LOSSES = ("gathered", "pooled", "pooled, padded", "tokens beside their mean", "balancing", "logprobs", "documents")


SETTINGS = (
    ("1x4", "empty", "none"),
    ("2x2", "uneven", "ddp"),
    ("2x2 apart", "one", "fsdp"),
    ("2x2 apart", "even", "none"),
)


@pytest.mark.ranks
@pytest.mark.parametrize(("mesh", "shards", "wrapper"), SETTINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_and_its_gradients(ranks: Ranks, loss: str, mesh: str, shards: str, wrapper: str) -> None:
    value, grads = in_one_process(loss, len(MESHES[mesh]))
    for found, found_grads in ranks(4).run(_on_ranks, loss, mesh, shards, wrapper):
        assert far([found], [value]) < EXACT
        for name, grad in found_grads.items():
            assert far([grad], [grads.get(name, torch.zeros_like(grad))]) < EXACT, name
        assert set(grads) <= set(found_grads)


def _sums() -> None:
    """Every dtype and dimension, with and without documents, and gradients that differ between ranks."""
    context, rank = context_of("empty"), dist.get_rank()
    packed = context.with_documents(DOCUMENTS)
    for dim, dtype in product((0, 1, -1), (torch.float64, torch.bfloat16, torch.int32, torch.bool)):
        shape = [3, 2, 4]
        shape[dim] = TOKENS
        x = (5 * drawn(1, *shape)).to(dtype)
        summed = torch.int64 if dtype in (torch.int32, torch.bool) else dtype
        found = sequence_sum(context, context.shard(x, dim), dim)
        exact = x.double().sum(dim)
        assert found.dtype == summed and far([found.double()], [exact]) <= 128 * rounding(dtype)
        split = torch.stack([part.double().sum(dim) for part in x.split(DOCUMENTS, dim)], dim)
        found = sequence_sum(packed, context.shard(x, dim), dim)
        assert found.dtype == summed and far([found.double()], [split]) <= 128 * rounding(dtype)
        if x.is_floating_point():
            lengths = torch.tensor(DOCUMENTS).clamp(min=1).view(-1, *[1] * (2 - dim % 3))
            for handle, mean in ((context, exact / TOKENS), (packed, split / lengths)):
                found = sequence_mean(handle, context.shard(x, dim), dim)
                assert found.dtype == dtype and far([found.double()], [mean]) <= 128 * rounding(dtype)
            mask = drawn(2, *shape[: dim % 3 + 1]) > 0
            mask[(0,) * (dim % 3)] = False  # a row, or a whole sequence, without tokens that count
            counted = mask.view(*mask.shape, *[1] * (2 - dim % 3))
            padded, local = x.masked_fill(~counted, math.nan), context.shard(mask, dim)
            kept, counts = x.masked_fill(~counted, 0).double(), counted.sum(dim).clamp(min=1)
            found = sequence_mean(context, context.shard(padded, dim), dim, mask=local.long())
            assert far([found.double()], [kept.sum(dim) / counts]) <= 128 * rounding(dtype)
            found = sequence_sum(packed, context.shard(padded, dim), dim, mask=local)
            split = torch.stack([part.sum(dim) for part in kept.split(DOCUMENTS, dim)], dim)
            assert far([found.double()], [split]) <= 128 * rounding(dtype)
    for dtype in (torch.float64, torch.bfloat16):
        whole, factors = drawn(2, 2, TOKENS, 3).to(dtype), [drawn(3 + r, 2, TOKENS, 3).to(dtype) for r in range(4)]
        x = context.shard(whole).requires_grad_()
        (grad,) = torch.autograd.grad((gather(context, x) * factors[rank]).sum(), x)
        asked = context.shard(torch.stack(factors).double().sum(0))
        assert grad.dtype == dtype and far([grad.double()], [asked]) <= 16 * rounding(dtype)
        (grad,) = torch.autograd.grad((sequence_sum(context, x) * factors[rank][:, 0]).sum(), x)
        asked = torch.stack(factors).double().sum(0)[:, :1].expand_as(x)
        assert grad.dtype == dtype and far([grad.double()], [asked]) <= 16 * rounding(dtype)


def _draws_of_the_page() -> tuple[int, list[float]]:
    (code,) = re.findall(
        r"```python\n(draw = .*?)```", (Path(ring.nn.__file__).parent / "README.md").read_text(), re.DOTALL
    )
    mesh = mesh_of_ranks(MESHES["2x2"])
    context = context_of("uneven", mesh["context"])
    names: dict[str, Any] = vars(ring.nn) | {
        "torch": torch, "mesh": mesh, "context": context, "dim": 3, "tokens": drawn(1, 2, TOKENS).long(),
        "hidden": context.shard(drawn(data_index("2x2"), 2, TOKENS, 3)),
    }  # fmt: skip
    exec(code, names)
    assert torch.equal(gather(context, names["batch"].others["noise"]), names["noise"])
    whole = torch.stack([drawn(rank, 2, TOKENS, 3) for rank in range(2)])
    assert far([names["mean"]], [whole.square().mean((0, 1, 2))]) < EXACT
    return data_index("2x2"), names["timesteps"].tolist()


@pytest.mark.ranks
def test_draws_are_those_of_the_data_rank(ranks: Ranks) -> None:
    times = ranks(4).run(_draws_of_the_page)
    assert len({(rank, *drawn_times) for rank, drawn_times in times}) == len({str(x) for _, x in times}) == 2


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@pytest.mark.ranks
def test_sums_and_gathers_of_every_type(ranks: Ranks) -> None:
    ranks(4).run(_sums)


def _only_on(who: str) -> str:
    """Run the backward of a loss of pooled values on some ranks only, then average."""
    context, weight = context_of("uneven"), nn.Parameter(torch.ones(3, dtype=torch.float64))
    loss = sequence_mean(context, context.shard(drawn(0, 2, TOKENS, 3)) * weight).square().sum()
    if who == "all" or dist.get_rank() == 0:
        answer = said(loss.backward)
        return said(lambda: average_gradients([weight])) if answer == "fine" else answer
    return said(lambda: average_gradients([weight]))


@pytest.mark.ranks
def test_backward_on_rank_0_alone_raises_on_all(ranks: Ranks) -> None:
    assert set(ranks(4).run(_only_on, "all")) == {"fine"}
    (answer,) = set(ranks(4).run(_only_on, "rank 0"))
    assert "calls on a group must come in the same order on every rank" in answer
    assert "the backward of call" in answer and "sequence_mean" in answer


def _over_a_part() -> list[str]:
    """Give `over` without the other context ranks, and too few losses counted."""
    context = context_of("uneven")
    one = mesh_of_ranks(((0,), (1,), (2,), (3,)))["context"]
    losses = drawn(0, 3)
    return [said(lambda: batch_mean(losses, context, one)), said(lambda: batch_mean(losses, context, counted=2))]


@pytest.mark.ranks
def test_a_mean_over_a_part_of_the_context_is_refused(ranks: Ranks) -> None:
    for part, few in ranks(4).run(_over_a_part):
        assert part.startswith("ValueError: over must hold all 4 ranks of each context group")
        assert few.endswith("micro-batches, got 2 where this call alone has 3")


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_one_process(number: float) -> None:
    context = ContextParallel(Layout.contiguous(3, 1))
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 2, IGNORED], [IGNORED] * 3])
    logprobs = sequence_logprobs(logits, labels, context)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[0, [0, 1], [1, 2]].sum() * torch.tensor([1.0, 0.0]))
    assert batch_mean(logprobs, context) == logprobs.mean() and batch_mean(logprobs[:0], context) == 0.0
    torch.testing.assert_close(batch_mean(torch.tensor(number), context), torch.tensor(number), equal_nan=True)


def test_a_mean_over_a_tree_needs_a_mask() -> None:
    context = ContextParallel(Layout.contiguous(13, 1)).with_pattern(Pattern.tree([None, 0], [5, 8]))
    x = torch.ones(1, 13)
    with pytest.raises(ValueError, match="mask must be given where the handle has a tree"):
        sequence_mean(context, x)
    assert sequence_mean(context, x, mask=(x > 0)).item() == 1.0
