"""Types of the tensors of a training step, as spmd_types infers them: shards, replicas, and sums that are pending.

A second opinion on the step, by a type checker that knows nothing of its numbers. It runs each operation on real ranks
and derives the type of the result: V, other values on each rank; R or I, the same values; P, summands of one value.
A gradient of a replicated parameter is P until it is reduced. An operation that mixes types wrongly is refused. Scales
have no types: a sum in place of an average passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import I, P, R, SpmdTypeError, V, rules
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ring import Layout, Pattern, consensus
from ring.nn import (
    Batch,
    ContextParallel,
    SelfAttention,
    average_gradients,
    clip_grad_norm,
    cross_entropy,
    gather,
    gradients,
    loss,
    next_tokens,
    sequence,
    shard_batch,
)
from ring.nn.batch_group import BatchRanks
from tests.support.ranks import Ranks

TOKENS, VOCABULARY, DIM = 8, 11, 8


class Step(NamedTuple):
    """The inputs of a step, with types: the batch is a shard, parameters are replicas."""

    axis: dist.ProcessGroup
    context: ContextParallel
    batch: Batch
    model: nn.ModuleList

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def labels(self) -> Tensor:
        assert self.batch.labels is not None
        return self.batch.labels

    def logits(self) -> Tensor:
        embedding, attention, norm, head = self.model
        x = embedding(self.batch.tokens)
        logits: Tensor = head(norm(x + attention(x, self.batch.context)))
        return logits

    def backward(self) -> None:
        """Run the step up to its backward. The gradients of replicas have the type that theory assigns to them, since
        the checker does not follow autograd."""
        cross_entropy(self.logits(), self.labels(), self.axis).backward()
        self.type_gradients()

    def type_gradients(self) -> None:
        for x in self.parameters:
            spmd.assert_type(x.grad, {self.axis: R.backward_type()})

    def update(self) -> None:
        torch.optim.SGD(self.parameters, lr=0.1, foreach=False).step()

    def type_of(self, x: Tensor | None) -> str:
        assert x is not None
        return repr(spmd.get_axis_local_type(x, self.axis))


@contextmanager
def typed_step() -> Iterator[Step]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    axis = mesh.get_group()
    context = ContextParallel(Layout.zigzag(TOKENS, mesh.size()), mesh)
    torch.manual_seed(0)
    model = nn.ModuleList(
        [
            nn.Embedding(VOCABULARY, DIM), SelfAttention(DIM, 2, Pattern.dense(causal=True)), nn.RMSNorm(DIM),
            nn.Linear(DIM, VOCABULARY),
        ]
    )  # fmt: skip
    tokens = torch.arange(TOKENS).reshape(1, -1)
    with spmd.set_current_mesh(mesh):
        sharded = shard_batch(context, tokens, next_tokens(tokens))
        step = Step(axis, context, sharded, model)
        spmd.assert_type([sharded.tokens, step.labels(), sharded.positions], {axis: V})
        spmd.assert_type(step.parameters, {axis: R})
        with typing_rules(axis), typecheck("strict"):
            yield step


@contextmanager
def typing_rules(axis: dist.ProcessGroup) -> Iterator[None]:
    """Rules for what the checker cannot derive.

    - Attention and `gather` send messages (`isend`, `irecv`): it takes the buffers that they fill for constants.
    - `all_gather` fills buffers that were made like its input; the checker wants them typed beforehand.
    - The autograd function of the loss is unknown to it. It is the sum of all ranks' shares, with this rank's gradient.
    - `to` is not linear to it, and `copy_` must not change a type. Each gives the type of its source: the average
      overwrites a pending gradient.
    - Comparisons of arguments, and of parameters, between ranks are no part of the computation.
    """

    def boundary(function: Callable[..., Any], inputs: Collection[object], output: object) -> Callable[..., Any]:
        @wraps(function)
        def typed(*arguments: Any, **named: Any) -> Any:
            for x in tree_leaves(arguments):
                if isinstance(x, Tensor) and spmd.get_axis_local_type(x, axis) not in inputs:
                    raise SpmdTypeError(f"{function.__name__} takes {inputs}, got {spmd.get_local_type(x)}")
            with spmd.no_typecheck():
                result = function(*arguments, **named)
            return spmd.assert_type(result, {axis: output})

        return typed

    def mean(*, local: Tensor, mean: Tensor, scale: Tensor) -> object:
        spmd.assert_type([mean, scale], {axis: R})
        return rules.all_reduce(rules.reinterpret(local, axis, src=V, dst=P), axis, src=P, dst=I)

    copy, to = Tensor.copy_, Tensor.to

    def copied(self: Tensor, source: Tensor) -> Tensor:
        with spmd.no_typecheck():
            copy(self, source)
        before, after = spmd.get_local_type(self), spmd.get_local_type(source)
        return spmd.mutate_type(self, src=before, dst=after) if before and after else self

    def converted(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        with spmd.no_typecheck():
            x = to(self, *arguments, **named)
        return spmd.assert_type(x, spmd.get_local_type(self))

    with (
        patch.object(ContextParallel, "attention", boundary(ContextParallel.attention, (V,), V)),
        patch.object(sequence, "_gathered", boundary(sequence._gathered, (V,), R)),
        patch.object(BatchRanks, "gather", boundary(BatchRanks.gather, (V, R), R)),
        patch.object(loss._Mean, "spmd_typecheck", staticmethod(mean), create=True),
        patch.object(Tensor, "copy_", copied),
        patch.object(Tensor, "to", converted),
        patch.object(gradients, "_check_replicas"),
        patch.object(consensus, "compare", spmd.no_typecheck(consensus.compare)),
    ):
        yield


def _types_of_a_step() -> dict[str, str]:
    with typed_step() as step:
        logits = step.logits()
        value = cross_entropy(logits, step.labels(), step.axis)
        results = {"logits": logits, "gathered logits": gather(step.context, logits), "loss": value}
        types = {name: step.type_of(x) for name, x in results.items()}
        value.backward()
        step.type_gradients()
        average_gradients(step.parameters, step.axis)
        types["gradients"] = "".join(sorted({step.type_of(x.grad) for x in step.parameters}))
        clip_grad_norm(step.parameters, 0.01, step.axis)
        step.update()
        types["parameters"] = "".join(sorted({step.type_of(x) for x in step.parameters}))
    return types


@pytest.mark.ranks
def test_a_step_has_the_types_of_its_documentation(ranks: Ranks) -> None:
    expected = {"logits": "V", "gathered logits": "R", "loss": "I", "gradients": "R", "parameters": "R"}
    assert ranks(2).run(_types_of_a_step) == [expected] * 2


def _clip_without_average(step: Step) -> None:
    step.backward()
    clip_grad_norm(step.parameters, 0.01, step.axis)


def _update_without_average(step: Step) -> None:
    step.backward()
    step.update()


def _average_twice(step: Step) -> None:
    step.backward()
    average_gradients(step.parameters, step.axis)
    average_gradients(step.parameters, step.axis)


def _leave_one_out_of_the_average(step: Step) -> None:
    step.backward()
    average_gradients(step.parameters[1:], step.axis)
    step.update()


def _loss_of_gathered_logits(step: Step) -> None:
    cross_entropy(gather(step.context, step.logits()), gather(step.context, step.labels()), step.axis)


def _mean_of_the_shard(step: Step) -> None:
    functional.cross_entropy(step.logits().flatten(0, 1), step.labels().flatten()).backward()


MISTAKES: dict[Callable[[Step], None], str] = {
    _clip_without_average: r"cannot propagate through non-linear ops(.|\n)*vector_norm",
    _update_without_average: r"requires all operands to be Partial",
    _average_twice: r"all_reduce: expected input type .*\.P on axis .*, got .*\.R",
    _leave_one_out_of_the_average: r"requires all operands to be Partial",
    _loss_of_gathered_logits: r"src=V, dst=P\) expects its input to be V .* it is R",
    _mean_of_the_shard: r"backward\(\) on a Varying loss",
}


def _refusal(mistake: Callable[[Step], None]) -> str:
    with typed_step() as step:
        try:
            mistake(step)
        except SpmdTypeError as error:
            return str(error)
    return "nothing was refused"


@pytest.mark.ranks
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_refused(ranks: Ranks, mistake: Callable[[Step], None]) -> None:
    for refusal in ranks(2).run(_refusal, mistake):
        assert re.search(MISTAKES[mistake], refusal), refusal
