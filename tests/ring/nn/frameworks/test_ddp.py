"""Steps under DDP equal those of one dense process; whose parameters ranks begin with, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring.nn.frameworks import ddp
from tests.support.framework_example import APART, SHORT, TOGETHER, Example, assert_near, dense, mesh_of
from tests.support.ranks import Ranks
from tests.support.torch_wrapper_tasks import under_ddp

pytestmark = pytest.mark.ranks

EXAMPLES = [
    Example(SHORT),
    Example(SHORT, "without rank 0", accumulation=2),
    Example(TOGETHER, accumulation=3, clip=0.1),
    Example(APART, "striped", clip=0.1),
    Example(((2, 0, 3, 1),), "contiguous", accumulation=2),
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_trains_as_one_process(ranks: Ranks, example: Example) -> None:
    assert_near(ranks(example.world).run(under_ddp, example), dense(example))


def _begin_apart() -> None:
    model = nn.Linear(2, 1)
    rank = dist.get_rank()
    with torch.no_grad():
        model.weight.fill_(5.0 + rank)
    wrapped = ddp.wrap(model, mesh_of((1, 0), ("context",)), gradient_as_bucket_view=True)
    assert wrapped.module is model and wrapped.gradient_as_bucket_view
    assert (model.weight == 5.0).all(), "all ranks have the parameters of the first one"
    (wrapped(torch.ones(1, 2)).sum() * (rank + 1)).backward()
    assert model.weight.grad is not None and (model.weight.grad == 1.5).all()


def test_ranks_begin_with_the_parameters_of_the_first_and_average_gradients(ranks: Ranks) -> None:
    ranks(2).run(_begin_apart)


def _refuse(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ddp.wrap(nn.Linear(1, 1), mesh_of(SHORT)["data"] if not options else mesh_of(SHORT), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "mesh must have the dimensions"),
        ({"process_group": None}, "process_group must be left out"),
        ({"device_mesh": None}, "device_mesh must be left out"),
    ],
)
def test_other_ranks_to_average_over_are_refused(ranks: Ranks, options: dict[str, Any], words: str) -> None:
    ranks(2).run(_refuse, options, words)
