"""The project's own models as a Setup: its training step, with what TrainingCases vary besides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ring.nn import ContextParallel, SameWeights, clip_grad_norm, next_tokens, shard_batch
from verification.models.batches import IGNORED
from verification.models.meshes import mesh_of
from verification.models.recording import arrays, copy_gradients, named_parameters, unsharded
from verification.models.results import Named
from verification.models.setup import Part, Run, Setup, WholeBatch, distribute, recompute_layers
from verification.training.inputs import initial_parameters
from verification.training.rank.graphs import Graphs
from verification.training.rank.losses import LOSSES
from verification.training.rank.ring_model import LAYERS, Inner, LanguageModel, ring_inner
from verification.training.training_case import TrainingCase


class OwnSetup(Setup):
    """The model and step of a TrainingCase, or of one of its parts. inner: the attention of a "sdpa" model.

    parts: what `shard` returned.
    """

    def __init__(self, case: TrainingCase, inner: Inner = ring_inner) -> None:
        self.case, self.inner, self.graphs = case, inner, Graphs(case.compiled)
        self.mesh = mesh_of(case)
        self.loss_of, self.mixed = LOSSES[case.loss], case.dtype == "bfloat16"
        self.parts: list[Part] = []

    def build(self, context: ContextParallel | None) -> LanguageModel:
        """Build the model and load its initial parameters. Raises RuntimeError if names or shapes differ."""
        model = LanguageModel(self.case, self.inner).to(self.case.device, self.case.parameter_dtype)
        state = initial_parameters(self.case)
        if self.case.model.tied:
            state["head.weight"] = state["embedding.weight"]
        model.load_state_dict(state)
        return model

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        """Compile, recompute and wrap the model. Under FSDP layers are compiled: its hooks stay outside of graphs."""
        assert isinstance(model, LanguageModel)
        if self.case.fully_sharded:
            for layer in model.layers:
                layer.forward = self.graphs.compiled(layer.forward)
        recompute_layers(model, LAYERS, run)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.mixed else None
        return distribute(model if self.case.fully_sharded else self.graphs.compiled(model), LAYERS, run, policy)

    def shard(self, batch: WholeBatch, run: Run) -> Part:
        """Cut this rank's part, with labels from the whole sequences."""
        context, documents = run.context, batch.documents
        assert context is not None
        tokens, ignored = batch.tokens, batch.ignored  # (B, n), whole sequences
        labels = next_tokens(tokens).masked_fill(ignored, IGNORED)
        if self.case.packed_by == "handle":
            context, documents = context.with_documents(documents), None
        own = shard_batch(context, tokens, labels, documents=documents)
        assert own.labels is not None
        self.parts.append(Part(own.tokens, own.labels, own.positions, own.context))
        return self.parts[-1]

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        autocast = self.mixed and not self.case.fully_sharded
        with torch.autocast(self.case.device, torch.bfloat16, enabled=autocast):
            return run.see(model(part.tokens, part.positions, part.context))

    def count(self, parts: Sequence[Part], run: Run) -> int:
        return self.loss_of.count([part.labels for part in parts], self.mesh)

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        logits = self.logits(model, part, run)
        labelled = run.labelled if run.case.accumulation > 1 else None  # a single micro-batch counts its own labels
        if isinstance(model, SameWeights):
            return self.loss_of.mean(logits, part.labels, model, labelled)
        return self.loss_of.mean(logits, part.labels, self.mesh, labelled)

    def backward(self, model: nn.Module, loss: Tensor, run: Run) -> None:
        (loss * self.loss_of.part).backward()

    def reduce(self, model: nn.Module, run: Run) -> None:
        """Average gradients, without a wrapper; those of parameters without gradient on any rank become zeros."""
        if self.case.wrapper != "none":
            return
        if self.case.drops_zeros:
            for x in model.parameters():
                x.grad = x.grad if x.grad is not None and x.grad.any() else None
        super().reduce(model, run)
        for x in model.parameters():
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad

    def gradients(self, model: nn.Module) -> Named:
        """Return unsharded gradients by name. Collective."""
        return copy_gradients(named_parameters(model))

    def parameters(self, model: nn.Module) -> Named:
        """Return unsharded parameters by name. Collective."""
        return arrays(named_parameters(model))


def wrongly_clipped(named: Mapping[str, nn.Parameter], number: float, run: Run) -> list[str]:
    """Return the parameters clipped otherwise than by torch when all gradients of the first are `number`, NaN or
    infinite. A norm of NaN makes all gradients NaN; an infinite norm makes finite ones 0."""
    wrong = []
    for index, x in enumerate(named.values()):
        x.grad = torch.full_like(x, 1.0 if index else number)
    norm = clip_grad_norm(named.values(), 1.0, run.mesh)
    for index, (name, x) in enumerate(named.items()):
        assert x.grad is not None
        grad = unsharded(x.grad)
        right = grad.isnan() if math.isnan(number) or not index else grad == 0.0  # infinity times 0 is NaN
        wrong += [] if bool(right.all()) else [name]
    return wrong if norm.isfinite().item() is False else [*wrong, "the norm"]
