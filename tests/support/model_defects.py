"""Defects of composition, each planted in a Setup, with what the diagnosis must name.

A defect is on ranks only: one process has no shards to get wrong. Public bugs of their kind are cited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from reference.pattern import Pattern
from ring.nn import IGNORED, ContextParallel, RingAttention, cross_entropy, next_tokens
from tests.support.model_examples import Attention, Layer, PlainModel, WithBuffers
from verification.models import ModelCase, Part, Run, Setup, WholeBatch


class Plain(Setup):
    """The sound Setup that each defect changes."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return PlainModel(context is not None, self.layer(context is not None))

    def layer(self, ranks: bool) -> type[Layer]:
        """Class of the model's layers, on ranks or in one process."""
        return Layer


# --- the same bits on any ranks ---


class AveragedByDdp(Plain):
    """DDP averages in the order of ranks, and matrix products have as many rows as a rank has tokens."""

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        return DistributedDataParallel(model)


class LossOfRanks(Plain):
    """The loss adds the sums of ranks."""

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        if run.mesh is None:
            return super().loss(model, part, run)
        logits = self.logits(model, part, run).flatten(0, 1)
        own = functional.cross_entropy(logits, part.labels.flatten(), reduction="sum") / run.labelled
        dist.all_reduce(total := own.detach().clone())
        return own + (total - own.detach())


class OwnShards(Plain):
    """Ignores the chunks: an order, a wrapper and shards of its own."""

    def claims(self, case: ModelCase) -> ModelCase:
        return replace(case, same_bits=None, order="zigzag", cuts=None, wrapper="ddp", checkpointing="none")


# --- batches and labels ---


class LabelsShiftedAfterSharding(Plain):
    """Each shard's last token has no label; the next one in a zigzag shard is not the next one (transformers#48491)."""

    def shard(self, batch: WholeBatch, run: Run) -> Part:
        part = super().shard(batch, run)
        return replace(part, labels=next_tokens(part.tokens))


class EndsOfDocumentsLabelled(Plain):
    """The last token of a document predicts the next document (bionemo-recipes#1449)."""

    def shard(self, batch: WholeBatch, run: Run) -> Part:
        part, labels = super().shard(batch, run), next_tokens(batch.tokens)
        assert run.context is not None
        return replace(part, labels=run.context.shard(labels))


class PositionsLocal(Plain):
    """Rotary positions count from the start of each shard."""

    def shard(self, batch: WholeBatch, run: Run) -> Part:
        part = super().shard(batch, run)
        return replace(part, positions=torch.arange(part.tokens.shape[1]))


# --- losses ---


class MeanOfEachRank(Plain):
    """The mean over each rank's labels, then over ranks, whose numbers of labels differ (transformers#34373)."""

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        if run.mesh is None:
            return super().loss(model, part, run)
        logits = self.logits(model, part, run).flatten(0, 1)
        total = functional.cross_entropy(logits, part.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        mean = total / max(1, int((part.labels != IGNORED).sum())) / run.case.accumulation
        dist.all_reduce(value := mean.detach().clone())
        return mean + (value / run.case.world - mean.detach())


class AveragedTwice(Plain):
    """The loss is divided by the number of ranks, and the wrapper divides again."""

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        if run.mesh is None:
            return super().loss(model, part, run)
        logits = self.logits(model, part, run)
        return cross_entropy(logits, part.labels, run.mesh, labelled=run.labelled, averaged_over=1)


class MeanOfMicroBatches(Plain):
    """The mean of the micro-batches' means, whose numbers of labels differ (transformers#34191)."""

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        if run.mesh is None:
            return super().loss(model, part, run)
        return cross_entropy(self.logits(model, part, run), part.labels, run.mesh) / run.case.accumulation


class LearnedPositions(PlainModel):
    """Positions without a dimension of sequences, as in GPT-2."""

    def __init__(self, ranks: bool) -> None:
        super().__init__(ranks)
        self.position = nn.Embedding(64, 8)

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel | None = None) -> Tensor:
        x = self.embedding(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x, positions, context)
        return self.head(self.norm(x))


class SumOfMicroBatches(MeanOfMicroBatches):
    """The mean of each micro-batch, summed."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return LearnedPositions(context is not None)

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        return super().loss(model, part, run) * (run.case.accumulation if run.mesh is not None else 1)


class RouterLossOfLocalTokens(Plain):
    """A balancing loss, a square of means over tokens, of each rank's tokens."""

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        self.routed = super().logits(model, part, run)
        return self.routed

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        loss = super().loss(model, part, run)
        return loss + self.routed.softmax(-1).flatten(0, 1).mean(0).square().sum()

    def claims(self, case: ModelCase) -> ModelCase:
        return replace(case.without_empty_shards(), packed=None, padding=False, accumulation=1)


