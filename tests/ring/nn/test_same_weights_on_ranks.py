"""`SameWeights` over ranks: errors of one of them, messages that begin in the backward."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring.nn import SameWeights, cross_entropy
from ring.nn.batch_group import BatchRanks
from ring.nn.same_weights import gradient_sums
from ring.nn.same_weights.gradient_sums import GradientSums, Held
from tests.support.chunked_model import (
    BACKWARD,
    FORWARD,
    TOKENS,
    Model,
    OwnError,
    bits,
    failing,
)
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_thread")]


def _failing_on_rank_1(data: int, place: str, compare: bool) -> str:
    mesh = dist.init_device_mesh("cpu", (data, 4 // data), mesh_dim_names=("data", "context"))
    _, same, batch = failing(place if dist.get_rank() == 1 else "", compare, mesh)
    try:
        cross_entropy(same(batch.tokens, batch.context), batch.labels, same).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("data", [1, 2, 4])
@pytest.mark.parametrize("place", [*FORWARD, *BACKWARD])
def test_an_error_of_one_rank_is_raised_on_all(ranks: Ranks, data: int, place: str) -> None:
    for compare in (True, False)[: 1 + (place in FORWARD)]:  # otherwise others learn of a backward in the next forward
        (answer,) = set(ranks(4).run(_failing_on_rank_1, data, place, compare))
        assert FORWARD.get(place, "OwnError: no such token") in answer


@pytest.mark.parametrize("place", [*FORWARD, *BACKWARD, "a buffer"])
def test_a_refused_comparison_leaves_nothing_behind(place: str) -> None:
    model, same, batch = failing(place)
    buffer, state = model.count, torch.get_rng_state()
    for _ in range(2):
        with pytest.raises((OwnError, RuntimeError), match="no such token|of size|buffers must stay"):
            same(batch.tokens, batch.context)
        assert model.count is buffer and buffer == 0 and torch.equal(torch.get_rng_state(), state)
        assert all(x.grad is None for x in model.parameters()) and not same._calls.probing
    model.place = ""
    same(batch.tokens, batch.context).sum().backward()


def _step_after_errors(interrupted: int) -> tuple[list[int], list[Tensor]]:
    """Messages begun at each error, and bits of the gradients of a step of two micro-batches. interrupted: rank
    with the first error.
    """
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "context"))
    with patch.object(gradient_sums, "BUCKET", 2**12):
        model, same, batch = failing("", mesh=mesh)
        begun: list[int] = []
        while True:
            try:
                for number in range(2):
                    model.place = BACKWARD[1] if number and dist.get_rank() == interrupted and not begun else ""
                    with nullcontext() if number else same.no_sync():
                        logits = same(batch.tokens, batch.context)
                        cross_entropy(logits, batch.labels, same, labelled=4 * TOKENS - 4).backward()
                return begun, [bits(x.grad) for x in same.parameters() if x.grad is not None]
            except (RuntimeError, ValueError, OwnError):
                begun.append(same._sums._messages.begun)
                same.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_after_an_interrupted_backward_is_whole(ranks: Ranks, world: int) -> None:
    """Also where the other rank has started messages that the interrupted one has not."""
    _, wanted = ranks(world).run(_step_after_errors, world)[0]
    first = []
    for begun, found in ranks(world).run(_step_after_errors, world - 1):
        assert begun and all(map(torch.equal, found, wanted)) and len(found) == len(wanted) > 5
        first.append(begun[0])
    assert first[-1] == 0 < min(first[:-1], default=9)


def _begun_in_backwards() -> list[int]:
    """Numbers of messages that had begun at the end of the backwards of two steps, and of all."""
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "context"))
    with patch.object(gradient_sums, "BUCKET", 2**12):
        _, same, batch = failing("", mesh=mesh)
    exchange, begun = GradientSums.exchange, []

    def counted(sums: GradientSums, own: Held) -> None:
        begun.append(sums._messages.begun)
        exchange(sums, own)
        begun.append(sums._messages.begun)

    with patch.object(GradientSums, "exchange", counted):
        for _ in range(2):
            cross_entropy(same(batch.tokens, batch.context), batch.labels, same).backward()
            for x in same.parameters():
                x.grad = None
    return begun


def test_messages_begin_in_the_backward_from_the_second_step_on(ranks: Ranks) -> None:
    for first, whole, second, again in ranks(2).run(_begun_in_backwards):
        # At the end come the second use of tied weights, and a bucket of which the model uses some parameters alone.
        assert first == 0 and whole == again > 8 and second == whole - 2


def _two_models(together: bool, of_both: bool) -> tuple[list[int], list[Tensor]]:
    """Messages begun at the end of each backward, and bits of the gradients of the second step of two models. of_both:
    both losses are over their models, else the second one is of the outputs alone.
    """
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "context"))
    begun, exchange = [], GradientSums.exchange

    def counted(sums: GradientSums, own: Held) -> None:
        begun.append(sums._messages.begun)
        exchange(sums, own)

    with patch.object(gradient_sums, "BUCKET", 2**12), patch.object(GradientSums, "exchange", counted):
        models = [failing("", mesh=mesh)[1:] for _ in range(2)]
        with torch.no_grad():
            for x in models[1][0].parameters():
                x.mul_(1.5)
        for _ in range(2):
            losses: list[Tensor] = []
            for same, batch in models:
                same.zero_grad()
                logits = same(batch.tokens, batch.context)
                other = losses and not of_both
                losses.append(logits.square().sum() if other else cross_entropy(logits, batch.labels, same))
            for loss in [losses[0] + losses[1]] if together else losses:
                loss.backward()
    return begun, [bits(x.grad) for same, _ in models for x in same.parameters() if x.grad is not None]


@pytest.mark.parametrize("of_both", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_two_models_at_a_time_begin_no_messages_in_the_backward(ranks: Ranks, together: bool, of_both: bool) -> None:
    ((_, wanted),) = ranks(1).run(_two_models, together, of_both)
    for begun, found in ranks(2).run(_two_models, together, of_both):
        assert len(begun) == 4 and all(map(torch.equal, found, wanted)) and len(found) == len(wanted) > 10
        # Another's number, of an earlier meeting, may still stand there.
        assert begun[0] == 0 and (begun[2] == 0 or not of_both)


def _two_sizes() -> list[Tensor]:
    """Bits of the gradients of two models' second step, of many messages and of few, the latter's backward first."""
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "context"))
    with patch.object(gradient_sums, "BUCKET", 2**12):
        models = [failing("", mesh=mesh)]
    models.append(failing("", mesh=mesh))
    for _ in range(2):
        losses = []
        for _, same, batch in models:
            for x in same.parameters():
                x.grad = None
            losses.append(cross_entropy(same(batch.tokens, batch.context), batch.labels, same))
        for loss in reversed(losses):
            loss.backward()
    return [bits(x.grad) for _, same, _ in models for x in same.parameters() if x.grad is not None]


def test_two_models_of_unequal_sizes_end_in_the_other_order(ranks: Ranks) -> None:
    (wanted,) = ranks(1).run(_two_sizes)
    for found in ranks(2).run(_two_sizes):
        assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted) > 10


def _smaller_step_after_error(interrupted: int) -> list[Tensor]:
    """Bits of the gradients of a step of one sequence after an error of the rank `interrupted` in a backward of two."""
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "context"))
    with patch.object(gradient_sums, "BUCKET", 2**12):
        model, same, batch = failing("", mesh=mesh)
        cross_entropy(same(batch.tokens, batch.context), batch.labels, same).backward()
        same.zero_grad()
        entries = 2 if interrupted < dist.get_world_size() else 1
        while True:
            try:
                model.place = BACKWARD[1] if entries == 2 and dist.get_rank() == interrupted else ""
                logits = same(batch.tokens[:entries], batch.context)
                cross_entropy(logits, batch.labels[:entries], same).backward()
                return [bits(x.grad) for x in same.parameters() if x.grad is not None]
            except (RuntimeError, ValueError, OwnError):
                entries = 1
                same.zero_grad()


def test_a_smaller_step_follows_an_interrupted_one(ranks: Ranks) -> None:
    wanted = ranks(2).run(_smaller_step_after_error, 2)[0]
    for found in ranks(2).run(_smaller_step_after_error, 1):
        assert len(found) == len(wanted) > 5 and all(map(torch.equal, found, wanted))


def test_a_loss_of_an_evaluation_leaves_the_next_step_alone() -> None:
    _, same, batch = failing("", compare=False)
    found = []
    for evaluated in (False, True):
        same.zero_grad()
        if evaluated:
            with torch.no_grad():
                cross_entropy(same(batch.tokens[:1], batch.context), batch.labels[:1], same)
        same(batch.tokens, batch.context).sum().backward()
        found.append([bits(x.grad) for x in same.parameters() if x.grad is not None])
    assert all(map(torch.equal, *found))


def test_a_parameter_used_twice_does_not_complete_its_bucket() -> None:
    sums = GradientSums([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))], BatchRanks(None))
    for _ in range(2):  # messages begin in the second step
        sums.begin(True)
        sums.meet(Held(0, 1, 1, (0,)))
        for index in (0, 0, 1):
            sums.insert(index, 0, 0, 1, torch.full((2,), index + 1.0))
        sums.exchange(Held(0, 1, 1, (0,)))
        assert {i: x.tolist() for i, x in sums.results().items()} == {0: [2.0, 2.0], 1: [2.0, 2.0]}


def test_after_an_error_a_step_begins_by_zero_grad() -> None:
    _, same, batch = failing(BACKWARD[0], compare=False)
    loss = cross_entropy(same(batch.tokens, batch.context), batch.labels, same)
    for error, message in ((OwnError, "no such token"), (ValueError, "one backward for each forward")):
        with pytest.raises(error, match=message):
            loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match=r"If an error ended the last step, write model.zero_grad\(\)"):
        same(batch.tokens, batch.context)


def _part_of_the_world() -> tuple[str, list[Tensor]]:
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "data", "context"))
    with pytest.raises(NotImplementedError) as error:
        SameWeights(Model(), mesh["data", "context"])
    _, same, batch = failing("", mesh=mesh, over=mesh["data", "context"]._flatten())
    cross_entropy(same(batch.tokens, batch.context), batch.labels, same).backward()
    return str(error.value), [bits(x.grad) for x in same.parameters() if x.grad is not None]


def test_a_part_of_the_world_is_flattened(ranks: Ranks) -> None:
    errors, found = zip(*ranks(8).run(_part_of_the_world), strict=True)
    assert "write mesh['data', 'context']._flatten()" in errors[0] and len(set(errors)) == 1
    assert all(torch.equal(x, y) for other in found for x, y in zip(other, found[0], strict=True))


def _made_by_ranks_in_different_groups() -> str:
    for _ in range(dist.get_rank()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = SameWeights(Model(), compare=False)
    again = SameWeights(Model(), dist.new_group([0, 1, 2]), compare=False)
    return f"{model.ranks.world_size} {again.ranks.world_size}"


def test_ranks_in_different_groups_make_a_model(ranks: Ranks) -> None:
    assert ranks(3).run(_made_by_ranks_in_different_groups) == ["3 3"] * 3
