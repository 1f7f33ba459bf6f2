"""What modules promise beside what a step asks of them: of formulas, copies, arguments in other places, DTensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from reference.oracle import attention, gradients
from reference.pattern import Pattern
from ring.nn import ContextParallel, LongNetBlock, RingAttention, SelfAttention, longnet_pattern, rotary
from ring.nn.frameworks.parallel_style import RingParallel, dtensor_layout
from verification.training.rank.handle_calls import some_documents
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, must_be_near, refused

EXACT = 1e-11  # in fp64, of numbers around 1: rounding does some 1e-15 of it, another token or head more than 1e-6
HALVES = (torch.bfloat16, torch.float16)


# --- attention --------------------------------------------------------------------------------------------------------


def _heads(draws: np.random.Generator, n: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole sequences, (2, n, heads, 4) fp64."""
    q, k, v = (torch.from_numpy(draws.normal(size=(2, n, h, 4))) for h in (heads, kv_heads, kv_heads))
    return q, k, v


def _over_the_handles_documents(s: CallPlace) -> str:
    """A pattern that has documents of its own: those of the handle hold, where it has some. The handle is given to the
    module or to the call, which goes before; the module is a copy, or was pickled; heads are shared."""
    draws, n = s.draws(), s.case.tokens
    for _ in range(2):
        own, packed = some_documents(draws, n), (None, some_documents(draws, n))[draws.integers(2)]
        causal, scale = bool(draws.integers(2)), (None, 0.3)[draws.integers(2)]
        heads, kv_heads = ((2, 2), (4, 2), (2, 1))[draws.integers(3)]
        pattern = Pattern.dense(causal=causal, documents=own)
        held = Pattern.dense(causal=causal, documents=own if packed is None else packed)
        q, k, v = _heads(draws, n, heads, kv_heads)
        exact = attention(q, k, v, held, scale=scale)[0][:, s.shard().cpu()]
        handle = s.context.with_documents(packed)
        module = RingAttention(pattern, name="inner")
        kept = RingAttention(pattern, s.context.with_documents((n,)) if draws.integers(2) else handle)
        copies: list[nn.Module] = [
            module,
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            copy.deepcopy(kept),
        ]
        chosen = copies[draws.integers(4)]
        x = [y[:, s.shard().cpu()].transpose(1, 2).to(s.device) for y in (q, k, v)]
        is_causal = (None, causal)[draws.integers(2)]
        out = chosen(*x, None, 0.0, is_causal, scale, heads != kv_heads, context=handle)
        must(not list(chosen.parameters()), "RingAttention must have no parameters")
        what = f"attention with documents {own}, over a handle with {packed}"
        must_be_near(what, out.transpose(1, 2), exact, EXACT)
    refused(("cannot be pickled",), lambda: pickle.dumps(RingAttention(pattern, s.context)), (TypeError,))
    return ""


