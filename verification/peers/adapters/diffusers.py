"""huggingface/diffusers (`diffusers`): its context-parallel attention, called by `dispatch_attention_fn`.

ring gathers keys and values and merges one partial result per rank, ulysses is all-to-all over heads, unified both. The
last part of a name is the package's backend. `flash_attn_shim` stands in for the kernels that need a GPU:

    flash          flash_attn's two functions; like the kernel, the stand-in reads lse by its memory, not its shape
    native-flash   the operator aten::_scaled_dot_product_flash_attention and its backward
    native         `scaled_dot_product_attention`, which has no lse, so not for the ring

The package raises for causal masks and grouped heads, and its "anything" modes for uneven lengths have no backward. Its
flash backend takes a window, which is right if the kernel has the whole sequence: ulysses claims windows there.

The adapter runs the diffusers that Python finds first. An older version in another folder is run by its PYTHONPATH:

    pip install --no-deps --target .venv/diffusers-0.39.0 diffusers==0.39.0
    PYTHONPATH=.venv/diffusers-0.39.0 python -m verification peers diffusers
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters import flash_attn_shim
from verification.peers.adapters.yunchang import all_to_all_ranks
from verification.peers.peer import Peer, Result

MODULE, CONFIG = "diffusers.models.attention_dispatch", "diffusers.models._modeling_parallel"
TINY = 1e-30  # dropout that releases up to 0.41 ask for, so that flash_attn returns lse
_operators = torch.library.Library("aten", "IMPL")


def prepare() -> None:
    module: Any = importlib.import_module(MODULE)
    importlib.import_module(CONFIG)
    # The ring gathers by a name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\S+_tensor` is deprecated", FutureWarning)
    module._wrapped_flash_attn_forward, module._wrapped_flash_attn_backward = flash_forward, flash_backward
    register_operators()


@lru_cache(maxsize=1)
def register_operators() -> None:
    """Give the operator and its backward, which torch has for GPUs only, a CPU kernel in this process."""
    _operators.impl("_scaled_dot_product_flash_attention", native_forward, "CPU")
    _operators.impl("_scaled_dot_product_flash_attention_backward", native_backward, "CPU")


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *options: Any
) -> tuple[Tensor, Tensor, None, None]:
    """Replacement for flash_attn's function. options: as for it; the last one, return_softmax, is not used."""
    return flash_attn_shim.forward(q, k, v, 0.0 if dropout_p == TINY else dropout_p, *options[:-1])


def flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> None:
    """Replacement for flash_attn's function. rest: dq, dk, dv, dropout_p and options, as for it."""
    batch, rows, heads, _ = q.shape
    lse = lse.as_strided((batch, heads, rows), (heads * rows, rows, 1))
    dq, dk, dv, dropout_p, *options = rest
    flash_attn_shim.backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0 if dropout_p == TINY else dropout_p, *options)


def native_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, Tensor, Tensor]:  # fmt: skip
    """(B, H, N, D) -> out, lse (B, H, N), and what only the backward on GPUs uses."""
    out, lse = flash_attn_shim.aten_forward(query, key, value, is_causal, scale, dropout_p)
    unused = [query.new_empty(0) for _ in range(5)]
    return out, lse, *unused[:2], query.shape[2], key.shape[2], *unused[2:]  # type: ignore[return-value]


def native_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """rest: two tensors, two lengths, dropout_p, is_causal, and two tensors."""
    dropout_p, is_causal = rest[4:6]
    if query.shape[1] % key.shape[1]:  # as the operator on GPUs
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    return flash_attn_shim.aten_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, dropout_p)


@lru_cache(maxsize=64)
def parallel_config(ring: int, ulysses: int) -> Any:
    """Return the package's configuration of that split. Collective. Its groups are created once, never destroyed."""
    module = importlib.import_module(CONFIG)
    context = module.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    config = module.ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    return config


@dataclass(frozen=True)
class Way:
    """One way of the package. kind: ring, ulysses or unified. backend: its name in the package."""

    kind: str
    backend: str

    def claimed(self, case: Case) -> Case:
        """Return the nearest Case that this way supports."""
        windows = self.kind == "ulysses" and self.backend == "flash"
        case = claims.dense(claims.all_ranks(claims.without_own_settings(case)), False, windows=windows)
        case = claims.equal_heads(claims.even_shards(case, "contiguous"))
        if self.kind == "ulysses":
            case = claims.divisible_heads(case, case.world)
        elif self.kind == "unified":
            case = claims.divisible_heads(case, 2)
        if self.backend == "native":
            return claims.without_lse(case)
        return claims.lse_returned(claims.in_dtypes(case, "bfloat16", "float16"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        ulysses = {"ring": 1, "ulysses": case.world, "unified": all_to_all_ranks(case)}[self.kind]
        options: dict[str, Any] = {} if case.lse == "unused" else {"return_lse": True}
        if (window := claims.window(case)) is not None:
            options["window_size"] = (window, window)
        result = importlib.import_module(MODULE).dispatch_attention_fn(
            q, k, v, scale=case.scale, attention_kwargs=options, backend=self.backend,
            parallel_config=parallel_config(case.world // ulysses, ulysses),
        )  # fmt: skip
        if case.lse == "unused":
            out: Tensor = result
            return out
        out, lse = result  # lse (B, N, H)
        return out, lse.transpose(1, 2)


def variant(way: Way) -> Peer:
    windows = ", with windows" if way.kind == "ulysses" and way.backend == "flash" else ""
    numbers = "fp32, fp64, bf16, fp16" if way.backend == "native" else "bf16 and fp16, lse is returned"
    supported = f"not causal{windows}, contiguous order in shards of one length, equal heads, any scale, all ranks"
    return Peer(
        f"diffusers/{way.kind}-{way.backend.strip('_').replace('_', '-')}", f"{supported}, {numbers}", way.claimed,
        way.attend, package="diffusers", arithmetic="half", prepare=prepare,
        merge="weighted" if way.kind == "ulysses" else "interpolated",
        worlds=(4,) if way.kind == "unified" else (2, 3, 4),
    )  # fmt: skip


ring_flash, ring_native, unified_flash = (
    variant(Way(*item)) for item in (("ring", "flash"), ("ring", "_native_flash"), ("unified", "flash"))
)
ulysses, ulysses_flash, ulysses_native = (
    variant(Way("ulysses", backend)) for backend in ("native", "flash", "_native_flash")
)
