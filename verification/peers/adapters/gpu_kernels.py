"""Attention kernels of GPUs as peers of one rank: FlashAttention-4, cuDNN, FlashAttention-2, flex_attention.

    python -m verification peers --device cuda verification.peers.adapters.gpu_kernels:flash_attention_4

They are run by name, since they need a GPU. Head dims and lengths are few: most of them are compiled anew for each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from reference.pattern import slices_seen
from verification.case import Case
from verification.peers import Peer, Refused, claims

COMPILES = 120.0  # seconds for an example that compiles a kernel
HEADS = ((1, 1), (2, 1), (4, 2), (3, 3))


def on_gpu() -> None:
    if not torch.cuda.is_available():
        raise Refused("these kernels need a GPU, and torch sees none; write --device cuda on a machine with one")


def repeatable() -> None:
    on_gpu()
    torch.use_deterministic_algorithms(True)  # the fastest kernels need not give the same bits again


one_rank = partial(Peer, worlds=(1,), arithmetic="gpu", prepare=repeatable, timeout=COMPILES)


def nearest(case: Case, head_dims: tuple[int, ...], lse: bool, positive: bool = True, equal: bool = False) -> Case:
    """Dense attention in bf16 on one process. lse: returned and differentiated. positive: a scale above 0. equal: as
    many key/value heads as query heads where values have another head dim."""
    case = claims.dense(claims.one_process(claims.without_own_settings(case)))
    case = claims.in_dtypes(case if lse else claims.without_lse(case), "bfloat16")
    case = claims.of_sizes(case, tokens=(), heads=HEADS, head_dims=head_dims)
    if case.value_dim is not None:  # these kernels take no others, which are those of MLA
        case = replace(claims.equal_heads(case) if equal else case, head_dim=192, value_dim=128)
    if case.tokens % 5:  # five times as long: blocks of these kernels have 64 tokens and more
        case = case.lengthened(5 * case.tokens, cuts=None)
    return claims.positive_scale(case) if positive else case


# --- FlashAttention-4 -------------------------------------------------------------------------------------------------


class _FlashAttention4(torch.autograd.Function):
    """The package's own forward and backward, with a gradient through lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, causal: bool, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        ctx.options = {"causal": causal, "softmax_scale": scale, "softcap": softcap}
        out, lse = _flash_attn_fwd(q, k, v, learnable_sink=sinks, return_lse=True, **ctx.options)[:2]
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, sinks, out, lse = ctx.saved_tensors
        grads = _flash_attn_bwd(
            q, k, v, out, dout.contiguous(), lse, learnable_sink=sinks, dlse=dlse.contiguous(), deterministic=True,
            **ctx.options,
        )  # fmt: skip
        return *grads[:3], None if sinks is None else grads[3], None, None, None


def flash4(
    q: Tensor, k: Tensor, v: Tensor, case: Case, group: object, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in (q, k, v))
    scoring = case.pattern.causal, case.softmax_scale, case.softcap or 0.0
    return _FlashAttention4.apply(q, k, v, None if sinks is None else sinks.contiguous(), *scoring)


def flash4_ready() -> None:
    repeatable()
    import flash_attn.cute.interface  # noqa: F401


by_flash4 = partial(one_rank, attend=flash4, package="flash-attn-4", prepare=flash4_ready)
flash_attention_4 = by_flash4(
    "flash-attention-4",
    "dense, bf16, head dims 32, 64, 96, 128, 160, 192, 256, or 192 with values of 128, scale > 0, lse, softcap, sinks",
    claims.takes("sinks", "softcap", "value_dim")(
        partial(nearest, head_dims=(32, 64, 96, 128, 160, 192, 256), lse=True, equal=True)
    ),
)
flash_attention_4_any_head_dim = by_flash4(
    "flash-attention-4 with any head dim",
    "dense, bf16, head dims 32, 40, 64, 72, 96, 128, scale > 0, lse",
    partial(nearest, head_dims=(32, 40, 64, 72, 96, 128), lse=True),
)
flash_attention_4_any_scale = by_flash4(
    "flash-attention-4 with any scale",
    "dense, bf16, head dim 64, any scale, lse",
    partial(nearest, head_dims=(64,), lse=True, positive=False),
)


# --- torch's own ------------------------------------------------------------------------------------------------------


def by_backend(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> Tensor:
    """Run scaled_dot_product_attention by one kernel, which raises where it does not support a call."""
    q, k, v = (x.contiguous().transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    with sdpa_kernel(kind):
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=case.pattern.causal, scale=case.softmax_scale, enable_gqa=case.heads != case.kv_heads
        )
    return out.transpose(1, 2)


@claims.takes("value_dim")
def cudnn_nearest(case: Case) -> Case:
    return replace(nearest(case, (32, 64, 128, 192, 256), lse=False), strided=False)


cudnn = one_rank(
    "cudnn", "dense, bf16, contiguous, head dims 32, 64, 128, 192, 256, or 192 with values of 128, scale > 0",
    cudnn_nearest, partial(by_backend, SDPBackend.CUDNN_ATTENTION), package="torch",
    prepare=on_gpu,  # torch leaves cuDNN out where kernels are to be deterministic
)  # fmt: skip
flash_attention_2 = one_rank(
    "flash-attention-2",
    "dense, bf16, head dims 8 to 256, scale > 0",
    partial(nearest, head_dims=(8, 32, 64, 96, 128, 256), lse=False),
    partial(by_backend, SDPBackend.FLASH_ATTENTION),
    package="torch",
)


# --- flex_attention ---------------------------------------------------------------------------------------------------


@claims.takes("slices")
def flexible(case: Case) -> Case:
    """Documents, windows and slices in bf16 on one process, with lse, in few sizes. A row that sees nothing is NaN in
    some versions, so slices stay where every row sees a key."""
    case = claims.packed(claims.one_process(claims.without_own_settings(case)), windows=True, sliced=True)
    case = claims.positive_scale(claims.in_dtypes(case, "bfloat16"))
    case = claims.of_sizes(case, tokens=(32, 128), heads=((2, 2), (4, 2)), head_dims=(64,), batches=(1,))
    return case if bool(visible(case).any(1).all()) else claims.packed(case, windows=True)


def visible(case: Case) -> Tensor:
    """Return the mask (tokens, tokens) of a pattern of one branch without dilation."""
    places, lengths = torch.arange(case.tokens), torch.tensor(case.pattern.documents or (case.tokens,))
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    seen = torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    for one in slices_seen(case.pattern.branches[0], case.pattern.causal):
        seen |= one.sees(places[:, None], places)
    return seen & (document[:, None] == document)


@cache
def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64  # two for each of the sizes
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise it would run uncompiled
    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    seen = visible(case).to(q.device)  # not as numbers, which would be compiled in

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[i, j]

    mask = create_block_mask(sees, None, None, case.tokens, case.tokens, device=str(q.device))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    out, lse = compiled_flex()(
        q, k, v, block_mask=mask, scale=case.softmax_scale, enable_gqa=case.heads != case.kv_heads, return_lse=True
    )
    return out.transpose(1, 2), lse


flex_attention = one_rank(
    "flex-attention", "dense, documents, windows, slices, bf16, 32 and 128 tokens, head dim 64, scale > 0, lse",
    flexible, flex, package="torch",
)  # fmt: skip
