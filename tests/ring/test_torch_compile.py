"""`torch.compile` takes the call in whole: the same numbers, as many forwards as there must be, the same errors."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from reference.pattern import Branch, Pattern, numbered_pattern
from ring import Layout, ring_attention
from ring.comm.group import transport_over
from ring.comm.process_group import ProcessGroupTransport
from ring.integrations.wrappers import recompute
from ring.nn import ContextParallel, RingAttention
from ring.settings import Settings
from ring.torch_compile import NO_GROUP, traced
from tests.support.attention_cases import PACKED, PATTERNS, inputs, plain
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks
from verification.run.recording_transport import RecordingTransport

LENGTHS = (16, 23, 30, 37)
PATTERN = Pattern.longnet((4, None), (1, 2), 2, causal=True)
ALONE = Layout.contiguous(17, 1)
MORE_PATTERNS = PATTERNS | {
    "documents": PACKED,
    "window": Pattern.dense(causal=True, window=3),
    "window of zero": Pattern((Branch(9, window=0), Branch(None, 2)), causal=True),
    "window and documents": Pattern.dense(window=4, documents=(5, 12)),
    "prefix": Pattern.prefix(5),
    "tree": Pattern.tree([None, 0, 0, 2], [5, 4, 2, 6]),
    "spans and documents": Pattern.spans([(2, 4), (6, 12)], documents=(5, 12), window=3),
}


@pytest.mark.parametrize(
    "pattern", [*MORE_PATTERNS.values(), Pattern((Branch(4, 2, (1,)),)), Pattern((Branch(4, 2, 1),))]
)
def test_a_pattern_is_the_one_of_its_text(pattern: Pattern) -> None:
    """Without its documents and slices, which are others in every step; one offset by head is not one for all heads."""
    branches = tuple(replace(branch, slices=None) for branch in pattern.branches)
    assert Pattern.from_dict(json.loads(pattern.text)) == replace(
        pattern, branches=branches, documents=None, depths=False
    )


def test_documents_go_by_the_number_of_their_pattern() -> None:
    copied = pickle.loads(pickle.dumps(PACKED))
    assert copied == PACKED and copied.number != PACKED.number and Pattern.dense().number == 0
    assert numbered_pattern(PACKED.number) is PACKED and numbered_pattern(copied.number) is copied
    with pytest.raises(ValueError, match="must be the number of an existing one, got -1"):
        numbered_pattern(-1)


SETTINGS: dict[str, Any] = {"exchange": "ring", "bucket": 5, "scale": None, "check": True, "name": None}


def results_of(attention: Callable[..., Any], given: list[Tensor], pattern: Pattern, copies: bool = False) -> Any:
    """out, lse and gradients. copies: of pattern and layout, which nobody holds when the backward comes."""
    leaves, layout = [x.detach().requires_grad_() for x in given[:3]], copy.deepcopy(ALONE) if copies else ALONE
    pattern = copy.deepcopy(pattern) if copies else pattern
    out, lse = attention(*leaves, pattern, layout, group=None, kernel="auto", return_lse=True, **SETTINGS)
    del pattern, layout
    through_lse = torch.autograd.grad([out, lse], leaves, given[3:], retain_graph=True)
    return out, lse, *through_lse, *torch.autograd.grad(out, leaves, given[3])


@pytest.mark.parametrize(("dtype", "strided"), ((torch.float64, False), (torch.float64, True), (torch.bfloat16, True)))
@pytest.mark.parametrize("pattern", MORE_PATTERNS.values(), ids=MORE_PATTERNS)
def test_operators_equal_calls_and_meta_results(pattern: Pattern, dtype: torch.dtype, strided: bool) -> None:
    """Bit for bit. Before anything runs, a graph is told shapes, types and strides of all results."""
    given = inputs(dtype=dtype)
    if strided:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    found, called = results_of(traced, given, pattern, copies=True), results_of(ring_attention, given, pattern)
    told = results_of(traced, [x.to("meta") for x in given], pattern)
    for x, same, y in zip(found, called, told, strict=True):
        assert x.equal(same) and (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


@pytest.mark.parametrize("attention", (traced, ring_attention))
def test_one_offset_for_several_heads_is_refused(attention: Callable[..., Any]) -> None:
    pattern = Pattern((Branch(4, 2, (1,)),))
    results_of(attention, inputs(heads=1, kv_heads=1), pattern)
    with pytest.raises(ValueError, match="pattern must be one for the 4 query heads, got one that was made for 1"):
        results_of(attention, inputs(heads=4), pattern)


@pytest.mark.parametrize("pattern", (PATTERNS["longnet causal"], PACKED), ids=("longnet", "documents"))
def test_the_operators_are_as_torch_wants_them(pattern: Pattern) -> None:
    q, k, v, dout, dlse = inputs()
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    settings = Settings(**SETTINGS, return_lse=True).for_operator()
    settings |= {"pattern": pattern.text, "sliced": 0, "packed": pattern.number}
    settings |= {"layout": ALONE.number, "key_layout": ALONE.number}
    settings |= {"group": NO_GROUP, "differentiated": True, "sinks_differentiated": False, "keeps": False}
    forward, backward = torch.ops.ring.attention_forward, torch.ops.ring.attention_backward
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(forward.default, (*leaves, None), settings)
    results = forward(q, k, v, None, **settings)
    torch.library.opcheck(backward.default, (dout, dlse, q, k, v, None, *results), settings)


def test_one_function_is_compiled_for_several_patterns() -> None:
    """Patterns that differ in a number, which torch would make a symbol of the graph."""
    torch._dynamo.reset()
    graph, (q, k, v, *_) = torch.compile(ring_attention, fullgraph=True, backend="aot_eager"), inputs()
    for pattern in (*(Pattern.dense(window=w) for w in (2, 3, 4)), *(Pattern.longnet([w], [2], 4) for w in (4, 8, 9))):
        torch.testing.assert_close(graph(q, k, v, pattern, ALONE), ring_attention(q, k, v, pattern, ALONE))
    torch._dynamo.reset()


def test_one_graph_takes_any_slices() -> None:
    """A batch of trees has others at every step."""
    torch._dynamo.reset()
    counter, (q, k, v, *_) = CompileCounterWithBackend("aot_eager"), inputs()
    graph = torch.compile(ring_attention, fullgraph=True, backend=counter)
    for length in range(3, 9):
        pattern = Pattern.tree([None, 0, 0], [length, 17 - 2 * length, length])
        torch.testing.assert_close(graph(q, k, v, pattern, ALONE), ring_attention(q, k, v, pattern, ALONE))
    assert counter.frame_count <= 2  # the number of a pattern is a constant at first, then a symbol
    torch._dynamo.reset()


@pytest.mark.parametrize("backward", (False, True))
def test_a_graph_leaves_nothing_out_that_nobody_reads(backward: bool) -> None:
    """Other ranks wait for this one."""

    def unread(*given: Tensor) -> Tensor:
        q, k, v = leaves = [x.detach().requires_grad_(backward) for x in given[:3]]
        out = traced(q, k, v, PATTERN, ALONE, group=None, kernel="auto", return_lse=False, **SETTINGS)
        if backward:
            torch.autograd.grad(out, leaves, given[3])
        return given[0] + 1

    graph = make_fx(unread, tracing_mode="fake")(*inputs(heads=2)).graph
    graph.eliminate_dead_code()
    kept = [str(node.target) for node in graph.nodes if "ring." in str(node.target)]
    assert kept == ["ring.attention_forward.default", "ring.attention_backward.default"][: 1 + backward]


def test_modules_without_a_group_refuse_masks() -> None:
    context, q = ContextParallel(Layout.contiguous(9, 1)), torch.randn(1, 2, 9, 4)
    module = RingAttention(PATTERNS["causal"])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, q, q, context=context), module(q, q, q, context=context), rtol=0, atol=1e-6)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attn_mask must be None, got Tensor"):
        compiled(q, q, q, torch.ones(9, 9), context=context)


def once(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    return attend(q.sin(), k, v, context).cos()


def twice_with_lse(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    """The second call is of other settings, and of the first one's result; gradients flow through its lse."""
    first = attend(q, k, v, context, name="first", scale=0.3)
    out, lse = ring_attention(
        first, k, v, Pattern.dense(), context.layout, group=context.group, exchange="direct", bucket=3,
        kernel="math", return_lse=True, name="second",
    )  # fmt: skip
    return out + lse.transpose(1, 2).unsqueeze(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, **options: Any) -> Tensor:
    return plain(q, k, v, PATTERN, context.layout, group=context.group, exchange=context.exchange, **options)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "once": once,
    "twice, with lse": twice_with_lse,
    "no gradients of keys": lambda q, k, v, context: attend(q, k.detach(), v, context) + k,
    "kept": lambda *given: checkpoint(once, *given, use_reentrant=False, context_fn=recompute.attention_kept),
    "computed again": lambda *given: checkpoint(once, *given, use_reentrant=False),
}


