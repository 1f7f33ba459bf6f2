"""The sequence-parallel self-attention against the same layer computed densely, in fp64: output and all gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from reference import Pattern
from ring import Layout
from ring.nn import ContextParallel, LongNetBlock, RingAttention, SelfAttention
from ring.nn.rotary import rotary
from tests.support import nn_dense
from tests.support.nn_ranks import (
    MESHES,
    TOKENS,
    UNEVEN,
    context_of,
    data_index,
    drawn,
    far,
    grad_of,
    in_fp64,
    mesh_of,
)
from tests.support.ranks import Ranks

EXACT = 1e-12  # fp64, outputs and gradients of the order of 1 to 100
DIM, HEADS = 16, 4
PATTERNS = {
    "causal": Pattern.dense(causal=True),
    "longnet": Pattern.longnet((4, None), (1, 2), HEADS, causal=True),
    "groups": Pattern.head_groups((5, 13), (1, 3), HEADS),  # tokens that a head does not see
}


def _error(shards: str, pattern: str, options: dict[str, Any]) -> float:
    who = PATTERNS[pattern]
    module = in_fp64(lambda: SelfAttention(DIM, HEADS, who, **options))
    theta, head_dim = module.rotary_theta, module.head_dim
    return nn_dense.module_error(module, shards, lambda x, w: nn_dense.self_attention(x, w, who, head_dim, theta))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shards", "pattern", "options"),
    [
        *((shards, pattern, {}) for shards in UNEVEN for pattern in ("causal", "longnet")),
        ("uneven", "groups", {"kv_heads": 2}),
        ("uneven", "groups", {"kv_heads": 1, "qk_norm": True}),
        ("uneven", "groups", {"head_dim": 6, "bias": True}),
        ("uneven", "groups", {"rotary_theta": None}),
        ("uneven", "groups", {"rotary_theta": 500.0, "inner_norm_eps": 1e-5, "bias": True}),
    ],
)
def test_output_and_gradients(ranks: Ranks, shards: str, pattern: str, options: dict[str, Any]) -> None:
    assert max(ranks(4).run(_error, shards, pattern, options)) < EXACT


def _over_a_mesh(name: str) -> None:
    """Each context group has a sequence of its own, on a dimension of the mesh."""
    context, pattern = context_of("even", mesh_of(name)["context"]), PATTERNS["causal"]
    module = in_fp64(lambda: SelfAttention(DIM, HEADS, pattern))
    x = drawn(10 + data_index(name), 2, TOKENS, DIM)
    wanted = nn_dense.self_attention(x, dict(module.named_parameters()), pattern, DIM // HEADS, 10000.0)
    assert far([module(context.shard(x), context)], [context.shard(wanted)]) < EXACT


@pytest.mark.ranks
@pytest.mark.parametrize("name", MESHES)
def test_each_context_group_of_a_mesh_has_its_own_sequence(ranks: Ranks, name: str) -> None:
    ranks(4).run(_over_a_mesh, name)


# --- recomputation and precision --------------------------------------------------------------------------------------


def _kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.ring.attention.default])


RECOMPUTED: dict[str, Callable[[nn.Module, Tensor, ContextParallel], Any]] = {
    "reentrant": lambda m, x, c: checkpoint(m, x, c, c.positions_on(x.device), use_reentrant=True),
    "non-reentrant": lambda m, x, c: checkpoint(m, x, context=c, positions=c.positions, use_reentrant=False),
    "selective": lambda m, x, c: checkpoint(m, x, c, use_reentrant=False, context_fn=_kept),
}


def _computed_again(way: str) -> None:
    """Two sequences under two layouts go through the same layers; the first one's backward comes last."""
    contexts = [context_of("uneven"), context_of("empty")]
    layers = [in_fp64(lambda: LongNetBlock(DIM, HEADS, [4, 13], [1, 2]), seed) for seed in range(2)]

    def gradients(run: Callable[[nn.Module, Tensor, ContextParallel], Tensor]) -> list[Tensor]:
        inputs = [context.shard(drawn(3, 2, TOKENS, DIM)).requires_grad_() for context in contexts]
        outs = []
        for x, context in zip(inputs, contexts, strict=True):
            y = x
            for layer in layers:
                y = run(layer, y, context)
            outs.append(y)
        for layer in layers:
            layer.zero_grad()
        for out in reversed(outs):
            out.square().sum().backward()
        return [grad_of(x).clone() for x in (*inputs, *layers[0].parameters(), *layers[1].parameters())]

    assert far(gradients(RECOMPUTED[way]), gradients(lambda layer, x, context: layer(x, context))) == 0.0


