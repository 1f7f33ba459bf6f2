"""Peers for tests/verification/peers/test_peers.py: a sound one, and others with one fault each. All run plain
attention in one process."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from reference import Pattern
from verification.case import Case
from verification.peers import Peer, claims
from verification.peers.adapters.plain_attention import attention
from verification.peers.peer import Result


def claim(case: Case) -> Case:
    case = claims.dense(claims.one_process(claims.without_own_settings(claims.default_scale(claims.without_lse(case)))))
    return claims.equal_heads(claims.in_dtypes(case, "float32", "float64"))


def with_lse(case: Case) -> Case:
    return dataclasses.replace(claim(case), lse="differentiated")


def dilated(case: Case) -> Case:
    """Odd positions see nothing."""
    return dataclasses.replace(claim(case), pattern=Pattern.longnet([2], [2], case.heads, offsets="fkodom"))


def with_documents(case: Case) -> Case:
    case = claims.packed(
        claims.one_process(claims.without_own_settings(claims.default_scale(claims.without_lse(case))))
    )
    return claims.equal_heads(claims.in_dtypes(case, "float32", "float64"))


def document_by_document(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Tensor:
    """One after another, and set end to end."""
    documents = list(case.pattern.documents or (case.tokens,))
    parts = ((*part, case, group) for part in zip(*(x.split(documents, 1) for x in (q, k, v)), strict=True))
    return torch.cat([plain(*part) for part in parts], 1)


def with_windows(case: Case) -> Case:
    return dataclasses.replace(claim(case), pattern=claims.dense(case, windows=True).pattern)


def within_windows(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Tensor:
    window, away = claims.window(case), torch.arange(case.tokens)[:, None] - torch.arange(case.tokens)
    seen = away.abs() <= (case.tokens if window is None else window)
    if case.pattern.causal:
        seen &= away >= 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Tensor:
    assert group is None
    return attention(q, k, v, case.softmax_scale, case.pattern.causal)[0]


def raising(*arguments: Any) -> Result:
    raise RuntimeError("never in this life")


def aborting(*arguments: Any) -> Result:
    os.abort()


def waiting(*arguments: Any) -> Result:
    threading.Event().wait()
    raise AssertionError("it waits for ever")


def connected_to_nothing(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    return plain(q, k, v.detach(), case, group)


def heads_before_tokens(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    return plain(q, k, v, case, group).transpose(1, 2)


class Spoil(torch.autograd.Function):
    """Changes v in its backward, when all results are there."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, out: Tensor) -> Tensor:
        ctx.v = v
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        ctx.v.detach().mul_(2)
        return None, gradients[0].clone()


def spoiling(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    out: Tensor = Spoil.apply(v.detach(), plain(q, k, v.clone(), case, group))
    return out


_calls: list[None] = []


def forgetting(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    """Every other call is off by one unit in the last place or two: within the bounds."""
    _calls.append(None)
    return plain(q, k, v, case, group) * (1 + (len(_calls) % 2) * torch.finfo(q.dtype).eps)


def widened(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    class Widen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            return out.to(torch.float64 if out.dtype == torch.float32 else torch.float32)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0].to(q.dtype)

    out: Tensor = Widen.apply(plain(q, k, v, case, group))
    return out


def overflowing(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    return plain(q, k, v, case, group) / (q.shape[1] < 4)


def partly_detached(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    return plain(q, k, (v + v.detach()) / 2, case, group)


def one_too_many(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    return plain(q, k, v.roll(1, 1), case, group)


def in_base_two(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    out, lse = attention(q, k, v, case.softmax_scale, case.pattern.causal)
    return out, lse / 0.6931471805599453


def without_package() -> None:
    importlib.import_module("no_such_package")


def without_end() -> None:
    threading.Event().wait()


sound = Peer("mine", "dense, one process", claim, plain, worlds=(1,))
raises = dataclasses.replace(sound, attend=raising)
aborts = dataclasses.replace(sound, attend=aborting)
packed = dataclasses.replace(sound, claims=with_documents, attend=document_by_document)
unpacked = dataclasses.replace(sound, claims=with_documents)
windowed = dataclasses.replace(sound, claims=with_windows, attend=within_windows)
unwindowed = dataclasses.replace(sound, claims=with_windows)
hangs = dataclasses.replace(sound, attend=waiting)
unconnected = dataclasses.replace(sound, attend=connected_to_nothing)
transposed = dataclasses.replace(sound, attend=heads_before_tokens)
spoils = dataclasses.replace(sound, attend=spoiling)
forgets = dataclasses.replace(sound, attend=forgetting)
wide = dataclasses.replace(sound, attend=widened)
infinite = dataclasses.replace(sound, attend=overflowing)
detached = dataclasses.replace(sound, attend=partly_detached)
shifted = dataclasses.replace(sound, attend=one_too_many)
wrong_lse = dataclasses.replace(sound, attend=in_base_two, claims=with_lse)
leaking = dataclasses.replace(sound, claims=dilated)

number = 7
needy = dataclasses.replace(sound, package="no-such-distribution", prepare=without_package)
endless = dataclasses.replace(sound, prepare=without_end)
claims_raise = dataclasses.replace(sound, claims=lambda case: case.tokens // 0)  # type: ignore[arg-type, return-value]
claims_other_world = dataclasses.replace(sound, claims=lambda case: dataclasses.replace(claim(case), world=2))
claims_nothing = dataclasses.replace(sound, claims=lambda case: None)
returns_list = dataclasses.replace(sound, attend=lambda *arguments: [plain(*arguments)])  # type: ignore[arg-type]
no_lse = dataclasses.replace(sound, claims=with_lse)
