"""Rings of other projects on the kernels of the baselines, so that only the ring differs.

ring-flash-attn calls flash_attn, which `fused` replaces; torch's context_parallel calls torch's own kernels.

ring-flash-attn has three functions for packed documents. llama3 takes contiguous shards of equal length, gathers keys
and values of some heads at a time, and makes one varlen call for the documents in a rank's shard; it supports windows.
ring and zigzag divide every document among all ranks, pass keys and values round, and make one varlen call per shard.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench import fused
from bench.workload import Attend, Contender, Inputs, Unsupported, Workload
from verification.failures import Refused
from verification.peers.adapters import context_parallel as torch_adapter
from verification.peers.adapters import flash_attn_shim, ring_flash_attn, ring_flash_attn_varlen

Function = TypeVar("Function", bound=Callable[..., Any])
ROTATIONS = ("allgather", "alltoall")
RINGS = {"ring": 1, "zigzag": 2}  # parts of each document that a rank has
VARLEN = {  # argument of flash_attn -> field of `fused.Varlen`
    "softmax_scale": "scale", "cu_seqlens_q": "query_edges", "cu_seqlens_k": "key_edges",
    "max_seqlen_q": "longest_query", "max_seqlen_k": "longest_key", "causal": "causal",
}  # fmt: skip
UNUSED = ("deterministic", "rng_state")  # options of flash_attn without effect if there is no dropout

# --- ring-flash-attn --------------------------------------------------------------------------------------------------


def in_place_of(theirs: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a function flash_attn's signature, from which ring-flash-attn reads defaults; it passes all by name."""

    def decorate(function: Function) -> Function:
        function.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
        return function

    return decorate


@in_place_of(flash_attn_shim.forward)
def flash_forward(
    *, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **options: Any
) -> tuple[Tensor, Tensor, None, None]:
    refuse(options)
    return *fused.forward(q, k, v, softmax_scale, causal), None, None


@in_place_of(flash_attn_shim.backward)
def flash_backward(
    *, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, softmax_scale: float, causal: bool, **options: Any,
) -> None:  # fmt: skip
    refuse(options)
    grads = fused.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for output, grad in zip((dq, dk, dv), grads, strict=True):
        output.copy_(grad)


@in_place_of(flash_attn_shim.varlen_forward)
def varlen_forward(*, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, None, None]:
    return *_varlen_of(options).forward(q, k, v), None, None


@in_place_of(flash_attn_shim.varlen_backward)
def varlen_backward(
    *, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, **options: Any,
) -> None:  # fmt: skip
    grads = _varlen_of(options).backward(dout, q, k, v, out, softmax_lse)
    for output, grad in zip((dq, dk, dv), grads, strict=True):
        output.copy_(grad)


def _varlen_of(options: dict[str, Any]) -> fused.Varlen:
    fields = {ours: options.pop(theirs) for theirs, ours in VARLEN.items()}
    left, causal = options.pop("window_size_left"), fields["causal"]
    if causal:
        options.pop("window_size_right")  # no effect: a row sees no later position
    elif left >= 0:
        raise NotImplementedError(f"the kernels of the baselines have causal windows only, got {left} without")
    refuse(options)
    return fused.Varlen(**fields, window=None if left < 0 else left)


def refuse(options: dict[str, Any]) -> None:
    """Raise NotImplementedError for options of flash_attn that have an effect, which the kernels here lack."""
    for name, value in options.items():
        harmless = (-1,) if name.startswith("window_size") else (None, False, 0)
        if name not in UNUSED and (isinstance(value, Tensor) or value not in harmless):
            raise NotImplementedError(f"the kernels of the baselines have no {name} here, got {name}={value}")


@contextmanager
def zigzag(workload: Workload, inputs: Inputs) -> Iterator[Contender]:
    """Make ring-flash-attn's zigzag ring. Raises Unsupported if it cannot be imported."""
    attend = zigzag_attend(workload)
    with zigzag_kernels():
        yield Contender.of(attend, inputs)


