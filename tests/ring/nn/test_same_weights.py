"""`SameWeights`: the same parameters, losses and norms on any data x context; refusals before the first step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from reference.documents import Documents
from ring import Layout
from ring.nn import (
    ContextParallel,
    SameWeights,
    average_gradients,
    clip_grad_norm,
    cross_entropy,
    gather,
    next_tokens,
    sequence_logprobs,
    sequence_mean,
    sequence_sum,
    shard_batch,
    token_mean,
)
from ring.nn.batch_group import BatchRanks
from ring.nn.same_weights import gradient_sums
from ring.nn.same_weights.chunk_rows import ChunkRows
from ring.nn.same_weights.gradient_sums import GradientSums, Held
from tests.support.chunked_model import CHUNK, TOKENS, VOCABULARY, Model, bits
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_thread")]
SEQUENCES = 6
DOCUMENTS = (70, 0, 3, 55, 64)


def dealt(n: int, p: int, documents: tuple[int, ...] | None) -> Layout:
    """Whole chunks in a random order, of four ranks in even shards: two chunks each, or more."""
    if p < 4:
        return Layout.whole_chunks(n, p, CHUNK, documents)
    chunks, begin, drawn = [], 0, random.Random(p)
    for length in documents or (n,):
        chunks += [range(begin + at, begin + min(at + CHUNK, length)) for at in range(0, length, CHUNK)]
        begin += length
    drawn.shuffle(chunks)
    ends = list(accumulate(map(len, chunks), initial=0))
    return Layout.from_cuts([i for chunk in chunks for i in chunk], [ends[len(chunks) * r // p] for r in range(p + 1)])


def _trained(
    data: int, micro_batches: int, dtype: torch.dtype, documents: tuple[int, ...] | None, recompute: str, autocast: bool
) -> list[Tensor]:
    """Bits of parameters and moments after three steps, of each step's norm and, of one micro-batch, loss."""
    mesh = dist.init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("data", "context"))
    torch.manual_seed(3)
    with patch.object(gradient_sums, "BUCKET", 2**12 if data == 1 else gradient_sums.BUCKET):
        model = SameWeights(Model(recompute).to(dtype), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    layout = dealt(TOKENS, mesh["context"].size(), documents)
    context, found = ContextParallel(layout, mesh["context"], same_bits=CHUNK), []
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))
        labels = next_tokens(tokens, documents=documents)
        labels[:, 5:40] = -100
        parts = zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
        for number, part in enumerate(parts, 1):
            own = (x.chunk(data)[mesh["data"].get_local_rank()] for x in part)
            batch = shard_batch(context, *own, documents=documents)
            with nullcontext() if number == micro_batches else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(batch.tokens, batch.context)
                loss = cross_entropy(logits, batch.labels, model, labelled=int((labels != -100).sum()))  # type: ignore[arg-type]
                loss.backward()
        found += [bits(clip_grad_norm(model.parameters(), 0.5, model))] + ([bits(loss)] if micro_batches == 1 else [])
        optimizer.step()
        optimizer.zero_grad()
    states = [x for state in optimizer.state.values() for x in (state["exp_avg"], state["exp_avg_sq"])]
    return [*map(bits, (*model.parameters(), *states)), *found]


SETTINGS: dict[str, tuple[torch.dtype, tuple[int, ...] | None, str, bool]] = {
    "fp32": (torch.float32, None, "none", False),
    "fp64, recomputed": (torch.float64, DOCUMENTS, "non-reentrant", False),
    "documents, recomputed with reentry": (torch.float32, DOCUMENTS, "reentrant", False),
    "bf16 by autocast": (torch.float32, DOCUMENTS, "none", True),
}


SLOW = ("fp64, recomputed", "bf16 by autocast")  # drawn steps have these too


