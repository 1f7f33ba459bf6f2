"""Training steps of a user's Setup: those of a rank, and those of one process that has all sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ring.comm.transport import Transport
from ring.nn import ContextParallel
from verification.models.loading import built, calling, load
from verification.models.model_case import ModelCase
from verification.models.observation import TRACED, ModelExpectation, ModelObservation, ModuleTrace, Named
from verification.models.precision import computing_in
from verification.models.setup import Misuse, Run, Setup, described, scalar
from verification.models.whole_batch import Rows, labelled, whole_batches
from verification.run.layouts import layout_of
from verification.run.observation import to_numpy
from verification.training.dense.noise import UNIT_ROUNDOFF, Rounded, noise
from verification.training.dense.tolerance import DRAWS, FACTOR
from verification.training.rank.meshes import mesh_of
from verification.training.rank.wrapping import RECOMPUTED, unsharded
from verification.training.step_observation import Array

QUANTITIES = ("start", "logits", "losses", "gradients", "norms", "parameters")
PREFIXES = ("_orig_mod.", RECOMPUTED)


def train_on_rank(transport: Transport, case: ModelCase, name: str, traced: bool = False) -> ModelObservation:
    """Task: train on this rank. transport: over all ranks; only its rank is used. traced: only step one, with a
    ModuleTrace."""
    setup, drawn = load(name), cast(Any, case)
    seen = ModelObservation(case.coordinates(transport.rank)[0])
    batches = [whole_batches(case, step)[seen.data_rank] for step in range(case.steps)]  # before the dtype changes
    with computing_in(case.dtype):
        mesh = mesh_of(drawn)
        context = ContextParallel(layout_of(case), mesh["context"], exchange=case.exchange)
        run = Run(case, context, mesh)
        model = built(setup, case, context)
        perturb(model)
        seen.start = _arrays(named_parameters(model))
        with calling("wrap"):
            wrapped: object = setup.wrap(model, run)
        if not isinstance(wrapped, nn.Module):
            raise Misuse(f"wrap returned {described(wrapped)}; it must return a torch.nn.Module")
        optimizer = _optimizer(setup, wrapped, run, seen)
        trace = ModuleTrace(model, PREFIXES) if traced else None
        for step in range(1 if traced else case.steps):
            with calling("step"):
                result: object = setup.step(wrapped, optimizer, batches[step], run)
            if not isinstance(result, tuple) or len(result) != 2:
                raise Misuse(f"step returned {described(result)}; it must return (loss, norm), norm may be None")
            _note_step(seen, step, *result)
            if step == 0:
                _note_logits(seen, run)
        seen.parameters = _arrays(named_parameters(wrapped))
        seen.entries = trace.entries() if trace is not None else []
    return seen


def _note_logits(seen: ModelObservation, run: Run) -> None:
    if len(run.logits) != run.case.accumulation:
        raise Misuse(
            f"step recorded logits {len(run.logits)} times with {run.case.accumulation} micro-batches; it must call "
            "run.see(logits, held) once for each"
        )
    for number, (logits, held) in enumerate(run.logits):
        if held is None or logits.dim() != 3 or logits.shape[1] != len(held):
            raise Misuse(
                f"run.see got logits of shape {tuple(logits.shape)} and held {described(held)}; logits must "
                "be (B, N, vocabulary) and held the indices (N,) of their tokens in the whole sequence"
            )
        seen.logits[f"micro-batch {number + 1}"] = to_numpy(logits)
        seen.held.append(held.numpy())


def expect(case: ModelCase, name: str, traced: bool = False) -> ModelExpectation:
    """Task: train in one process, and estimate the effect of rounding in fp32."""
    exact = train_alone(case, name, traced=traced)
    values = {quantity: getattr(exact, quantity) for quantity in QUANTITIES}
    largest = {quantity: max(map(_size, named.values()), default=0.0) for quantity, named in values.items()}
    if case.dtype == "float64" or traced:
        limit = TRACED[case.dtype]
        allowed = {quantity: dict.fromkeys(named, limit * largest[quantity]) for quantity, named in values.items()}
        return ModelExpectation(values, allowed, exact.entries)
    unit = UNIT_ROUNDOFF[case.dtype]
    squares = {quantity: dict.fromkeys(named, 0.0) for quantity, named in values.items()}
    for draw in range(DRAWS):
        drawn = train_alone(case, name, noise(unit, case.seed * DRAWS + draw))
        for quantity, named in values.items():
            for key, x in named.items():
                squares[quantity][key] += _size(getattr(drawn, quantity)[key] - x) ** 2 / DRAWS
    allowed = {
        quantity: {key: FACTOR * (math.sqrt(square) + unit * largest[quantity]) for key, square in named.items()}
        for quantity, named in squares.items()
    }
    return ModelExpectation(values, allowed, exact.entries)


def train_alone(case: ModelCase, name: str, rounded: Rounded | None = None, traced: bool = False) -> ModelObservation:
    """Train in this process on all sequences. rounded: applied to parameters and to outputs of all modules."""
    setup, rows, seen = load(name), Rows.of(case), ModelObservation()
    shape = (case.data, case.accumulation, case.batch, case.tokens)
    parts = [(rows.alone(case, step), labelled(case, step)) for step in range(case.steps)]
    with computing_in(case.dtype):
        model = built(setup, case, None)
        perturb(model)
        seen.start = _arrays(named_parameters(model))
        run = Run(case)
        parameters = list(model.parameters())
        optimizer = _optimizer(setup, model, run, seen)
        trace = ModuleTrace(model, PREFIXES) if traced else None
        for step in range(1 if traced else case.steps):
            if rounded is not None:
                _round(model, rounded, hooked=step == 0)
            part, run.labelled = parts[step]
            with calling("loss, in one process,"):
                loss = scalar("loss, in one process,", setup.loss(model, part, run))
                loss.backward()
            limit = math.inf if case.clipping is None else case.clipping
            norm = nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.step()
            optimizer.zero_grad()
            _note_step(seen, step, loss, None if case.clipping is None else norm)
        if not run.logits:
            raise Misuse("loss, in one process, recorded no logits; it must call self.logits, or run.see(logits)")
        logits = to_numpy(run.logits[0][0])[rows.row, rows.column].reshape(*shape, -1)
        seen.logits = {f"micro-batch {m + 1}": logits[:, m] for m in range(case.accumulation)}
        seen.parameters = _arrays(named_parameters(model))
        seen.entries = trace.entries() if trace is not None else []
    return seen


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Change the initial parameters a little: 0 and 1 hide misplaced gradients, and small ones make attention flat."""
    for name, x in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        fan_in = x[0].numel() if x.dim() > 1 and len(x) else 1
        x.add_(torch.randn(x.shape, dtype=x.dtype, generator=generator), alpha=0.3 * fan_in**-0.5)