# --- gradients, clipping, optimizer ---


class NotOverContext(Plain):
    """Gradients are averaged over the data ranks only (torchtune#2879)."""

    def reduce(self, model: nn.Module, run: Run) -> None:
        if run.case.wrapper == "none":
            group = mesh_of(run).get_group("data")
            for x in model.parameters():  # by hand: average_gradients refuses other ranks than those of the loss
                if x.grad is not None:
                    dist.all_reduce(x.grad, group=group)
                    x.grad /= dist.get_world_size(group)

    def clip(self, model: nn.Module, run: Run) -> Any:
        return torch_clip(model, run)


class NormOfLocalShards(Plain):
    """FSDP shards gradients, and each rank clips by the norm of its shard."""

    def clip(self, model: nn.Module, run: Run) -> Any:
        if run.case.clipping is None or (not run.case.wrapper.endswith("fsdp2") and run.case.wrapper != "hsdp2"):
            return super().clip(model, run)
        grads = [x.grad.to_local() for x in model.parameters() if isinstance(x.grad, DTensor)]
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
        for grad in grads:
            grad.mul_(min(1.0, run.case.clipping / (float(norm) + 1e-6)))
        return norm


class ZeroedLate(Plain):
    """Gradients of a step are still there in the next."""

    def optimizer(self, parameters: Any, run: Run) -> torch.optim.Optimizer:
        optimizer = super().optimizer(parameters, run)
        if run.mesh is not None:
            vars(optimizer)["zero_grad"] = lambda: None
        return optimizer


class TyingBroken(Plain):
    """The wrapper gives the head weights of its own."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        model = PlainModel(context is not None)
        model.head.weight = model.embedding.weight
        return model

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        assert isinstance(model, PlainModel)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return super().wrap(model, run)


class ChangedContext(Plain):
    """The handle is an attribute that has changed when the backward recomputes a layer."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return PlainModel(context is not None, HandleFromElsewhere)

    def shard(self, batch: WholeBatch, run: Run) -> Part:
        part = super().shard(batch, run)
        HandleFromElsewhere.current = part.context
        return part

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        HandleFromElsewhere.current = part.context
        loss = super().loss(model, part, run)
        HandleFromElsewhere.current = run.context
        return loss


class CountNotReduced(Plain):
    """Each rank counts its own tokens."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return WithBuffers(context is not None, reduced=False)


class CountNotUpdated(CountNotReduced):
    """Ranks do not count."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return WithBuffers(context is not None, counts=context is None)


class LogitsOfSomeTokens(Plain):
    """The step records the logits of one rank's tokens alone."""

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        logits = super().logits(model, part, run)
        if run.context is not None and run.context.rank == 1:
            run.logits[-1] = logits[:, :0].detach(), torch.arange(0)
        return logits


class HandleFromElsewhere(Layer):
    current: ContextParallel | None = None

    def forward(self, x: Tensor, positions: Tensor, context: ContextParallel | None) -> Tensor:
        return super().forward(x, positions, HandleFromElsewhere.current)


class GatheredInOrderOfRanks(Plain):
    """Logits are gathered in the order of ranks, although the layout has another order of tokens."""

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        logits = super().logits(model, part, run)
        if run.context is not None and run.mesh is not None:
            shards: list[Any] = [None] * run.context.world_size
            dist.all_gather_object(shards, logits.detach(), mesh_of(run)["context"].get_group())
            run.logits[-1] = torch.cat(shards, 1), torch.arange(run.case.tokens)
        return logits


# --- modules ---


class SequenceNorm(nn.Module):
    """Normalises over the sequence, of which each rank sees its part."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1.0 + x.square().mean(1, keepdim=True)) if x.shape[1] else x


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)  # (B, dim)


class Pooled(nn.Module):
    """Adds the mean of all tokens to each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Mean()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pool(x)[:, None] if x.shape[1] else x


def mixing(mixer: Callable[[], nn.Module]) -> type[Layer]:
    """Layers that end in a mixer."""

    class Mixing(Layer):
        def new_mixer(self) -> nn.Module:
            return mixer()

    return Mixing


class Unpacked(Plain):
    """A Setup without documents and padding, which a mixer of tokens would see."""

    def claims(self, case: ModelCase) -> ModelCase:
        return replace(case, packed=None, padding=False)


