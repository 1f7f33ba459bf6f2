"""Training run of one rank, as a user of `ring.nn` writes it, and its StepObservation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from ring.comm.transport import RecordingTransport, Transport
from ring.nn import Batch, ContextParallel, gather, next_tokens, shard_batch
from verification.run.layouts import layout_of
from verification.run.observation import to_numpy
from verification.training.inputs import IGNORED, global_batch, initial_parameters
from verification.training.rank.losses import LOSSES
from verification.training.rank.meshes import handle_of, mesh_of
from verification.training.rank.resume import resume
from verification.training.rank.ring_model import Inner, LanguageModel, ring_inner
from verification.training.rank.wrapping import TrainableModel, Wrap, wrapped
from verification.training.step_observation import Array, PartObservation, StepObservation
from verification.training.training_case import TrainingCase


def train_on_rank(
    transport: Transport, case: TrainingCase, inner: Inner = ring_inner, wrap: Wrap = wrapped
) -> StepObservation:
    """Task: train a few steps on this rank. transport: over all ranks; only its rank is used. inner: the attention of a
    "sdpa" model. wrap: the wrapper, by default the Case's."""
    observation = StepObservation(*case.coordinates(transport.rank))
    run, first = None, 0
    for part in case.parts:
        data_rank, index = part.coordinates(transport.rank)
        context = ContextParallel(layout_of(part), handle_of(part), exchange=case.exchange, bucket=case.bucket)
        model = load_model(case, inner)
        counter = TokenCounts(watched_modules(model, part))
        run, before = wrap(model, part), run
        if before is not None:
            first = resume(before, run, first)
        for step in range(first, first + part.steps):
            batches = batches_of_step(case, part, context, data_rank, step)
            train_one_step(part, run, context, batches, step, observation)
        first += part.steps
        observation.parts.append(_part_observation(context, index, counter, run.graphs.runs))
    assert run is not None
    observation.parameters.update(_to_arrays(run.parameters()))
    if case.spoilt is not None:
        observation.wrongly_clipped = run.wrongly_clipped(float(case.spoilt))
    return observation


def train_one_step(
    case: TrainingCase, run: TrainableModel, context: ContextParallel, batches: list[Batch], step: int,
    observation: StepObservation,
) -> None:  # fmt: skip
    losses = take_gradients(case, run, context, batches, observation if step == 0 else None)
    if step == 0:
        observation.gradients.update(_to_arrays(run.gradients()))
    observation.losses[f"step {step + 1}"] = to_numpy(losses)
    norm = run.step()
    if norm is not None:
        observation.norms[f"step {step + 1}"] = to_numpy(norm)


def batches_of_step(
    case: TrainingCase, part: TrainingCase, context: ContextParallel, data_rank: int, step: int
) -> list[Batch]:
    """Return this rank's shards of its data rank's micro-batches."""
    step_batch, shards = global_batch(case, step).of(part), []
    documents = case.at(step).pattern.documents
    for number in range(part.accumulation):
        tokens = step_batch.tokens[data_rank, number].to(case.device)  # (B, n), whole sequences
        ignored = step_batch.ignored[data_rank, number].to(case.device)
        labels = next_tokens(tokens).masked_fill(ignored, IGNORED)
        if case.packed_by == "handle":
            shards.append(shard_batch(context.with_documents(documents), tokens, labels))
        else:
            shards.append(shard_batch(context, tokens, labels, documents=documents))
    return shards


def take_gradients(
    case: TrainingCase, run: TrainableModel, context: ContextParallel, batches: list[Batch],
    observation: StepObservation | None,
) -> Tensor:  # fmt: skip
    """Run forward and backward of all micro-batches; return the loss of the step. observation: of the first step."""
    mesh = mesh_of(case)
    loss_of = LOSSES[case.loss]
    labelled = None  # a single micro-batch counts its own labels
    if len(batches) > 1:
        labelled = loss_of.count([labels_of(batch) for batch in batches], mesh)
    losses = []
    for number, batch in enumerate(batches):
        with run.micro_batch(last=number == len(batches) - 1):
            logits = run.logits(batch.tokens, batch.positions, batch.context)
            loss = loss_of.mean(logits, labels_of(batch), mesh, labelled)
            run.backward(loss * loss_of.part)
        losses.append(loss.detach())
        if observation is not None:
            _note_batch(observation, batch)
            if number == 0:
                observation.logits["first micro-batch"] = to_numpy(gather(context, logits.detach()))
    run.end_of_backward()
    return sum(losses[1:], losses[0])


def labels_of(batch: Batch) -> Tensor:
    assert batch.labels is not None
    return batch.labels


def load_model(case: TrainingCase, inner: Inner = ring_inner) -> LanguageModel:
    """Build the Case's model and load its initial parameters. Raises RuntimeError if names or shapes differ."""
    model = LanguageModel(case, inner).to(case.device, case.parameter_dtype)
    state = initial_parameters(case)
    if case.model.tied:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state)
    return model


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


def _note_batch(observation: StepObservation, batch: Batch) -> None:
    observation.tokens.append(batch.tokens.cpu().numpy())
    observation.labels.append(labels_of(batch).cpu().numpy())
    observation.positions.append(batch.positions.cpu().numpy())


def _to_arrays(named: dict[str, Tensor]) -> dict[str, Array]:
    """Copy: gradients and parameters are modified in place later."""
    return {name: to_numpy(x).copy() for name, x in named.items()}


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
