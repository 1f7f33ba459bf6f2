#!/usr/bin/env python3
"""Trains a byte-level LongNet language model on text that every Python brings along, its sequence sharded over ranks.

    scripts/train.py --ranks 4                      # 4 processes on this machine, each with a quarter of the sequence
    scripts/train.py --ranks 4 --data 2             # 2 x 2: two batches side by side, each over 2 ranks
    scripts/train.py --ranks 2 --steps 400 --resume # goes on from the last checkpoint, on another number of ranks
    scripts/train.py --check                        # the same training on 1 and on 4 ranks: one curve, else status 1
    torchrun --nproc-per-node=8 scripts/train.py    # the same under torchrun; on GPUs with NCCL

What makes it a training over ranks is marked (1) to (6); all else is what one process would do. A step is the same on
any number of ranks, up to rounding, because its batch depends on the step alone.
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
BOUND = 1e-9  # of the relative difference between two curves in fp64: far above rounding, far below any mistake


class Model(nn.Module):
    """Bytes in, logits of the next byte out: (B, N) -> (B, N, 256)."""

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
    """(bytes,): the chapters of Python's reference manual, some 500 KiB, or the source of its library, some 10 MiB."""
    if name == "manual":
        return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    folder, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test", "tests"}
    files = [file for file in sorted(folder.rglob("*.py")) if not others & set(file.relative_to(folder).parts)]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def divided(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The text to train on, (bytes,), and behind it the windows that are held out, (windows, tokens)."""
    whole, held = text(options.text), options.held_out * options.tokens
    return whole[: len(whole) - held], whole[len(whole) - held :].view(-1, options.tokens)


def windows(step: int, options: argparse.Namespace) -> Tensor:
    """The batch of a step: (batch, tokens) bytes, from places that depend on the step alone."""
    trained_on, _ = divided(options)
    generator = torch.Generator().manual_seed(1_000_003 * options.seed + step)
    starts = torch.randint(len(trained_on) - options.tokens, (options.batch,), generator=generator)
    return torch.stack([trained_on[start : start + options.tokens] for start in starts])


@dataclass
class Training:
    """A model in training on this rank."""

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
        # (1) One handle: which rank of the context group holds which positions.
        ranks = self.mesh["context"].size()
        self.context = ContextParallel(LAYOUTS[options.layout](options.tokens, ranks), self.mesh["context"])
        if options.resume:
            self.load()
        # (2) Gradients are averaged over all ranks, data and context.
        self.parallel = DistributedDataParallel(self.model, process_group=self.mesh._flatten().get_group())

    def loss(self, sequences: Tensor) -> Tensor:
        """The mean loss of all of (batch, tokens), the same number on every rank."""
        rows = sequences.chunk(self.mesh["data"].size())[self.mesh["data"].get_local_rank()].to(self.device).long()
        # (3) Labels are shifted first; (4) then tokens, labels and positions are sharded together.
        batch = shard_batch(self.context, rows, next_tokens(rows))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            logits = self.parallel(batch.tokens, batch.context)
        # (5) The mean over all labelled tokens, with the gradient that an average over ranks turns into the right one.
        assert batch.labels is not None
        return cross_entropy(logits, batch.labels, self.mesh)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss of the windows that no step sees."""
        _, held_out = divided(self.options)
        batches = held_out.split(self.options.batch)
        return sum(self.loss(batch).item() for batch in batches) / len(batches)

    def train_step(self) -> float:
        """One step; returns its loss."""
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
        """Every rank has the same parameters: one of them saves, and any number of ranks can go on."""
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


class Saved:
    """Counts the bytes that autograd keeps for the backward, parameters left out: the memory of activations."""

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
    """All ranks, as a mesh (data, context), and the device of this one."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    shape = (options.data, dist.get_world_size() // options.data)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "context")), device


def train(options: argparse.Namespace) -> None:
    """On this rank."""
    mesh, device = join(options)
    training, ranks = Training(options, mesh, device), dist.get_world_size()
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"{ranks} ranks ({options.data} data x {ranks // options.data} context), {options.tokens} tokens in a sequence")
    saved, started, began = Saved(training.model), time.perf_counter(), training.step
    while training.step < options.steps:
        first = training.step == began
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x) if first else nullcontext():
            loss = training.train_step()
        if training.step % options.every == 0 or training.step == options.steps:
            rate = (training.step - began) * options.batch * options.tokens / (time.perf_counter() - started)
            say(f"step {training.step:5d}   loss {loss:.4f}   {rate:9,.0f} tokens/s", flush=True)
            training.save()
    most = torch.tensor(saved.bytes, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    say(f"activations of a step: {most.item() / 2**20:.1f} MiB on the rank with most")
    held_out = training.held_out_loss() if options.held_out else None
    if held_out is not None:
        say(f"held-out loss {held_out:.4f}")
    if options.json and dist.get_rank() == 0:
        record = {"ranks": ranks, "losses": training.losses, "activations": most.item(), "held_out": held_out}
        options.json.write_text(json.dumps(record) + "\n")


def leave() -> None:
    """Ends the groups, and with them gloo's threads: one that gives back a tensor while Python ends aborts the process.

    They end with the last reference to their group, so the caller keeps no mesh, and cycles (DDP's hooks) are broken.
    """
    gc.collect()
    dist.destroy_process_group()


def check(options: argparse.Namespace) -> int:
    """The same training on 1 and on 4 ranks, in fp64: status 0 if the curves agree within BOUND."""
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
    apart = max(abs(a - b) / abs(a) for a, b in zip(one["losses"], four["losses"], strict=True))
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(one["losses"], linewidth=5, alpha=0.35, label="1 rank")
    axes.plot(four["losses"], linewidth=1, color="black", label="4 ranks")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"largest relative difference {apart:.1e}")
    axes.legend()
    figure.savefig(options.folder / "check.png", dpi=120)
    share = 4 * four["activations"] / one["activations"]
    print(f"1 and 4 ranks: the losses differ by {apart:.1e} of their size at most; allowed is {BOUND:.0e}")
    print(f"activations of a rank of 4: {share:.3f} of a quarter of one rank's")
    print(f"picture: {options.folder / 'check.png'}")
    return 0 if apart <= BOUND else 1


def parser_of(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes to start, where torchrun starts none")
    parser.add_argument("--data", type=int, default=1, help="groups of ranks that have batches of their own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between lines, and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --folder")
    parser.add_argument("--check", action="store_true", help="train on 1 and on 4 ranks and compare")
    parser.add_argument("--folder", type=Path, default=Path(".training"), help="for checkpoints and pictures")
    parser.add_argument("--json", type=Path, help="write the losses there")
    parser.add_argument("--tokens", type=int, default=1024, help="in a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step, of all data groups together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--segment-length", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--dilated-ratio", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16: by autocast, parameters in fp32")
    parser.add_argument("--text", choices=TEXTS, default="manual", help="Python's manual, or its library's source")
    parser.add_argument("--held-out", type=int, default=0, help="windows at the text's end that no step sees")
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
