#!/usr/bin/env python3
"""Trains a byte-level LongNet language model on text that ships with Python, with the sequence sharded over ranks.

    scripts/train.py --ranks 4                      # 4 processes on this machine, each with a quarter of the sequence
    scripts/train.py --ranks 4 --data 2             # 2 x 2: two batches in parallel, each over 2 ranks
    scripts/train.py --ranks 2 --steps 400 --resume # resumes from a checkpoint, on another number of ranks
    scripts/train.py --check                        # trains on 1 and on 4 ranks; status 1 if the curves differ
    torchrun --nproc-per-node=8 scripts/train.py    # the same under torchrun; on GPUs with NCCL

Comments (1) to (6) mark what sharding adds to the code of one process. A step gives the same result on any number of
ranks, up to rounding, because its batch depends on the step alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ring import Layout
from ring.nn import ContextParallel, LongNetBlock, clip_grad_norm, cross_entropy, next_tokens, shard_batch

LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}  # of parameters
TEXTS = ("manual", "library")
BOUND = 1e-9  # on the relative difference of two fp64 curves: far above rounding, far below the effect of any bug


class Model(nn.Module):
    """Language model: bytes (B, N) -> logits of the next byte (B, N, 256)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, options.dim)
        self.blocks = nn.ModuleList(
            LongNetBlock(options.dim, options.heads, options.segment_length, options.dilated_ratio, name=f"block {i}")
            for i in range(options.layers)
        )
        self.norm = nn.LayerNorm(options.dim)
        self.head = nn.Linear(options.dim, 256, bias=False)

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)  # (B, N, dim)
        for block in self.blocks:
            x = block(x, context)
        return self.head(self.norm(x))


