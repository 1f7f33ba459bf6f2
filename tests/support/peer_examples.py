"""Peers for tests/verification/peers: sound ones, and others with one fault each. All run in one process."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from reference import Pattern
from verification.case import Case
from verification.peers import Peer, claims
from verification.peers.adapters.flash_attn_shim import attention


def plain(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    case, group = given
    assert group is None or group.size() == 1
    return attention(q, k, v, case.softmax_scale, case.pattern.causal)[0]


def document_by_document(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Tensor:
    """Documents one after another, set end to end."""
    documents = list(case.pattern.documents or (case.tokens,))
    parts = zip(*(x.split(documents, 1) for x in (q, k, v)), strict=True)
    return torch.cat([plain(*part, case, group) for part in parts], 1)


def within_windows(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Tensor:
    window, away = claims.window(case), torch.arange(case.tokens)[:, None] - torch.arange(case.tokens)
    seen = away.abs() <= (case.tokens if window is None else window)
    if case.pattern.causal:
        seen &= away >= 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)


def raising(*given: Any) -> Tensor:
    raise RuntimeError("never in this life")


def aborting(*given: Any) -> Tensor:
    os.abort()


def without_package() -> None:
    importlib.import_module("no_such_package")


def waiting(*given: Any) -> Any:
    threading.Event().wait()
    raise AssertionError("it waits for ever")


class Spoil(torch.autograd.Function):
    """Changes v in its backward, when all results are there."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, out: Tensor) -> Tensor:
        ctx.v = v
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.v.detach().mul_(2)
        return None, grads[0].clone()


class Widen(torch.autograd.Function):
    """Returns another type than that of the inputs."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.dtype = out.dtype
        return out.to(torch.float64 if out.dtype == torch.float32 else torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(ctx.dtype)


_calls: list[None] = []


def forgetting(q: Tensor, *given: Any) -> Tensor:
    """Every other call is off by one unit in the last place or two: within the bounds."""
    _calls.append(None)
    return plain(q, *given) * (1 + (len(_calls) % 2) * torch.finfo(q.dtype).eps)


def in_base_two(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, case.softmax_scale, case.pattern.causal)
    return out, lse / 0.6931471805599453


def claim(case: Case) -> Case:
    return claims.dense(claims.plain_process(case))


def then(**changes: Callable[[Case], Any]) -> Callable[[Case], Case]:
    """A claim with these fields changed, each by a function of the Case that is claimed without."""
    return lambda case: replace(claim(case), **{name: change(case) for name, change in changes.items()})


lse_too = then(lse=lambda case: "differentiated")

sound = Peer("mine", "dense, one process", claim, plain, worlds=(1,))
packed = replace(sound, claims=lambda case: claims.packed(claims.plain_process(case)), attend=document_by_document)
unpacked = replace(packed, attend=plain)
windowed = replace(
    sound, claims=then(pattern=lambda case: claims.dense(case, windows=True).pattern), attend=within_windows
)
unwindowed = replace(windowed, attend=plain)

raises = replace(sound, attend=raising)
aborts = replace(sound, attend=aborting)
hangs = replace(sound, attend=waiting)
unconnected = replace(sound, attend=lambda q, k, v, *given: plain(q, k, v.detach(), *given))
transposed = replace(sound, attend=lambda *given: plain(*given).transpose(1, 2))
spoils = replace(sound, attend=lambda q, k, v, *given: Spoil.apply(v.detach(), plain(q, k, v.clone(), *given)))
forgets = replace(sound, attend=forgetting)
wide = replace(sound, attend=lambda *given: Widen.apply(plain(*given)))
infinite = replace(sound, attend=lambda q, *given: plain(q, *given) / (q.shape[1] < 4))
detached = replace(sound, attend=lambda q, k, v, *given: plain(q, k, (v + v.detach()) / 2, *given))
shifted = replace(sound, attend=lambda q, k, v, *given: plain(q, k, v.roll(1, 1), *given))
wrong_lse = replace(sound, attend=in_base_two, claims=lse_too)
# Odd positions see nothing.
leaking = replace(
    sound, claims=then(pattern=lambda case: Pattern.longnet([2], [2], claim(case).heads, offsets="fkodom"))
)

number = 7
needy = replace(sound, package="no-such-distribution", prepare=without_package)
endless = replace(sound, prepare=waiting)
claims_raise = replace(sound, claims=lambda case: case.tokens // 0)  # type: ignore[arg-type, return-value]
claims_other_world = replace(sound, claims=then(world=lambda case: 2))
claims_unsettled = replace(sound, claims=then(tokens=lambda case: case.tokens + 1))
claims_nothing = replace(sound, claims=lambda case: None)
returns_list = replace(sound, attend=lambda *given: [plain(*given)])  # type: ignore[arg-type]
no_lse = replace(sound, claims=lse_too)
