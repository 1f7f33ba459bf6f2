"""Training steps of a user's Setup: those of a rank, and those of one process that has all sequences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring import count_kernels
from ring.comm.transport import Transport
from ring.nn import ContextParallel
from verification.models.batches import IGNORED, global_batch
from verification.models.loading import built, calling, load
from verification.models.meshes import mesh_of
from verification.models.model_case import ModelCase
from verification.models.noise import Rounded, exact
from verification.models.observation import TRACED, ModelExpectation, ModelObservation, read_entries, trace
from verification.models.precision import computing_in
from verification.models.recording import (
    arrays,
    copy_buffers,
    copy_gradients,
    count_steps,
    named_parameters,
    note_step,
    record_gradients,
    record_states,
    round_parameters,
    train_in_one_process,
)
from verification.models.results import Named
from verification.models.setup import Misuse, Run, Setup, Steps, described, scalar
from verification.models.tolerance import allowed_deviations, threshold_of
from verification.models.whole_batch import Rows, dealt_batches, held_batch, held_parts, whole_batches
from verification.run.layouts import layout_of
from verification.run.observation import to_numpy


def save_on_rank(transport: Transport, before: ModelCase, name: str, case: ModelCase, folder: str) -> None:
    """Task: train on this rank until the checkpoint of the Case, and save that to the folder. before: the Case's
    `before()`."""
    whole = [whole_batches(case, step) for step in range(case.steps)]
    _train(transport, before, name, whole, Run(before, folder=folder, saves_after=case.resumed_after))


def train_on_rank(
    transport: Transport, case: ModelCase, name: str, traced: bool = False, folder: str = "",
    drawn: ModelCase | None = None,
) -> ModelObservation:  # fmt: skip
    """Task: train on this rank. transport: over all ranks; only its rank is used. traced: at most two steps, the first
    with the calls of modules. folder: of the Case's checkpoint. drawn: Case of which the sequences are; None: this."""
    whole = [dealt_batches(drawn or case, case, step) for step in range(count_steps(case, traced))]
    run = Run(case, held=held_batch(case), folder=folder, resumes_after=case.resumed_after)
    return _train(transport, case, name, whole, run, traced, drawn is not None or case.other_ranks is not None)


def _train(
    transport: Transport, case: ModelCase, name: str, steps: Steps, run: Run, traced: bool = False, states: bool = False
) -> ModelObservation:
    """Train on this rank. states: record parameters after each step of the optimizer."""
    setup, seen = load(name), ModelObservation(case.coordinates(transport.rank)[0])
    with computing_in(case.dtype):
        mesh = mesh_of(case)
        run.context = context = ContextParallel(
            layout_of(case), mesh["context"], exchange=case.exchange, same_bits=case.same_bits
        )
        run.mesh = mesh
        rank, world = str(transport.rank), str(case.world)  # trainers read these, which torchrun sets
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        model = _started(setup, case, context, seen)
        buffers = copy_buffers(model)
        with calling("wrap"):
            wrapped: object = setup.wrap(model, run)
        if not isinstance(wrapped, nn.Module):
            raise Misuse(f"wrap returned {described(wrapped)}; it must return a torch.nn.Module")
        named = named_parameters(wrapped)
        optimizer = _optimizer(setup, named, run)
        record_gradients(optimizer, seen, lambda: copy_gradients(named), traced)
        if states:
            record_states(optimizer, named, seen)
        recorded = trace(model, case.accumulation) if traced else None
        with count_kernels() as kernels:
            _take_steps(setup, wrapped, optimizer, run, seen, steps)
        seen.rings = kernels.total()
        seen.evaluation = _evaluation(run.evaluation)
        seen.parameters = arrays(named)
        seen.note_buffers(buffers, copy_buffers(model))
        seen.entries = read_entries(recorded)
    return seen


def _take_steps(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, seen: ModelObservation, steps: Steps
) -> None:
    """Take the steps, and note the results of each."""
    function = "step" if type(setup).train is Setup.train else "train"
    number, taken = (run.saves_after or len(steps)) - run.resumes_after, 0
    with calling(function):
        results: object = setup.train(model, optimizer, steps, run)
        if not isinstance(results, Iterable):
            raise Misuse(f"{function} returned {described(results)}; it must return (loss, norm) of each step")
        for taken, result in enumerate(results, 1):
            checked: object = result
            if not isinstance(checked, tuple) or len(checked) != 2:
                raise Misuse(f"{function} returned {described(result)}; it must return (loss, norm), norm may be None")
            note_step(seen, run.resumes_after + taken - 1, *result)
            if taken == 1:
                _note_logits(seen, run, function, number)
    if taken != number:
        raise Misuse(f"train returned results of {taken} steps; it must return (loss, norm) of each of {number}")


