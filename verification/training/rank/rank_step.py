"""Training run of one rank, as a user of `ring.nn` writes it, and its StepObservation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import Transport
from ring.nn import ContextParallel, gather
from verification.models.meshes import mesh_of
from verification.models.recording import named_parameters, note_step, record_gradients, record_states
from verification.models.setup import Part, Run
from verification.models.whole_batch import dealt_batches
from verification.run.layouts import layout_of
from verification.run.observation import to_numpy
from verification.run.recording_transport import RecordingTransport
from verification.training.rank.own_setup import OwnSetup, wrongly_clipped
from verification.training.rank.resume import resume
from verification.training.rank.ring_model import LanguageModel
from verification.training.step_observation import PartObservation, StepObservation
from verification.training.training_case import TrainingCase


def train_on_rank(
    transport: Transport,
    case: TrainingCase,
    setup_of: Callable[[TrainingCase], OwnSetup] = OwnSetup,
    drawn: TrainingCase | None = None,
) -> StepObservation:
    """Task: train a few steps on this rank. transport: over all ranks; only its rank is used. setup_of: called for each
    part of the Case. drawn: Case of which the sequences are; None: this one."""
    seen = StepObservation(*case.coordinates(transport.rank))
    before, first = None, 0
    for part in case.parts:
        data_rank, index = part.coordinates(transport.rank)
        context = make_handle(part)
        setup, run = setup_of(part), Run(part, context, mesh_of(part))
        model = setup.build(context)
        counter = TokenCounts(watched_modules(model, part))
        wrapped = setup.wrap(model, run)
        optimiser = setup.optimizer(list(named_parameters(wrapped).values()), run)
        record_gradients(optimiser, seen, partial(setup.gradients, wrapped))
        if before is not None:
            resume(before, (wrapped, optimiser))
        if part.same_bits is not None:  # after the resume, which takes a step of its own to make states
            record_states(optimiser, named_parameters(wrapped), seen, first)
        for step in range(first, first + part.steps):
            if part.same_bits is not None:  # the layout has the chunks of the step's documents
                run.context = make_handle(part.at(step - first))
            batches = dealt_batches(drawn or case, part, step)[data_rank]
            note_step(seen, step, *setup.step(wrapped, optimiser, batches, run))
            if step == 0:
                _note_batches(seen, setup.parts)
                seen.logits["first micro-batch"] = to_numpy(gather(context, run.logits[0][0]))
        first += part.steps
        seen.parts.append(_part_observation(context, index, counter, setup.graphs.runs))
        before = wrapped, optimiser
    seen.parameters = setup.parameters(wrapped)
    if case.spoilt is not None:
        seen.wrongly_clipped = wrongly_clipped(named_parameters(wrapped), float(case.spoilt), run)
    return seen


def make_handle(case: TrainingCase) -> ContextParallel:
    """Return the context handle of the model's modules."""
    return ContextParallel(
        layout_of(case), make_handle_group(case), exchange=case.exchange, bucket=case.bucket, same_bits=case.same_bits
    )


def make_handle_group(case: TrainingCase) -> dist.ProcessGroup | DeviceMesh | Transport:
    """Return the group argument of the context handle."""
    mesh = mesh_of(case)["context"]
    if case.handle == "mesh":
        return mesh
    group = mesh.get_group()
    return RecordingTransport(transport_of(group)) if case.handle == "recorded" else group


def watched_modules(model: LanguageModel, case: TrainingCase) -> list[nn.Module]:
    """Modules whose tokens are counted; not the layers that a graph recomputes, which must have no side effects."""
    if case.compiled == "no" or case.checkpointing == "none":
        return list(model.modules())
    within = {module for layer in model.layers for module in layer.modules()}
    return [module for module in model.modules() if module not in within]


class TokenCounts:
    """Records the token dimensions that occur in inputs and outputs of modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.counts: set[int] = set()
        for module in modules:
            module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        for x in (*inputs, output):
            if isinstance(x, Tensor) and x.dim() == 3:  # (B, N, anything)
                self.counts.add(x.shape[1])


def _note_batches(seen: StepObservation, parts: Iterable[Part]) -> None:
    for part in parts:
        seen.tokens.append(part.tokens.cpu().numpy())
        seen.labels.append(part.labels.cpu().numpy())
        seen.positions.append(part.positions.cpu().numpy())


def _part_observation(context: ContextParallel, index: int, counter: TokenCounts, graph_runs: int) -> PartObservation:
    observation = PartObservation(index, counter.counts, graph_runs=graph_runs)
    if isinstance(context.transport, RecordingTransport):
        observation.sent = _bytes_by_peer(context.transport.sent)
        observation.received = _bytes_by_peer(context.transport.received)
    return observation


def _bytes_by_peer(messages: list[tuple[int, int, str]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for peer, size, _ in messages:
        total[peer] += size
    return dict(total)