@pytest.mark.parametrize(
    "setting",
    [pytest.param(x, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, x in SETTINGS.items()],
)
def test_any_ranks_train_one_model(ranks: Ranks, setting: Any) -> None:
    (wanted,) = ranks(1).run(_trained, 1, 1, *setting)
    for world, data in ((2, 2), (3, 1), (3, 3), (4, 1), (4, 2)):
        for found in ranks(world).run(_trained, data, 1, *setting):
            assert all(map(torch.equal, found, wanted)), (world, data)


@pytest.mark.parametrize("world, data, micro_batches", [(1, 1, 3), (2, 2, 3), (3, 1, 2)])
def test_micro_batches_add_up_to_the_same_step(ranks: Ranks, world: int, data: int, micro_batches: int) -> None:
    parameters = len(list(Model().parameters()))
    whole = ranks(1).run(_trained, 1, 1, *SETTINGS["fp32"])[0]
    parts = ranks(world).run(_trained, data, micro_batches, *SETTINGS["fp32"])[0]
    assert all(map(torch.equal, parts[: 3 * parameters], whole[: 3 * parameters]))


class Activated(nn.Module):
    """A function between modules of sizes that fill no vectors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(VOCABULARY, 9), nn.Linear(9, 7), nn.Linear(7, VOCABULARY)
        self.function = function

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel) -> Tensor:
        x = self.up(self.embedding(tokens) * (1 + 0.01 * positions[:, None]))
        return self.down(self.function(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "SiLU": nn.SiLU(),
    "gelu": functional.gelu,
    "tanh": partial(functional.gelu, approximate="tanh"),
    "power": lambda x: x.abs() ** 0.3 + x.exp(),
    "elu": functional.elu,
    "in place": lambda x: functional.silu(functional.relu(x, inplace=True)),
    "the most of a row": lambda x: x - x.max(-1, keepdim=True).values,  # not elementwise, as max of two tensors is
    "mantissa": lambda x: x * torch.frexp(x).exponent,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_elements_at_the_end_have_the_bits_of_others(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Torch computes those that fill no vector by other code."""
    tokens, found = torch.randint(VOCABULARY, (4, 50), generator=torch.Generator().manual_seed(1)), []
    context = ContextParallel(Layout.whole_chunks(50, 1, CHUNK), same_bits=CHUNK)
    for parts in (1, 2, 4):
        torch.manual_seed(1)
        model = Activated(function).to(dtype)
        same = SameWeights(model)
        for number, part in enumerate(tokens.chunk(parts), 1):
            batch = shard_batch(context, part, next_tokens(part))
            with nullcontext() if number == parts else same.no_sync():
                logits = same(batch.tokens, batch.positions, batch.context)
                cross_entropy(logits, batch.labels, same, labelled=196).backward()  # type: ignore[arg-type]
        found.append([bits(x.grad) for x in model.parameters() if x.grad is not None])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_several_threads_are_refused() -> None:
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="must be 1 on CPUs, got 2: .* Write torch.set_num_threads"):
        SameWeights(Model())


def _step(model: nn.Module, compare: bool = True, world: Any = None) -> SameWeights:
    """A step of a model on one rank, without a group."""
    torch.manual_seed(1)
    same = SameWeights(model, compare=compare)
    context = ContextParallel(Layout.contiguous(TOKENS, 1), same_bits=CHUNK)
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    batch = shard_batch(context, tokens, next_tokens(tokens))
    assert batch.labels is not None
    cross_entropy(same(batch.tokens, batch.context), batch.labels, same).backward()
    return same


def test_gradients_are_those_of_a_plain_model() -> None:
    torch.manual_seed(2)
    plain, fixed = Model().double(), Model().double()
    fixed.load_state_dict(plain.state_dict())
    _step(fixed)
    torch.manual_seed(1)
    context = ContextParallel(Layout.contiguous(TOKENS, 1))
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    batch = shard_batch(context, tokens, next_tokens(tokens))
    assert batch.labels is not None
    cross_entropy(plain(batch.tokens, batch.context), batch.labels).backward()
    for x, y in zip(plain.parameters(), fixed.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-14)


