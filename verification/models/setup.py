"""Setup: how a user builds a model and takes a training step. Every default is plain next-token training by `ring.nn`.

    class MySetup(Setup):
        def build(self, context): ...                        # the model; context is None in one process
        def loss(self, model, part, run): ...                # optional: a micro-batch's share of the loss of a step
        def step(self, model, optimizer, batches, run): ...  # optional: a whole step, by any package
        def train(self, model, optimizer, steps, run): ...   # optional: all steps, by a trainer with a loop of its own

A function `build(context)` alone is a Setup too. The same `build`, `optimizer` and `loss` serve the one process, which
has all sequences; it never calls `shard`, `wrap`, `reduce`, `clip`, `step` or `train`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ring.nn import (
    ContextParallel,
    SameWeights,
    average_gradients,
    clip_grad_norm,
    count_labels,
    cross_entropy,
    shard_batch,
)
from verification.models.batches import IGNORED
from verification.models.model_case import ModelCase
from verification.models.step_case import StepCase

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Loss = Tensor | float
UNTIL_THE_LAST = DistributedDataParallel, SameWeights  # wrappers with `no_sync`


class Misuse(Exception):
    """A function of a Setup returned something else than it must."""


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """A micro-batch of whole sequences, the same on all ranks of a context group.

    Args:
        tokens: (B, n) int64.
        labels: (B, n) int64, the next tokens; -100 for none: at ends of documents, for padding, and others.
        positions: (n,) int64, within documents.
        documents: lengths of the documents that every row is packed from; None: it is not packed.
        padding: (B, n) bool, True for tokens that only fill the row.
        ignored: (B, n) bool, True where labels have none beside ends of documents.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: tuple[int, ...] | None
    padding: Tensor
    ignored: Tensor


Steps = Sequence[Sequence[Sequence[WholeBatch]]]  # for each step and data rank its micro-batches


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens of this rank in a micro-batch. In one process: all sequences, a document in each row, padded at the end.

    Args:
        tokens: (B, N) int64.
        labels: (B, N) int64, the next tokens, -100 for none.
        positions: (N,) int64, within documents.
        context: handle of the sharded sequence for the model's modules; None in one process.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    context: ContextParallel | None


@dataclass(eq=False)
class Run:
    """Part of this process in a training run.

    Args:
        case: wrapper, clipping, checkpointing, ... of the run.
        context: handle of the sharded sequence; None in one process.
        mesh: ("data", "context"); None in one process.
        labelled: number of labels of the step, over all ranks; on ranks `Setup.step` sets it, and it is 0 before.
        held: sequences to be evaluated after the last step; None: no evaluation.
        folder: of the checkpoint, the same on all ranks.
        saves_after: number of steps after which `Setup.train` saves a checkpoint and ends; 0: it takes all steps.
        resumes_after: number of steps of the checkpoint that `Setup.train` loads first; 0: there is none.
        evaluation: values that `Setup.train` computed on the held sequences, by the names of `Setup.evaluate`.
        logits: what `see` recorded, (logits, held) for each micro-batch.
    """

    case: StepCase
    context: ContextParallel | None = None
    mesh: DeviceMesh | None = None
    labelled: int = 0
    held: WholeBatch | None = None
    folder: str = ""
    saves_after: int = 0
    resumes_after: int = 0
    evaluation: dict[str, Loss] = field(default_factory=dict)
    logits: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def see(self, logits: Tensor, held: Tensor | None = None) -> Tensor:
        """Record a micro-batch's logits to be compared with those of the one process.

        Args:
            logits: (B, N, vocabulary).
            held: (N,) int64, indices of these tokens in the whole sequence; None: those of the context's layout.

        Returns:
            The logits themselves.
        """
        if held is None and self.context is not None:
            held = self.context.layout.positions(self.context.rank)
        self.logits.append((logits.detach(), held))
        return logits


