"""In which ways a model attends over a sharded sequence: ours, other people's, and one GPU with all of it.

Each way has its layout, its batch, and what must be in force while it runs. What a way replaces in a library is
replaced during its own turn only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import baselines, peers, published
from bench.step_models import ModelShape
from bench.workload import PATTERNS, Attend, AttentionShape, Workload
from ring import Layout
from ring.comm.transport import SoloTransport
from ring.nn import Batch, ContextParallel, next_tokens, shard_batch
from ring.nn.rotary import THETA, cached_angles

DTYPE = "bfloat16"  # of parameters and activations, as ring-flash-attn and cuDNN take it
OURS, UNCHECKED, ALONE = "ours", "ours-unchecked", "one-gpu"
PEERS = {"llama": ("all-to-all", "zigzag", "context-parallel"), "longnet": ("published",)}  # by kind of model
MEANING = {
    OURS: "ring_attention, whose ranks agree before each call",
    UNCHECKED: "the same with check=False",
    "all-to-all": "all-to-all over heads (Ulysses)",
    "zigzag": "ring-flash-attn's zigzag ring, on the kernels of torch",
    "context-parallel": "torch's context_parallel, with its default rotation; keys and values expanded to all heads",
    "published": "LongNet's published method; its gradients of queries and keys are not exact",
    ALONE: "the whole sequence on every GPU: Llama by torch's attention, LongNet by ours; / GPUs: the ceiling",
}


def names_of(kind: str) -> tuple[str, ...]:
    """The ways of a kind of model; what they are compared with comes first."""
    return ALONE, OURS, UNCHECKED, *PEERS[kind]


@dataclass(frozen=True)
class Way:
    """attend: q (B, N, H, D), k and v (B, N, Hk, D) -> like q. inside: what is in force during a step. whole: fits into
    one graph. exact: so are its gradients."""

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
        """True where this rank computes for the whole sequence."""
        return self.context.world_size == 1


@dataclass(frozen=True)
class StepProblem:
    """A model over a sequence. tokens: of each rank; kind: of `step_models.KINDS`."""

    kind: str
    shape: ModelShape
    tokens: int
    rank: int
    world: int
    device: torch.device

    @property
    def workload(self) -> Workload:
        one = self.shape
        if self.kind == "llama":
            heads = AttentionShape(one.heads, one.kv_heads, one.head_dim, 1, DTYPE)
            return Workload.dense(self.tokens, self.world, heads)
        heads = AttentionShape(one.heads, one.heads, one.head_dim, 1, DTYPE)
        return Workload.longnet(self.tokens, self.world, heads, *PATTERNS[self.device.type])

    def whole(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels of the whole sequence, (1, n), the same on every rank."""
        draw = torch.Generator().manual_seed(1)
        drawn = torch.randint(self.shape.vocabulary, (1, self.tokens * self.world), generator=draw).to(self.device)
        return drawn, next_tokens(drawn)

    def batch(self, layout: Layout, check: bool = True) -> Batch:
        """This rank's shard; of a layout of one rank, all of it."""
        group = SoloTransport() if layout.world_size == 1 else None
        batch = shard_batch(ContextParallel(layout, group, check=check), *self.whole())
        like = torch.empty(1, 0, 1, self.shape.head_dim, dtype=self.workload.dtype, device=self.device)
        cached_angles(batch.context, like, THETA)  # kept in the context: a graph would compute them at every run
        return batch


def way_of(name: str, problem: StepProblem) -> Way:
    """Raises Impossible where it cannot take the problem, or cannot run here."""
    workload = problem.workload
    if name in (OURS, UNCHECKED):
        batch = problem.batch(workload.layout, check=name == OURS)
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

    inside()  # raises Impossible; it is not entered

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = workload.shape.query // workload.shape.kv
        k, v = (x.repeat_interleave(share, dim=2) for x in (k, v))
        query, key, value = (_Swapped.apply(x) for x in (q, k, v))
        out: Tensor = _Swapped.apply(peers.heads_first_attention(query, key, value, workload.scale))
        return out

    # Each time that it is entered, torch's function is another one: a graph of it would be compiled at every turn.
    return Way("context-parallel", problem.batch(workload.layout), torch.compiler.disable(attend), inside)


class _Swapped(torch.autograd.Function):
    """(B, N, H, D) -> (B, H, N, D) and back, contiguous in both passes: torch (2.11) keeps a backward of cuDNN's by the
    strides of queries, keys and values alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].transpose(1, 2).contiguous()
