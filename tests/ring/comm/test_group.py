"""What a caller may give as a group: process groups, meshes of one dimension, transports, or nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ring.comm.group import transport_over
from ring.comm.transport import RecordingTransport, SoloTransport
from tests.support import group_tasks
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, preload=("torch", "torch._dynamo", group_tasks.__name__)) as ranks:
        yield ranks


def test_one_process_needs_no_group() -> None:
    assert isinstance(transport_over(None, 1), SoloTransport)
    with pytest.raises(ValueError, match="group must be given, or torch.distributed initialised, for a layout of 2"):
        transport_over(None, 2)


def test_a_transport_is_taken_as_it_is() -> None:
    transport = RecordingTransport(SoloTransport())
    assert transport_over(transport, 1) is transport


@pytest.mark.parametrize("group", ("gloo", 3, object))
def test_anything_else_is_refused(group: object) -> None:
    with pytest.raises(ValueError, match="group must be a process group, a mesh, a Transport or None, got"):
        transport_over(group, 1)  # type: ignore[arg-type]


def test_a_mesh_of_one_dimension_is_its_group(pool: Pool) -> None:
    """Whole, and as a part of a mesh of two; its calls and those on its process group are numbered together."""
    for rank, (whole, part, ranks, numbers, worst) in enumerate(pool.run(group_tasks.calls_over_meshes)):
        assert (whole, part) == ((rank, 4), (rank // 2, 2)) and ranks == [rank % 2, rank % 2 + 2]
        assert numbers == [1, 2, 3] and worst < 1e-12


def test_other_meshes_are_refused(pool: Pool) -> None:
    for rank, (flat, outside) in enumerate(pool.run(group_tasks.meshes_that_do_not_fit)):
        assert "group must be a mesh of one dimension, got 2 dimensions ('data', 'context')" in flat
        assert 'take the one along which the sequence is sharded, as mesh["context"]' in flat
        if rank < 2:
            assert outside == "taken"
        else:
            assert f"group must contain the calling process; world rank {rank} is not in" in outside


def test_a_dtensor_is_refused_by_name_on_every_rank(pool: Pool) -> None:
    for outcome in pool.run(group_tasks.dtensors):
        for name, said in zip("qkv", outcome, strict=True):
            assert said.startswith(
                f"NotImplementedError: rank 1: {name} must be a plain tensor, the shard of this rank"
            )
            assert f"give {name}.to_local(), sharded as the layout says" in said and "Shard(dim=1)" in said
