"""Gradients between backward and the optimizer: averages them if no wrapper does, and clips them by their norm.

    average_gradients(model.parameters(), mesh)             # DDP and FSDP do this themselves
    norm = clip_grad_norm(model.parameters(), 1.0, mesh)    # afterwards: the norm of averages, not of a rank's part

Every rank of `over` calls these functions, with the same parameters in the same order. All raise the same errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring.nn import loss_ranks
from ring.nn.batch_group import BatchRanks
from ring.nn.replicas import check_plain, check_real, check_replicas
from ring.nn.same_weights.wrapper import SameWeights, ranks_over
from ring.precision import accumulator_dtype
from ring.validation import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BUCKET = 2**25  # bytes of gradients summed in one message, as in DDP


@torch.no_grad()
def average_gradients(
    parameters: Iterable[Tensor] | Tensor, over: dist.ProcessGroup | DeviceMesh | None = None
) -> None:
    """Replace every gradient by its average over the ranks, as DDP does; for a model without a wrapper.

    With `torch.amp.GradScaler` average before `unscale_`: an overflow is then seen on every rank, and all leave out the
    step. Torch's `ShardedGradScaler(process_group=...)` agrees on overflows, and takes any order.

    Args:
        parameters: the same on every rank, bit by bit, also those without gradient. A gradient that is None counts as
            zero if another rank has one, and stays None if no rank has. In 16 bits gradients are summed in fp32.
        over: ranks of the batch, data x context: a process group, a `DeviceMesh`, or None: the default group, if any.

    Raises:
        ValueError: on every rank, for parameters that differ between ranks in number, shape or value, as if seeds
            differed or one rank left out a step; for sparse gradients, an exhausted iterator, and a loss over other
            ranks.
        NotImplementedError: for complex gradients, and for DTensors, whose wrapper averages them.
    """
    if isinstance(over, SameWeights):
        raise ValueError("over must be a process group, a DeviceMesh or None: SameWeights sums gradients itself")
    ranks = BatchRanks(over)
    with ranks.lock():
        _average_gradients(parameters, ranks)


def _average_gradients(parameters: Iterable[Tensor] | Tensor, ranks: BatchRanks) -> None:
    def checked() -> tuple[dict[str, object], list[Tensor]]:
        tensors = _parameter_list(parameters)
        for number, x in enumerate(tensors):
            check_plain(number, x)
        for of_loss in loss_ranks.left():
            if of_loss not in (ranks.world_ranks, frozenset()):  # empty: of SameWeights
                raise ValueError(
                    f"over must have the ranks of the loss, {sorted(of_loss)}, got {sorted(ranks.world_ranks)}: give "
                    "average_gradients and the loss the same mesh, data x context"
                )
        return {"parameters": [[str(x.dtype), list(x.shape), x.device.type] for x in tensors]}, tensors

    tensors = ranks.agree("average_gradients", checked)
    check_replicas(tensors, ranks)
    with_grad = [x for x, has_grad in zip(tensors, _has_grad_anywhere(tensors, ranks), strict=True) if has_grad]
    for bucket in _buckets(with_grad):
        _average(bucket, ranks)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    over: dist.ProcessGroup | DeviceMesh | SameWeights | None = None,
) -> Tensor:
    """Scale all gradients by max_norm / (norm + 1e-6) where that is below 1, as `torch.nn.utils.clip_grad_norm_` does.

    norm is the 2-norm of all gradients together: of plain ones, which are averages and equal on all ranks, and of
    DTensors on any meshes. As in torch, a norm of NaN makes the gradients NaN, and an infinite one makes the finite
    gradients 0.

    Args:
        parameters: the same on every rank; those without gradient do not count.
        max_norm: greatest norm afterwards, > 0.
        over: ranks of the batch, data x context: a process group, a `DeviceMesh`, or None: the default group, if any;
            or the model with `SameWeights`.

    Returns:
        The norm before clipping: a scalar in fp64 on the CPU.

    Raises:
        ValueError: on every rank, unless max_norm is positive, finite and equal on all; for gradients that differ
            between ranks, since they were not averaged, or as DTensors averaged over some ranks of `over` alone; for an
            exhausted iterator.
        NotImplementedError: for complex gradients and for DTensors that are partial sums.
    """
    ranks = ranks_over(over)
    with ranks.lock():
        return _clip_grad_norm(parameters, max_norm, ranks)


def _clip_grad_norm(parameters: Iterable[Tensor] | Tensor, max_norm: float, ranks: BatchRanks) -> Tensor:
    def checked() -> tuple[dict[str, object], list[Any]]:
        grads = [x.grad for x in _parameter_list(parameters) if x.grad is not None]
        if not isinstance(max_norm, (int, float)) or isinstance(max_norm, bool) or not 0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be a positive finite number, got {max_norm!r}")
        for grad in grads:
            _check_grad(grad)
        counts = {"number of gradients": len(grads), "number of DTensors": sum(map(is_dtensor, grads))}
        return {"max_norm": float(max_norm), **counts}, grads

    grads = ranks.agree("clip_grad_norm", checked)
    plain, sharded = ([grad for grad in grads if is_dtensor(grad) is kind] for kind in (False, True))
    square = _common(_square(plain), plain, ranks, "of plain parameters")
    if sharded:
        square = square + _common(_square_of_sharded(sharded), sharded, ranks, "of DTensors")
    norm = square.sqrt()
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for grad in grads:
        (grad.to_local() if is_dtensor(grad) else grad).mul_(factor)
    return norm


def _parameter_list(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, Iterator):
        raise ValueError(
            "parameters must hold a tensor, got an iterator at its end, as model.parameters() is after its first use"
        )
    for x in listed:
        if not isinstance(x, Tensor):
            raise ValueError(f"parameters must be tensors, got {type(x)!r}")
    return list({id(x): x for x in listed}.values())  # list tied parameters once


# --- the average ------------------------------------------------------------------------------------------------------


def _has_grad_anywhere(parameters: Sequence[Tensor], ranks: BatchRanks) -> list[bool]:
    """For each parameter, True if some rank has a gradient of it."""
    flags = torch.tensor([x.grad is not None for x in parameters], dtype=torch.uint8)
    if not len(flags):
        return []
    anywhere: list[bool] = ranks.gather(flags).any(0).tolist()
    return anywhere


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters of one dtype and device, in their order, up to BUCKET bytes."""
    filled: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for x in parameters:
        lists = filled.setdefault((x.dtype, x.device), [[]])
        if lists[-1] and sum(y.nbytes for y in lists[-1]) + x.nbytes > BUCKET:
            lists.append([])
        lists[-1].append(x)
    return [bucket for lists in filled.values() for bucket in lists]


