"""`torch.compile` takes the call in whole: the same numbers, as many forwards as there must be, the same errors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from reference.pattern import Pattern, numbered_pattern
from ring import Layout
from ring.compiled import NO_GROUP, pattern_of, text_of
from ring.layout import numbered_layout
from ring.nn import ContextParallel, RingAttention, SelfAttention
from tests.support import compiled_tasks, torch_wrapper_tasks
from tests.support.attention_cases import PACKED, PATTERNS, inputs, plain
from tests.support.compiled_tasks import FUNCTIONS, LENGTHS, MODULES
from tests.support.framework_example import EXACT, TOGETHER, Example, dense, differences
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_the_one_of_its_text(name: str) -> None:
    assert pattern_of(text_of(PATTERNS[name])) == PATTERNS[name]


def test_a_layout_goes_by_its_number() -> None:
    layout = Layout.striped(9, 2)
    assert numbered_layout(layout.number) is layout and Layout.striped(9, 2).number != layout.number
    copied = pickle.loads(pickle.dumps(layout))
    assert copied == layout and copied.number != layout.number and numbered_layout(copied.number) is copied
    with pytest.raises(ValueError, match="layout must be the number of one that is there, got -1"):
        numbered_layout(-1)


def test_a_pattern_with_documents_goes_by_its_number() -> None:
    pattern = PACKED
    assert pattern_of(text_of(pattern)) == replace(pattern, documents=None)
    assert numbered_pattern(pattern.number) is pattern and replace(pattern).number != pattern.number
    copied = pickle.loads(pickle.dumps(pattern))
    assert copied == pattern and copied.number != pattern.number and numbered_pattern(copied.number) is copied
    assert Pattern.dense().number == 0
    with pytest.raises(ValueError, match="pattern must be the number of one that is there, got 0"):
        numbered_pattern(0)


def test_documents_are_no_constants_of_a_graph() -> None:
    """One graph for the first documents, one for all others."""
    q, k, v, _, _ = inputs()
    layout, graphs = Layout.contiguous(17, 1), []

    def counted(module: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(module)
        return module.forward

    def attend(x: torch.Tensor, pattern: Pattern) -> Any:
        return plain(x, k, v, pattern, layout) * 2.0

    compiled = torch.compile(attend, fullgraph=True, backend=counted)
    for documents in ((17,), (5, 12), (0, 16, 1), (1,) * 17):
        pattern = Pattern.dense(True, documents)
        assert torch.equal(compiled(q, pattern), attend(q, pattern))
    assert len(graphs) == 2


def test_a_module_on_one_rank_without_any_group_takes_positions_and_refuses_masks() -> None:
    context, pattern = ContextParallel(Layout.contiguous(9, 1)), PATTERNS["causal"]
    module, x = SelfAttention(8, 2, pattern), torch.randn(1, 9, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, context, context.positions), module(x, context), rtol=0, atol=1e-6)
    q = torch.randn(1, 2, 9, 4)
    attention = torch.compile(RingAttention(pattern), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attn_mask must be None, got Tensor"):
        attention(q, q, q, torch.ones(9, 9), context=context)


@pytest.mark.parametrize("strided", (False, True))
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "pattern", (PATTERNS["longnet causal"], PATTERNS["gaps"], PACKED), ids=("longnet", "gaps", "documents")
)
def test_the_operators_are_as_torch_wants_them(pattern: Pattern, dtype: torch.dtype, strided: bool) -> None:
    q, k, v, dout, dlse = inputs(dtype=dtype)
    if strided:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    layout = Layout.contiguous(17, 1)
    settings: dict[str, Any] = {
        "layout": layout.number, "pattern": text_of(pattern), "group": NO_GROUP, "exchange": "ring",
        "bucket": 5, "kernel_name": "auto", "scale": None, "return_lse": True, "check": True, "name": None,
        "packed": pattern.number,
    }  # fmt: skip
    forward, backward = torch.ops.ring.attention_forward, torch.ops.ring.attention_backward
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(forward.default, leaves, settings | {"differentiated": True})
    out, lse, number = forward(q, k, v, **settings, differentiated=True)
    torch.library.opcheck(backward.default, (dout, dlse, q, k, v, out, lse, number), settings)


# --- two ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, preload=("torch", "torch._dynamo", compiled_tasks.__name__), timeout=120) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_results_are_those_without_a_graph_at_every_length(pool: Pool, name: str) -> None:
    """One graph for the first length, one for all others: layouts are no constants of a graph."""
    for found in pool.run(compiled_tasks.compared, name, "none", "aot_eager"):
        assert found.difference < 1e-14 and found.graphs == 2 < len(LENGTHS)


@pytest.mark.parametrize("group", ("group", "mesh"))
def test_groups_go_by_their_names(pool: Pool, group: str) -> None:
    for found in pool.run(compiled_tasks.compared, "once", group, "aot_eager"):
        assert found.difference < 1e-14 and found.graphs == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ("twice, with lse", "LongNetBlock"))
def test_inductor_takes_it_in(pool: Pool, name: str) -> None:
    for found in pool.run(compiled_tasks.compared, name, "none", "inductor", timeout=300):
        assert found.difference < 1e-13 and found.graphs == 2


@pytest.mark.parametrize("name", ("once", "kept", "computed again"))
@pytest.mark.parametrize("compile_it", (False, True))
def test_each_forward_runs_as_often_as_it_must(pool: Pool, name: str, compile_it: bool) -> None:
    (forwards, number), other = pool.run(compiled_tasks.forwards_of, name, compile_it)
    assert forwards == (2 if name == "computed again" else 1) and other == (forwards, number)


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_a_forward_that_one_rank_does_not_read_runs(pool: Pool, backend: str) -> None:
    first, second = pool.run(compiled_tasks.one_rank_drops_its_result, backend)
    assert first == second


def test_a_graph_that_is_kept_goes_backward_again(pool: Pool) -> None:
    assert pool.run(compiled_tasks.two_backwards) == [True, True]


def test_wrong_calls_are_refused_on_both_ranks(pool: Pool) -> None:
    first, second = pool.run(compiled_tasks.refusals)
    assert "group must be a process group, a mesh of one dimension or None within torch.compile" in first["a transport"]
    assert first["tokens"] == "ValueError: rank 0: q must have the 8 tokens that the layout gives this rank, got 5"
    assert first["another layout on rank 1"].startswith("ValueError: layout must be the same on every rank: rank 0 has")
    assert first["exchange"].startswith("ValueError: rank 0: exchange must be one of")
    assert first["nothing"] == "fine"
    first.pop("a transport"), second.pop("a transport")
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", (None, {}))
def test_compiled_layers_train_under_fsdp_as_one_process(recomputed: dict[str, Any] | None) -> None:
    example = Example(TOGETHER, accumulation=2, clip=0.1)
    exact = dense(example)
    with Pool(4, preload=("torch", "torch._dynamo", torch_wrapper_tasks.__name__), timeout=200) as ranks:
        for result in ranks.run(torch_wrapper_tasks.under_fsdp, example, recomputed, None, False, True):
            assert max(differences(result, exact).values()) < EXACT, differences(result, exact)
