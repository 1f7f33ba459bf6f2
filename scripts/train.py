#!/usr/bin/env python3
"""Trains a byte-level LongNet language model on text that ships with Python, with the sequence sharded over ranks.

    scripts/train.py --ranks 4                      # 4 processes on this machine, each with a quarter of the sequence
    scripts/train.py --ranks 4 --data 2             # 2 x 2: two batches in parallel, each over 2 ranks
    scripts/train.py --ranks 2 --steps 400 --resume # resumes from the last checkpoint, on another number of ranks
    scripts/train.py --ranks 3 --same-bits 64       # 64: tokens of a chunk; any ranks print one digest of parameters
    scripts/train.py --check                        # trains on 1 and on 4 ranks; status 1 if the curves differ
    torchrun --nproc-per-node=8 scripts/train.py    # the same under torchrun; on GPUs with NCCL

Checkpoints are folders step-N in --folder, of which the last is kept. With --resume, options that are not given are
those of the checkpoint; only RESUMABLE ones may differ. The folder is locked, and ranks end with their launcher.

Comments (1) to (6) mark what sharding adds to the code of one process. A step gives the same result on any number of
ranks, up to rounding, because its batch depends on the step alone. With --same-bits it has the same bits.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

from ring import Layout
from ring.extras import optional_imports
from ring.nn import ContextParallel, LongNetBlock, SameWeights, clip_grad_norm, cross_entropy, next_tokens, shard_batch
from verification import whole_file
from verification.cli.arguments import check_file, check_folder, count, number
from verification.run.processes.parent_death import end_with_parent

LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}  # of parameters
TEXTS = ("manual", "library")
# Options that a checkpoint keeps; with --resume those in RESUMABLE may be given another value.
KEPT = (
    "tokens", "batch", "layers", "dim", "heads", "segment_length", "dilated_ratio", "layout", "dtype", "text",
    "held_out", "lr", "seed", "same_bits",
)  # fmt: skip
RESUMABLE = ("lr", "layout")  # besides --ranks, --data, --steps and --every, which it does not keep
LAUNCHER = "TRAIN_LAUNCHER"  # environment variable: number of the parent process, with which this one ends
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
        ranks, chunk = self.mesh["context"].size(), options.same_bits or None
        layout = LAYOUTS[options.layout](options.tokens, ranks)
        if chunk:
            layout = Layout.whole_chunks(options.tokens, ranks, chunk)
            torch.set_num_threads(1)  # bits depend on their number, and torchrun lets a rank that is alone have many
        self.context = ContextParallel(layout, self.mesh["context"], same_bits=chunk)
        if options.resume:
            self.load()
            for group in self.optimizer.param_groups:
                group["lr"] = options.lr
        # (2) Gradients are averaged over all ranks, data and context, or summed in an order that no split changes.
        self.parallel: nn.Module
        self.over: DeviceMesh | SameWeights
        if chunk:
            self.parallel = self.over = SameWeights(self.model, self.mesh)
        else:
            self.parallel = DistributedDataParallel(self.model, process_group=self.mesh._flatten().get_group())
            self.over = self.mesh

    def loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss over (batch, tokens), the same on every rank."""
        rows = sequences.chunk(self.mesh["data"].size())[self.mesh["data"].get_local_rank()].to(self.device).long()
        # (3) Labels are shifted first; (4) then tokens, labels and positions are sharded together.
        batch = shard_batch(self.context, rows, next_tokens(rows))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            logits = self.parallel(batch.tokens, batch.context)
        # (5) The mean over all labelled tokens, scaled so that the average, or the sum, of gradients is exact.
        assert batch.labels is not None
        return cross_entropy(logits, batch.labels, self.over)

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
        # (6) The norm of the gradients after (2), which every rank has in full.
        clip_grad_norm(self.model.parameters(), 1.0, self.over)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self) -> None:
        """Save a checkpoint, which any number of ranks can resume, then remove the one before it."""
        options = {name: getattr(self.options, name) for name in KEPT} | {"text_digest": text_digest(self.options)}
        new = self.options.folder / f"step-{self.step}"
        checkpoint.save(new, self.model, self.optimizer, step=self.step, losses=self.losses, options=options)
        if dist.get_rank() == 0:
            for old in checkpoints(self.options.folder)[:-1]:
                shutil.rmtree(old)

    def digest(self) -> str:
        """Return a digest of all parameters."""
        whole = hashlib.sha256()
        for parameter in self.model.parameters():
            whole.update(parameter.detach().cpu().numpy().tobytes())
        return whole.hexdigest()[:16]

    def load(self) -> None:
        progress = checkpoint.load(self.options.last[0], self.model, self.optimizer)
        self.step, self.losses = progress["step"], progress["losses"]


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the last step's last."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def text_digest(options: argparse.Namespace) -> str:
    """Return a digest of the text, which another Python may bring in another version."""
    return hashlib.sha256(text(options.text).numpy().tobytes()).hexdigest()[:16]