def _average(bucket: Sequence[Tensor], ranks: BatchRanks) -> None:
    kind = accumulator_dtype(bucket[0].dtype)
    joined = torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten().to(kind) for x in bucket])
    ranks.add(joined)
    joined /= ranks.world_size
    for x, part in zip(bucket, joined.split([x.numel() for x in bucket]), strict=True):
        if x.grad is None:
            x.grad = torch.empty_like(x)
        x.grad.copy_(part.view(x.shape))


# --- the norm ---------------------------------------------------------------------------------------------------------


def _check_grad(grad: Any) -> None:
    if is_dtensor(grad) and any(placement.is_partial() for placement in grad.placements):
        raise NotImplementedError(
            f"gradients must be averaged before they are clipped, got a DTensor {grad.placements}"
        )
    check_real(grad)
    if grad.layout is not torch.strided:
        raise ValueError(f"gradients must be dense, got one in {grad.layout}")


def _square(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all entries, in fp64 on the CPU."""
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum().cpu()


def _common(square: Tensor, grads: Sequence[Tensor], ranks: BatchRanks, kind: str) -> Tensor:
    """Return rank 0's square of the norm. ValueError, on every rank, if ranks differ by more than the order of
    summation explains.
    """
    squares = ranks.gather(square)
    least, most = float(squares.min()), float(squares.max())
    # All terms are positive, so sums of n terms in different orders, as on different GPUs, differ by n roundings.
    rounding = sum(grad.numel() for grad in grads) * 2.0**-52
    if most - least > rounding * most or squares.isfinite().any() != squares.isfinite().all():
        average = "average them first (average_gradients, DDP)"
        if kind != "of plain parameters":
            average = (
                "shard the model over all of these ranks (ring.integrations.wrappers.fsdp.shard with the whole mesh)"
            )
        raise ValueError(
            f"gradients {kind} must be equal on all ranks: {average}, "
            f"got norms from {least**0.5:.6g} to {most**0.5:.6g}"
        )
    return squares[0]


def _square_of_sharded(grads: Sequence[Any]) -> Tensor:
    """Square of the norm of DTensors. Counts each shard once, even if several ranks hold it."""
    groups: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for grad in grads:
        sharded = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
        groups.setdefault((grad.device_mesh, sharded), []).append(grad.to_local())
    total = torch.zeros((), dtype=torch.float64)
    for (mesh, sharded), local in groups.items():
        square = _square(local)
        for dim in sharded:
            square = BatchRanks(mesh.get_group(dim)).gather(square).sum()
        total += square
    return total
