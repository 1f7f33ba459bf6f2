"""The sequence-parallel self-attention against the same layer computed densely, in fp64: output and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from reference import Pattern
from ring import Layout
from ring.nn import ContextParallel, SelfAttention
from ring.nn.rotary import rotary
from tests.support import nn_dense
from tests.support.nn_module_tasks import (
    WAYS,
    in_bf16_autocast,
    in_fp64,
    over_a_mesh,
    recomputation_error,
    self_attention_error,
)
from tests.support.nn_ranks import MESHES, UNEVEN, drawn
from verification.run.processes.pool import Pool

EXACT = 1e-12  # fp64, outputs and gradients of the order of 1 to 100


@pytest.mark.ranks
@pytest.mark.parametrize("shards", UNEVEN)
@pytest.mark.parametrize("pattern", ["causal", "longnet"])
def test_output_and_gradients(pool: Pool, shards: str, pattern: str) -> None:
    assert max(pool.run(self_attention_error, shards, pattern, {})) < EXACT


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 2},
        {"kv_heads": 1, "qk_norm": True},
        {"head_dim": 6, "bias": True},
        {"rotary_theta": None},
        {"rotary_theta": 500.0, "inner_norm_eps": 1e-5, "bias": True},
    ],
    ids=str,
)
def test_options(pool: Pool, options: dict[str, Any]) -> None:
    assert max(pool.run(self_attention_error, "uneven", "groups", options)) < EXACT


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What torch.compile learns of lengths here, it does not know in later tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(module, fullgraph=True, backend="aot_eager")


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("rows", (None, 1, 2))
def test_a_graph_for_any_length_takes_positions_that_come_later(rows: int | None) -> None:
    """When they come, torch takes their length for a constant, and that of x for one that may change."""
    module = SelfAttention(8, 2, Pattern.dense(True))
    graph = compiled(module)
    for number, n in enumerate((16, 23, 30, 37)):
        context, x = ContextParallel(Layout.contiguous(n, 1)), torch.randn(2, n, 8)
        positions = context.positions if rows is None else context.positions.repeat(rows, 1)
        given = positions if number >= 2 else None
        torch.testing.assert_close(graph(x, context, given), module(x, context, given))


@pytest.mark.usefixtures("forgetful")
def test_a_graph_for_any_length_refuses_positions_of_another() -> None:
    graph = compiled(SelfAttention(8, 2, Pattern.dense(True)))
    for n in (16, 23, 30):
        context = ContextParallel(Layout.contiguous(n, 1))
        context.positions_on(torch.device("cpu"))  # as shard_batch does
        graph(torch.randn(2, n, 8), context)
    for shape in ((29,), (3, 30), (2, 29), (1, 1, 30)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="positions must have the shape"):
            graph(torch.randn(2, 30, 8), context, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.usefixtures("forgetful")
def test_a_graph_for_any_length_turns_by_positions_that_come_as_constants() -> None:
    graph = compiled(rotary)
    for n in (16, 23):
        x, positions = torch.randn(2, n, 2, 4), torch.arange(n)
        torch._dynamo.maybe_mark_dynamic(x, 1)
        torch.testing.assert_close(graph(x, positions), rotary(x, positions))


@pytest.mark.ranks
@pytest.mark.parametrize("name", MESHES)
def test_each_context_group_of_a_mesh_has_its_own_sequence(pool: Pool, name: str) -> None:
    assert max(pool.run(over_a_mesh, name)) < EXACT


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_meets_the_layout_of_its_forward(pool: Pool, way: str) -> None:
    assert pool.run(recomputation_error, way) == [0.0] * 4


@pytest.mark.ranks
def test_under_autocast(pool: Pool) -> None:
    for dtype, error in pool.run(in_bf16_autocast):
        assert dtype == "torch.bfloat16" and error < 0.05  # bf16 has 8 bits; outputs of the order of 1


def test_one_process() -> None:
    pattern = Pattern.dense(causal=True)
    module, x = in_fp64(lambda: SelfAttention(16, 4, pattern)), drawn(1, 2, 9, 16)
    context = ContextParallel(Layout.contiguous(9, 1))
    wanted = nn_dense.self_attention(x, dict(module.named_parameters()), pattern, 4, 10000.0)
    for positions in (None, torch.arange(9), context.positions_on(x.device), torch.arange(9).expand(2, 9)):
        torch.testing.assert_close(module(x, context, positions), wanted, rtol=0.0, atol=EXACT)


def test_the_names_are_those_of_llama() -> None:
    module = SelfAttention(16, 4, Pattern.dense(), kv_heads=2, dtype=torch.bfloat16, device="meta")
    shapes = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        f"{name}.weight": shape for name, shape in shapes.items()
    }
    assert {(x.dtype, x.device.type) for x in module.parameters()} == {(torch.bfloat16, "meta")}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dim": 0}, "dim must be an integer >= 1, got 0"),
        ({"heads": 4.0}, "heads must be an integer >= 1, got 4.0"),
        ({"heads": 3}, "dim must be a multiple of heads unless head_dim is given, got 16 and 3"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"kv_heads": True}, "kv_heads must be an integer >= 1, got True"),
        ({"head_dim": 5}, "head_dim must be even for rotary positions, got 5"),
        ({"rotary_theta": 0.0}, "theta must be a positive finite number, got 0.0"),
        ({"pattern": "dense"}, "pattern must be a Pattern, got 'dense'"),
        ({"pattern": Pattern.longnet((4,), (2,), 8)}, "for the 4 query heads, got one that was made for 8"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dim": 16, "heads": 4, "pattern": Pattern.dense()} | changes
    with pytest.raises(ValueError, match=message):
        SelfAttention(**arguments)
