"""The handle of a sharded sequence: it never changes, and what is computed for it is computed once."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from ring import Layout, Pattern
from ring.comm.transport import SoloTransport
from ring.nn import ContextParallel, SelfAttention, gather, next_tokens, shard_batch
from tests.support.ranks import Ranks

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


PARENTS, LENGTHS = [None, 0, 1, 1, 0, 4], [4, 3, 2, 0, 5, 4]
TREE = Pattern.tree(PARENTS, LENGTHS)
EDGES = list(itertools.accumulate(LENGTHS, initial=0))


def layers() -> torch.nn.ModuleList:
    torch.manual_seed(5)
    return torch.nn.ModuleList(SelfAttention(8, 2, Pattern.dense(True), dtype=torch.float64) for _ in range(2))


def results(layers: torch.nn.ModuleList, x: Tensor, context: ContextParallel, dout: Tensor) -> list[Tensor]:
    """Outputs, and gradients of the input and of parameters, which ranks add up."""
    x = x.requires_grad_()
    out = layers[1](layers[0](x, context), context)
    grads = torch.autograd.grad(out, [x, *layers.parameters()], dout)
    return [out.detach(), *grads]


def whole_tree() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(6)
    n = sum(LENGTHS)
    return tuple(torch.randn(1, n, 8, generator=draw, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def _tree(kind: str) -> tuple[list[Tensor], list[int], Tensor]:
    layout = getattr(Layout, kind)(sum(LENGTHS), dist.get_world_size())
    x, dout = whole_tree()
    tokens = torch.arange(sum(LENGTHS))[None]
    batch = shard_batch(ContextParallel(layout), tokens, tokens + 1, pattern=TREE, x=x, dout=dout)
    out, dx, *others = results(layers(), batch.others["x"], batch.context, batch.others["dout"])
    for grad in others:
        dist.all_reduce(grad)
    whole = [gather(batch.context, part) for part in (out, dx)]
    assert batch.labels is not None
    return [*whole, *others], batch.positions.tolist(), gather(batch.context, batch.labels)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "kind"), [(1, "contiguous"), (2, "zigzag"), (3, "contiguous"), (3, "striped")])
def test_a_tree_equals_its_leaves_alone(ranks: Ranks, world: int, kind: str) -> None:
    x, dout = whole_tree()
    out, *sums = [torch.zeros_like(x), torch.zeros_like(x), *map(torch.zeros_like, layers().parameters())]
    given: set[int] = set()
    for leaf in (2, 3, 5):
        path = [leaf]
        while (above := PARENTS[path[0]]) is not None:
            path.insert(0, above)
        rows = torch.cat([torch.arange(EDGES[node], EDGES[node + 1]) for node in path])
        own = dout[:, rows].clone()
        own[:, torch.isin(rows, torch.tensor(sorted(given), dtype=torch.int64))] = 0  # a node's gradient counts once
        given |= set(rows.tolist())
        alone, dx, *grads = results(
            layers(), x[:, rows].clone(), ContextParallel(Layout.contiguous(len(rows), 1), SoloTransport()), own
        )
        out[:, rows] = alone
        sums[0].index_add_(1, rows, dx)
        sums[1:] = [total + grad for total, grad in zip(sums[1:], grads, strict=True)]
    depths = [0, 1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    for rank, (found, positions, labels) in enumerate(ranks(world).run(_tree, kind)):
        for wanted, got in zip([out, *sums], found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        assert positions == [depths[i] for i in getattr(Layout, kind)(18, world).positions(rank)]
        ends = (labels == -100).nonzero()[:, 1].tolist()
        assert ends == [8, 17]  # the next token, if there is one, is of another answer


WORDS, ANSWERS = torch.arange(7)[None], Pattern.tree([None, 0, 0], [3, 2, 2])
REFUSED: dict[str, tuple[Callable[[ContextParallel], object], str]] = {
    "no slices": (lambda x: x.with_pattern(Pattern.dense(True)), "pattern must be a Pattern with slices"),
    "too long": (lambda x: x.with_pattern(Pattern.prefix(8)), "slices must lie within the 7 tokens"),
    "a tree's places": (lambda x: attend(x, Pattern.tree([None, 0], [3, 4])), "shard_batch.*pattern=pattern"),
    "places of noisy frames": (lambda x: attend(x, Pattern.frames([3], noisy=True)), "pattern of noisy frames must be"),
    "a window": (lambda x: attend(x.with_pattern(Pattern.prefix(3)), Pattern.dense(True, window=2)), "must be plain"),
    "a second": (lambda x: attend(x.with_pattern(Pattern.prefix(3)), Pattern.prefix(3)), "pattern must be plain"),
    "positions": (
        lambda x: shard_batch(x, WORDS, pattern=ANSWERS, positions=torch.arange(7)),
        "positions must be None or depths",
    ),
    "documents of a tree": (lambda x: x.with_pattern(ANSWERS).with_documents((3, 4)), "documents must be left out"),
    "documents of both": (
        lambda x: x.with_documents((3, 4)).with_pattern(Pattern.prefix(2, (4, 3))),
        r"documents of the pattern must be those of the handle or batch, \(3, 4\).*got \(4, 3\)",
    ),
    "documents of a batch": (
        lambda x: shard_batch(x, WORDS, pattern=Pattern.prefix(2, (4, 3)), documents=(2, 2, 3)),
        r"documents of the pattern must be those of the handle or batch, \(2, 2, 3\).*got \(4, 3\)",
    ),
    "other documents later": (
        lambda x: x.with_pattern(Pattern.prefix(2, (4, 3))).with_documents((3, 4)),
        "documents of the pattern must be those of the handle or batch",
    ),
    "documents of a module with slices": (
        lambda x: attend(x.with_documents((3, 4)), Pattern.prefix(2, (4, 3))),
        "documents of the pattern must be those of the handle",
    ),
    "documents of a plain module": (
        lambda x: attend(x.with_pattern(Pattern.prefix(2)), Pattern.dense(True, (3, 4))),
        "documents of the pattern must be those of the handle",
    ),
    "labels of another branch": (
        lambda x: shard_batch(x, WORDS, pattern=ANSWERS, later=next_tokens(WORDS, ahead=2)),
        "later must not cross the ends of documents, got the tokens 2 ahead",
    ),
}  # fmt: skip


def attend(context: ContextParallel, pattern: Pattern) -> Tensor:
    q, k, v = torch.randn(3, 1, 7, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return context.attention(q, k, v, pattern)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_pattern_of_a_handle_is_refused(kind: str) -> None:
    wrong, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        wrong(ContextParallel(LAYOUT))


def test_a_handle_with_a_pattern_replaces_plain_attention() -> None:
    context, pattern = ContextParallel(LAYOUT), Pattern.spans([(4, 6)])
    for plain in (Pattern.dense(True), Pattern.dense()):
        assert torch.equal(attend(context.with_pattern(pattern), plain), attend(context, pattern))
    packed = context.with_pattern(pattern).with_documents((3, 4))
    for same in (context.with_documents((3, 4)).with_pattern(pattern), packed.with_documents(None)):
        assert same.pattern == packed.pattern
    assert packed.pattern == Pattern.spans([(4, 6)], (3, 4)) and packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
