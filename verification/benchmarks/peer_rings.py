"""Other people's rings on the kernels of the baselines, so that only the ring differs.

ring-flash-attn calls flash_attn, for which `fused` stands in; torch's context_parallel calls torch's own kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verification.benchmarks import fused
from verification.benchmarks.baselines import Impossible
from verification.benchmarks.contender import Attend, Contender, Inputs
from verification.benchmarks.workload import Workload
from verification.peers.adapters import context_parallel as torch_adapter
from verification.peers.adapters import flash_attn_shim, ring_flash_attn
from verification.peers.peer import Refused

ROTATIONS = ("allgather", "alltoall")


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """In place of flash_attn's _flash_attn_forward."""
    refuse_windows(window_size_left, window_size_right)
    flash_attn_shim.refuse_options(dropout_p, softcap, alibi_slopes)
    out, lse = fused.forward(q, k, v, softmax_scale, causal)
    return out, lse, None, None


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """In place of flash_attn's _flash_attn_backward."""
    refuse_windows(window_size_left, window_size_right)
    flash_attn_shim.refuse_options(dropout_p, softcap, alibi_slopes)
    found = fused.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for place, gradient in zip((dq, dk, dv), found, strict=True):
        place.copy_(gradient)


def refuse_windows(left: int, right: int) -> None:
    if (left, right) != (-1, -1):
        raise NotImplementedError(
            f"the kernels of the baselines have no windows here, got window_size=({left}, {right})"
        )


@contextmanager
def zigzag(workload: Workload, inputs: Inputs) -> Iterator[Contender]:
    """ring-flash-attn's zigzag ring. Raises Impossible where it is not installed, or cannot be imported."""
    attend = zigzag_attend(workload)
    with zigzag_kernels():
        yield Contender.of(attend, inputs)


def zigzag_attend(workload: Workload) -> Attend:
    """To be called within `zigzag_kernels`, backward too. Raises Impossible as `zigzag` does."""
    function = _zigzag_module().zigzag_ring_flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cast(Tensor, function(q, k, v, causal=True, softmax_scale=workload.scale))

    return attend


def zigzag_kernels() -> AbstractContextManager[Any]:
    """Inside, ring-flash-attn's zigzag ring calls the kernels of the baselines."""
    return mock.patch.multiple(_zigzag_module(), _flash_attn_forward=flash_forward, _flash_attn_backward=flash_backward)


def _zigzag_module() -> Any:
    try:
        ring_flash_attn.prepare()
    except (Refused, ImportError) as error:
        raise Impossible(f"ring-flash-attn cannot be run: {error}") from error
    return importlib.import_module(f"{ring_flash_attn.PACKAGE}.zigzag_ring_flash_attn")


@contextmanager
def context_parallel(workload: Workload, inputs: Inputs, rotation: str) -> Iterator[Contender]:
    """torch's context_parallel, with its load balance. Raises Impossible without GPUs, where it has no kernels.

    It needs as many key/value heads as query heads, so keys and values are expanded before; that is not timed.
    """
    q, k, v, dout = inputs
    inside = context_parallel_kernels(workload, q.device, rotation)
    share = workload.shape.query // workload.shape.kv
    expanded = [x.detach().repeat_interleave(share, dim=2) for x in (k, v)]
    own: Inputs = (_heads_first(q), _heads_first(expanded[0]), _heads_first(expanded[1]), _heads_first(dout).detach())

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return heads_first_attention(query, key, value, workload.scale)

    with inside:
        note = f"keys and values expanded to {workload.shape.query} heads" if share > 1 else ""
        yield Contender.of(attend, own, note=note)


def heads_first_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """(B, H, N, D), causal, as torch's own function has it at the moment."""
    # Looked up here: context_parallel replaces it in its module, and the old function sees this rank's shard only.
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def context_parallel_kernels(workload: Workload, device: torch.device, rotation: str) -> AbstractContextManager[None]:
    """Inside, torch's attention is that of all ranks, by cuDNN's kernel. Raises Impossible as `context_parallel` does,
    at once."""
    if device.type != "cuda":
        raise Impossible("torch's context_parallel has kernels on GPUs only")
    try:
        module = importlib.import_module(torch_adapter.MODULE)
        entered, rotate = module.context_parallel, module.set_rotate_method
    except (ImportError, AttributeError) as error:
        raise Impossible(f"torch {torch.__version__} has no context_parallel as known here: {error}") from error
    return _in_context_parallel(workload, device, partial(rotate, rotation), entered)


@contextmanager
def _in_context_parallel(
    workload: Workload, device: torch.device, rotate: Callable[[], None], entered: Callable[..., Any]
) -> Iterator[None]:
    positions = torch.arange(workload.total, device=device).unsqueeze(0)  # it must be given something to shard
    rotate()
    chosen = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
    with chosen, entered(_mesh(workload.world), buffers=[positions], buffer_seq_dims=[1]):
        yield


@lru_cache(maxsize=1)
def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))


def _heads_first(x: Tensor) -> Tensor:
    """(B, N, H, D) -> (B, H, N, D), a copy that requires gradients."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_()
