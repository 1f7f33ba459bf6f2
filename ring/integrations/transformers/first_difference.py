"""First module of a sharded forward whose output differs from that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ring.nn.module_calls import ModuleCall, first_difference

LIMIT = torch.finfo(torch.float64).eps ** 0.5  # of the greatest magnitude: half of the digits
MODEL = ("", 0)  # the key of the model's own call
Key = tuple[str, int]  # a module's name, and the number of its call


@dataclass(frozen=True, eq=False)
class Part:
    """A document, or the whole sequence, in one process.

    length: its tokens. tokens: those of this rank's shard. here: rows of the shard that belong to it. there: their
    rows in it. calls: of the modules in one process.
    """

    length: int
    tokens: int
    here: Tensor
    there: Tensor
    calls: list[ModuleCall]


def differing_module(calls: list[ModuleCall], parts: list[Part]) -> tuple[int, str] | None:
    """Return the first module that differs: its place in the order of the forward, and a sentence.

    Args:
        calls: of this rank's shard.
        parts: in one process.

    Returns:
        None if the model's own outputs agree.
    """
    ours, *wholes = [{(x.name, x.number): x for x in some} for some in (calls, *(part.calls for part in parts))]

    def difference(key: Key, tensors: Callable[[ModuleCall], dict[str, Tensor]]) -> tuple[str, bool] | None:
        if key not in ours or any(key not in whole for whole in wholes):
            return None
        return _difference(tensors(ours[key]), [tensors(whole[key]) for whole in wholes], parts, key == MODEL)

    def output_difference(call: ModuleCall) -> tuple[str, bool] | None:
        return difference((call.name, call.number), lambda x: x.outputs)

    def input_difference(call: ModuleCall) -> tuple[str, bool] | None:
        return difference((call.name, call.number), lambda x: x.inputs)

    order = parts[0].calls
    if output_difference(order[-1]) is None:
        return None
    first, *around = first_difference(order, output_difference, input_difference)
    cause = [first, *around][-1]
    name, is_along = output_difference(cause) or ("output", True)
    return order.index(first), _sentence(cause, name, is_along, len(wholes) > 1)


def _difference(
    ours: dict[str, Tensor], wholes: list[dict[str, Tensor]], parts: list[Part], required: bool
) -> tuple[str, bool] | None:
    """The first tensor that differs: its name, and whether it runs along the tokens.

    Tensors without rows of tokens are compared as they are, but not with those of a document. required: tensors of
    another shape differ.
    """
    if required and not ours:
        return "output", False
    for name, x in ours.items():
        for part, whole in zip(parts, wholes, strict=True):
            if name not in whole:
                continue
            pairs = [*_rows(x, whole[name], part)]
            is_along = bool(pairs)
            if not pairs and len(parts) == 1:
                if x.shape == whole[name].shape:
                    pairs = [(x, whole[name])]
                elif required:
                    return name, False
            if pairs and not any(_is_near(a, b, whole[name]) for a, b in pairs):
                return name, is_along
    return None


def _rows(x: Tensor, whole: Tensor, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the part's rows of a rank's tensor and of that of one process, along each dimension that fits."""
    for dim in range(x.dim() if x.dim() == whole.dim() else 0):
        fits = (x.shape[dim], whole.shape[dim]) == (part.tokens, part.length)
        if fits and x.shape[:dim] + x.shape[dim + 1 :] == whole.shape[:dim] + whole.shape[dim + 1 :]:
            here, there = (rows.to(x.device) for rows in (part.here, part.there))
            yield x.index_select(dim, here), whole.index_select(dim, there)


def _is_near(x: Tensor, expected: Tensor, whole: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return torch.equal(x, expected)
    finite = whole[whole.isfinite()].abs()
    limit = LIMIT * float(finite.max()) if finite.numel() else 0.0
    return bool(((x == expected) | ((x - expected).abs() <= limit) | (x.isnan() & expected.isnan())).all())


def _sentence(call: ModuleCall, name: str, is_along: bool, packed: bool) -> str:
    where = f"{call.name} ({call.kind})" if call.name else f"the model itself ({call.kind}), beside its submodules,"
    what = "" if name == "output" else f" {name}"
    if is_along:
        return (
            f"the output{what} of {where} differs, whose inputs agree: it mixes tokens outside the attention that is "
            "sharded (an attention of its own, a convolution, a state along the sequence), or counts positions itself. "
            "Use a model whose layers mix tokens only in the attention of transformers' AttentionInterface"
        )
    return (
        f"the output{what} of {where} differs, whose inputs agree: it is a function of the whole sequence (a pooled "
        "output, a mean over tokens, an auxiliary loss), and a rank has a part. Leave it out (as by "
        "add_pooling_layer=False, output_router_logits=False), and compute it from gathered outputs"
    )