def _evaluation(values: Mapping[str, object]) -> Named:
    return {name: to_numpy(scalar("evaluate", x).detach()) for name, x in values.items()}


def _note_logits(seen: ModelObservation, run: Run, function: str, steps: int) -> None:
    first = run.logits[: run.case.accumulation]
    if len(run.logits) not in (run.case.accumulation, run.case.accumulation * steps):
        raise Misuse(
            f"{function} recorded logits {len(run.logits)} times with {run.case.accumulation} micro-batches; it must "
            "call run.see(logits, held) once for each"
        )
    for number, (logits, held) in enumerate(first):
        if held is None or logits.dim() != 3 or logits.shape[1] != len(held):
            raise Misuse(
                f"run.see got logits of shape {tuple(logits.shape)} and held {described(held)}; logits must "
                "be (B, N, vocabulary) and held the indices (N,) of their tokens in the whole sequence"
            )
        seen.logits[f"micro-batch {number + 1}"] = to_numpy(logits)
        seen.held.append(held.cpu().numpy())


def expect(case: ModelCase, name: str, traced: bool = False) -> ModelExpectation:
    """Task: train in one process, and estimate the effect of rounding in fp32."""
    alone = train_alone(case, name, traced=traced)
    values = alone.quantities()
    if traced:
        allowed = threshold_of(values, TRACED[case.dtype])
    else:
        allowed = allowed_deviations(case, values, partial(train_alone, case, name))
    return ModelExpectation(
        exact=values, allowed=allowed, entries=alone.entries, second=alone.second, shapes=alone.shapes
    )


def train_alone(
    case: ModelCase, name: str, rounded: Rounded = exact, stored: Rounded = exact, traced: bool = False
) -> ModelObservation:
    """Train in this process on all sequences. rounded: applied to initial parameters and to outputs of all modules;
    stored: to parameters after each step."""
    setup, rows, seen = load(name), Rows.of(case), ModelObservation()
    shape = (case.data, case.accumulation, case.batch, case.tokens)
    with computing_in(case.dtype):
        model = _started(setup, case, None, seen)
        run, named, buffers = Run(case), named_parameters(model), copy_buffers(model)
        recorded = trace(model, 1) if traced else None
        if rounded is not exact:
            round_parameters(named, rounded)
            _round_outputs(model, rounded)

        def loss_of(step: int) -> Tensor:
            run.labelled = global_batch(case, step).labelled
            with calling("loss, in one process,"):
                return scalar("loss, in one process,", setup.loss(model, rows.alone(case, step), run))

        optimizer = _optimizer(setup, named, run)
        with calling("the step, in one process,"):
            train_in_one_process(case, named, optimizer, loss_of, seen, stored=stored, traced=traced)
        seen.note_buffers(buffers, copy_buffers(model))
        if case.held:
            parts = held_parts(case)
            run.labelled = sum(int((part.labels != IGNORED).sum()) for part in parts)
            with calling("evaluate, in one process,"), torch.no_grad():
                seen.evaluation = _evaluation(setup.evaluate(model.eval(), parts, run))
        if not run.logits:
            raise Misuse("loss, in one process, recorded no logits; it must call self.logits, or run.see(logits)")
        logits = to_numpy(run.logits[0][0])[rows.row, rows.column].reshape(*shape, -1)
        seen.logits = {f"micro-batch {m + 1}": logits[:, m] for m in range(case.accumulation)}
        seen.entries = read_entries(recorded)
    return seen


def _started(setup: Setup, case: ModelCase, context: ContextParallel | None, seen: ModelObservation) -> nn.Module:
    """Return the model with the initial parameters, which are recorded."""
    model = built(setup, case, context)
    perturb(model)
    seen.start = arrays(named_parameters(model))
    return model


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Change the initial parameters a little: 0 and 1 hide misplaced gradients, and small ones make attention flat."""
    for name, x in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        fan_in = x[0].numel() if x.dim() > 1 and len(x) else 1
        x.add_(torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device), alpha=0.3 * fan_in**-0.5)


def _round_outputs(model: nn.Module, rounded: Rounded) -> None:
    hook: Callable[..., Any] = lambda module, inputs, out: (  # noqa: E731
        rounded(out) if isinstance(out, Tensor) and out.is_floating_point() else None
    )
    for module in model.modules():
        module.register_forward_hook(hook)


def _optimizer(setup: Setup, named: dict[str, nn.Parameter], run: Run) -> torch.optim.Optimizer:
    with calling("optimizer"):
        optimizer: object = setup.optimizer(list(named.values()), run)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Misuse(f"optimizer returned {described(optimizer)}; it must return a torch.optim.Optimizer")
    return optimizer
