"""What ranks of a pool are asked to do with losses: a linear model on global batches whose labels lie unevenly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ring.nn import IGNORED, count_labels, cross_entropy, token_mean
from tests.support.nn_ranks import TOKENS, apart, context_of, data_index, drawn, far, mesh_of, said, summed
from verification.run.programs import in_second_thread

DIM, VOCABULARY = 5, 7


def _labels(kind: str, data: int, micro: int) -> Tensor:
    """Of the whole sequences of one data rank: (2, n)."""
    draw = torch.Generator().manual_seed(100 * data + micro)
    labels = torch.randint(VOCABULARY, (2, TOKENS), generator=draw)
    some = torch.rand(2, TOKENS, generator=draw)
    if kind == "some":
        labels[some < 0.4 + 0.2 * data] = IGNORED
    elif kind == "one":  # in the global batch
        alone = (data, micro) == (0, 0)
        labels[:] = IGNORED
        if alone:
            labels[1, 4] = 3
    elif kind == "one data rank":
        labels[:] = labels if data == 0 else IGNORED
    elif kind == "first tokens":  # the ranks that hold the others have none
        labels[:, 2:] = IGNORED
    elif kind == "none":
        labels[:] = IGNORED
    return labels


KINDS = ("all", "some", "one", "one data rank", "first tokens", "none")


def _whole(kind: str, data: int, micro: int) -> tuple[Tensor, Tensor]:
    return drawn(1000 + 10 * data + micro, 2, TOKENS, DIM), _labels(kind, data, micro)


def _dense(kind: str, ranks: int, micros: int) -> tuple[Tensor, list[Tensor]]:
    """torch's own cross entropy on the whole batch, and the gradients of the model's parameters."""
    model = _model()
    parts = [_whole(kind, data, micro) for data in range(ranks) for micro in range(micros)]
    x, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    loss = torch_cross_entropy(model(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    if not bool((labels != IGNORED).any()):
        loss = model(x).sum() * 0.0  # torch's is 0 / 0
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def _model() -> nn.Linear:
    model = nn.Linear(DIM, VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        for number, x in enumerate(model.parameters()):
            x.copy_(drawn(number, *x.shape))
    return model


def loss_error(kind: str, shards: str, mesh: str, micros: int, wrapped: bool) -> tuple[float, float, list[float]]:
    """(error of the value, error of the averaged gradient, this rank's values).

    wrapped: DDP averages, under no_sync until the last micro-batch; else the gradients are added and divided here.
    """
    ranks = mesh_of(mesh)
    context, data = context_of(shards, ranks["context"]), data_index(mesh)
    plain = _model()
    model = DistributedDataParallel(plain) if wrapped else plain
    labels = [context.shard(_whole(kind, data, micro)[1]) for micro in range(micros)]
    labelled = count_labels(labels, ranks) if micros > 1 else None
    values = []
    for micro in range(micros):
        x = context.shard(_whole(kind, data, micro)[0])
        if wrapped:
            assert isinstance(model, DistributedDataParallel)
            model.require_backward_grad_sync = micro == micros - 1
        loss = cross_entropy(model(x), labels[micro], ranks, labelled=labelled)
        loss.backward()
        values.append(loss.item())
    grads = [x.grad for x in plain.parameters()]
    if not wrapped:
        grads = [summed(grad) / dist.get_world_size() for grad in grads if grad is not None]
    wanted, exact = _dense(kind, ranks.size(0), micros)
    return apart(sum(values), wanted), far(grads, exact), values


def counted(kind: str, mesh: str) -> tuple[int, int, int]:
    """The labels of two micro-batches, of the first one, and of no micro-batch."""
    ranks = mesh_of(mesh)
    context, data = context_of("uneven", ranks["context"]), data_index(mesh)
    labels = [context.shard(_labels(kind, data, micro)).int() for micro in range(2)]
    return count_labels(labels, ranks), count_labels(labels[0], ranks), count_labels([], ranks)


def scales() -> list[float]:
    """By how much the gradient grows with averaged_over, with a factor on the loss, and for losses of one's own."""
    context = context_of("uneven")
    x = context.shard(drawn(1, 2, TOKENS, VOCABULARY)).requires_grad_()
    labels = context.shard(_labels("some", 0, 0))

    def gradient(loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, x)
        return found

    usual = gradient(cross_entropy(x, labels))
    each = torch_cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(2, -1)
    each = each.masked_fill(labels == IGNORED, float("nan"))  # which must not count
    return [
        far([gradient(cross_entropy(x, labels, averaged_over=1))], [usual / 4]),
        far([gradient(cross_entropy(x, labels, averaged_over=2.5))], [usual * 2.5 / 4]),
        far([gradient(3.0 * cross_entropy(x, labels))], [usual * 3]),
        far([gradient(token_mean(each, labels))], [usual]),
        apart(token_mean(each, labels), cross_entropy(x, labels)),
    ]


def in_type(dtype: torch.dtype) -> tuple[str, str, float, float]:
    """The types of value and gradient, and their errors against fp64 from the same rounded logits."""
    context = context_of("uneven")
    logits, labels = drawn(1, 2, TOKENS, VOCABULARY).to(dtype), _labels("some", 0, 0)
    x = context.shard(logits).requires_grad_()
    loss = cross_entropy(x, context.shard(labels).int())
    loss.backward()
    assert x.grad is not None
    whole = logits.double().requires_grad_()
    wanted = torch_cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    wanted.backward()
    assert whole.grad is not None
    error = far([x.grad.double() / 4], [context.shard(whole.grad)])
    return str(loss.dtype), str(x.grad.dtype), apart(loss, wanted), error


def too_few_labelled() -> str:
    """This rank's own count, given as that of the step."""
    context = context_of("even")
    labels = context.shard(_labels("all", 0, 0))
    try:
        cross_entropy(drawn(1, *labels.shape, VOCABULARY), labels, labelled=2)
    except ValueError as error:
        cross_entropy(drawn(1, *labels.shape, VOCABULARY), labels)
        return str(error)
    return "nothing"


def from_a_second_thread(culprit: int) -> tuple[str, float]:
    """What is said where one rank computes its loss in a second thread; and the loss of all ranks afterwards."""
    context = context_of("even")
    logits, labels = context.shard(drawn(1, 2, TOKENS, VOCABULARY)), context.shard(_labels("some", 0, 0))
    cross_entropy(logits, labels)

    def lossy() -> Tensor:
        return cross_entropy(logits, labels)

    answer = said(lambda: in_second_thread(lossy) if context.rank == culprit else lossy())
    return answer, lossy().item()


def evaluated() -> tuple[bool, float]:
    """Without gradients, over a process group."""
    context = context_of("even")
    logits, labels = drawn(1, 2, TOKENS, VOCABULARY), _labels("some", 0, 0)
    with torch.no_grad():
        loss = cross_entropy(context.shard(logits), context.shard(labels), dist.group.WORLD)
    wanted = torch_cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return loss.requires_grad, apart(loss, wanted)


def loss_within_a_checkpoint() -> float:
    """The head and its loss computed again in backward: by how much the gradient changes."""
    from torch.utils.checkpoint import checkpoint

    context, model = context_of("uneven"), _model()
    x, labels = context.shard(drawn(1, 2, TOKENS, DIM)), context.shard(_labels("some", 0, 0))

    def loss(given: Tensor) -> Tensor:
        return cross_entropy(model(given), labels)

    found = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), list(model.parameters()))
    return far(found, torch.autograd.grad(loss(x), list(model.parameters())))
