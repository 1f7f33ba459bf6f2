"""Initial parameters of a TrainingCase, rebuilt from the Case alone.

The names and shapes of parameters are listed here, not read from the modules under test. The modules load this list
strictly, so a missing or extra parameter, or a wrong shape, shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verification.models.batches import VOCABULARY
from verification.training.training_case import TrainingCase
from verification.training.training_model import Model

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(case: TrainingCase) -> Shapes:
    """Shapes by the names of `named_parameters`; tied weights appear once, as the embedding's."""
    model = case.model
    shapes: Shapes = {"embedding.weight": (VOCABULARY, model.dim)}
    if model.positions == "learned":
        shapes["position_table.weight"] = (case.tokens, model.dim)
    for number in range(model.layers):
        layer = _BY_KIND[model.kind](model)
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes |= _norm("norm", model.dim, model.norm)
    if not model.tied:
        shapes["head.weight"] = (VOCABULARY, model.dim)
    return shapes


def _linear(name: str, inner: int, outer: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outer, inner)}
    return shapes | ({f"{name}.bias": (outer,)} if bias else {})


def _norm(name: str, dim: int, kind: str) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (dim,)}
    return shapes | ({f"{name}.bias": (dim,)} if kind == "layer" else {})


def _projections(name: str, model: Model, bias: bool) -> Shapes:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        **_linear(f"{name}.q_proj", model.dim, q, bias), **_linear(f"{name}.k_proj", model.dim, kv, bias),
        **_linear(f"{name}.v_proj", model.dim, kv, bias), **_linear(f"{name}.o_proj", q, model.dim, bias),
    }  # fmt: skip


def _llama(model: Model) -> Shapes:
    shapes = _norm("attention_norm", model.dim, model.norm) | _projections("attention", model, model.bias)
    if model.qk_norm:
        shapes |= _norm("attention.q_norm", model.head_dim, "rms") | _norm("attention.k_norm", model.head_dim, "rms")
    return shapes | _norm("feed_norm", model.dim, model.norm) | {
        **_linear("gate", model.dim, 2 * model.dim), **_linear("up", model.dim, 2 * model.dim),
        **_linear("down", 2 * model.dim, model.dim),
    }  # fmt: skip


def _sdpa(model: Model) -> Shapes:
    return {
        **_norm("attention_norm", model.dim, model.norm), **_projections("attention", model, model.bias),
        **_norm("feed_norm", model.dim, model.norm), **_linear("up", model.dim, 2 * model.dim, bias=True),
        **_linear("down", 2 * model.dim, model.dim, bias=True),
    }  # fmt: skip


def _longnet(model: Model) -> Shapes:
    shapes = _norm("attention_norm", model.dim, "layer") | _projections("attention", model, bias=True)
    shapes |= _norm("ffn_norm", model.dim, "layer") | _linear("fc1", model.dim, 2 * model.dim, bias=True)
    if model.subln:
        shapes |= _norm("attention.inner_norm", model.dim, "layer") | _norm("ffn_inner_norm", 2 * model.dim, "layer")
    return shapes | _linear("fc2", 2 * model.dim, model.dim, bias=True)


_BY_KIND = {"llama": _llama, "longnet": _longnet, "sdpa": _sdpa}


def initial_parameters(case: TrainingCase) -> dict[str, Tensor]:
    """Parameters by name, float64, on the CPU; for lower precisions their values fit float32. No value is special: norm
    weights are not 1 and biases not 0, so a misplaced gradient or a missing term shows."""
    generator = torch.Generator().manual_seed(case.seed)
    parameters = {}
    for name, shape in parameter_shapes(case).items():
        drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
        if name.endswith("bias"):
            drawn *= 0.2
        elif len(shape) == 1:  # weight of a norm
            drawn = 1 + 0.2 * drawn
        else:
            drawn *= shape[1] ** -0.5
        parameters[name] = drawn.to(case.parameter_dtype).double()
    return parameters
