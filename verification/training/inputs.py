"""Initial parameters, tokens and labels of a TrainingCase, rebuilt from the Case alone.

The names and shapes of parameters are listed here, not read from the modules under test. The modules load this list
strictly, so a missing or extra parameter, or a wrong shape, shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verification.training.training_case import VOCABULARY, TrainingCase
from verification.training.training_model import Model

IGNORED = -100  # as torch.nn.functional.cross_entropy has it
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


def optimiser_of(case: TrainingCase, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    kind, settings = optimiser_settings(case)
    return kind(parameters, **settings)


def optimiser_settings(case: TrainingCase) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class of the Case's optimiser, and its arguments."""
    if case.optimiser == "sgd":
        return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    # AdamW divides a gradient by its size, so the rounding of one near 0 would become a full step: eps bounds that.
    return torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The batch of one step, each tensor (data, accumulation, batch, n): tokens, int64; labels, int64, already shifted,
    the next token or IGNORED; ignored, bool, True where the label is dropped."""

    tokens: Tensor
    labels: Tensor
    ignored: Tensor

    def of(self, part: TrainingCase) -> GlobalBatch:
        """The same sequences, divided into the data ranks and micro-batches of one of the Case's parts."""
        shape = (part.data, part.accumulation, part.batch, part.tokens)
        return GlobalBatch(self.tokens.reshape(shape), self.labels.reshape(shape), self.ignored.reshape(shape))

    @property
    def labelled(self) -> int:
        return int((self.labels != IGNORED).sum())


def global_batch(case: TrainingCase, step: int) -> GlobalBatch:
    """Batch of all ranks in that step."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + step + 1)
    shape = (case.data, case.accumulation, case.batch, case.tokens)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.full_like(tokens, IGNORED)
    labels[..., :-1] = tokens[..., 1:]
    last = [end - 1 for end in accumulate(case.at(step).documents) if end]
    labels[..., last] = IGNORED  # the next token belongs to another document
    ignored = _ignored(case, generator, shape)
    return GlobalBatch(tokens, labels.masked_fill(ignored, IGNORED), ignored)


def _ignored(case: TrainingCase, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Mask of the labels to drop, (data, accumulation, batch, n) bool."""
    out = torch.zeros(shape, dtype=torch.bool)
    if case.labels == "some":
        return torch.rand(shape, generator=generator) < 1 / 3
    if case.labels == "shards" and case.context > 1:
        out[..., torch.from_numpy(case.shards().positions[case.seed % case.context].copy())] = True
    elif case.labels == "ranks" and case.data > 1:
        out[case.seed % case.data] = True
    elif case.labels == "ranks" and case.accumulation > 1:
        out[:, case.seed % case.accumulation] = True
    elif case.labels == "none":
        out[:] = True
    return out