class NormOverSequence(Unpacked):
    def layer(self, ranks: bool) -> type[Layer]:
        return mixing(SequenceNorm)


class PooledOutput(Unpacked):
    def layer(self, ranks: bool) -> type[Layer]:
        return mixing(Pooled)


class LocalAttention(Attention):
    """Attends to this rank's tokens only: the ring was not switched on."""

    def __init__(self, ranks: bool) -> None:
        super().__init__(False)


class AttentionNotSharded(Plain):
    def layer(self, ranks: bool) -> type[Layer]:
        return attending(LocalAttention) if ranks else Layer


class GatheredAttention(Attention):
    """Gathers keys and values without autograd, so their gradients are incomplete (as in Megatron-LM#1464)."""

    def forward(self, x: Tensor, positions: Tensor, context: ContextParallel | None) -> Tensor:
        if context is None:
            return super().forward(x, positions, context)
        self.inner = Gathering()
        return super().forward(x, positions, context)


class Gathering(RingAttention):
    def __init__(self) -> None:
        super().__init__(Pattern.dense(causal=True))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, context: ContextParallel, **_: Any) -> Tensor:  # type: ignore[override]
        group: Any = context.group.get_group() if isinstance(context.group, DeviceMesh) else None
        wholes = []
        for own in (k, v):
            shards: list[Any] = [None] * context.world_size
            dist.all_gather_object(shards, own.detach(), group)
            shards[context.rank] = own
            wholes.append(context.layout.unshard(shards, 2))
        mask = torch.arange(context.layout.n) <= context.layout.positions(context.rank)[:, None]
        return functional.scaled_dot_product_attention(q, wholes[0], wholes[1], mask)


class KeysWithoutGradient(Plain):
    def layer(self, ranks: bool) -> type[Layer]:
        return attending(GatheredAttention) if ranks else Layer

    def claims(self, case: ModelCase) -> ModelCase:
        return replace(case.without_empty_shards(), packed=None)


def attending(attention: type[Attention]) -> type[Layer]:
    class Attending(Layer):
        def new_attention(self, ranks: bool) -> Attention:
            return attention(ranks)

    return Attending


def mesh_of(run: Run) -> DeviceMesh:
    assert run.mesh is not None
    return run.mesh


def torch_clip(model: nn.Module, run: Run) -> Any:
    """Clip as torch does, which does not compare ranks."""
    if run.case.clipping is None:
        return None
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), run.case.clipping)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(frozen=True)
class Defect:
    """named: pattern of the diagnosis, the module at fault or another cause."""

    setup: type[Setup]
    named: str
    worlds: tuple[int, ...] = (2,)


SCALE = "times the expected ones: no single module"
# Which of these depends on the example that is found.
NO_MODULE = f"the loss, not a module|{SCALE}|their reduction or clipping|and the gradients of the parameters too"
DEFECTS = (
    Defect(LabelsShiftedAfterSharding, NO_MODULE),
    Defect(EndsOfDocumentsLabelled, NO_MODULE),
    Defect(PositionsLocal, "the model is called with other positions"),
    Defect(MeanOfEachRank, NO_MODULE),
    Defect(AveragedTwice, SCALE),
    Defect(MeanOfMicroBatches, NO_MODULE),
    Defect(SumOfMicroBatches, NO_MODULE),
    Defect(RouterLossOfLocalTokens, NO_MODULE),
    Defect(NotOverContext, NO_MODULE),
    Defect(NormOfLocalShards, NO_MODULE),
    Defect(ZeroedLate, "step two's gradients include step one's: are they zeroed"),
    Defect(CountNotReduced, "and the gradients of the parameters too"),
    Defect(CountNotUpdated, "buffers: count on rank 0 .* did not change; in one process it did"),
    Defect(LogitsOfSomeTokens, "logits: no rank recorded the logits of token"),
    Defect(TyingBroken, "whose parameter has another gradient is embedding"),
    Defect(ChangedContext, "the cause is in the backward of layers.1"),
    Defect(GatheredInOrderOfRanks, "the model is called with other tokens and positions"),
    Defect(NormOverSequence, "whose output differs is layers.0.mixer,"),
    Defect(PooledOutput, "whose output differs is layers.0.mixer.pool,"),
    Defect(AttentionNotSharded, "no rank called ring_attention: .* the cause is in the forward of layers.0.attention,"),
    Defect(KeysWithoutGradient, "the cause is in the backward of layers.1.attention"),
)