class Setup:
    """A model and its training step. Only `build` has no default.

    evaluates: True if `train` evaluates `run.held` after the last step. resumes: True if `train` saves and loads
    checkpoints; the default `train` does.
    """

    evaluates = False
    resumes = False

    def build(self, context: ContextParallel | None) -> nn.Module:
        """Return the model. Both calls must draw the same initial parameters; neither wraps the model (see `wrap`).

        Args:
            context: handle of the sharded sequence; None: for one process, with ordinary attention.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError

    def claims(self, case: ModelCase) -> ModelCase | None:
        """Return the nearest ModelCase of the same world that the Setup supports, or None. Default: it supports all.

        Args:
            case: as drawn, or as returned by this method, which must then return it unchanged.
        """
        return case

    def layers(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        """Return the classes of the layers, which FSDP shards and checkpointing recomputes. Default: those in the first
        ModuleList that is not empty, if any.

        Args:
            model: not wrapped, or with the layers wrapped for checkpointing.
        """
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
        return tuple(dict.fromkeys(type(layer) for layer in lists[0])) if lists else ()

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        """Return the model with the Case's checkpointing and wrapper.

        Args:
            model: as built; changed in place.
            run: of a rank.

        Raises:
            ValueError: the Case's checkpointing or wrapper needs layers, and the model has none of `layers`.
        """
        recompute_layers(model, self.layers(model), run)
        return distribute(model, self.layers(model), run)

    def optimizer(self, parameters: Sequence[nn.Parameter], run: Run) -> torch.optim.Optimizer:
        """Return the optimizer, after wrapping. Default: SGD with momentum or AdamW, as the Case has it.

        Args:
            parameters: all of the wrapped model, or of the model in one process.
            run: of a rank, or of the one process.
        """
        kind, settings = run.case.optimizer
        return kind(parameters, **settings)

    def shard(self, batch: WholeBatch, run: Run) -> Part:
        """Return this rank's part of a micro-batch.

        Args:
            batch: whole sequences, the same on all ranks of the context group.
            run: of a rank.
        """
        assert run.context is not None
        part = shard_batch(run.context, batch.tokens, batch.labels, documents=batch.documents)
        assert part.labels is not None
        return Part(part.tokens, part.labels, part.positions, part.context)

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        """Call the model with the conventions of transformers, or as model(tokens, positions=, context=) with the
        keywords that its forward has, and record its logits.

        Args:
            model: wrapped, or in one process as built.
            part: the micro-batch.
            run: of a rank, or of the one process.

        Returns:
            The logits, (B, N, vocabulary).

        Raises:
            Misuse: the model returned no such logits.
        """
        inner = model.module if isinstance(model, UNTIL_THE_LAST) else model
        accepted = inspect.signature(cast(nn.Module, inner).forward).parameters
        keywords: dict[str, Any] = {}
        if "position_ids" in accepted:
            keywords = {"position_ids": part.positions[None]} | ({"context": part.context} if part.context else {})
            keywords |= {"use_cache": False} if "use_cache" in accepted else {}
        else:
            values = {"positions": part.positions, "context": part.context}
            keywords = {name: value for name, value in values.items() if name in accepted}
        output = model(part.tokens, **keywords)
        logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
        wanted = "logits (B, N, vocabulary), or an object or tuple that has them (else write `loss`)"
        return run.see(logits_of_tokens("the model", logits, part, wanted))

    def count(self, parts: Sequence[Part], run: Run) -> int:
        """Return the number of labels of a step, over all ranks.

        Args:
            parts: the micro-batches of this rank.
            run: of a rank.
        """
        return count_labels([part.labels for part in parts], run.mesh)

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        """Return this micro-batch's share of the mean over all labels of the step, the same on all ranks. It goes
        backward so that the average of all ranks' gradients is that of the mean.

        Args:
            model: wrapped, or in one process as built.
            part: the micro-batch; in one process the whole step.
            run: of a rank, or of the one process; `run.labelled` is set.

        Raises:
            Misuse: `logits` returned none.
        """
        code = getattr(self.logits, "__code__", None)
        where = f"logits ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code is not None else "logits"
        logits = logits_of_tokens(where, self.logits(model, part, run), part, "logits (B, N, vocabulary)")
        if run.mesh is not None:
            return cross_entropy(logits, part.labels, summed_over(model, run), labelled=run.labelled)
        total = functional.cross_entropy(
            logits.flatten(0, 1), part.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / max(1, run.labelled)

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's forward and backward: wrappers reduce gradients in the step's last one.

        Args:
            model: wrapped.
            last: whether the micro-batch is the last one of the step.
        """
        if isinstance(model, UNTIL_THE_LAST):
            return nullcontext() if last else model.no_sync()
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor, run: Run) -> None:
        """Run the backward of a micro-batch.

        Args:
            model: wrapped.
            loss: what `loss` returned, a scalar.
            run: of a rank.
        """
        loss.backward()

    def reduce(self, model: nn.Module, run: Run) -> None:
        """Average the gradients over all ranks, if no wrapper does.

        Args:
            model: wrapped, after the last backward of a step.
            run: of a rank.
        """
        if run.case.wrapper == "none" and not isinstance(model, UNTIL_THE_LAST):
            average_gradients(model.parameters(), run.mesh)

    def clip(self, model: nn.Module, run: Run) -> Loss | None:
        """Clip the gradients if the Case has clipping.

        Args:
            model: wrapped, with the averaged gradients of a step.
            run: of a rank.

        Returns:
            The norm of all gradients before, a scalar; None if the Case has no clipping.
        """
        if run.case.clipping is None:
            return None
        return clip_grad_norm(model.parameters(), run.case.clipping, summed_over(model, run))

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[WholeBatch], run: Run
    ) -> tuple[Loss, Loss | None]:
        """Take a step of training. A step of your own calls `run.see` with each micro-batch's logits.

        Args:
            model: wrapped.
            optimizer: of the wrapped model's parameters.
            batches: the micro-batches of this data rank, whole sequences.
            run: of a rank.

        Returns:
            The loss of the step over all ranks, a scalar; and the norm of the gradients before clipping, or None.

        Raises:
            Misuse: `loss` returned no scalar, or the model no logits.
        """
        parts = [self.shard(batch, run) for batch in batches]
        run.labelled = self.count(parts, run)
        total = torch.zeros(())
        for number, part in enumerate(parts):
            with self.micro_batch(model, last=number == len(parts) - 1):
                loss = scalar("loss", self.loss(model, part, run))
                self.backward(model, loss, run)
            total = total + loss.detach()
        self.reduce(model, run)
        norm = self.clip(model, run)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Steps, run: Run
    ) -> Iterable[tuple[Loss, Loss | None]]:
        """Take all steps. Default: `step` with the micro-batches of this data rank, between checkpoints of
        `torch.distributed.checkpoint`. One of your own calls `run.see` for each micro-batch, at least in the first
        step. It fills `run.evaluation` if the Setup `evaluates`, and heeds `run.saves_after` and `run.resumes_after`
        if it `resumes`.

        Args:
            model: wrapped.
            optimizer: of the wrapped model's parameters.
            steps: for each step and each data rank its micro-batches, the same on all ranks; also the steps that a
                checkpoint replaces.
            run: of a rank.

        Returns:
            What `step` returns, for each step that is taken.
        """
        from verification.models import checkpoints

        assert run.mesh is not None
        if run.resumes_after:
            checkpoints.load(run.folder, model, optimizer)
        for batches in steps[run.resumes_after : run.saves_after or None]:
            yield self.step(model, optimizer, batches[run.mesh.get_local_rank("data")], run)
        if run.saves_after:
            checkpoints.save(run.folder, model, optimizer)

    def evaluate(self, model: nn.Module, parts: Sequence[Part], run: Run) -> dict[str, Loss]:
        """Evaluate in one process, which says what `train` must find. Default: the loss and the probability of the
        labels, means over all labels.

        Args:
            model: after the last step.
            parts: batches of `run.case.batch` held sequences, in their order.
            run: of the one process; `run.labelled` is the number of labels of all parts.

        Returns:
            Scalars by name.
        """
        loss, probability = torch.zeros(()), torch.zeros(())
        for part in parts:
            loss = loss + self.loss(model, part, run)
            probability = probability + probabilities(run.logits[-1][0], part.labels).sum() / run.labelled
        return {"loss": loss, "probability": probability}