@pytest.mark.ranks
@pytest.mark.parametrize("way", RECOMPUTED)
def test_a_recomputation_meets_the_layout_of_its_forward(ranks: Ranks, way: str) -> None:
    ranks(4).run(_computed_again, way)


def test_under_autocast() -> None:
    context, x = ContextParallel(Layout.contiguous(9, 1)), drawn(1, 2, 9, DIM).float()
    torch.manual_seed(0)
    module = SelfAttention(DIM, HEADS, PATTERNS["causal"], qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, context)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), module(x, context), rtol=0.0, atol=0.05)  # 8 bits; outputs of 1


# --- what layers share on one handle, and copies of modules -----------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("differs", ["theta", "head_dim", "dtype", "documents", "nothing"])
def test_a_layer_is_not_disturbed_by_another_on_its_handle(differs: str, first: int) -> None:
    """It has the bits that it has on a handle of its own, also where the other one came in inference mode."""
    choices: dict[str, tuple[Any, Any]] = {
        "theta": (100.0, 10000.0), "head_dim": (2, 4), "dtype": (torch.float64, torch.float32),
        "documents": ((9,), (4, 5)),
    }  # fmt: skip
    shared = ContextParallel(Layout.contiguous(9, 1))
    for number in (first, 1 - first):
        of = {name: pair[number if name == differs else 0] for name, pair in choices.items()}
        layer = in_fp64(
            lambda: SelfAttention(4, 1, PATTERNS["causal"], head_dim=of["head_dim"], rotary_theta=of["theta"])  # noqa: B023
        ).to(of["dtype"])
        x, context = drawn(1, 2, 9, 4).to(of["dtype"]), shared
        if differs == "documents":
            context = shared = shared.with_documents(of["documents"])
        with torch.inference_mode(number == first):
            found = layer(x, context)
        wanted = layer(x, ContextParallel(shared.layout, documents=context.documents))
        assert torch.equal(found, wanted)
        if number != first:
            ours, theirs = (torch.autograd.grad(out.sum(), layer.q_proj.weight)[0] for out in (found, wanted))
            assert torch.equal(ours, theirs)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "self-attention": lambda **made: SelfAttention(
        DIM, HEADS, PATTERNS["groups"], kv_heads=2, qk_norm=True, inner_norm_eps=1e-3, bias=True, **made
    ),
    "longnet": lambda **made: LongNetBlock(DIM, HEADS, "[2,4]", (1, 2), **made),
    "longnet without subln": lambda **made: LongNetBlock(DIM, HEADS, [4], [2], subln=False, causal=False, **made),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_copies_give_the_same_bits_and_parameters_are_of_the_type_asked_for(name: str, dtype: torch.dtype) -> None:
    module = MODULES[name](dtype=dtype, device="cpu")
    assert {(x.dtype, x.device.type) for x in module.parameters()} == {(dtype, "cpu")}
    assert {x.device.type for x in MODULES[name](device="meta").parameters()} == {"meta"}
    x, context = drawn(1, 2, 9, DIM).to(dtype), ContextParallel(Layout.contiguous(9, 1))
    wanted = module(x, context)
    loaded = MODULES[name](dtype=dtype)
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x, context, context.positions), wanted) and repr(other) == repr(module)


def test_a_module_that_holds_a_handle_is_copied_and_not_pickled() -> None:
    module = RingAttention(PATTERNS["causal"], ContextParallel(Layout.contiguous(9, 1)), name="layer 3")
    assert list(module.state_dict()) == [] and "layer 3" in repr(module)
    assert copy.deepcopy(module).context is module.context
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(module)


# --- graphs -----------------------------------------------------------------------------------------------------------


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


# --- one process ------------------------------------------------------------------------------------------------------


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
