"""Trains one model with dense attention, then with LongNet's, and records losses by bytes and by seconds.

    torchrun --nproc-per-node=P scripts/bench patterns --seconds 100 --held-out 8 --seeds 0 1 2 --json FILE
        [options of train.py]

Both trainings of a seed are those of scripts/train.py, with the same model, initial parameters and batches. The dense
one ends after --seconds. The dilated one, with the pattern of --segment-length and --dilated-ratio, ends when it has
seen as many bytes and taken as many seconds. Seconds are of training steps after a warm-up step. The held-out loss,
every --every steps, is not timed. Compare only seconds of the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from train import Training, join, leave, parse, parser_of, text

from bench.command import command_line
from verification import whole_file
from verification.report.provenance import surroundings

SHARED = ("tokens", "batch", "layers", "dim", "heads", "lr", "dtype", "text", "held_out", "layout", "seeds", "data")


class Timed(Training):
    """A training with its times and its regular held-out loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seconds: list[float] = []  # at the end of each step, on the slowest rank
        self.held_out: list[dict[str, float]] = []

    def timed_step(self) -> None:
        started = time.perf_counter()
        self.train_step()  # ends with loss.item(), so the GPU has finished
        seconds = torch.tensor(time.perf_counter() - started, device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + seconds.item())

    def to_dict(self, pattern: str) -> dict[str, Any]:
        """Return the record of the training so far, with the current held-out loss."""
        self.held_out.append({"step": self.step, "loss": self.held_out_loss()})
        return {
            "pattern": pattern,
            "seed": self.options.seed,
            "segment_length": self.options.segment_length,
            "dilated_ratio": self.options.dilated_ratio,
            "steps": self.step,
            "losses": [round(loss, 5) for loss in self.losses],
            "seconds": [round(second, 4) for second in self.seconds],
            "held_out": self.held_out,
        }


def compare(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """Run both trainings of each seed. Rank 0 rewrites the file after each held-out loss."""
    ranks = dist.get_world_size()
    record: dict[str, Any] = surroundings(device.type, ranks, command_line(ranks))
    record |= {name: getattr(options, name) for name in SHARED} | {"text_bytes": len(text(options.text))}
    record["trainings"] = []
    for seed in options.seeds:
        compare_seed(argparse.Namespace(**vars(options) | {"seed": seed}), mesh, device, record)


def compare_seed(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device, record: dict[str, Any]) -> None:
    """Run both trainings of a seed, and add them to the record."""
    # Dense: one segment with rate 1.
    dense = argparse.Namespace(**vars(options) | {"segment_length": [options.tokens], "dilated_ratio": [1]})
    steps = 0
    for pattern, own in (("dense", dense), ("dilated", options)):
        Timed(own, mesh, device).train_step()  # warm-up of the kernels
        training = Timed(own, mesh, device)
        record["parameters"] = sum(x.numel() for x in training.model.parameters())
        record["trainings"].append({})
        going = True
        while going:
            training.timed_step()
            going = training.seconds[-1] < options.seconds or training.step < steps
            if training.step % options.every and going:
                continue
            record["trainings"][-1] = training.to_dict(pattern)
            if dist.get_rank() == 0:
                size, seconds = training.step * options.batch * options.tokens, training.seconds[-1]
                loss, held_out = training.losses[-1], training.held_out[-1]["loss"]
                print(
                    f"seed {options.seed}, {pattern}: {size:,} bytes, {seconds:.1f} s: loss {loss:.4f}, "
                    f"held-out {held_out:.4f}",
                    flush=True,
                )
                whole_file.write(options.json, json.dumps(record) + "\n")
        steps = training.step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=100.0, help="duration of the dense training")
    parser.add_argument("--seeds", type=int, nargs="+", help="several --seed, each with both trainings")
    options = parse(parser, arguments)
    if options.seeds and options.seed != parser.get_default("seed"):
        parser.error(f"--seed is {options.seed}; with --seeds it must be left out")
    options.seeds = options.seeds or [options.seed]
    if options.json is None or options.held_out < 1:
        parser.error("--json and --held-out are needed")
    compare(options, *join(options))
    leave()
    return 0
