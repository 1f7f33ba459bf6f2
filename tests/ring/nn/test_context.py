"""The handle of a sharded sequence: it never changes, and what is computed for it is computed once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.utils import _apply_to_tensors

from ring import Layout, Pattern
from ring.nn import ContextParallel

LAYOUT = Layout.contiguous(7, 1)


def test_context_is_frozen() -> None:
    context = ContextParallel(LAYOUT, bucket=4)
    with pytest.raises(AttributeError, match="layout cannot be set: make another ContextParallel"):
        context.layout = Layout.contiguous(8, 1)
    with pytest.raises(AttributeError, match="bucket cannot be deleted"):
        del context.bucket
    assert (context.layout, context.bucket, context.exchange, context.check) == (LAYOUT, 4, "direct", True)
    assert (context.rank, context.world_size, context.tokens) == (0, 1, 7)
    assert "7 of 7 tokens" in repr(context)


def test_positions_in_a_graph_are_of_the_ranks_tokens() -> None:
    with pytest.raises(ValueError, match="x must have the 7 tokens of this rank, got 3"):
        torch.ops.ring.positions(torch.zeros(1, 3, 2), layout=LAYOUT.number, rank=0, packed=0)


def test_copies_are_itself_and_wrappers_leave_it_alone() -> None:
    context = ContextParallel(LAYOUT)
    assert copy.deepcopy({"context": context})["context"] is context is copy.copy(context)
    assert not dataclasses.is_dataclass(context)  # torch's wrappers rebuild those when they cast inputs
    assert _apply_to_tensors(torch.Tensor.half, {"context": context})["context"] is context
    assert context != ContextParallel(LAYOUT) and len({context, context}) == 1
    with pytest.raises(TypeError, match="a ContextParallel cannot be pickled, since its group belongs to this process"):
        pickle.dumps({"context": context})


def test_positions_are_made_once_for_a_device() -> None:
    context = ContextParallel(LAYOUT)
    with torch.inference_mode():
        first = context.positions_on(torch.device("cpu"))
    assert torch.equal(first, torch.arange(7)) and not first.is_inference()
    assert context.positions_on(torch.device("cpu")) is first
    assert context.positions_on(torch.device("meta")).device.type == "meta"
    assert context.cached("key", lambda: 1) == context.cached("key", lambda: 2) == 1


@pytest.mark.parametrize("documents", [None, (7,), (3, 0, 4)])
def test_a_handle_says_what_it_was_made_with(documents: tuple[int, ...] | None) -> None:
    settings: dict[str, Any] = {"exchange": "gather", "bucket": 3, "kernel": "math", "check": False}
    made = ContextParallel(LAYOUT, **settings, documents=(1, 6))
    first = made.positions_on(torch.device("cpu"))
    for context in (made.with_documents(documents), ContextParallel(LAYOUT, **settings, documents=documents)):
        assert {name: getattr(context, name) for name in settings} == settings
        assert context.layout is LAYOUT and (context.documents is None or tuple(context.documents) == documents)
        assert (documents is None) == (context.documents is None) == ("documents=" not in repr(context))
        within = torch.cat([torch.arange(length) for length in documents or (7,)])
        assert torch.equal(context.positions, within) and torch.equal(context.positions_on(first.device), within)
        context.positions.add_(1)  # a tensor of the caller's own
        assert torch.equal(context.positions, within)
    assert torch.equal(first, torch.tensor([0, 0, 1, 2, 3, 4, 5])) and made.positions_on(first.device) is first
    assert made.with_documents(documents).transport is made.transport
    own = type("Own", (ContextParallel,), {})
    assert type(own(LAYOUT).with_documents(documents)) is own


@pytest.mark.parametrize("documents", [(), (7, 1), (8, -1), (3.5, 3.5), 7])
def test_documents_unlike_the_sequence_are_refused(documents: Any) -> None:
    with pytest.raises(ValueError, match="documents must"):
        ContextParallel(LAYOUT, documents=documents)
    with pytest.raises(ValueError, match="documents must"):
        ContextParallel(LAYOUT).with_documents(documents)


def test_agree_raises_what_the_check_raises() -> None:
    def wrong() -> NoReturn:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="rank 0: 'no such thing'"):
        ContextParallel(LAYOUT).agree("work", wrong)
    with pytest.raises(KeyError):
        ContextParallel(LAYOUT, check=False).agree("work", wrong)
    assert ContextParallel(LAYOUT).agree("work", lambda: ({"size": 1}, "done")) == "done"


def test_attention_runs_over_its_contexts_group() -> None:
    """In a default group that was made anew, ranks may have other numbers than those that the shards are for."""
    x = torch.ones(1, 7, 1, 2)
    solo = context = ContextParallel(LAYOUT)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            if context is not solo:  # the second time
                with pytest.raises(ValueError, match="not registered"):
                    context.attention(x, x, x, Pattern.dense())
            context = ContextParallel(LAYOUT)
            for each in (context, solo):
                each.attention(x, x, x, Pattern.dense())
        finally:
            dist.destroy_process_group()