class Shift(nn.Module):
    """A module that adds the token before, within what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Broken(Model):
    """A model with something between its modules."""

    def __init__(self, between: Callable[[Broken, Tensor], Tensor]) -> None:
        super().__init__()
        self.between, self.dropout, self.batch_norm = between, nn.Dropout(0.1), nn.BatchNorm1d(32, affine=False)
        self.count: Tensor
        self.shift = Shift()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        return self.head(self.norm(self.blocks[0](self.between(self, self.embedding(tokens)), context)))


REFUSED: dict[str, tuple[Callable[[Broken, Tensor], Tensor], str]] = {
    "dropout": (lambda model, x: model.dropout(x), r"the output of dropout \(Dropout\)"),
    "a mean over tokens": (lambda model, x: x - x.mean(1, keepdim=True), r"the output of blocks.0"),
    "a mean of gradients": (lambda model, x: x + (x.mean(1, True) - x.mean(1, True).detach()), "the gradient of"),
    "the token before": (lambda model, x: x + x.roll(1, 1), r"the output of blocks.0"),
    "the token before, in a module": (lambda model, x: model.shift(x), r"module 'shift' \(Shift\) must compute each"),
    "statistics": (lambda model, x: model.batch_norm(x.mT).mT, r"the output of batch_norm|buffers must stay"),
    "a count": (lambda model, x: x + 0 * model.count.add_(1), r"buffers must stay .* changes count"),
    "a direct use": (lambda model, x: x + model.norm.weight, r"parameters must be used by calls .* norm.weight"),
    "other rows": (lambda model, x: model.norm(x.flatten(0, 1)).view_as(x), r"module 'norm' \(LayerNorm\) must be c"),
}  # fmt: skip


@pytest.mark.parametrize("between, message", REFUSED.values(), ids=REFUSED)
def test_refuses_what_mixes_tokens_by_name(between: Callable[[Broken, Tensor], Tensor], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        _step(Broken(between))


class Embedded(Model):
    """A model with an embedding of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, **options)
        self.head = nn.Linear(32, VOCABULARY)


@pytest.mark.parametrize("options, message", [
    ({"max_norm": 1.0}, r"module 'embedding' \(Embedding\) must leave its parameters as they are"),
    ({"sparse": True}, r"module 'embedding' \(Embedding\) must have dense gradients, got torch.sparse_coo: write"),
])  # fmt: skip
def test_embeddings_that_cannot_be_held_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        _step(Embedded(**options))


def test_dropout_that_begins_later_is_refused() -> None:
    """The comparison was before the first step, and this is seen in each."""
    model = Broken(lambda model, x: model.dropout(x))
    model.dropout.p = 0.0
    same = _step(model)
    same.zero_grad()
    model.dropout.p = 0.5
    context = ContextParallel(Layout.contiguous(TOKENS, 1), same_bits=CHUNK)
    with pytest.raises(NotImplementedError, match="must draw no random numbers, but this forward drew some"):
        same(torch.zeros(2, TOKENS, dtype=torch.long), context)
    with torch.no_grad():
        same(torch.zeros(2, TOKENS, dtype=torch.long), context)


def test_a_comparison_leaves_nothing_behind() -> None:
    torch.manual_seed(7)
    first, second = Model(), Model()
    second.load_state_dict(first.state_dict())
    before = torch.get_rng_state()
    _step(first)
    torch.set_rng_state(before)
    _step(second, compare=False)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(first.parameters(), second.parameters(), strict=True))  # type: ignore[arg-type]


def test_one_chunk_alone_cannot_be_compared() -> None:
    same = SameWeights(Model())
    context = ContextParallel(Layout.contiguous(CHUNK, 1), same_bits=CHUNK)
    with pytest.raises(ValueError, match="two chunks or sequences, which are compared, got one"):
        same(torch.zeros(1, CHUNK, dtype=torch.long), context)


