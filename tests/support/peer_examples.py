"""Peers for tests/verification/peers: sound ones, and others with one fault each. All run in one process."""

from __future__ import annotations

import importlib
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from reference.pattern import multiplicity
from ring import Layout, ring_attention
from verification.case import Case
from verification.peers import Peer, claims
from verification.peers.adapters.flash_attn_shim import attention

EXAMPLES = __name__


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    return attention(q, k, v, case.softmax_scale, case.pattern.causal)[0]


def scored(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object, sinks: Tensor | None = None) -> Tensor:
    """Attention with a softcap, and with sinks as one more column of scores."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * case.softmax_scale
    scores = scores if case.softcap is None else case.softcap * (scores / case.softcap).tanh()
    if case.pattern.causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., : k.shape[1]], v)


def masked(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    """Attention with slices; a row that sees nothing is 0."""
    places = torch.arange(case.tokens)
    hidden = multiplicity(case.pattern, places, places, 1) == 0
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * case.softmax_scale
    weights = scores.masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def document_by_document(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    parts: Any = zip(*(x.split(list(case.pattern.documents or (case.tokens,)), 1) for x in (q, k, v)), strict=True)
    return torch.cat([plain(q, k, v, case, group) for q, k, v in parts], 1)


def raising(*given: Any) -> Tensor:
    raise RuntimeError("never in this life")


def without_package() -> None:
    importlib.import_module("no_such_package")


def waiting(*given: Any) -> Any:
    threading.Event().wait()


def spoiling(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    """v is changed in the backward, when the results are there."""
    out = plain(q, k, v.clone(), *given)

    def spoil(grad: Tensor) -> None:
        v.detach().mul_(2)

    out.register_hook(spoil)
    return out


STATE: dict[Any, Any] = {}  # of earlier calls in this process


def of_first_call(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    return attention(q, k, v, case.softmax_scale, STATE.setdefault(q.shape[2], case.pattern.causal))[0]


def worse_later(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    STATE[q.shape] = STATE.get(q.shape, 0) + 1
    return plain(q, k, v, case, group) * (1 if STATE[q.shape] < 3 else 2)


def worse_after(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    before, STATE["dtype"] = STATE.get("dtype"), q.dtype
    return plain(q, k, v, case, group) * (2 if (before, q.dtype) == (torch.float64, torch.float32) else 1)


class LastCall(torch.autograd.Function):
    """Differentiates the latest call: wrong if another came between forward and backward, as another layer's does."""

    inputs: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        q_, k_, v_ = (x.detach().requires_grad_() for x in (q, k, v))
        LastCall.inputs, ctx.case = (q_, k_, v_), case
        return plain(q, k, v, case, None)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            out = plain(*LastCall.inputs, case=ctx.case, group=None)
        return *torch.autograd.grad(out, LastCall.inputs, dout), None


KEPT: list[Any] = []
GROWING = torch.empty(0)
# Side effects, by the seed of the Case that has them: of multiples of 16 those of repeated calls. Each gets the output.
SIDE_EFFECTS: dict[int, Callable[[Tensor], object]] = {
    1: lambda out: torch.set_autocast_enabled("cpu", True),
    12: lambda out: out.register_hook(torch.rand_like),
    16: KEPT.append,
    32: lambda out: KEPT.append(out.detach()),
    48: lambda out: KEPT.append(out.grad_fn),
    64: lambda out: threading.Thread(target=waiting, daemon=True).start(),
    80: lambda out: KEPT.append(open(os.devnull)),  # noqa: SIM115
    96: lambda out: KEPT.append(subprocess.Popen(["sleep", "60"])),
    112: lambda out: setattr(GROWING, "data", torch.cat((GROWING, out.detach().flatten()))),
    128: lambda out: KEPT.append(torch.UntypedStorage(8)),
}