def summed_over(model: nn.Module, run: Run) -> DeviceMesh | SameWeights | None:
    """Return what losses and norms are summed over: the model with `SameWeights`, which orders sums, else the mesh."""
    return model if isinstance(model, SameWeights) else run.mesh


def probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each label, (B, N), zero where there is none. logits: (B, N, vocabulary)."""
    chosen = logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(labels == IGNORED, 0.0)


def recompute_layers(model: nn.Module, layers: tuple[type[nn.Module], ...], run: Run) -> None:
    """Apply the Case's checkpointing to layers of these classes, in place."""
    from ring.integrations.wrappers import recompute

    kind = run.case.checkpointing
    if kind != "none":
        recompute.wrap(model, layers, keep_attention=kind == "selective", reentrant=kind == "reentrant")


def distribute(
    model: nn.Module, layers: tuple[type[nn.Module], ...], run: Run, policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """Return the model with the Case's wrapper. policy: of FSDP."""
    from ring.integrations.wrappers import ddp, fsdp

    assert run.mesh is not None
    if run.case.same_bits is not None:
        return SameWeights(model, run.mesh, compare=run.case.compares)
    if run.case.wrapper == "ddp":
        return ddp.wrap(model, run.mesh)
    if run.case.fully_sharded:
        fsdp.shard(model, run.mesh, layers, policy=policy, replicate="data" if run.case.wrapper == "hsdp2" else ())
    return model


def logits_of_tokens(function: str, logits: object, part: Part, wanted: str) -> Tensor:
    """Return logits of the tokens of a part. Raises Misuse for anything else that a function returned."""
    if isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[:2] == part.tokens.shape:
        return logits
    shape = tuple(part.tokens.shape)
    raise Misuse(f"{function} returned {described(logits)} for tokens of shape {shape}; it must return {wanted}")


def scalar(function: str, x: object) -> Tensor:
    """Return a scalar as a tensor. Raises Misuse for anything else that a function returned."""
    if isinstance(x, Tensor) and x.dim() == 0:
        return x
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return torch.tensor(x)
    raise Misuse(f"{function} returned {described(x)}; it must be a scalar")


def described(x: object) -> str:
    """Describe what a function returned in a few words."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    shown = repr(x)
    return shown if len(shown) < 80 and "\n" not in shown else f"a {type(x).__name__}"
