"""The self-attention and LongNet's block against the same layers computed densely: output and all gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from reference import Branch, Pattern
from ring import Layout
from ring.nn import ContextParallel, LongNetBlock, RingAttention, SelfAttention, longnet_pattern
from tests.support import nn_dense
from tests.support.nn_ranks import drawn, in_fp64
from tests.support.ranks import Ranks

EXACT = 1e-12  # fp64, outputs and gradients of the order of 1 to 100
DIM, HEADS = 16, 4
CAUSAL, GROUPS = Pattern.dense(causal=True), Pattern.head_groups((5, 13), (1, 3), HEADS)  # some tokens are not seen


def torchscale_pattern(segment_length: list[int], dilated_ratio: list[int], heads: int, causal: bool) -> Pattern:
    """Torchscale deals heads out in groups of ceil(heads / ratio), and each group begins one token later."""
    groups = [(heads + ratio - 1) // ratio for ratio in dilated_ratio]
    parts = zip(segment_length, dilated_ratio, groups, strict=True)
    return Pattern(
        tuple(Branch(n, ratio, tuple(h // group for h in range(heads))) for n, ratio, group in parts), causal
    )


def _self_attention_error(shards: str, options: dict[str, Any]) -> float:
    module = in_fp64(lambda: SelfAttention(DIM, HEADS, GROUPS, **options))
    theta, head_dim = module.rotary_theta, module.head_dim
    others = {name: options[name] for name in ("value_head_dim", "softcap") if name in options}
    return nn_dense.module_error(
        module, shards, lambda x, w: nn_dense.self_attention(x, w, GROUPS, head_dim, theta, **others)
    )


def _longnet_error(shards: str, options: dict[str, Any]) -> float:
    given = {"segment_length": [4, 13], "dilated_ratio": [1, 2]} | options
    who = torchscale_pattern(given["segment_length"], given["dilated_ratio"], HEADS, options.get("causal", True))
    module, theta = in_fp64(lambda: LongNetBlock(DIM, HEADS, **given)), options.get("rotary_theta", 10000.0)
    return nn_dense.module_error(module, shards, lambda x, w: nn_dense.longnet_block(x, w, who, DIM // HEADS, theta))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("error", "shards", "options"),
    [
        (_self_attention_error, "empty", {"kv_heads": 2}),
        (_self_attention_error, "uneven", {"kv_heads": 1, "qk_norm": True}),
        (_self_attention_error, "one", {"head_dim": 6, "rotary_theta": None}),
        (_self_attention_error, "uneven", {"rotary_theta": 500.0, "inner_norm_eps": 1e-5, "bias": True}),
        (_self_attention_error, "empty", {"kv_heads": 2, "sinks": True}),
        (_self_attention_error, "uneven", {"softcap": 0.5, "value_head_dim": 6, "inner_norm_eps": 1e-5, "bias": True}),
        (_self_attention_error, "uneven", {"softcap": 0.5, "value_head_dim": 3, "sinks": True}),
        (_longnet_error, "even", {}),
        (_longnet_error, "uneven", {"segment_length": [5], "dilated_ratio": [3], "causal": False}),
        (_longnet_error, "empty", {"kv_heads": 2, "ffn_dim": 10}),
        (_longnet_error, "uneven", {"dilated_ratio": [1, 6], "subln": False, "rotary_theta": None}),
    ],
)
def test_output_and_gradients(ranks: Ranks, error: Any, shards: str, options: dict[str, Any]) -> None:
    assert max(ranks(4).run(error, shards, options)) < EXACT


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("differs", ["theta", "head_dim", "dtype", "documents", "nothing"])
def test_layers_share_a_context_undisturbed(differs: str, first: int) -> None:
    """It has the bits that it has on a handle of its own, also where the other one came in inference mode."""
    choices: dict[str, tuple[Any, Any]] = {
        "theta": (100.0, 10000.0), "head_dim": (2, 4), "dtype": (torch.float64, torch.float32),
        "documents": ((9,), (4, 5)),
    }  # fmt: skip
    context = ContextParallel(Layout.contiguous(9, 1))
    for number in (first, 1 - first):
        of = {name: pair[number if name == differs else 0] for name, pair in choices.items()}
        layer = SelfAttention(4, 1, CAUSAL, head_dim=of["head_dim"], rotary_theta=of["theta"], dtype=of["dtype"])
        x = drawn(1, 2, 9, 4).to(of["dtype"])
        if differs == "documents":
            context = context.with_documents(of["documents"])
        with torch.inference_mode(number == first):
            found = layer(x, context)
        wanted = layer(x, ContextParallel(context.layout, documents=context.documents))
        assert torch.equal(found, wanted)
        if number != first:
            ours, theirs = (torch.autograd.grad(out.sum(), layer.q_proj.weight)[0] for out in (found, wanted))
            assert torch.equal(ours, theirs)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "self-attention": lambda **made: SelfAttention(
        DIM, HEADS, GROUPS, kv_heads=2, qk_norm=True, inner_norm_eps=1e-3, bias=True, **made
    ),
    "self-attention with sinks": lambda **made: SelfAttention(
        DIM, HEADS, GROUPS, value_head_dim=6, softcap=2.0, sinks=True, **made
    ),
    "longnet": lambda **made: LongNetBlock(DIM, HEADS, "[2,4]", (1, 2), **made),
    "longnet without subln": lambda **made: LongNetBlock(DIM, HEADS, [4], [2], subln=False, causal=False, **made),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_copies_keep_bits_and_parameters_their_dtype(name: str, dtype: torch.dtype) -> None:
    module = MODULES[name](dtype=dtype, device="cpu")
    assert {(x.dtype, x.device.type) for x in module.parameters()} == {(dtype, "cpu")}
    assert {x.device.type for x in MODULES[name](device="meta").parameters()} == {"meta"}
    x, context = drawn(1, 2, 9, DIM).to(dtype), ContextParallel(Layout.contiguous(9, 1))
    wanted = module(x, context)
    loaded = MODULES[name](dtype=dtype)
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x, context, context.positions), wanted) and repr(other) == repr(module)


def test_modules_with_a_context_copy_and_do_not_pickle() -> None:
    module = RingAttention(CAUSAL, ContextParallel(Layout.contiguous(9, 1)), name="layer 3")
    assert list(module.state_dict()) == [] and "layer 3" in repr(module)
    assert copy.deepcopy(module).context is module.context
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(module)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget the lengths that torch.compile has seen, before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("rows", (None, 1, 2))
def test_dynamic_graphs_take_later_positions(rows: int | None) -> None:
    """When they come, torch takes their length for a constant, and that of x for one that may change."""
    module = SelfAttention(8, 2, CAUSAL)
    graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    for number, n in enumerate((16, 23, 30, 37)):
        context, x = ContextParallel(Layout.contiguous(n, 1)), torch.randn(2, n, 8)
        positions = context.positions if rows is None else context.positions.repeat(rows, 1)
        given = positions if number >= 2 else None
        torch.testing.assert_close(graph(x, context, given), module(x, context, given))
    for shape in ((36,), (3, 37), (2, 36), (1, 1, 37)) if rows is None else ():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="positions must have the shape"):
            graph(x, context, torch.zeros(shape, dtype=torch.int64))


TREES = [((None, 0, 0), (4, 9, 6)), ((None, 0, 1, 0), (2, 7, 7, 3)), ((None,), (19,)), ((None, 0), (1, 18))]


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("trees", [False, True])
def test_compiled_modules_take_documents_that_change(trees: bool) -> None:
    pattern = CAUSAL if trees else Pattern.longnet([4, None], [1, 2], 2, causal=True)
    module, x, graphs = SelfAttention(8, 2, pattern), torch.randn(1, 19, 8), []

    def counted(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    graph = torch.compile(module, fullgraph=True, backend=counted)
    with torch.no_grad():
        for documents, tree in zip(((4, 0, 1, 9, 5), (19,), (3, 16), (1,) * 19), TREES, strict=True):
            context = ContextParallel(Layout.contiguous(19, 1), documents=None if trees else documents)
            context = context.with_pattern(Pattern.tree(*tree)) if trees else context
            if documents != (3, 16):  # as shard_batch does; a handle may also come without
                context.positions_on(x.device)
            torch.testing.assert_close(graph(x, context), module(x, context))
    assert len(graphs) <= 3  # for the first documents, for any, and for a handle without positions


def test_the_names_are_those_of_llama() -> None:
    module = SelfAttention(16, 4, Pattern.dense(), kv_heads=2, device="meta")
    shapes = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        f"{name}.weight": shape for name, shape in shapes.items()
    }


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_the_pattern_is_torchscales(heads: int) -> None:
    lengths, ratios = [2048, 4096, 8192], [1, 2, 4]
    for causal in (True, False):
        wanted = torchscale_pattern(lengths, ratios, heads, causal)
        assert longnet_pattern(lengths, ratios, heads, causal) == wanted
        assert longnet_pattern("[2048,4096,8192]", "[1, 2, 4]", heads, causal) == wanted
        assert longnet_pattern(" (2048, 4096, 8192) ", (1, 2, 4), heads, causal) == wanted
    assert longnet_pattern(lengths, ratios, heads, offsets="paper") == Pattern.longnet(lengths, ratios, heads, True)


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (SelfAttention, {"dim": 0}, "dim must be an integer >= 1, got 0"),
        (SelfAttention, {"heads": 4.0}, "heads must be an integer >= 1, got 4.0"),
        (SelfAttention, {"heads": 3}, "dim must be a multiple of heads unless head_dim is given, got 16 and 3"),
        (SelfAttention, {"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        (SelfAttention, {"kv_heads": True}, "kv_heads must be an integer >= 1, got True"),
        (SelfAttention, {"head_dim": 5}, "head_dim must be even for rotary positions, got 5"),
        (SelfAttention, {"rotary_theta": 0.0}, "theta must be a positive finite number, got 0.0"),
        (SelfAttention, {"softcap": -1}, "softcap must be None or a number from 1e-30 to 1e30, got -1"),
        (SelfAttention, {"softcap": True}, "softcap must be None or a number"),
        (SelfAttention, {"sinks": torch.ones(2)}, "sinks must be True or False, got tensor"),
        (SelfAttention, {"pattern": "dense"}, "pattern must be a Pattern, got 'dense'"),
        (SelfAttention, {"pattern": Pattern.longnet((4,), (2,), 8)}, "for the 4 query heads, got one that was made"),
        (LongNetBlock, {"dim": 0}, "dim must be"),
        (LongNetBlock, {"ffn_dim": 0}, "ffn_dim must be"),
        (LongNetBlock, {"heads": 3}, "dim must be a multiple"),
        *(
            (LongNetBlock, {"segment_length": given}, "segment_length must be integers >= 1")
            for given in ("", "[2048", "__import__('os')", [], 2048, [0], None)
        ),
        (LongNetBlock, {"dilated_ratio": [True]}, "dilated_ratio must be integers >= 1"),
        (LongNetBlock, {"dilated_ratio": [1.0]}, "dilated_ratio must be integers >= 1"),
        (LongNetBlock, {"dilated_ratio": "[1,2]"}, r"dilated_ratio must have one entry for each .*\[4\], got \[1, 2\]"),
    ],
)
def test_wrong_sizes_are_refused(module: Any, changes: dict[str, Any], message: str) -> None:
    right = {"pattern": CAUSAL} if module is SelfAttention else {"segment_length": [4], "dilated_ratio": [1]}
    with pytest.raises(ValueError, match=message):
        module(**{"dim": 16, "heads": 4} | right | changes)
