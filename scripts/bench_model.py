#!/usr/bin/env python3
"""Times a training step of a Llama-shaped model in bf16 under FSDP2, its sequence sharded over the GPUs of one host.

    torchrun --nproc-per-node=P scripts/bench_model.py [--tokens 16Ki 64Ki] [--recompute none all attention-kept]
        [--compare] [--json FILE]

A step is forward, backward and the reduction of gradients; tokens are those of the whole sequence. With --compare,
rank 0 also computes the loss of the same model on the whole sequence, with torch's own attention. `--device cpu` tries
the script out over gloo, with tiny sizes. Times of one run can be compared with each other, times of
different runs cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ring import Layout, Pattern
from ring.nn import ContextParallel, SelfAttention, next_tokens, rotary, shard_batch, token_mean
from ring.nn.frameworks import fsdp, recompute
from verification.benchmarks.workload import size
from verification.report.provenance import surroundings

CHUNK = 4096  # tokens whose logits exist at a time
SHAPES = {  # by device: layers, dim, heads, key/value heads, width of the feed-forward, vocabulary
    "cuda": (8, 2048, 16, 8, 8192, 8192),
    "cpu": (2, 64, 4, 2, 128, 256),
}
WAYS = ("none", "all", "attention-kept")


class Layer(nn.Module):
    """A decoder layer of Llama: attention and a gated feed-forward, each behind a norm."""

    def __init__(self, dim: int, heads: int, kv_heads: int, width: int, number: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.attention = SelfAttention(dim, heads, Pattern.dense(True), kv_heads=kv_heads, name=f"layer {number}")
        self.gate, self.up = nn.Linear(dim, width, bias=False), nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor, context: ContextParallel | None) -> Tensor:
        """x: (B, N, dim) of this rank's tokens; without context: of the whole sequence, by torch's own attention."""
        attend = self.attention if context is not None else self.alone
        x = x + attend(self.attention_norm(x), context)
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    def alone(self, x: Tensor, _: None) -> Tensor:
        a = self.attention
        positions = torch.arange(x.shape[1], device=x.device)
        q = rotary(a.q_proj(x).unflatten(2, (-1, a.head_dim)), positions).transpose(1, 2)  # (B, H, N, D)
        k = rotary(a.k_proj(x).unflatten(2, (-1, a.head_dim)), positions).transpose(1, 2)
        v = a.v_proj(x).unflatten(2, (-1, a.head_dim)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return a.o_proj(out.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, kv_heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, width, i) for i in range(layers))
        self.norm = nn.RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, context: ContextParallel | None) -> Tensor:
        """The loss of each token, (B, N)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context)
        parts = zip(self.norm(x).split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)
        return torch.cat([checkpoint(self.losses, h, y, use_reentrant=False) for h, y in parts], 1)

    def losses(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(h).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def made(device: torch.device) -> Llama:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    with device:
        model = Llama(*SHAPES[device.type])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else None
    return model


def batch_of(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(SHAPES[device.type][-1], (1, tokens), generator=generator).to(device)
    return whole, next_tokens(whole)


def step_times(tokens: int, way: str, mesh: DeviceMesh, device: torch.device, steps: int) -> dict[str, Any]:
    model = made(device)
    if way != "none":
        recompute.wrap(model, Layer, keep_attention=way == "attention-kept")
    fsdp.shard(model, mesh, Layer, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    context = ContextParallel(Layout.zigzag(tokens, mesh.size()), mesh)
    batch = shard_batch(context, *batch_of(tokens, device))
    times, losses = [], []
    for _ in range(steps + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        per_token = model(batch.tokens, batch.labels, context)
        loss = token_mean(per_token, batch.labels, mesh)
        loss.backward()
        losses.append(loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
        model.zero_grad()
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"tokens": tokens, "recompute": way, "ms": slowest.item(), "loss": losses[0], "peak_bytes": peak}


@torch.no_grad()
def loss_alone(tokens: int, device: torch.device) -> float:
    """Of one GPU with the whole sequence, its parameters in bf16 as FSDP's policy has them."""
    model = made(device).to(torch.bfloat16)
    whole, labels = batch_of(tokens, device)
    losses = model(whole, labels, None)
    return (losses.masked_fill(labels < 0, 0).double().sum() / (labels >= 0).sum()).item()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=size, nargs="+", default=None, help="of the whole sequence, as 64Ki")
    parser.add_argument("--recompute", choices=WAYS, nargs="+", default=WAYS, help="which layers are computed again")
    parser.add_argument("--steps", type=int, default=5, help="whose median is taken, after two more")
    parser.add_argument("--compare", action="store_true", help="compare the loss with that of one GPU")
    parser.add_argument("--device", choices=tuple(SHAPES), default="cuda")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args()


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    speaks, world = dist.get_rank() == 0, dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("context",))
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens or ([16 * 2**10, 64 * 2**10] if device.type == "cuda" else [256]):
        alone = loss_alone(tokens, device) if options.compare and speaks else None
        for way in options.recompute:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            row = step_times(tokens, way, mesh, device, options.steps)
            if alone is not None:
                row |= {"loss_of_one_gpu": alone, "relative_difference": abs(row["loss"] - alone) / alone}
            rows.append(row)
            if speaks:
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.json and speaks:
        command = f"torchrun --nproc-per-node={world} scripts/bench_model.py {' '.join(sys.argv[1:])}"
        record = surroundings(device.type, world, command) | {"shape": SHAPES[device.type], "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
