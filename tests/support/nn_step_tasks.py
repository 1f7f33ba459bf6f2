"""A whole training step on the ranks of a pool, from tokens to parameters, against one process with the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.utils.checkpoint import checkpoint

from reference import Pattern
from ring import Layout
from ring.nn import (
    IGNORED,
    ContextParallel,
    LongNetBlock,
    average_gradients,
    clip_grad_norm,
    count_labels,
    cross_entropy,
    gather,
    next_tokens,
    shard_batch,
)
from tests.support import nn_dense
from tests.support.nn_module_tasks import in_fp64
from tests.support.nn_ranks import apart, far

DIM, HEADS, VOCABULARY, TOKENS, BLOCKS = 16, 4, 11, 24, 2
LENGTHS, RATIOS = [8, 24], [1, 2]
MAX_NORM, RATE, STEPS, MICROS = 0.5, 0.1, 2, 2


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.blocks = nn.ModuleList(LongNetBlock(DIM, HEADS, LENGTHS, RATIOS, name=f"layer {i}") for i in range(BLOCKS))

    def forward(self, tokens: Tensor, context: ContextParallel, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, context, positions, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits

    def dense(self, tokens: Tensor, pattern: Pattern) -> Tensor:
        """The same of whole sequences, by the oracle."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = nn_dense.longnet_block(x, dict(block.named_parameters()), pattern, DIM // HEADS, 10000.0)
        logits: Tensor = self.head(x)
        return logits


def _whole(step: int, data: int, micro: int) -> tuple[Tensor, Tensor]:
    """tokens, labels (1, n): another part is labelled in each, and in one nothing."""
    draw = torch.Generator().manual_seed(100 * step + 10 * data + micro)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=draw)
    labels = next_tokens(tokens)
    labels[:, : 7 * data + 3 * micro] = IGNORED
    if (data, micro) == (1, 1):
        labels[:] = IGNORED
    return tokens, labels


def steps_error(data: int, ranks: int, device: str) -> dict[str, float]:
    """The greatest errors over some steps of SGD with clipping, in fp64, on a mesh of `data` x the other ranks."""
    mesh = init_device_mesh(device, (data, ranks // data), mesh_dim_names=("data", "context"))
    context = ContextParallel(Layout.zigzag(TOKENS, ranks // data), mesh["context"])
    model, alone = (in_fp64(SmallModel) for _ in range(2))
    model.to(device)
    assert isinstance(alone, SmallModel)
    worst = {"loss": 0.0, "gradients": 0.0, "norm": 0.0, "parameters": 0.0, "logits": 0.0}

    def note(name: str, error: float) -> None:
        worst[name] = max(worst[name], error)

    for step in range(STEPS):
        mine = [_whole(step, mesh.get_local_rank("data"), micro) for micro in range(MICROS)]
        batches = [shard_batch(context, tokens.to(device), labels.to(device)) for tokens, labels in mine]
        labelled = count_labels([batch.labels for batch in batches if batch.labels is not None], mesh)
        model.zero_grad()
        loss, logits = 0.0, []
        for batch in batches:
            assert batch.labels is not None
            logits.append(model(batch.tokens, batch.context, batch.positions))
            share = cross_entropy(logits[-1], batch.labels, mesh, labelled=labelled)
            share.backward()
            loss += share.item()
        average_gradients(model.parameters(), mesh)
        norm = clip_grad_norm(model.parameters(), MAX_NORM, mesh)
        _descend(model)

        wanted, wanted_norm, exact = _dense_step(alone, step, data)
        here = mesh.get_local_rank("data")
        note("loss", apart(loss, wanted))
        note("norm", apart(norm, wanted_norm))
        for micro, one in enumerate(logits):
            note(
                "logits", far([gather(context, one).cpu()], [exact[MICROS * here + micro : MICROS * here + micro + 1]])
            )
        grads = [x.grad.cpu() for x in model.parameters() if x.grad is not None]
        note("gradients", far(grads, [x.grad for x in alone.parameters()]))
        note(
            "parameters", far([x.detach().cpu() for x in model.parameters()], [x.detach() for x in alone.parameters()])
        )
    return worst


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for x in model.parameters():
            assert x.grad is not None
            x.sub_(x.grad, alpha=RATE)


def _dense_step(model: SmallModel, step: int, data: int) -> tuple[float, float, Tensor]:
    """The loss, the norm and the logits of the whole batch; the model makes the step."""
    pattern = nn_dense.torchscale_pattern(LENGTHS, RATIOS, HEADS, True)
    parts = [_whole(step, one, micro) for one in range(data) for micro in range(MICROS)]
    tokens, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    model.zero_grad()
    logits = model.dense(tokens, pattern)
    loss = torch_cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    _descend(model)
    return loss.item(), norm.item(), logits.detach()
