"""Ways to attend over a sharded sequence in a model: ours, peers, and one GPU with the whole sequence.

Each way has its layout, its batch and a context for its steps. Patches of libraries are active in that context only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import baselines, fused, peers, published
from bench.step_models import ModelShape
from bench.workload import PATTERNS, Attend, AttentionShape, Unsupported, Workload
from ring import Layout
from ring.comm.transport import SoloTransport
from ring.compute.kernels import FA4
from ring.nn import Batch, ContextParallel, next_tokens, shard_batch
from ring.nn.rotary import THETA, cached_angles

DTYPE = "bfloat16"  # of parameters and activations; ring-flash-attn and cuDNN need 16 bits
OURS, UNCHECKED, ALONE = "ours", "ours-unchecked", "one-gpu"
EXCHANGES = {  # of ours
    OURS: "direct", UNCHECKED: "direct", "ours-kept": "direct-kept", "ours-by-heads": "all-to-all",
    "ours-by-heads-kept": "all-to-all-kept",
}  # fmt: skip
ON_FA4 = "-on-fa4"  # ends the name of a way whose kernel is FlashAttention-4
PEERS = {  # by kind of model
    "llama": ("all-to-all", "zigzag", "context-parallel", f"all-to-all{ON_FA4}", f"zigzag{ON_FA4}"),
    "longnet": ("published", f"published{ON_FA4}"),
}
MEANING = {
    OURS: "ring_attention, with consensus of the ranks before each call",
    UNCHECKED: "the same with check=False",
    "ours-kept": "the same as ours; received keys are kept for the backward",
    "ours-by-heads": "the same as ours; ranks divide the heads",
    "ours-by-heads-kept": "the same; rows of the own heads, and their results, are kept for the backward",
    "all-to-all": "all-to-all over heads (Ulysses)",
    "zigzag": "ring-flash-attn's zigzag ring, on torch's kernels",
    "context-parallel": "torch's context_parallel, with its default rotation; keys and values expanded to all heads",
    "published": "LongNet's published method, with inexact gradients of queries and keys",
    ALONE: "the whole sequence on every GPU, llama by torch's attention, longnet by ours; its ms / GPUs is the ceiling",
}
MEANING |= {f"{name}{ON_FA4}": f"{name}, on FlashAttention-4" for name in ("all-to-all", "zigzag", "published", ALONE)}


def names_of(kind: str) -> tuple[str, ...]:
    """Return the ways of a kind of model, with the baseline first."""
    return ALONE, *((f"{ALONE}{ON_FA4}",) if kind == "llama" else ()), *EXCHANGES, *PEERS[kind]


@dataclass(frozen=True)
class Way:
    """A way to attend. attend: q (B, N, H, D), k and v (B, N, Hk, D) -> like q. inside: context of a step. whole:
    compiles to one graph. exact: has exact gradients."""

    name: str
    batch: Batch
    attend: Attend
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: bool = False
    exact: bool = True

    @property
    def context(self) -> ContextParallel:
        return self.batch.context

    @property
    def alone(self) -> bool:
        """True if this rank computes the whole sequence."""
        return self.context.world_size == 1


@dataclass(frozen=True)
class StepProblem:
    """A model and a sequence. tokens: of each rank; kind: of `step_models.KINDS`."""

    kind: str
    shape: ModelShape
    tokens: int
    rank: int
    world: int
    device: torch.device

    @property
    def workload(self) -> Workload:
        model = self.shape
        if self.kind == "llama":
            heads = AttentionShape(model.heads, model.kv_heads, model.head_dim, 1, DTYPE)
            return Workload.dense(self.tokens, self.world, heads)
        heads = AttentionShape(model.heads, model.heads, model.head_dim, 1, DTYPE)
        return Workload.longnet(self.tokens, self.world, heads, *PATTERNS[self.device.type])

    def whole(self) -> tuple[Tensor, Tensor]:
        """Draw tokens and labels of the whole sequence, (1, n), the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        size = (1, self.tokens * self.world)
        tokens = torch.randint(self.shape.vocabulary, size, generator=generator).to(self.device)
        return tokens, next_tokens(tokens)

    def batch(self, layout: Layout, exchange: str = "direct", check: bool = True) -> Batch:
        """Return this rank's shard; the whole sequence if the layout has one rank."""
        group = SoloTransport() if layout.world_size == 1 else None
        batch = shard_batch(ContextParallel(layout, group, exchange=exchange, check=check), *self.whole())
        like = torch.empty(1, 0, 1, self.shape.head_dim, dtype=self.workload.dtype, device=self.device)
        cached_angles(
            batch.context, like, THETA
        )  # cache them in the context: a graph would recompute them at every run
        return batch