@torch.no_grad()
def _round(model: nn.Module, rounded: Rounded, hooked: bool) -> None:
    for x in model.parameters():
        x.copy_(rounded(x))
    if hooked:
        hook: Callable[..., Any] = lambda module, inputs, out: (  # noqa: E731
            rounded(out) if isinstance(out, Tensor) and out.is_floating_point() else None
        )
        for module in model.modules():
            module.register_forward_hook(hook)


def _optimizer(setup: Setup, model: nn.Module, run: Run, seen: ModelObservation) -> torch.optim.Optimizer:
    """Return the optimizer, which records the gradients of its first step."""
    named = named_parameters(model)
    with calling("optimizer"):
        optimizer: object = setup.optimizer(list(named.values()), run)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Misuse(f"optimizer returned {described(optimizer)}; it must return a torch.optim.Optimizer")

    def note(*_: object) -> None:
        if not seen.gradients:
            grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in named.items()}
            seen.gradients = _arrays(grads)

    optimizer.register_step_pre_hook(note)
    return optimizer


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, without the prefixes of wrappers."""
    return {plain_name(name): x for name, x in model.named_parameters()}


def plain_name(name: str) -> str:
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name.removeprefix("module.")


def _note_step(seen: ModelObservation, step: int, loss: object, norm: object) -> None:
    seen.losses[f"step {step + 1}"] = to_numpy(scalar("step", loss))
    if norm is not None:
        seen.norms[f"step {step + 1}"] = to_numpy(scalar("step", norm))


def _arrays(named: dict[str, Any]) -> Named:
    return {name: to_numpy(unsharded(x)).copy() for name, x in named.items()}


def _size(x: Array) -> float:
    return float(np.abs(x).max(initial=0.0))
