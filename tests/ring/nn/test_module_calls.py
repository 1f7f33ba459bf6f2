"""Calls of a model's modules, and the search among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring.nn.module_calls import ModuleCalls, first_difference


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, raises: bool = False) -> dict[str, Tensor]:
        if raises:
            self.inner(x.view(-1))
        return {"logits": self.inner(x) + self.inner(2 * x)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layer, x, use_reentrant=False)["logits"]


def test_calls_are_recorded_once_in_the_order_in_which_they_end() -> None:
    model, x = Model(), torch.ones(1, 2)
    with ModuleCalls(model, 2) as recorded:
        for _ in range(3):
            model(x).sum().backward()
    names = ["layer.inner", "layer.inner", "layer", ""]
    assert [call.name for call in recorded.calls] == 2 * names
    assert [(call.forward, call.number) for call in recorded.calls[4:]] == [(1, 0), (1, 1), (1, 0), (1, 0)]
    _, second, layer, _ = recorded.calls[:4]
    assert second.inputs["input"].equal(2 * x) and layer.inputs["x"].equal(x) and layer.kind == "Layer"
    assert layer.gradients["logits"].equal(torch.ones(1, 2))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_names_its_module() -> None:
    layer = Layer()
    with pytest.raises(RuntimeError) as raised, ModuleCalls(layer):
        layer(torch.ones(3, 1), raises=True)
    assert raised.value.__notes__ == [" in inner (Linear)"]


PATH = ["layer.inner", "layer", ""]


@pytest.mark.parametrize("changed, expected", [([], 1), (PATH[:1], 2), (PATH[:2], 3), (PATH, 3), (PATH[1:], 1)])
def test_the_cause_is_the_first_call_around_whose_inputs_agree(changed: list[str], expected: int) -> None:
    model = Model()
    with ModuleCalls(model) as recorded:
        model(torch.ones(1, 2))
    path = first_difference(recorded.calls, lambda call: call.name in PATH, lambda call: call.name in changed)
    assert [call.name for call in path] == PATH[:expected]
    assert first_difference(recorded.calls, lambda call: False, lambda call: True) == []