def tensors_for(context: ContextParallel) -> list[Tensor]:
    """This rank's q, k, v (1, N, 2, 4)."""
    draw = torch.Generator().manual_seed(context.layout.n)
    wholes = [torch.randn(1, context.layout.n, 2, 4, dtype=torch.float64, generator=draw) for _ in range(3)]
    return [context.shard(x).requires_grad_() for x in wholes]


def results(function: Callable[..., Any], *given: Any) -> list[Tensor]:
    """Return the function's output, and the gradients of the sum of its squares by its tensors."""
    out, leaves = function(*given), [x for x in given if isinstance(x, Tensor)]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def _compared(name: str, group: str, backend: str, exchange: str) -> tuple[float, int]:
    """The greatest difference between compiled and not, over layouts of all LENGTHS; and graphs that were made. None
    may break, also without `fullgraph`. In contiguous order rank 0 receives no keys.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    over: Any = {"none": None, "group": dist.group.WORLD, "mesh": init_device_mesh("cpu", (2,))}[group]
    compiled = torch.compile(FUNCTIONS[name], backend=backend)
    worst = 0.0
    for layout in (*(Layout.zigzag(tokens, 2) for tokens in LENGTHS), Layout.contiguous(LENGTHS[0], 2)):
        context = ContextParallel(layout, over, exchange=exchange)
        eager, found = (results(one, *tensors_for(context), context) for one in (FUNCTIONS[name], compiled))
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(eager, found, strict=True)))
    assert not torch._dynamo.utils.counters["graph_break"]
    return worst, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "group", "backend", "exchange"),
    [
        ("once", "group", "aot_eager", "direct-kept"),
        ("once", "group", "aot_eager", "all-to-all-kept"),
        ("once", "mesh", "aot_eager", "direct"),
        *(
            pytest.param(name, "none", "aot_eager", exchange, marks=pytest.mark.slow)
            for name in FUNCTIONS
            for exchange in ("direct", "direct-kept", "all-to-all-kept")
        ),
        pytest.param("twice, with lse", "none", "inductor", "direct-kept", marks=pytest.mark.slow),
        pytest.param("twice, with lse", "none", "inductor", "all-to-all-kept", marks=pytest.mark.slow),
    ],
)
def test_results_equal_eager_ones_at_every_length(
    ranks: Ranks, name: str, group: str, backend: str, exchange: str
) -> None:
    """One graph for the first length, one for all others: layouts are no constants of a graph."""
    for difference, graphs in ranks(2).run(_compared, name, group, backend, exchange, timeout=300):
        assert difference < 1e-13 and graphs == 2 < len(LENGTHS)


def test_vmap_within_a_graph_is_refused_by_name() -> None:
    """Nothing would be kept for the backward, since within it no tensor requires gradients."""
    q, k, v = (x.detach().requires_grad_() for x in inputs()[:3])
    call = torch.compile(
        torch.func.vmap(lambda q: plain(q, k, v, PATTERN, ALONE, exchange="direct-kept")), backend="aot_eager"
    )
    with pytest.raises(NotImplementedError, match="ring_attention does not work within torch.func's vmap"):
        call(torch.stack([q, q]))


def _forwards_of(name: str, compile_it: bool) -> tuple[int, int]:
    """Numbers of the ring's forwards in one forward and backward of a function, and of the last call."""
    torch._dynamo.reset()
    context = ContextParallel(Layout.zigzag(16, 2))
    function = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager") if compile_it else FUNCTIONS[name]
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupTransport, "prepare", lambda self, key, outgoing: seen.append(key))
        results(function, *tensors_for(context), context)
    return sum("forward" in key for key in seen), context.transport.calls.number


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "due"), (("once", 1), ("kept", 1), ("computed again", 2)))
@pytest.mark.parametrize("compile_it", (False, True))
def test_each_forward_runs_as_often_as_it_must(ranks: Ranks, name: str, due: int, compile_it: bool) -> None:
    (forwards, number), other = ranks(2).run(_forwards_of, name, compile_it, timeout=120)
    assert forwards == due and other == (forwards, number)


