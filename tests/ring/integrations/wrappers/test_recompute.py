"""Layers that are computed again in backward: how often they run, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring.integrations.wrappers import recompute

WAYS: list[dict[str, Any]] = [{}, {"keep_attention": True}, {"reentrant": True}]


class Counted(nn.Module):
    """A layer that counts how often it runs, and drops half of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.linear = 0, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.dropout(torch.sin(self.linear(x)), 0.5, self.training)


class Derived(Counted):
    """A layer by the class that it is derived from."""


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("layers", [Counted, (nn.Conv1d, Counted)], ids=str)
def test_each_layer_runs_once_more_with_the_same_random_numbers(way: dict[str, Any], layers: Any) -> None:
    """Layers of derived classes count too, other modules do not. Gradients are the same, bit by bit."""
    plain = nn.Sequential(Counted(), nn.Linear(4, 4), nn.Sequential(Derived()), Derived())
    wrapped = copy.deepcopy(plain)
    counted = [module for module in wrapped.modules() if isinstance(module, Counted)]
    recompute.wrap(wrapped, layers, **way)
    x = torch.linspace(-1.0, 1.0, 64).view(16, 4).requires_grad_()
    for model in (plain, wrapped):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model(x).square().sum().backward()
    assert [layer.runs for layer in counted] == [2, 2, 2]
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_recomputes_all_but_attention_where_it_is_kept() -> None:
    layer = Counted()
    checkpoint(layer, torch.ones(1, 4), use_reentrant=False, context_fn=recompute.attention_kept).sum().backward()
    assert layer.runs == 2


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((), "layers must be classes of modules, got none"),
        ("Linear", "layers must be classes of modules, got a str"),
        ((nn.Linear, int), "layers must be classes of modules, got Linear, int"),
        (nn.Linear(1, 1), "layers must be classes of modules, got a Linear"),
        (nn.Conv1d, "got Conv1d, of which it has none"),
        (nn.Sequential, "got Sequential, of which it has none"),  # the model itself is no layer of it
    ],
)
def test_layers_that_are_none_are_refused(layers: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"layers must .*{words}|{words}"):
        recompute.wrap(nn.Sequential(nn.Linear(2, 2)), layers)


def test_attention_cannot_be_kept_where_inputs_are_all_that_is() -> None:
    with pytest.raises(NotImplementedError, match="keep_attention=True needs reentrant=False"):
        recompute.wrap(nn.Sequential(nn.Linear(2, 2)), nn.Linear, keep_attention=True, reentrant=True)