def zigzag_attend(workload: Workload) -> Attend:
    """Make its function, to be called within `zigzag_kernels`, as is the backward. Raises Unsupported."""
    function = _module("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cast(Tensor, function(q, k, v, causal=True, softmax_scale=workload.scale))

    return attend


def zigzag_kernels() -> AbstractContextManager[Any]:
    """Return a context in which ring-flash-attn's zigzag ring calls the kernels of the baselines."""
    module = _module("zigzag_ring_flash_attn")
    return mock.patch.multiple(module, _flash_attn_forward=flash_forward, _flash_attn_backward=flash_backward)


@contextmanager
def llama3(workload: Workload, inputs: Inputs, rank: int, heads: int) -> Iterator[Contender]:
    """Make llama3. inputs: of `workload.tokens` tokens. heads: key/value heads that are gathered at a time.

    Raises Unsupported if it cannot be imported."""
    module, device, window = _module("llama3_flash_attn_varlen"), inputs[0].device, workload.window
    edges = fused.document_edges(workload.documents, torch.device("cpu"))
    of_queries, of_keys, *rest = module.llama3_flash_attn_prepare_cu_seqlens(edges, True, rank, workload.world)
    lengths = of_queries.to(device), of_keys.to(device), *rest[:2], heads, rest[2]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *lengths, causal=True, softmax_scale=workload.scale,
            window_size=(-1, -1) if window is None else (window, 0),
        )  # fmt: skip
        return out[None]

    with _varlen_kernels(module):
        yield Contender.of(attend, inputs, note="contiguous shards of equal length")


@contextmanager
def by_document(workload: Workload, inputs: Inputs, ring: str) -> Iterator[Contender]:
    """Make a ring of RINGS. inputs: of `workload.tokens` tokens, with equal shares of each document.

    Raises Unsupported as `llama3` does, and for lengths of documents that do not divide."""
    parts = workload.world * RINGS[ring]
    if any(length % parts for length in workload.documents):
        raise Unsupported(f"it takes documents of lengths that {parts} divides (--divisible)")
    name = "ring_flash_attn_varlen" if ring == "ring" else "zigzag_ring_flash_attn_varlen"
    module = _module(name)
    function = getattr(module, f"{name}_func")
    edges = fused.document_edges(workload.documents, inputs[0].device) // workload.world
    longest = max(workload.documents) // workload.world

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function(q[0], k[0], v[0], edges, longest, causal=True, softmax_scale=workload.scale)
        return out[None]

    with _varlen_kernels(module):
        yield Contender.of(attend, inputs, note="every document divided among all ranks")


def _varlen_kernels(module: Any) -> AbstractContextManager[Any]:
    """Return a context in which the module calls the varlen kernel of the baselines."""
    return mock.patch.multiple(
        module, _flash_attn_varlen_forward=varlen_forward, _flash_attn_varlen_backward=varlen_backward
    )


def _module(name: str) -> Any:
    try:
        (ring_flash_attn_varlen if name.endswith("varlen") else ring_flash_attn).prepare()
    except (Refused, ImportError) as error:
        raise Unsupported(f"ring-flash-attn cannot run: {error}") from error
    return importlib.import_module(f"{ring_flash_attn.PACKAGE}.{name}")


# --- torch's context_parallel -----------------------------------------------------------------------------------------


@contextmanager
def context_parallel(workload: Workload, inputs: Inputs, rotation: str) -> Iterator[Contender]:
    """Make torch's context_parallel with load balance. Raises Unsupported without GPUs, for lack of kernels.

    It needs as many key/value heads as query heads: they are expanded before, which is not timed.
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
    """Attend causally, (B, H, N, D), with torch's current function."""
    # Look it up at each call: context_parallel replaces it, and the original sees this rank's shard only.
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def context_parallel_kernels(workload: Workload, device: torch.device, rotation: str) -> AbstractContextManager[None]:
    """Return a context in which torch's attention spans all ranks, by cuDNN's kernel. Raises Unsupported at once, as
    `context_parallel` does."""
    if device.type != "cuda":
        raise Unsupported("torch's context_parallel has kernels on GPUs only")
    try:
        module = importlib.import_module(torch_adapter.MODULE)
        entered, rotate = module.context_parallel, module.set_rotate_method
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"torch {torch.__version__} has no known context_parallel: {error}") from error
    return _in_context_parallel(workload, device, partial(rotate, rotation), entered)


@contextmanager
def _in_context_parallel(
    workload: Workload, device: torch.device, rotate: Callable[[], None], entered: Callable[..., Any]
) -> Iterator[None]:
    positions = torch.arange(workload.total, device=device).unsqueeze(0)  # it needs a buffer to shard
    rotate()
    cudnn = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
    with cudnn, entered(_mesh(workload.world), buffers=[positions], buffer_seq_dims=[1]):
        yield


@lru_cache(maxsize=1)
def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))


def _heads_first(x: Tensor) -> Tensor:
    """Copy (B, N, H, D) as (B, H, N, D) that requires gradients."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_()
