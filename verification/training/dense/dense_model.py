"""The three kinds of model as formulas over named parameters, for whole sequences in one process.

Written from the published definitions, without any code of `ring.nn`. `rounded` is applied to every number that a lower
precision would round (`verification.models.noise`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from verification.models.formulas import oracle_attention, rotated
from verification.models.noise import Rounded
from verification.training.training_case import TrainingCase
from verification.training.training_model import NORM_EPS

QK_NORM_EPS = 1e-6


def dense_logits(case: TrainingCase, parameters: Mapping[str, Tensor], tokens: Tensor, rounded: Rounded) -> Tensor:
    """tokens (S, n) of S whole sequences -> (S, n, vocabulary), fp64."""
    weights = Weights({name: rounded(x) for name, x in parameters.items()}, rounded)
    model = case.model
    x = weights["embedding.weight"][tokens]  # (S, n, dim)
    if model.positions == "learned":
        x = rounded(x + weights["position_table.weight"][case.positions()])
    for number in range(model.layers):
        layer = Layer(case, model.theta(number))
        x = _LAYERS[model.kind](layer, weights.below(f"layers.{number}."), x)
    x = _norm(weights.below("norm."), model.norm, x)
    return rounded(x @ weights["embedding.weight" if model.tied else "head.weight"].T)


@dataclass(frozen=True)
class Layer:
    """Settings of a layer. theta: base of its rotary positions."""

    case: TrainingCase
    theta: float


@dataclass(frozen=True)
class Weights:
    """Parameters of a part of the model, by their names below that part."""

    by_name: Mapping[str, Tensor]
    rounded: Rounded

    def __getitem__(self, name: str) -> Tensor:
        return self.by_name[name]

    def below(self, prefix: str) -> Weights:
        parameters = {name.removeprefix(prefix): x for name, x in self.by_name.items() if name.startswith(prefix)}
        return Weights(parameters, self.rounded)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return x W^T, plus the bias if there is one."""
        out = x @ self[f"{name}.weight"].T
        return self.rounded(out + self[f"{name}.bias"] if f"{name}.bias" in self.by_name else out)


# --- layers: x (S, n, dim) -> (S, n, dim) -----------------------------------------------------------------------------


def _llama(layer: Layer, weights: Weights, x: Tensor) -> Tensor:
    rounded, kind = weights.rounded, layer.case.model.norm
    x = rounded(x + _attention(layer, weights, _norm(weights.below("attention_norm."), kind, x)))
    fed = _norm(weights.below("feed_norm."), kind, x)
    gated = rounded(functional.silu(weights.linear("gate", fed)) * weights.linear("up", fed))
    return rounded(x + weights.linear("down", gated))


def _sdpa(layer: Layer, weights: Weights, x: Tensor) -> Tensor:
    rounded, kind = weights.rounded, layer.case.model.norm
    x = rounded(x + _attention(layer, weights, _norm(weights.below("attention_norm."), kind, x)))
    fed = _norm(weights.below("feed_norm."), kind, x)
    return rounded(x + weights.linear("down", _gelu(rounded, weights.linear("up", fed))))


def _longnet(layer: Layer, weights: Weights, x: Tensor) -> Tensor:
    rounded = weights.rounded
    x = rounded(x + _attention(layer, weights, _norm(weights.below("attention_norm."), "layer", x)))
    fed = _norm(weights.below("ffn_norm."), "layer", x)
    inner = _gelu(rounded, weights.linear("fc1", fed))
    if layer.case.model.subln:
        inner = _norm(weights.below("ffn_inner_norm."), "layer", inner)
    return rounded(x + weights.linear("fc2", inner))


_LAYERS = {"llama": _llama, "longnet": _longnet, "sdpa": _sdpa}


# --- parts of a layer -------------------------------------------------------------------------------------------------


def _attention(layer: Layer, weights: Weights, x: Tensor) -> Tensor:
    """Multi-head attention: projections, norms of heads, rotary positions, attention, output projection."""
    case, model = layer.case, layer.case.model
    attention = weights.below("attention.")
    counts = {"q_proj": model.heads, "k_proj": model.kv_heads, "v_proj": model.kv_heads}
    q, k, v = (attention.linear(name, x).unflatten(2, (n, -1)) for name, n in counts.items())  # (S, n, heads, D)
    if model.qk_norm:
        q, k = (_norm(attention.below(f"{name}_norm."), "rms", y, QK_NORM_EPS) for name, y in (("q", q), ("k", k)))
    if model.positions == "rotary":
        q, k = (weights.rounded(rotated(y, case.positions(), layer.theta)) for y in (q, k))
    out, _ = oracle_attention(q, k, v, case.pattern, scale=model.scale)  # (S, n, H, D)
    out = weights.rounded(out).flatten(2)
    if model.subln:
        out = _norm(attention.below("inner_norm."), "layer", out)
    return attention.linear("o_proj", out)


def _norm(weights: Weights, kind: str, x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """RMS or layer norm over the last dimension."""
    rounded = weights.rounded
    centred = x if kind == "rms" else rounded(x - rounded(x.mean(-1, keepdim=True)))
    scaled = rounded(centred / rounded((centred.square().mean(-1, keepdim=True) + eps).sqrt()))
    return rounded(scaled * weights["weight"] + (0 if kind == "rms" else weights["bias"]))


def _gelu(rounded: Rounded, x: Tensor) -> Tensor:
    return rounded(x * 0.5 * (1 + torch.erf(x / 2**0.5)))
