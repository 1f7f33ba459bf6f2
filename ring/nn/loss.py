"""Loss of a global batch: the mean over all its labelled tokens, with the gradient scale that DDP and FSDP expect.

    L = sum over ranks and micro-batches of (sum of the local losses) / labelled

Ranks, and micro-batches, have unequal numbers of labelled tokens, so a mean of their means would be another loss. Every
rank computes the gradient of its own summand. DDP and FSDP divide the sum of these gradients by the number of ranks, so
this module multiplies each by that number.

A function of a sum, as in the losses of DPO and GSPO, is no sum of functions. There the sums over the context come
first, then the function, then the mean over sequences:

    policy = sequence_logprobs(model(batch.tokens, batch.context), batch.labels, batch.context)    # (B,)
    chosen, rejected = (policy - reference).view(2, -1)                 # rows: the chosen ones, then the rejected ones
    loss = batch_mean(-functional.logsigmoid(0.1 * (chosen - rejected)), batch.context, mesh)

Every rank of `over` calls these functions, with the same `over`. All raise the same errors. Ranks that wait for one
another on two groups are named after the timeout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring.nn import loss_ranks
from ring.nn.batch import IGNORED, INTEGERS
from ring.nn.batch_group import BatchRanks
from ring.nn.context import ContextParallel
from ring.nn.same_weights.wrapper import SameWeights, ranks_over
from ring.nn.sequence import sequence_sum
from ring.precision import accumulator_dtype
from ring.validation import refuse_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def count_labels(
    labels: Tensor | Sequence[Tensor], over: dist.ProcessGroup | DeviceMesh | None = None, ignored: int = IGNORED
) -> int:
    """Return the number of labels that are not `ignored`, over all ranks and, for a list, all micro-batches of a step.

    Args:
        labels: this rank's, int64 or int32, any shape: a tensor, or one for each micro-batch.
        over: ranks of the batch, data x context: a process group, a `DeviceMesh`, or None: the default group, if any.
        ignored: the label of a token without label.

    Raises:
        ValueError: on every rank, for labels of another type and for lists of unequal lengths.
    """
    ranks = BatchRanks(over)
    with ranks.lock():
        return _count_labels(labels, ranks, ignored)


def _count_labels(labels: Tensor | Sequence[Tensor], ranks: BatchRanks, ignored: int) -> int:
    def local() -> tuple[dict[str, object], Tensor]:
        if not isinstance(labels, (Tensor, list, tuple)):
            raise ValueError(f"labels must be a tensor or a list of tensors, got {type(labels)!r}")
        micro_batches = [labels] if isinstance(labels, Tensor) else list(labels)
        for batch_labels in micro_batches:
            _check_labels(batch_labels)
        _check_ignored(ignored)
        counts = [(batch_labels != ignored).sum() for batch_labels in micro_batches]
        count = torch.stack(counts).sum().reshape(1) if counts else torch.zeros(1, dtype=torch.int64)
        return {"number of micro-batches": len(micro_batches), "ignored": ignored}, count

    return int(ranks.gather(ranks.agree("count_labels", local)).sum())


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    over: dist.ProcessGroup | DeviceMesh | SameWeights | None = None,
    *,
    labelled: int | None = None,
    averaged_over: float | None = None,
    ignored: int = IGNORED,
) -> Tensor:
    """Return the mean cross entropy over all labelled tokens of the global batch, the same on every rank.

    Args:
        logits: (B, N, V) of this rank's tokens; fp64, fp32, bf16 or fp16; 16 bits are computed in fp32.
        labels: (B, N) int64 or int32, the next tokens, `ignored` for no label.
        over: the ranks that share the global batch, data x context: a process group, a `DeviceMesh` of any number of
            dimensions, or None for the default group, or for this process without one; or the model with `SameWeights`.
        labelled: number of labelled tokens of the whole step if it has several micro-batches (`count_labels`). The
            value is then this micro-batch's share of the mean; add the shares. None: number of this call.
        averaged_over: the divisor that the wrapper applies to the sum of all ranks' gradients; None: the number of
            ranks, as for DDP and FSDP. 1 if gradients are only summed, as by `SameWeights`.
        ignored: the label of a token without label.

    Returns:
        A scalar in fp32 (fp64 for fp64); 0, with zero gradients, without labels. The gradient is that of
        averaged_over / labelled times the sum of this rank's losses.

    Raises:
        ValueError, NotImplementedError: an argument is wrong on some rank, or differs between ranks. Every rank raises
            the same error.
        RuntimeError: a rank did not come within the group's timeout.
    """

    def losses() -> Tensor:
        _check_logits(logits)
        _check_shapes("logits", logits, labels, logits.shape[:2])
        if fixed is not None:
            return fixed.token_sums.by_chunks("logits", lambda x, y: _losses(x, y, ignored), logits, labels)
        return _losses(logits, labels, ignored)

    ranks, fixed = ranks_over(over), over if isinstance(over, SameWeights) else None
    with ranks.lock():
        return _mean("cross_entropy", losses, labels, ranks, labelled, averaged_over, ignored, fixed)


def token_mean(
    losses: Tensor,
    labels: Tensor | None,
    over: dist.ProcessGroup | DeviceMesh | SameWeights | None = None,
    *,
    labelled: int | None = None,
    averaged_over: float | None = None,
    ignored: int = IGNORED,
) -> Tensor:
    """Return the mean over all labelled tokens of the global batch, in fp32 (fp64 for losses in fp64).

    A function of means, as a router's load-balancing loss, has the right gradient if every rank computes the same one.

    Args:
        losses: (B, N, ...) of this rank's tokens, real. Those of `ignored` labels do not count, not even if infinite
            or NaN.
        labels: (B, N) int64 or int32, `ignored` for no label, as at padding; None: every token counts.
        over: ranks of the batch, data x context: a process group, a `DeviceMesh`, or None: the default group, if any;
            or the model with `SameWeights`.
        labelled: number of labelled tokens of the whole step if it has several micro-batches; None: of this call.
        averaged_over: divisor of the sum of all ranks' gradients, by the wrapper; None: the number of ranks, or 1 for
            `SameWeights`.
        ignored: the label of a token without label.

    Returns:
        The means, (...): a scalar for losses (B, N).

    Raises:
        ValueError, NotImplementedError: on every rank, if an argument is wrong on one, or differs between ranks.
        RuntimeError: a rank did not come within the group's timeout.
    """

    def checked() -> Tensor:
        _check_real("losses", losses, "(batch, local tokens, ...)", range(2, 65))
        if labels is not None:
            _check_shapes("losses", losses, labels, losses.shape[:2])
        return losses

    ranks, fixed = ranks_over(over), over if isinstance(over, SameWeights) else None
    with ranks.lock():
        return _mean("token_mean", checked, labels, ranks, labelled, averaged_over, ignored, fixed)


def batch_mean(
    losses: Tensor,
    context: ContextParallel,
    over: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    counted: int | None = None,
    averaged_over: float | None = None,
) -> Tensor:
    """Return the mean of losses of whole sequences over the global batch, the same on every rank.

    Args:
        losses: any shape, real: one entry for each sequence, pair or document of this data rank. Every rank of a
            context group has the same, since they are functions of whole values (`sequence_logprobs`, `sequence_mean`,
            `gather`).
        context: handle of the sequences.
        over: ranks of the batch, data x context: a process group, a `DeviceMesh`, or None: the default group, if any.
        counted: number of losses of the whole step, over all data ranks and micro-batches; the value is then this
            micro-batch's share of the mean. None: of this call.
        averaged_over: divisor of the sum of all ranks' gradients, by the wrapper; None: the number of ranks.

    Returns:
        A scalar in fp32 (fp64 for fp64); 0 without losses.

    Raises:
        ValueError, NotImplementedError: on every rank, if an argument is wrong on one, or differs between ranks, if
            the ranks of a context group have different losses, or if `over` holds a part of one.
        RuntimeError: a rank did not come within the group's timeout.
    """
    ranks = BatchRanks(over)
    with ranks.lock():
        return _batch_mean(losses, context, ranks, counted, averaged_over)


def _batch_mean(
    losses: Tensor, context: ContextParallel, ranks: BatchRanks, counted: int | None, averaged_over: float | None
) -> Tensor:
    def summed() -> tuple[dict[str, object], tuple[Tensor, Tensor]]:
        if not isinstance(context, ContextParallel):
            raise ValueError(f"context must be a ContextParallel, got {type(context)!r}")
        _check_real("losses", losses, "(...)", range(65))
        _check_options("counted", counted, averaged_over)
        local, size = losses.sum(dtype=torch.float64), losses.detach().abs().sum(dtype=torch.float64)
        group, number = local.new_tensor([float(context.first_rank), float(losses.numel())])
        signature: dict[str, object] = {
            "counted": counted, "averaged_over": averaged_over, "ranks of the context": context.world_size,
            "dtype": str(losses.dtype), "device type": losses.device.type,
        }  # fmt: skip
        return signature, (local, torch.stack((group, number, local.detach(), size)))

    local, own = ranks.agree("batch_mean", summed)
    everyone = ranks.gather(own).cpu()
    _check_copies(everyone, context.world_size, torch.finfo(losses.dtype).eps)
    number, total = (everyone[:, 1:3].sum(0) / context.world_size).tolist()
    if counted is not None:
        if counted < number:
            raise ValueError(
                f"counted must be the number of losses of the whole step, over all data ranks and micro-batches, got "
                f"{counted} where this call alone has {number:.0f}"
            )
        number = counted
    mean = local.detach().new_tensor(total / max(1, number)).to(accumulator_dtype(losses.dtype))
    factor = ranks.world_size if averaged_over is None else averaged_over
    scale = local.detach().new_tensor(factor / (context.world_size * max(1, number)))
    return _Mean.apply(local, mean, scale, ranks.world_ranks)


def sequence_logprobs(logits: Tensor, labels: Tensor, context: ContextParallel, ignored: int = IGNORED) -> Tensor:
    """Return each sequence's sum of the log-probabilities of its labels, the same on every rank of the context group.

    Args:
        logits: (B, N, V) of this rank's tokens; fp64, fp32, bf16 or fp16; 16 bits are computed in fp32.
        labels: (B, N) int64 or int32, the next tokens, `ignored` for no label, whose log-probability counts as 0.
        context: handle of the sequences. If it has documents, each of them is a sequence. That of a tree is refused:
            sum over each answer, `sequence_sum(context, logprobs, mask=own)`.
        ignored: the label of a token without label.

    Returns:
        (B,), or (B, documents), in fp32 (fp64 for fp64). For means over labels divide by
        `sequence_sum(context, labels != ignored)`.

    Raises:
        ValueError, NotImplementedError: on every rank of the context group, if an argument is wrong on one.
        RuntimeError: a rank did not come within the group's timeout.
    """

    def computed() -> tuple[dict[str, object], Tensor]:
        _check_ignored(ignored)
        _check_logits(logits)
        _check_shapes("logits", logits, labels, logits.shape[:2])
        if context.pattern is not None and context.pattern.depths:
            raise ValueError(
                "context must be no tree's, whose paths share tokens, got one that would sum over all of them: write "
                "logprobs = -functional.cross_entropy(logits.transpose(1, 2), labels, reduction='none'), and for each "
                "path sequence_sum(context, logprobs, mask=own), own (B, N) True for this rank's tokens of the path"
            )
        logprobs = -_losses(logits, labels, ignored)
        return {"ignored": ignored, "dtype of logits": str(logits.dtype)}, logprobs

    return sequence_sum(context, context.agree("sequence_logprobs", computed))


def _mean(
    operation: str,
    compute: Callable[[], Tensor],
    labels: Tensor | None,
    ranks: BatchRanks,
    labelled: int | None,
    averaged_over: float | None,
    ignored: int,
    fixed: SameWeights | None,
) -> Tensor:
    """Mean of the losses (B, N, ...) that `compute` returns; it also checks the arguments of the caller.

    fixed: the model whose chunks give the order of sums.
    """

    def summed() -> tuple[dict[str, object], tuple[Tensor, Tensor, Tensor, torch.dtype]]:
        _check_ignored(ignored)
        _check_options("labelled", labelled, averaged_over)
        if fixed is not None and averaged_over not in (None, 1):
            raise ValueError(f"averaged_over must be None or 1, since SameWeights sums gradients, got {averaged_over}")
        losses = compute()
        counts = losses.new_ones(losses.shape[:2]).bool() if labels is None else labels != ignored  # (B, N)
        per_token = counts.view(*counts.shape, *[1] * (losses.dim() - 2))
        counted = losses.masked_fill(~per_token, 0.0)
        if fixed is None:
            sums = local = counted.sum((0, 1), dtype=torch.float64)
        else:
            sums = fixed.token_sums.of_chunks("losses", counted)  # (B chunks, ...)
            local = sums.sum(0)
        signature: dict[str, object] = {
            "labelled": labelled, "averaged_over": averaged_over, "ignored": ignored, "dtype": str(losses.dtype),
            "device type": losses.device.type, "other dimensions": list(local.shape),
        }  # fmt: skip
        return signature, (local, sums.detach(), counts.sum(dtype=torch.float64), accumulator_dtype(losses.dtype))

    local, sums, number, kind = ranks.agree(operation, summed)
    if fixed is None:
        gathered = ranks.gather(torch.cat((sums.flatten(), number[None]))).sum(0)
        total, count = gathered[:-1].view(sums.shape), gathered[-1]
    else:
        total, count = fixed.token_sums.total(sums), ranks.gather(number).sum(0)
    if labelled is not None:
        if labelled < int(count):
            raise ValueError(
                f"labelled must be the number of labelled tokens of the whole step, over all ranks and micro-batches, "
                f"got {labelled} where this call alone has {int(count)}"
            )
        count = torch.full_like(count, labelled)
    share = 1.0 / count.clamp(min=1.0)
    divisor = ranks.world_size if fixed is None else 1
    scale = divisor if averaged_over is None else averaged_over
    averaging = ranks.world_ranks if fixed is None else frozenset[int]()
    mean: Tensor = _Mean.apply(local, (total * share).to(kind), share * scale, averaging)
    return mean


class _Mean(torch.autograd.Function):
    """The mean of all ranks' losses, with the gradient of `scale` times this rank's own sum."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mean: Tensor, scale: Tensor, ranks: frozenset[int]) -> Tensor:
        ctx.scale, ctx.ranks = scale, ranks
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        loss_ranks.note(ctx.ranks)
        return grad.double() * ctx.scale, None, None, None


