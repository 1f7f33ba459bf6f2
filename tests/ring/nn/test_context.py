"""The handle of a sharded sequence: it never changes, and what is computed for it is computed once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.utils import _apply_to_tensors

from ring import Layout, Pattern
from ring.nn import ContextParallel

LAYOUT = Layout.contiguous(7, 1)


def test_it_does_not_change() -> None:
    context = ContextParallel(LAYOUT, bucket=4)
    with pytest.raises(AttributeError, match="layout cannot be set: make another ContextParallel"):
        context.layout = Layout.contiguous(8, 1)
    with pytest.raises(AttributeError, match="bucket cannot be deleted"):
        del context.bucket
    assert (context.layout, context.bucket, context.exchange, context.check) == (LAYOUT, 4, "direct", True)
    assert (context.rank, context.world_size, context.tokens) == (0, 1, 7)
    assert "7 of 7 tokens" in repr(context)


def test_copies_are_itself_and_wrappers_leave_it_alone() -> None:
    context = ContextParallel(LAYOUT)
    assert copy.deepcopy({"context": context})["context"] is context
    assert copy.copy(context) is context
    assert not dataclasses.is_dataclass(context)  # torch's wrappers rebuild those when they cast inputs
    assert _apply_to_tensors(torch.Tensor.half, {"context": context})["context"] is context
    assert context != ContextParallel(LAYOUT) and len({context, context}) == 1


def test_it_is_not_saved() -> None:
    with pytest.raises(TypeError, match="a ContextParallel cannot be pickled, since its group is of this process"):
        pickle.dumps({"context": ContextParallel(LAYOUT)})


def test_positions_are_made_once_for_a_device() -> None:
    context = ContextParallel(LAYOUT)
    with torch.inference_mode():
        first = context.positions_on(torch.device("cpu"))
    assert torch.equal(first, torch.arange(7)) and not first.is_inference()
    assert context.positions_on(torch.device("cpu")) is first
    assert context.positions_on(torch.device("meta")).device.type == "meta"
    assert context.once("key", lambda: 1) == context.once("key", lambda: 2) == 1


def test_agree_raises_what_the_check_raises() -> None:
    def wrong() -> dict[str, object]:
        raise KeyError("no such thing")

    with pytest.raises(ValueError, match="rank 0: KeyError: 'no such thing'"):
        ContextParallel(LAYOUT).agree("work", wrong)
    with pytest.raises(KeyError):
        ContextParallel(LAYOUT, check=False).agree("work", wrong)
    ContextParallel(LAYOUT).agree("work", lambda: {"size": 1})


def test_attention_runs_over_the_group_that_it_was_made_for() -> None:
    """In a default group that was made anew, ranks may have other numbers than those that the shards are for."""
    x = torch.ones(1, 7, 1, 2)
    solo = ContextParallel(LAYOUT)
    with _group_of_one():
        context = ContextParallel(LAYOUT)
        context.attention(x, x, x, Pattern.dense())
        solo.attention(x, x, x, Pattern.dense())
    with _group_of_one(), pytest.raises(ValueError, match="not registered"):
        context.attention(x, x, x, Pattern.dense())


@contextmanager
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
