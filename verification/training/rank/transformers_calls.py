"""What the adapter for Hugging Face's models gives and refuses, called as a layer of such a model calls it.

It needs the package transformers (requirements-training.txt). Without it these calls do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reference.pattern import Branch, Pattern
from ring.nn import ContextParallel
from verification.training.rank.handle_calls import some_documents
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, refused

HEADS, KV_HEADS, DIM = 4, 2, 2
TRIED = 8  # wrong calls an example


class _CallingLayer(nn.Module):
    """What a model's attention module says of itself."""

    def __init__(self, causal: bool, rotary: dict[str, Any]) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = causal, 3
        self.config = SimpleNamespace(rope_parameters=rotary)


def _inputs(s: CallPlace, draws: np.random.Generator) -> list[Tensor]:
    """This rank's tokens of q (B, H, N, D), k and v (B, Hk, N, D)."""
    batch = int(draws.integers(1, 3))
    shapes = [(batch, heads, s.case.tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [s.context.shard(torch.from_numpy(draws.standard_normal(shape)), 2).to(s.device) for shape in shapes]


def _handle(s: CallPlace, draws: np.random.Generator) -> ContextParallel:
    return s.context.with_documents(some_documents(draws, s.case.tokens)) if draws.integers(2) else s.context


def _position_ids(handle: ContextParallel, batch: int, draws: np.random.Generator, device: torch.device) -> Tensor:
    """The caller's own."""
    return handle.positions.to(device).repeat(batch if draws.integers(2) else 1, 1)


def _as_a_layer_calls(s: CallPlace) -> str:
    """Output and gradients are those of the handle's attention, dense, in a window, or by a pattern of the caller's.
    Positions that are changed after a call are refused in the next."""
    if find_spec("transformers") is None:
        return ""
    from ring.nn.frameworks import transformers

    draws = s.draws()
    q, k, v = (x.requires_grad_() for x in _inputs(s, draws))
    handle, causal, of_module = _handle(s, draws), bool(draws.integers(2)), bool(draws.integers(2))
    scale, window = (None, 0.25)[draws.integers(2)], int(draws.integers(1, 6)) if causal and draws.integers(2) else None
    layer = _CallingLayer(causal if of_module else not causal, {"rope_type": "llama3"})
    given: dict[str, Any] = {"scaling": scale, "sliding_window": window, "context": handle, "cache_position": q}
    given["softcap"] = (None, False, 0, 0.0)[draws.integers(4)]  # which all say that there is none
    given |= {} if of_module else {"is_causal": causal}
    pattern = Pattern.dense(causal, window=None if window is None else window - 1)
    if window is None and draws.integers(2):
        pattern = given["pattern"] = Pattern((Branch(3, 1), Branch(None, 2)), causal)
    ids = _position_ids(handle, len(q), draws, s.device)
    found, none = transformers.attention(layer, q, k, v, None, position_ids=ids, **given)
    by_token = [x.transpose(1, 2) for x in (q, k, v)]  # (B, N, H or Hk, D)
    wanted = handle.attention(by_token[0], by_token[1], by_token[2], pattern, scale=scale)
    ours, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, wanted))
    transformers.attention(layer, q, k, v, None, position_ids=ids, **given)  # which may trust them now
    ids += 1
    said = refused(
        ("position_ids must be",), lambda: transformers.attention(layer, q, k, v, None, position_ids=ids, **given)
    )
    # Compared behind the last call: a rank that left before it would keep the others waiting.
    must(none is None, f"a layer must get no weights, got {none!r}")
    must_be(f"attention of a layer, {pattern}, scale {scale}", found.detach(), wanted.detach())
    for name, x, right in zip("qkv", ours, theirs, strict=True):
        must_be(f"the gradient of a layer's {name}", x, right)
    return said


def _wrong(layer: _CallingLayer, given: dict[str, Any]) -> Iterator[tuple[str, _CallingLayer, dict[str, Any]]]:
    """By what the error must name: a causal layer, and arguments, of which one is wrong."""
    for kind in ("dynamic", "longrope"):
        for rotary in ({"rope_type": kind}, {"full_attention": {"rope_type": "default"}, "other": {"rope_type": kind}}):
            yield "rope_type", _CallingLayer(True, rotary), given
    ids = given["position_ids"]
    arguments: list[tuple[str, Any]] = [
        ("attention_mask", torch.ones(1, 1, 2, 2)), ("dropout", 0.1), ("softcap", 30.0), ("softcap", -1.0),
        ("s_aux", torch.zeros(HEADS)), ("output_attentions", True), ("position_ids", ids[:, 1:]),
        ("sliding_window", 0), ("sliding_window", True), ("sliding_window", 2.0), ("position_ids", None),
        ("position_ids", ids[0]), ("position_ids", ids.unsqueeze(2)), ("position_ids", torch.cat((ids, ids), 1)),
        ("pattern", Pattern.dense()), ("pattern", "dense"),
    ]  # fmt: skip
    for name, value in arguments:  # ids of a rank without tokens may be right; then the others refuse them
        yield name, layer, given | {name: value}
    yield "sliding_window", layer, given | {"sliding_window": 2, "is_causal": False}
    yield "pattern", layer, given | {"sliding_window": 2, "pattern": Pattern.dense(causal=True)}


def _refused_of_a_layer(s: CallPlace) -> str:
    """On every rank, in the same words."""
    if find_spec("transformers") is None:
        return ""
    from ring.nn.frameworks import transformers

    draws = s.draws()
    q, k, v = _inputs(s, draws)
    ids = s.context.positions.to(s.device)[None]
    right: dict[str, Any] = {"context": s.context, "position_ids": ids, "attention_mask": None}
    every = list(_wrong(_CallingLayer(True, {"rope_type": "default"}), right))
    said = []
    for number in draws.choice(len(every), TRIED, replace=False):
        name, layer, given = every[number]
        said.append(refused((name,), partial(transformers.attention, layer, q, k, v, **given)))
    return "\n".join(said)


TRANSFORMERS_CALLS: dict[str, OtherCall] = {
    "attention as a layer of transformers calls it": OtherCall(_as_a_layer_calls, "context"),
    "what a layer of transformers may not ask for": OtherCall(_refused_of_a_layer, ""),
}