def _losses(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Losses (B, N) of logits (B, N, V)."""
    wide = logits.to(accumulator_dtype(logits.dtype)).flatten(0, 1)
    return _per_token(wide, labels.flatten().long(), ignored).view_as(labels)


def _per_token(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Losses: logits (T, V), labels (T,) -> (T,), 0 for ignored labels."""
    try:
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    except IndexError as error:  # on CPUs only: on a GPU the process aborts
        raise ValueError(f"labels must be {ignored}, or from 0 to {logits.shape[1] - 1}: {error}") from error


def _check_copies(everyone: Tensor, copies: int, eps: float) -> None:
    """Raise ValueError, on every rank, unless all ranks of each context group are there and have the same losses.

    everyone: (ranks, 4) on the CPU: group, number of losses, their sum and that of their sizes. Ranks compute losses
    from the same bits, if perhaps on other hardware, so half of the digits of eps must agree.
    """
    for group in everyone[:, 0].unique():
        rows = everyone[everyone[:, 0] == group]
        if len(rows) != copies:
            raise ValueError(
                f"over must hold all {copies} ranks of each context group, data x context, got {len(rows)} of them"
            )
        spread = float(rows[:, 2].max() - rows[:, 2].min())
        if not rows[:, 1].eq(rows[0, 1]).all() or spread > eps**0.5 * float(rows[:, 3].max()):
            raise ValueError(
                "losses must be the same on every rank of a context group, functions of whole values "
                "(sequence_logprobs, sequence_mean, gather), got other ones on each: "
                f"{rows[:, 1].long().tolist()} losses with the sums {rows[:, 2].tolist()}"
            )


def _check_logits(logits: Tensor) -> None:
    _check_real("logits", logits, "(batch, local tokens, vocabulary)", (3,))
    if not logits.shape[2]:
        raise ValueError(f"logits must have a vocabulary, got shape {tuple(logits.shape)}")


def _check_real(name: str, x: Tensor, shape: str, dims: Collection[int]) -> None:
    refuse_dtensor(name, x)
    if not isinstance(x, Tensor) or x.dim() not in dims or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
        raise ValueError(f"{name} must be a real {shape} tensor, got {got}")


def _check_shapes(name: str, x: Tensor, labels: Tensor, shape: tuple[int, ...]) -> None:
    _check_labels(labels)
    if labels.shape != shape:
        whole = labels.dim() == 2 and labels.shape[0] == shape[0] and labels.shape[1] > shape[1]
        hint = ": labels of the whole sequence? shard_batch shards them with the tokens" if whole else ""
        raise ValueError(f"labels must have the shape {tuple(shape)} of {name}, got {tuple(labels.shape)}{hint}")
    if labels.device != x.device:
        raise ValueError(f"labels must be on the device of {name}, {x.device}, got {labels.device}")


def _check_labels(labels: Tensor) -> None:
    refuse_dtensor("labels", labels)
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS:
        got = str(labels.dtype) if isinstance(labels, Tensor) else repr(type(labels))
        raise ValueError(f"labels must be an int64 or int32 tensor, got {got}")


def _check_ignored(ignored: int) -> None:
    if not isinstance(ignored, int) or isinstance(ignored, bool):
        raise ValueError(f"ignored must be an integer, got {ignored!r}")


def _check_options(name: str, count: int | None, averaged_over: float | None) -> None:
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise ValueError(f"{name} must be None or an integer >= 0, got {count!r}")
    number = isinstance(averaged_over, (int, float)) and not isinstance(averaged_over, bool)
    if averaged_over is not None and not (number and 0 < averaged_over < math.inf):
        raise ValueError(f"averaged_over must be None or a positive finite number, got {averaged_over!r}")
