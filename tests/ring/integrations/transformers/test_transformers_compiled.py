"""Prepared models of transformers within torch.compile: whole or layer by layer, with checks and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ring import Layout
from ring.integrations import transformers
from ring.nn import ContextParallel, shard_batch
from tests.support.framework_example import EXACT
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow
LAYERS = 3


def llama() -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2
            )
        ).double()


def tokens(n: int) -> Tensor:
    return torch.randint(19, (1, n), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget the lengths that torch.compile has seen, before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: PreTrainedModel, by_layer: bool, backend: Any) -> Callable[..., Any]:
    if not by_layer:
        graph: Callable[..., Any] = torch.compile(model, fullgraph=True, backend=backend)
        return graph
    for layer in model.get_decoder().layers:
        layer.compile(fullgraph=True, backend=backend)
    return model


def inputs(n: int, ranks: int, documents: tuple[int, ...] | None) -> tuple[Tensor, dict[str, Any]]:
    batch = shard_batch(ContextParallel(Layout.zigzag(n, ranks)), tokens(n), documents=documents)
    return batch.tokens, {"position_ids": batch.positions[None], "context": batch.context}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("prepare", [True, False])
def test_graphs_serve_any_length_and_documents(by_layer: bool, prepare: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    models = [llama(), llama()]
    for model in models:
        if prepare:
            transformers.prepare(model, compare=False)
        else:
            transformers.register()
            model.set_attn_implementation(transformers.NAME)
    call, counts = compiled(models[0], by_layer, counted), []
    with torch.no_grad():
        for n in (12, 16, 20, 28):
            for documents in (None, (5, n - 5), (3, 4, n - 7)):
                x, given = inputs(n, 1, documents)
                arguments = given if prepare else given | {"use_cache": False}
                assert torch.equal(call(x, **arguments).logits, models[1](x, **arguments).logits), (n, documents)
            counts.append(len(graphs))
        with pytest.raises(ValueError, match="position_ids must be context.positions.* got others"):
            call(x, **arguments | {"position_ids": given["position_ids"] + 1})
    assert counts[2:] == counts[1:2] * 2, "graphs for a length or for documents"


def _train(by_layer: bool, checkpointing: bool) -> list[Tensor]:
    """Gradients; then rank 1 alone gives wrong positions."""
    torch._dynamo.reset()
    model, rank = transformers.prepare(llama()).train(), dist.get_rank()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    call = compiled(model, by_layer, "aot_eager")
    x, given = inputs(22, 2, (9, 13))
    call(x, **given).logits.square().sum().backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
    for other in (0, 1):
        wrong = {"position_ids": given["position_ids"] + (rank == other)}
        with torch.no_grad(), pytest.raises(ValueError, match=f"rank {other}: position_ids must be"):
            call(x, **given | wrong)
    assert call(x, **given).logits.isfinite().all()
    torch._dynamo.reset()
    return grads


@pytest.mark.ranks
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_compiled_models_train_as_one_process(ranks: Ranks, by_layer: bool, checkpointing: bool) -> None:
    model = llama()
    parts = [model(part).logits for part in tokens(22).split((9, 13), 1)]
    torch.cat(parts, 1).square().sum().backward()
    exact = [x.grad for x in model.parameters()]
    for grads in ranks(2).run(_train, by_layer, checkpointing):
        torch.testing.assert_close(grads, exact, rtol=EXACT, atol=EXACT)