def with_side_effect(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    out = plain(q, k, v, case, group)
    SIDE_EFFECTS[case.seed](out)
    return out


off = cycle((1, 0))


def forgetting(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> tuple[Tensor, Tensor]:
    """lse of every other call is off by one unit in the last place or two: within the bounds."""
    out, lse = attention(q, k, v, case.softmax_scale, case.pattern.causal)
    return out, lse * (1 + next(off) * torch.finfo(lse.dtype).eps)


def in_base_two(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, case.softmax_scale, case.pattern.causal)
    return out, lse / 0.6931471805599453


def with_heads_first(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    return plain(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), case, group).transpose(1, 2)


def on_numpy(q: Any, k: Any, v: Any, case: Case, group: object) -> Any:
    return plain(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(v), case, group).numpy()


def claim(case: Case) -> Case:
    return claims.dense(claims.plain_process(case))


def claim_of_slices(case: Case) -> Case:
    return claims.dense(claims.plain_process(case), sliced=True)


def ours(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    out = ring_attention(q, k, v, case.pattern, Layout.contiguous(case.tokens, 1), scale=case.softmax_scale)
    assert isinstance(out, Tensor)
    return out


def then(**changes: Callable[[Case], Any]) -> Callable[[Case], Case]:
    """A claim with these fields changed, each by a function of the Case that is claimed without."""
    return lambda case: replace(claim(case), **{name: change(case) for name, change in changes.items()})


def off_where(wrong: Callable[[Tensor], bool]) -> Peer:
    return replace(sound, attend=lambda q, *given: plain(q, *given) * (1.01 if wrong(q) else 1))


in_16_bits = then(dtype=lambda case: "bfloat16", lse=lambda case: "returned")
sound = Peer("mine", "dense, one process", claim, plain, worlds=(1,))
of_ring = replace(sound, attend=ours)
with_scores = replace(sound, claims=claims.takes(*claims.OPTIONAL)(claim), attend=scored)
with_slices = replace(sound, claims=claims.takes("slices")(claim_of_slices), attend=masked)
drops_slices = replace(
    with_slices,
    attend=lambda q, k, v, case, group: attention(q, k, v, case.softmax_scale, not case.pattern.has_slices)[0],
)
drops_sinks = replace(with_scores, attend=lambda q, k, v, case, group, sinks=None: scored(q, k, v, case, group))
packed = replace(sound, claims=lambda case: claims.packed(claims.plain_process(case)), attend=document_by_document)
unpacked = replace(packed, attend=plain)
raises = replace(sound, attend=raising)
unconnected = replace(sound, attend=lambda q, k, v, *given: plain(q, k, v.detach(), *given))
transposed = replace(sound, attend=lambda *given: plain(*given).transpose(1, 2))
spoils = replace(sound, attend=spoiling)
of_last_call = replace(sound, attend=lambda q, k, v, case, group: LastCall.apply(q, k, v, case))
only_in_training = replace(
    sound, attend=lambda *given: plain(*given) * (1 if all(x.requires_grad for x in given[:3]) else 2)
)
has_side_effects = replace(sound, attend=with_side_effect)
in_integers = replace(sound, attend=lambda *given: plain(*given).int())
forgets = replace(sound, claims=in_16_bits, attend=forgetting)
wide = replace(sound, claims=in_16_bits, attend=lambda *given: tuple(x.float() for x in forgetting(*given)))
detached = replace(sound, attend=lambda q, k, v, *given: plain(q, k, (v + v.detach()) / 2, *given))
no_lse = replace(sound, claims=then(lse=lambda case: "differentiated"))
wrong_lse = replace(no_lse, attend=in_base_two)
heads_first = replace(sound, heads_first=True, attend=with_heads_first)
forward_only = replace(sound, claims=lambda case: claims.forward_only(claim(case)))
keeps_settings = replace(sound, claims=lambda case: case)
in_numpy = replace(forward_only, arrays="numpy", attend=on_numpy)
peeks = replace(sound, attend=lambda q, k, v, *given: plain(q, k, v, *given) + 1e-5 * v.mean(1, keepdim=True))
numbers_heads = replace(sound, attend=lambda q, *given: plain(q, *given) * (1 + torch.arange(q.shape[2])[:, None]))
adds_up_to_more = replace(sound, attend=lambda *given: plain(*given) * 1.001)
weighs_hidden = replace(sound, attend=lambda q, k, *given: plain(q, k.clamp(min=-1.0), *given))
hides_nan = replace(sound, attend=lambda q, k, v, *given: plain(q, k, v.nan_to_num(), *given))
off_beyond_tokens = off_where(lambda q: q.shape[1] > 1024)
off_beyond_dims = off_where(lambda q: q.shape[3] > 64)
off_beyond_batches = off_where(lambda q: q.shape[0] > 2)
number = 7
needy = replace(sound, package="no-such-distribution", prepare=without_package)
endless = replace(sound, prepare=waiting)
claims_raise = replace(sound, claims=lambda case: case.tokens // 0)  # type: ignore[arg-type, return-value]
claims_other_world = replace(sound, claims=then(world=lambda case: 2))
claims_unsettled = replace(sound, claims=then(tokens=lambda case: case.tokens + 1))
claims_nothing = replace(sound, claims=lambda case: None)
causal_by_heads = replace(sound, attend=of_first_call)
worse_at_third = replace(sound, attend=worse_later)
worse_after_fp64 = replace(sound, attend=worse_after)
returns_none = replace(sound, attend=lambda *given: None)