def way_of(name: str, problem: StepProblem) -> Way:
    """Make a way by name. Raises Unsupported if it cannot take the problem or cannot run."""
    return _on_fa4(name, problem) if name.endswith(ON_FA4) else _way_of(name, problem)


def _way_of(name: str, problem: StepProblem) -> Way:
    workload = problem.workload
    if name in EXCHANGES:
        batch = problem.batch(workload.layout, EXCHANGES[name], name != UNCHECKED)
        return Way(name, batch, ring_attend(batch.context, workload), whole=True)
    if name == ALONE:
        return _alone(problem)
    if name == "all-to-all":
        attend = baselines.all_to_all(workload)
        return Way(name, problem.batch(Layout.contiguous(workload.total, workload.world)), attend)
    if name == "zigzag":
        attend = peers.zigzag_attend(workload)
        return Way(name, problem.batch(workload.layout), attend, peers.zigzag_kernels)
    if name == "context-parallel":
        return _context_parallel(problem)
    attend = published.longnet(workload, problem.rank)
    return Way(name, problem.batch(workload.layout), attend, exact=False)


def _on_fa4(name: str, problem: StepProblem) -> Way:
    if problem.device.type != "cuda" or (reason := FA4.missing()) is not None:
        raise Unsupported("it needs a GPU" if problem.device.type != "cuda" else str(reason))
    way = _way_of(name.removesuffix(ON_FA4), problem)

    @contextmanager
    def inside() -> Iterator[None]:
        with fused.kernel("fa4"), way.inside():
            yield

    attend = _fused_attend(problem.workload) if way.alone else way.attend
    return replace(way, name=name, attend=torch.compiler.disable(attend), inside=inside, whole=False)


def _fused_attend(workload: Workload) -> Attend:
    return lambda q, k, v: fused.attention(q, k, v, workload.scale, True)[0]


def ring_attend(context: ContextParallel, workload: Workload) -> Attend:
    pattern = workload.pattern

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context.attention(q, k, v, pattern)

    return attend


def _alone(problem: StepProblem) -> Way:
    batch = problem.batch(Layout.contiguous(problem.workload.total, 1))
    if problem.kind == "longnet":
        return Way(ALONE, batch, ring_attend(batch.context, problem.workload), whole=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return Way(ALONE, batch, attend, _torchs_kernel if problem.device.type == "cuda" else nullcontext)


def _torchs_kernel() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def _context_parallel(problem: StepProblem) -> Way:
    workload = problem.workload

    def inside() -> AbstractContextManager[None]:
        return peers.context_parallel_kernels(workload, problem.device, "allgather")

    inside()  # raises Unsupported now; not entered

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = workload.shape.query // workload.shape.kv
        k, v = (x.repeat_interleave(share, dim=2) for x in (k, v))
        query, key, value = (_Swapped.apply(x) for x in (q, k, v))
        out: Tensor = _Swapped.apply(peers.heads_first_attention(query, key, value, workload.scale))
        return out

    # Each entry installs a new function, which torch.compile would recompile at every turn.
    return Way("context-parallel", problem.batch(workload.layout), torch.compiler.disable(attend), inside)


class _Swapped(torch.autograd.Function):
    """Transpose (B, N, H, D) to (B, H, N, D) or back, contiguous in both passes: torch (2.11) caches cuDNN's backward
    by the strides of q, k, v alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].transpose(1, 2).contiguous()