def _refusals() -> dict[str, str]:
    """Errors of wrong calls within a graph; afterwards a right one runs on the same group."""
    context = ContextParallel(Layout.zigzag(16, 2))
    q, k, v = tensors_for(context)
    other = Layout.striped(16, 2) if context.rank else context.layout
    calls: dict[str, tuple[Tensor, Layout, Any, str]] = {
        "a transport": (q, context.layout, RecordingTransport(transport_over(None, 2)), "ring"),
        "another layout on rank 1": (q, other, None, "ring"),
        "exchange": (q, context.layout, None, "post"),
        "heads kept on rank 1": (q, context.layout, None, "all-to-all-kept" if context.rank else "all-to-all"),
        "nothing": (q, context.layout, None, "ring"),
    }

    def attention(q: Tensor, layout: Layout, group: Any, exchange: str) -> Any:
        return ring_attention(q, k, v, PATTERN, layout, group=group, exchange=exchange)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    answers = {}
    for name, arguments in calls.items():
        torch._dynamo.reset()
        answers[name] = said(lambda: compiled(*arguments))  # noqa: B023
    return answers


@pytest.mark.ranks
def test_wrong_calls_are_refused_on_both_ranks(ranks: Ranks) -> None:
    first, second = ranks(2).run(_refusals, timeout=120)
    assert "group must be a process group, a mesh of one dimension or None within torch.compile" in first["a transport"]
    assert first["another layout on rank 1"].startswith("ValueError: layout must be the same on every rank: rank 0 has")
    assert first["exchange"].startswith("ValueError: rank 0: exchange must be one of")
    assert first["heads kept on rank 1"].startswith("ValueError: exchange must be the same on every rank: rank 0 has")
    assert first["nothing"] == "fine"
    first.pop("a transport"), second.pop("a transport")
    assert first == second