@cache
def text(name: str) -> Tensor:
    """Return (bytes,): Python's reference manual, about 500 KiB, or the source of its library, about 10 MiB."""
    if name == "manual":
        return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    folder, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test", "tests"}
    files = [file for file in sorted(folder.rglob("*.py")) if not others & set(file.relative_to(folder).parts)]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def split_text(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the training text, (bytes,), and the held-out windows at the end, (windows, tokens)."""
    whole = text(options.text)
    end = len(whole) - options.held_out * options.tokens
    return whole[:end], whole[end:].view(-1, options.tokens)


def windows(step: int, options: argparse.Namespace) -> Tensor:
    """Return the batch of a step, (batch, tokens) bytes, from positions that depend on the step alone."""
    training_text, _ = split_text(options)
    generator = torch.Generator().manual_seed(1_000_003 * options.seed + step)
    starts = torch.randint(len(training_text) - options.tokens, (options.batch,), generator=generator)
    return torch.stack([training_text[start : start + options.tokens] for start in starts])


@dataclass
class Training:
    """Training of a model, on this rank."""

    options: argparse.Namespace
    mesh: DeviceMesh
    device: torch.device

    def __post_init__(self) -> None:
        options = self.options
        torch.manual_seed(options.seed)
        self.model = Model(options).to(self.device, DTYPES[options.dtype])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr, weight_decay=0.1)
        self.step = 0
        self.losses: list[float] = []
        # (1) The layout: which rank of the context group has which positions.
        ranks = self.mesh["context"].size()
        self.context = ContextParallel(LAYOUTS[options.layout](options.tokens, ranks), self.mesh["context"])
        if options.resume:
            self.load()
        # (2) Gradients are averaged over all ranks, data and context.
        self.parallel = DistributedDataParallel(self.model, process_group=self.mesh._flatten().get_group())

    def loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss over (batch, tokens), the same on every rank."""
        rows = sequences.chunk(self.mesh["data"].size())[self.mesh["data"].get_local_rank()].to(self.device).long()
        # (3) Labels are shifted first; (4) then tokens, labels and positions are sharded together.
        batch = shard_batch(self.context, rows, next_tokens(rows))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            logits = self.parallel(batch.tokens, batch.context)
        # (5) The mean over all labelled tokens, scaled so that DDP's average of gradients is exact.
        assert batch.labels is not None
        return cross_entropy(logits, batch.labels, self.mesh)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss of the held-out windows."""
        _, held_out = split_text(self.options)
        batches = held_out.split(self.options.batch)
        return sum(self.loss(batch).item() for batch in batches) / len(batches)

    def train_step(self) -> float:
        """Make one step and return its loss."""
        loss = self.loss(windows(self.step, self.options))
        loss.backward()
        # (6) The norm of the averaged gradients, which every rank has in full.
        clip_grad_norm(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self) -> None:
        """Save a checkpoint from rank 0: all ranks have the same parameters, so any number of ranks can resume."""
        if dist.get_rank() == 0:
            state = {
                "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                "losses": self.losses,
            }  # fmt: skip
            path = self.options.folder / "checkpoint.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    def load(self) -> None:
        state = torch.load(self.options.folder / "checkpoint.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]


class ActivationMeter:
    """Counts the bytes of activations: all that autograd saves for the backward, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return x


def join(options: argparse.Namespace) -> tuple[DeviceMesh, torch.device]:
    """Join all ranks, and return their mesh (data, context) and the device of this rank."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    shape = (options.data, dist.get_world_size() // options.data)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "context")), device


def train(options: argparse.Namespace) -> None:
    """Train on this rank."""
    mesh, device = join(options)
    training, ranks = Training(options, mesh, device), dist.get_world_size()
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"{ranks} ranks ({options.data} data x {ranks // options.data} context), {options.tokens} tokens in a sequence")
    activations, started, first_step = ActivationMeter(training.model), time.perf_counter(), training.step
    while training.step < options.steps:
        first = training.step == first_step
        with torch.autograd.graph.saved_tensors_hooks(activations.pack, lambda x: x) if first else nullcontext():
            loss = training.train_step()
        if training.step % options.every == 0 or training.step == options.steps:
            rate = (training.step - first_step) * options.batch * options.tokens / (time.perf_counter() - started)
            say(f"step {training.step:5d}   loss {loss:.4f}   {rate:9,.0f} tokens/s", flush=True)
            training.save()
    peak = torch.tensor(activations.bytes, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    say(f"activations of a step: {peak.item() / 2**20:.1f} MiB on the fullest rank")
    held_out = training.held_out_loss() if options.held_out else None
    if held_out is not None:
        say(f"held-out loss {held_out:.4f}")
    if options.json and dist.get_rank() == 0:
        record = {"ranks": ranks, "losses": training.losses, "activations": peak.item(), "held_out": held_out}
        options.json.write_text(json.dumps(record) + "\n")


def leave() -> None:
    """Destroy the groups and gloo's threads: a thread that frees a tensor while Python exits aborts the process.

    The threads end with the last reference to their group. The caller must keep no mesh; `gc` frees DDP's cycles.
    """
    gc.collect()
    dist.destroy_process_group()


def check(options: argparse.Namespace) -> int:
    """Train on 1 and on 4 ranks in fp64, and return 0 if the curves agree within BOUND."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        print("error: --check draws with matplotlib: install it with `pip install -e .[notebooks]`", file=sys.stderr)
        return 2
    records = []
    for ranks in (1, 4):
        folder = options.folder / f"check on {ranks}"
        command = [*sys.argv[1:], "--ranks", str(ranks), "--dtype", "float64", "--folder", str(folder)]
        command = [word for word in command if word != "--check"] + ["--json", str(folder / "record.json")]
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, __file__, *command], check=True)
        records.append(json.loads((folder / "record.json").read_text()))
    one, four = records
    difference = max(abs(a - b) / abs(a) for a, b in zip(one["losses"], four["losses"], strict=True))
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(one["losses"], linewidth=5, alpha=0.35, label="1 rank")
    axes.plot(four["losses"], linewidth=1, color="black", label="4 ranks")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"largest relative difference {difference:.1e}")
    axes.legend()
    figure.savefig(options.folder / "check.png", dpi=120)
    share = 4 * four["activations"] / one["activations"]
    print(f"1 and 4 ranks: the largest relative difference of losses is {difference:.1e}; allowed is {BOUND:.0e}")
    print(f"activations per rank on 4 ranks: {share:.3f} of a quarter of those on 1 rank")
    print(f"picture: {options.folder / 'check.png'}")
    return 0 if difference <= BOUND else 1


def parser_of(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes to start, without torchrun")
    parser.add_argument("--data", type=int, default=1, help="data-parallel groups, each with its own batch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between lines and checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --folder")
    parser.add_argument("--check", action="store_true", help="train on 1 and on 4 ranks, and compare")
    parser.add_argument("--folder", type=Path, default=Path(".training"), help="for checkpoints and pictures")
    parser.add_argument("--json", type=Path, help="file for the losses")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step, over all data groups")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--segment-length", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--dilated-ratio", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16: by autocast, parameters in fp32")
    parser.add_argument("--text", choices=TEXTS, default="manual", help="Python's manual, or its library's source")
    parser.add_argument("--held-out", type=int, default=0, help="held-out windows at the end of the text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    if options.data < 1 or ranks % options.data or options.batch % options.data:
        parser.error(f"--data is {options.data}; it must divide the {ranks} ranks and the batch of {options.batch}")
    if options.held_out < 0 or options.held_out % options.batch:
        parser.error(f"--held-out is {options.held_out}; it must be a multiple of the batch of {options.batch}")
    if (options.held_out + 1) * options.tokens >= len(text(options.text)):
        parser.error(f"--text {options.text} has {len(text(options.text))} bytes; that is not enough for the windows")
    return options


def main() -> int:
    options = parse(parser_of())
    if options.check:
        return check(options)
    if "RANK" in os.environ:
        train(options)
        leave()
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return subprocess.run([*torchrun, __file__, *sys.argv[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