class Beside(nn.Module):
    """A module with a parameter beside modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.sinks = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))


def _again(same: SameWeights, context: ContextParallel, x: Tensor) -> None:
    out = same(x, context)
    same(x, context)
    out.sum().backward()


def _twice(same: SameWeights, context: ContextParallel, x: Tensor) -> None:
    out = same(x, context)
    out.sum().backward(retain_graph=True)
    same.zero_grad()
    out.sum().backward()


def _with_gradients(same: SameWeights, context: ContextParallel, x: Tensor) -> None:
    for _ in range(2):
        same(x, context).sum().backward()


def _other_loss(same: SameWeights, context: ContextParallel, x: Tensor) -> None:
    cross_entropy(same(x, context), x).backward()


def _hooked(same: SameWeights, context: ContextParallel, x: Tensor) -> None:
    next(same.parameters()).register_hook(lambda gradient: gradient)
    same(x, context)


def _another_parameter(same: SameWeights, context: ContextParallel, x: Tensor) -> None:
    same.module.norm = nn.LayerNorm(32)
    same(x, context)


WRONG: dict[str, tuple[Callable[[SameWeights, ContextParallel, Tensor], object], str]] = {
    "no handle": (lambda same, context, x: same(x), "one ContextParallel"),
    "a handle without chunks": (lambda same, context, x: same(x, ContextParallel(context.layout)), "same_bits=C"),
    "other tokens": (lambda same, context, x: same(x[:, :5], context), r"tensors of tokens, \(B, 192"),
    "a second forward": (_again, "after the backward of its output"),
    "a second backward": (_twice, "one backward for each forward"),
    "gradients": (_with_gradients, "must be None before the first forward of a step"),
    "average": (lambda same, context, x: average_gradients(same.parameters(), same), "SameWeights sums gradients"),  # type: ignore[arg-type]
    "a hook": (_hooked, "must have no hooks, which get no gradient of a chunk, got some of embedding.weight"),
    "another parameter": (_another_parameter, "must be those that SameWeights was made with"),
    "a copy": (lambda same, context, x: copy.deepcopy(same), r"write copy.deepcopy\(model.module\)"),
    "a loss too early": (lambda same, context, x: token_mean(x.double(), x, same), "which was not called yet"),
    "the loss of a wrapper": (_other_loss, "losses must be over the model with SameWeights"),
    "averaged": (
        lambda same, context, x: cross_entropy(same(x, context), x, same, averaged_over=2.0), "must be None or 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_refusals_say_what_to_write(call: Callable[..., object], message: str) -> None:
    same = SameWeights(Model(), compare=False)
    context = ContextParallel(Layout.contiguous(TOKENS, 1), same_bits=CHUNK)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call(same, context, torch.zeros(2, TOKENS, dtype=torch.long))


def _with_a_compiled_norm() -> Model:
    model = Model()
    model.norm.compile()
    return model


@pytest.mark.parametrize("model, message", [
    (Beside, r"the model \(Beside\) must have no parameters of its own beside modules, got sinks"),
    (nn.ReLU, "parameters to train, got ReLU"),
    (lambda: SameWeights(Model()), "must be a plain model"),
    (lambda: torch.compile(Model()), "must be a plain model"),
    (_with_a_compiled_norm, "must be a plain model with parameters to train, got Model, compiled"),
])  # fmt: skip
def test_models_that_cannot_be_held_are_refused(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        SameWeights(model())


def test_a_restored_model_is_plain() -> None:
    model = Model()
    same = SameWeights(model)
    assert same.restore() is model and "forward" not in model.norm.__dict__
    assert model.norm(torch.ones(5, 32)).shape == (5, 32)


def test_a_copy_is_a_model_of_its_own() -> None:
    model = Model()
    SameWeights(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.norm.weight.zero_()
    assert not other.norm(torch.randn(5, 32)).any() and model.norm(torch.randn(5, 32)).any()


def test_chunks_without_a_gradient_count_as_zero() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    sums = GradientSums(parameters, BatchRanks(None))
    for chunk in range(2):
        sums.insert(0, 0, chunk, 2, torch.full((2,), chunk + 1.0))
    sums.insert(1, 0, 1, 2, torch.full((3,), 5.0))
    sums.exchange(Held(0, 1, 2, (0, 1)))
    assert {i: x.tolist() for i, x in sums.results().items()} == {0: [3.0, 3.0], 1: [5.0, 5.0, 5.0]}


def test_chunks_of_documents_are_counted_through() -> None:
    documents = Documents((37, 0, 5, 48, 16))
    layout = Layout.whole_chunks(106, 2, 16, documents)
    own = [ChunkRows.of(layout, documents, 16, rank) for rank in range(2)]
    assert own[1] == ChunkRows(((0, 5), (5, 10), (10, 26), (26, 42)), (2, 3, 4, 5), 8, 42)
    assert sorted(own[0].numbers + own[1].numbers) == list(range(8))


def _cut_chunks() -> str:
    context = ContextParallel(Layout.whole_chunks(TOKENS, 2, CHUNK), same_bits=CHUNK, documents=(40, 3, 50, 99))
    with pytest.raises(ValueError) as caught:
        SameWeights(Model(), compare=False)(torch.zeros(2, context.tokens, dtype=torch.long), context)
    return str(caught.value)


def test_a_layout_that_cuts_chunks_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(_cut_chunks):
        assert "write Layout.whole_chunks(192, 2, 16, documents)" in said


def _sequence_values(documents: tuple[int, ...] | None) -> list[Tensor]:
    """Bits of sums, means and log-probabilities of sequences, and of the gradient of this rank's tokens, whole."""
    world = dist.get_world_size()
    layout = Layout.whole_chunks(TOKENS, world, CHUNK, documents)
    context = ContextParallel(layout, same_bits=CHUNK, documents=documents)
    whole = torch.randn(3, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    x = context.shard(whole).requires_grad_()
    labels = context.shard(torch.arange(3 * TOKENS).view(3, TOKENS) % VOCABULARY)
    masked = sequence_mean(context, x, mask=labels > 3)
    values = [sequence_sum(context, x), masked, sequence_logprobs(x, labels, context)]
    (gradient,) = torch.autograd.grad(values[0].square().sum() / world, x)
    torch.testing.assert_close(values[0].sum(), whole.sum(), rtol=1e-4, atol=1e-3)
    return [*map(bits, values), gather(context, gradient)]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_values_of_sequences_have_the_same_bits(ranks: Ranks, documents: tuple[int, ...] | None) -> None:
    (wanted,) = ranks(1).run(_sequence_values, documents)
    for found in ranks(2).run(_sequence_values, documents) + ranks(3).run(_sequence_values, documents):
        assert all(map(torch.equal, found[:3], wanted[:3]))
        torch.testing.assert_close(found[3], wanted[3])


def _unequal_parameters() -> str:
    torch.manual_seed(dist.get_rank())
    try:
        SameWeights(Model())
    except ValueError as error:
        return str(error)
    return "no error"


def test_parameters_that_differ_are_refused_on_every_rank(ranks: Ranks) -> None:
    (answer,) = set(ranks(2).run(_unequal_parameters))
    assert "parameters must have the same values on every rank" in answer


def _dropout_on_ranks() -> str:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    torch.manual_seed(1)
    same = SameWeights(Broken(lambda model, x: x if dist.get_rank() else model.dropout(x)), mesh)
    context = ContextParallel(Layout.whole_chunks(TOKENS, 2, CHUNK), mesh, same_bits=CHUNK)
    batch = shard_batch(context, torch.zeros(2, TOKENS, dtype=torch.long))
    try:
        same(batch.tokens, batch.context)
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_a_difference_on_one_rank_is_raised_on_every_rank(ranks: Ranks) -> None:
    (answer,) = set(ranks(2).run(partial(_dropout_on_ranks)))
    assert "the output of dropout (Dropout) must not depend on the chunks beside one" in answer


class _Scale(nn.Linear):
    def forward(self, x: Tensor, _: ContextParallel) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_a_comparison_leaves_the_graph_of_its_input() -> None:
    before, model = nn.Linear(1, 32).double(), _Scale(32, 32).double()
    context = ContextParallel(Layout.contiguous(TOKENS, 1), same_bits=CHUNK)
    SameWeights(model)(before(torch.ones(2, TOKENS, 1).double()), context).sum().backward()
    torch.testing.assert_close(before.bias.grad, 2 * TOKENS * model.weight.detach().sum(0))