class HeadsLast(nn.Module):
    """An attention that takes (B, N, H, D)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: ContextParallel | None = None) -> Tensor:
        assert context is not None
        return context.attention(q, k, v, Pattern.dense(causal=True))


def _as_dtensors(s: CallPlace) -> str:
    """A module in a plan of `parallelize_module`, whose tensors are shards or DTensors, of tokens that the ranks may
    not divide: what it gives, the whole of it, its gradients."""
    draws, n, mesh = s.draws(), s.case.tokens, s.mesh["context"]
    p, number = mesh.size(), s.context.rank
    share = -(-n // p)
    start, end = min(number * share, n), min((number + 1) * share, n)
    handle = ContextParallel(dtensor_layout(n, p), mesh)
    must(handle.layout.counts[number] == end - start, f"dtensor_layout must give ceil(n / p) each, got {handle.layout}")
    last, local = bool(draws.integers(2)), bool(draws.integers(4) == 0)
    dim = 1 if last else 2
    style = RingParallel(handle, token_dim=dim - (4 if draws.integers(2) else 0), use_local_output=local)
    module = parallelize_module(HeadsLast() if last else RingAttention(Pattern.dense(causal=True)), mesh, style)
    whole = _heads(draws, n, 2, 2)
    exact = attention(*whole, Pattern.dense(causal=True))[0]
    dout = torch.from_numpy(draws.normal(size=exact.shape))
    laid = [x if last else x.transpose(1, 2) for x in (*whole, dout)]
    shards = [x.narrow(dim, start, end - start).contiguous().to(s.device) for x in laid]
    as_dtensors = [bool(y) for y in draws.integers(0, 2, 3)]
    leaves = [
        (_dtensor(x, mesh, dim, laid[i]) if wrapped else x).requires_grad_()
        for i, (x, wrapped) in enumerate(zip(shards[:3], as_dtensors, strict=True))
    ]
    out = module(*leaves[:2], leaves[2])
    must(isinstance(out, DTensor) is not local, f"use_local_output={local} must not give a {type(out).__name__}")
    incoming = shards[3] if local else _dtensor(shards[3], mesh, dim, laid[3])
    must(local or out.shape == laid[0].shape, f"the DTensor must have the shape {laid[0].shape}, got {out.shape}")
    grads = torch.autograd.grad(out, leaves, incoming)
    if isinstance(out, DTensor):
        must(out.placements == (Shard(dim),), f"the DTensor must be Shard({dim}), got {out.placements}")
        out = out.full_tensor()
        must_be_near("the whole DTensor", out if last else out.transpose(1, 2), exact, EXACT)
    else:
        must_be_near("the shard", out if last else out.transpose(1, 2), exact[:, start:end], EXACT)
    wanted = gradients(*whole, Pattern.dense(causal=True), dout)
    for name, found, right in zip("qkv", grads, wanted, strict=True):
        mine = found.to_local() if isinstance(found, DTensor) else found
        must_be_near(f"the gradient of {name}", mine if last else mine.transpose(1, 2), right[:, start:end], EXACT)
    return ""


def _dtensor(x: Tensor, mesh: Any, dim: int, whole: Tensor) -> DTensor:
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=stride)


# --- positions --------------------------------------------------------------------------------------------------------


def _turned_by_the_formula(s: CallPlace) -> str:
    """x'[i] + j x'[i + D / 2] = (x[i] + j x[i + D / 2]) exp(j p theta^(-2 i / D)), in complex numbers; heads in 16 bits
    are rounded once."""
    draws = s.draws()
    for _ in range(4):
        half, dtype = int(draws.integers(1, 4)), (torch.float64, torch.float32, *HALVES)[draws.integers(4)]
        theta = (10000.0, 500000, 2.5)[draws.integers(3)]
        batch, n = int(draws.integers(1, 3)), int(draws.integers(0, 5))
        rows = (n,) if draws.integers(2) else (batch, n)
        kind = (torch.int64, torch.int32)[draws.integers(2)]
        positions = torch.from_numpy(draws.integers(0, 2**21, rows)).to(s.device, kind)
        x = torch.from_numpy(draws.normal(size=(batch, n, 2, 2 * half))).to(s.device, dtype)
        before = x.clone()
        found = rotary(x, positions, theta)
        exponents = -torch.arange(half, dtype=torch.float64, device=s.device) / half
        angle = positions.double()[..., None, None] * torch.tensor(theta, dtype=torch.float64) ** exponents
        given = before.double()
        turned = torch.complex(given[..., :half], given[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        wanted = torch.cat((turned.real, turned.imag), -1)
        must_be("the heads that are turned, which must not change,", x, before)
        must(found.dtype == dtype, f"heads in {dtype} must be turned to {dtype}, got {found.dtype}")
        # An angle of up to 2^21 in fp64 is off by 2^-31 at most, products and their sum in fp32 by 4 roundings.
        eps = 0.0 if dtype == torch.float64 else 2.0**-22 + (torch.finfo(dtype).eps / 2 if dtype in HALVES else 0.0)
        most = (2.0**-30 + eps) * float(wanted.abs().max() + 1 if wanted.numel() else 1)
        must_be_near(f"heads in {dtype} at {positions.tolist()}, theta {theta}", found, wanted, most)
    return ""


# --- modules ----------------------------------------------------------------------------------------------------------


def _copied(s: CallPlace) -> str:
    """Copies, pickles and loaded state dicts of modules give the same bits; parameters are of the type asked for."""
    draws = s.draws()
    longnet, subln = bool(draws.integers(2)), bool(draws.integers(2))
    dtype = (torch.float64, torch.float32)[draws.integers(2)]

    def made() -> nn.Module:
        if longnet:
            given = ("[2,4]", "[1, 2]") if draws.integers(2) else ((2, 4), [1, 2])
            return LongNetBlock(4, 2, *given, subln=subln, causal=subln, name="layer", device=s.device, dtype=dtype)
        pattern = Pattern((*Pattern.dense().branches,), True, some_documents(draws, s.case.tokens))
        return SelfAttention(
            4, 2, pattern, kv_heads=1, head_dim=4, bias=subln, qk_norm=not subln, device=s.device, dtype=dtype,
            inner_norm_eps=1e-3 if subln else None,
        )  # fmt: skip

    module: Any
    module, x = (
        made(),
        torch.from_numpy(draws.normal(size=(1, s.case.tokens, 4)))[:, s.shard().cpu()].to(s.device, dtype),
    )
    if longnet:
        must(module.get_parameter("fc1.weight").shape == (16, 4), "ffn_dim must be 4 dim where none is given")
    inner = module.attention if isinstance(module, LongNetBlock) else module
    kinds = {(p.dtype, p.device.type) for p in module.parameters()}
    must(kinds == {(dtype, s.device.type)}, f"parameters must be {dtype} on {s.device}, got {kinds}")
    wanted = module(x, s.context)
    loaded = copy.deepcopy(module)
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        must_be("a copied module", other(x, s.context, s.context.positions_on(s.device)).detach(), wanted.detach())
        pattern = other.attention.pattern if longnet else other.pattern
        must(pattern == inner.pattern, f"a copy must have the pattern {inner.pattern}, got {pattern}")
    return ""


def _longnets_patterns(s: CallPlace) -> str:
    """Head h of a branch with ratio r takes every r-th token from h // ceil(heads / r) on, or as the rule says."""
    draws = s.draws()
    for _ in range(3):
        heads, count = int(draws.integers(1, 7)), int(draws.integers(1, 4))
        lengths, ratios = draws.integers(1, 50, count).tolist(), draws.integers(1, 6, count).tolist()
        causal = bool(draws.integers(2))
        kinds: list[Callable[[Any], Any]] = [str, tuple, list, lambda x: f" {x} "]
        given = [kinds[draws.integers(4)](x) for x in (lengths, ratios)]
        found = longnet_pattern(given[0], given[1], heads, causal)
        must(found.causal is causal and len(found.branches) == count, f"branches must be {count}, got {found}")
        for branch, length, ratio in zip(found.branches, lengths, ratios, strict=True):
            offsets = tuple(h // -(-heads // ratio) for h in range(heads))
            held = tuple(branch.offset) if isinstance(branch.offset, tuple) else (branch.offset,) * heads
            must(
                (branch.segment_length, branch.dilation_rate, held) == (length, ratio, offsets),
                f"a branch of {length}, {ratio} for {heads} heads must have offsets {offsets}, got {branch}",
            )
    return ""


MODULE_CALLS: dict[str, OtherCall] = {
    "attention over a handle's documents": OtherCall(_over_the_handles_documents, ""),
    "a module in a plan, with DTensors": OtherCall(_as_dtensors, ""),
    "rotary positions by the formula": OtherCall(_turned_by_the_formula, ""),
    "copies of modules": OtherCall(_copied, ""),
    "patterns of LongNet's configurations": OtherCall(_longnets_patterns, ""),
}