def kept_options(folder: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options of a checkpoint, with all its progress validated. Raises ValueError."""
    progress = checkpoint.read_progress(folder)
    if set(progress) != {"step", "losses", "options"}:
        raise ValueError(f"{folder} must be a checkpoint of this script, got one with {[*progress]}")
    step, losses, options = progress["step"], progress["losses"], progress["options"]
    if isinstance(options, dict):
        options = {"same_bits": 0} | options  # of a checkpoint without that option
    if type(step) is not int or f"step-{step}" != folder.name:
        raise ValueError(f"step of {folder} must be that of its name, got {step!r}")
    if not isinstance(losses, list) or len(losses) != step or not all(type(loss) is float for loss in losses):
        raise ValueError(f"losses of {folder} must be {step} numbers")
    types = {name: type(parser.get_default(name)) for name in KEPT} | {"text_digest": str}
    if not isinstance(options, dict) or {name: type(value) for name, value in options.items()} != types:
        raise ValueError(f"options of {folder} must be {', '.join(types)}, got {options!r}")
    if not all(type(value) is int for name in ("segment_length", "dilated_ratio") for value in options[name]):
        raise ValueError(f"segment_length and dilated_ratio of {folder} must be integers, got {options!r}")
    try:
        parser_of(exit_on_error=False).parse_args([*words_of(options)])  # as if they were typed
    except argparse.ArgumentError as error:
        raise ValueError(f"options of {folder}: {error}") from error
    return options


def words_of(options: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a command line with these options."""
    for name in KEPT:
        value, option = options[name], f"--{name.replace('_', '-')}"
        yield from (option, *map(str, value)) if isinstance(value, list) else (f"{option}={value}",)


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
    with checkpoint.hold(options.folder):
        check_last(options)
        train_on(options, mesh, device)


def train_on(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """Train on a mesh, while no other training saves in the folder."""
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
    record = {"ranks": ranks, "losses": training.losses, "activations": peak.item(), "held_out": held_out}
    if options.same_bits:
        record["digest"] = training.digest()
        say(f"digest of parameters {record['digest']}")
    if options.json and dist.get_rank() == 0:
        whole_file.write(options.json, json.dumps(record) + "\n")


def leave() -> None:
    """Destroy the groups and gloo's threads: a thread that frees a tensor while Python exits aborts the process.

    The threads end with the last reference to their group. The caller must keep no mesh; `gc` frees DDP's cycles.
    """
    gc.collect()
    dist.destroy_process_group()


def check(options: argparse.Namespace) -> int:
    """Train on 1 and on 4 ranks in fp64, and return 0 if the curves agree within BOUND."""
    try:
        with optional_imports("--check"):
            import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = []
    for ranks in (1, 4):
        folder = options.folder / f"check on {ranks}"
        command = [*sys.argv[1:], "--ranks", str(ranks), "--dtype", "float64", "--folder", str(folder)]
        command = [word for word in command if word != "--check"] + ["--json", str(folder / "record.json")]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        environment = os.environ | {LAUNCHER: str(os.getpid())}
        subprocess.run([sys.executable, __file__, *command], check=True, env=environment)
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


def parser_of(description: str | None = __doc__, exit_on_error: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, exit_on_error=exit_on_error
    )
    parser.add_argument("--ranks", type=count, default=1, help="processes to start, without torchrun")
    parser.add_argument("--data", type=int, default=1, help="data-parallel groups, each with its own batch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=count, default=10, help="steps between lines and checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --folder")
    parser.add_argument("--check", action="store_true", help="train on 1 and on 4 ranks, and compare")
    parser.add_argument("--folder", type=Path, default=Path(".training"), help="for checkpoints and pictures")
    parser.add_argument("--json", type=Path, help="file for the losses")
    parser.add_argument("--tokens", type=count, default=1024, help="tokens per sequence")
    parser.add_argument("--batch", type=count, default=2, help="sequences per step, over all data groups")
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--dim", type=count, default=128)
    parser.add_argument("--heads", type=count, default=4)
    parser.add_argument("--segment-length", type=count, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--dilated-ratio", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16: by autocast, parameters in fp32")
    parser.add_argument("--text", choices=TEXTS, default="manual", help="Python's manual, or its library's source")
    parser.add_argument("--held-out", type=int, default=0, help="held-out windows at the end of the text")
    parser.add_argument("--lr", type=number(float, lambda x: 0 < x < math.inf, "a number above 0"), default=1e-3)
    parser.add_argument(
        "--seed", type=number(int, lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"), default=0
    )
    step = 128 if torch.cuda.is_available() else 16
    chunk = number(int, lambda x: 0 <= x <= 2**40 and x % step == 0, f"0 or a multiple of {step} up to 2**40")
    parser.add_argument(
        "--same-bits", type=chunk, default=0, metavar="C", help="tokens of a chunk, for the same bits on any ranks"
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    last = checkpoints(options.folder)[-1:]
    if options.resume:
        options = resumed(options, parser, arguments, last)
    options.last = last
    if options.json and os.environ.get("RANK", "0") == "0":
        try:
            check_file("--json", options.json)
        except OSError as error:
            parser.error(str(error))
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    if options.data < 1 or ranks % options.data or options.batch % options.data:
        parser.error(f"--data is {options.data}; it must divide the {ranks} ranks and the batch of {options.batch}")
    if options.held_out < 0 or options.held_out % options.batch:
        parser.error(f"--held-out is {options.held_out}; it must be a multiple of the batch of {options.batch}")
    if options.same_bits:
        if parser.parse_args(arguments, argparse.Namespace(layout=None)).layout:
            parser.error("--layout must be left out with --same-bits, whose ranks hold whole chunks")
        chunks, needed = -(-options.tokens // options.same_bits), ranks // options.data
        if chunks < needed:
            parser.error(
                f"--same-bits is {options.same_bits}; it must make {needed} chunks, one per context rank, or more"
            )
    if (options.held_out + 1) * options.tokens >= len(text(options.text)):
        parser.error(f"--text {options.text} has {len(text(options.text))} bytes; that is not enough for the windows")
    return options


def resumed(
    options: argparse.Namespace, parser: argparse.ArgumentParser, arguments: Sequence[str] | None, last: list[Path]
) -> argparse.Namespace:
    """Return the options with those of the last checkpoint where none is given. Exits for others than RESUMABLE."""
    if options.check or not last:
        missing = "--check trains from the beginning" if options.check else f"{options.folder} has no checkpoint"
        parser.error(f"--resume: {missing}: leave it out")
    try:
        kept = kept_options(last[0], parser)
    except ValueError as error:
        parser.error(f"--resume: {error}")
    parser.set_defaults(**{name: kept[name] for name in KEPT})
    options = parser.parse_args(arguments)
    fixed = {name: getattr(options, name) for name in KEPT if name not in RESUMABLE}
    fixed["text_digest"] = text_digest(options)
    changed = [f"{name.replace('_', '-')} is {x}, was {kept[name]}" for name, x in fixed.items() if x != kept[name]]
    if changed:
        may = ", ".join(("ranks", "data", "steps", "every", *RESUMABLE))
        parser.error(f"--resume: {'; '.join(changed)}. Only these may change: {may}")
    return options


def check_last(options: argparse.Namespace) -> None:
    """Raise ValueError if the folder has a checkpoint that is not to be resumed, or another than when it was read."""
    last = checkpoints(options.folder)[-1:]
    if last and not options.resume:
        raise ValueError(f"--folder {options.folder} has {last[0].name}: write --resume, or name another folder")
    if last != options.last:
        raise ValueError(f"--folder {options.folder} was held by another training until now: start again")


def launched(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a launcher. Exits, before ranks are started, if their folder is of no use or held."""
    folder = parser.parse_args(arguments).folder
    try:
        check_folder("--folder", folder)
        with checkpoint.hold(folder):
            options = parse(parser, arguments)
            if not options.check:
                check_last(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def main() -> int:
    parser = parser_of()
    if "RANK" in os.environ or LAUNCHER in os.environ:
        end_with_parent()
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):  # it ended before that call
            return 1
    if "RANK" in os.environ:
        train(parse(parser))
        leave()
        return 0
    options = launched(parser)
    if options.check:
        return check(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER] = str(os.getpid())
    torchrun(["--standalone", f"--nproc-per-node={options.ranks}", __file__, *sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
