"""Records what a training run computes, under the names that parameters have without wrappers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verification.models.noise import Rounded, exact
from verification.models.results import Named, Results
from verification.models.setup import scalar
from verification.models.step_case import StepCase
from verification.run.observation import to_numpy

PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of compiled and of checkpointed modules


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, without the prefixes of wrappers."""
    return {plain_name(name): x for name, x in model.named_parameters()}


def without_wrappers(name: str) -> str:
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def plain_name(name: str) -> str:
    return without_wrappers(name).removeprefix("module.")


def arrays(named: Mapping[str, Tensor]) -> Named:
    """Return copies: gradients and parameters are modified in place later. Collective if some are sharded."""
    return {name: to_numpy(unsharded(x)).copy() for name, x in named.items()}


def unsharded(x: Tensor) -> Tensor:
    """Gather a DTensor; return other tensors as they are. Detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def copy_gradients(named: Mapping[str, Tensor]) -> Named:
    """Return copies of the gradients, zeros for None."""
    return arrays({name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in named.items()})


def record_gradients(
    optimizer: torch.optim.Optimizer, seen: Results, gradients: Callable[[], Named], second: bool = False
) -> None:
    """Record the gradients that the optimizer gets in its first step. second: in its second step, too. A closure, as
    Lightning gives, computes them within the step."""

    def note() -> None:
        if not seen.gradients:
            seen.gradients = gradients()
        elif second and not seen.second:
            seen.second = gradients()

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            note()
            return None

        def noted() -> Any:
            loss = closure()
            note()
            return loss

        return (args[0], noted), {}

    optimizer.register_step_pre_hook(before)


def record_states(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], seen: Results, first: int = 0
) -> None:
    """Record parameters and what the optimizer keeps of them after each of its steps. first: its number, from 0."""
    numbers = count(first + 1)

    def note(*_: object) -> None:
        states = ((name, optimizer.state.get(x, {})) for name, x in named.items())
        kept = {f"{key} of {name}": x for name, state in states for key, x in state.items() if isinstance(x, Tensor)}
        number = next(numbers)
        seen.after |= {f"{name} after step {number}": x for name, x in arrays({**named, **kept}).items()}

    optimizer.register_step_post_hook(note)


def count_steps(case: StepCase, traced: bool) -> int:
    """Return the number of steps of a run: at most two if it is traced."""
    return min(2, case.steps) if traced else case.steps


def copy_buffers(model: nn.Module) -> Named:
    """Return copies of the buffers of numbers, in fp64."""
    return arrays(
        {
            plain_name(name): x.to(torch.float64)
            for name, x in model.named_buffers()
            if x.is_floating_point() or not (x.is_complex() or x.dtype is torch.bool)
        }
    )


def note_step(seen: Results, step: int, loss: object, norm: object) -> None:
    seen.losses[f"step {step + 1}"] = to_numpy(scalar("step", loss))
    if norm is not None:
        seen.norms[f"step {step + 1}"] = to_numpy(scalar("step", norm))


def train_in_one_process(
    case: StepCase, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], Tensor], seen: Results, *, stored: Rounded = exact, traced: bool = False,
) -> None:  # fmt: skip
    """Take the steps of a Case. loss_of: of a step, from 0, over its whole batch. stored: applied to parameters after
    each step. traced: at most two steps, and the gradients of both."""
    record_gradients(optimizer, seen, lambda: copy_gradients(parameters), traced)
    for step in range(count_steps(case, traced)):
        loss = loss_of(step)
        loss.backward()
        norm = _norm(parameters)
        nn.utils.clip_grads_with_norm_(parameters.values(), math.inf if case.clipping is None else case.clipping, norm)
        optimizer.step()
        optimizer.zero_grad()
        note_step(seen, step, loss, None if case.clipping is None else norm)
        round_parameters(parameters, stored)
    seen.parameters = arrays(parameters)


def _norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """Norm of all gradients, in fp64: torch adds the squares of a million entries in fp32 with an error of 4e-5."""
    grads = [x.grad for x in parameters.values() if x.grad is not None]
    return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]).norm()


@torch.no_grad()
def round_parameters(parameters: Mapping[str, Any], rounded: Rounded) -> None:
    for x in parameters.values():
        x.copy_(rounded(x))
