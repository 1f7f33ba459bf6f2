"""Training of one small language model on the ranks of a pool, with and without `SameWeights`, for notebook 11."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from notebooks.figures import DATA
from ring import Layout
from ring.nn import (
    Batch,
    ContextParallel,
    LongNetBlock,
    SameWeights,
    average_gradients,
    clip_grad_norm,
    cross_entropy,
    next_tokens,
    shard_batch,
)

State = dict[str, Any]  # of the model, of the optimizer, and the number of steps done
TEXT = torch.tensor(list((DATA.parents[1] / "LICENSE").read_bytes()))


@dataclass(frozen=True)
class Training:
    """A training of a byte-level model on this repository's licence.

    Args:
        data: ranks that share the sequences of a batch; the others share each sequence.
        way: "SameWeights", with `same_bits`; "same_bits" alone, or "usual", with neither: gradients are then averaged.
        tokens: of a sequence.
        chunk: tokens, of `same_bits` and of the layout.
        sequences: of a batch, on all data ranks.
        dim, layers: of the model.
        rate: of AdamW.
        bf16: by autocast.
    """

    data: int
    way: str
    tokens: int
    chunk: int
    sequences: int
    dim: int
    layers: int
    rate: float
    seed: int
    bf16: bool = False


class Model(nn.Module):
    """Blocks of LongNet, and a head that shares the embedding's weights."""

    def __init__(self, tokens: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, dim), nn.LayerNorm(dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.blocks = nn.ModuleList(
            LongNetBlock(dim, 2, [tokens // 4, tokens], [1, 2], name=f"block {i}") for i in range(layers)
        )
        self.head = nn.Linear(dim, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, context)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Trainer:
    """Model, optimizer and batches of a training on this rank. Collective. start: what an earlier one has left."""

    def __init__(self, training: Training, start: State | None = None) -> None:
        world = dist.get_world_size()
        torch.set_num_threads(1)
        torch.manual_seed(training.seed)
        self.training, self.model = training, Model(training.tokens, training.dim, training.layers)
        shape = (training.data, world // training.data)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), training.rate)
        self.done = 0
        if start is not None:
            nn.utils.vector_to_parameters(start["weights"], self.model.parameters())
            self.optimizer.load_state_dict(start["optimizer"])
            self.done = start["done"]
        layout = Layout.whole_chunks(training.tokens, shape[1], training.chunk)
        chunk = None if training.way == "usual" else training.chunk
        self.context = ContextParallel(layout, mesh["context"], same_bits=chunk)
        self.place = mesh["data"].get_local_rank()
        self.same = SameWeights(self.model) if training.way == "SameWeights" else None

    def batch(self) -> Batch:
        """Return this rank's part of the batch of the next step."""
        training, drawn = self.training, torch.Generator().manual_seed(self.done)
        begins = torch.randint(len(TEXT) - training.tokens, (training.sequences,), generator=drawn).tolist()
        tokens = torch.stack([TEXT[begin : begin + training.tokens] for begin in begins])
        own = (x.chunk(training.data)[self.place] for x in (tokens, next_tokens(tokens)))
        return shard_batch(self.context, *own)

    def step(self) -> Tensor:
        """Train on the next batch, and return its loss."""
        batch = self.batch()
        assert batch.labels is not None
        with torch.autocast("cpu", torch.bfloat16) if self.training.bf16 else nullcontext():
            logits = (self.same or self.model)(batch.tokens, batch.context)
        loss = cross_entropy(logits, batch.labels, self.same)
        loss.backward()
        if self.same is None:
            average_gradients(self.model.parameters())
        clip_grad_norm(self.model.parameters(), 1.0, self.same)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()

    def state(self) -> State:
        """Return a copy of what another training may start with."""
        weights = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        return deepcopy({"weights": weights, "optimizer": self.optimizer.state_dict(), "done": self.done})


def trained(training: Training, looks: tuple[int, ...], start: State | None = None) -> tuple[Tensor, dict[int, State]]:
    """Return the losses of all steps, and the state after each step of `looks`, ascending."""
    trainer = Trainer(training, start)
    losses, states = [], {}
    for before, look in pairwise((trainer.done, *looks)):
        losses += [trainer.step() for _ in range(before, look)]
        states[look] = trainer.state()
    return torch.stack(losses), states


def digest(state: State) -> str:
    """Return a digest of all bits of the parameters and of the optimizer's moments."""
    moments = [x for one in state["optimizer"]["state"].values() for x in (one["exp_avg"], one["exp_avg_sq"])]
    numbers = [x.numpy().tobytes() for x in (state["weights"], *moments)]
    return sha256(b"".join(numbers)).hexdigest()


def seconds_by_turns(trainings: tuple[Training, ...], rounds: int, steps: int) -> list[list[float]]:
    """Return for each training the CPU seconds that this rank takes for a step, in each round."""
    trainers = [Trainer(training) for training in trainings]
    for trainer in trainers:
        trainer.step()
    return [list(times) for times in zip(*([_timed(x, steps) for x in trainers] for _ in range(rounds)), strict=True)]


def _timed(trainer: Trainer, steps: int) -> float:
    begin = process_time()
    for _ in range(steps):
        trainer.step()
    return (process_time() - begin) / steps
