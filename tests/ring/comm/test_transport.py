"""Contract of a transport, as far as one process can check it: its ranks, its refusals, a group of one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from ring.comm.process_group import ProcessGroupTransport, backends_of
from ring.comm.transport import Message, SoloTransport
from tests.support.ranks import Ranks
from verification.run.recording_transport import RecordingTransport


@pytest.fixture
def rank_1_of_3() -> Iterator[ProcessGroupTransport]:
    """A transport of a group whose messages go nowhere and are done at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield ProcessGroupTransport()
    dist.destroy_process_group()


PEER = "peer must be another rank of the 3, got {} on rank 1"
TENSOR = "message 'keys' must be contiguous and not empty"
FORBIDDEN = {
    "to nobody": (-1, torch.ones(2), PEER.format(-1)),
    "to oneself": (1, torch.ones(2), PEER.format(1)),
    "beyond the last rank": (3, torch.ones(2), PEER.format(3)),
    "empty": (2, torch.ones(0), TENSOR),
    "not contiguous": (2, torch.ones(2, 3).T, TENSOR),
}


@pytest.mark.parametrize("received", (False, True), ids=("sent", "received"))
@pytest.mark.parametrize(("peer", "tensor", "said"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_message_that_the_contract_forbids_is_refused(
    peer: int, tensor: torch.Tensor, said: str, received: bool, rank_1_of_3: ProcessGroupTransport
) -> None:
    allowed, forbidden = [Message(0, torch.ones(2), "values")], [Message(peer, tensor, "keys")]
    with pytest.raises(ValueError) as caught:
        rank_1_of_3.post(*((allowed, forbidden) if received else (forbidden, allowed)))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("irecv", "the message 'keys' from rank 2 did not come: connection reset"),
        ("isend", "rank 0 did not take the message 'values': connection reset"),
    ],
)
def test_a_message_that_fails_is_named(call: str, said: str, rank_1_of_3: ProcessGroupTransport) -> None:
    """After a connection breaks, the first message fails in its wait, later ones where they are posted."""
    fails = Mock(side_effect=RuntimeError("connection reset\nand much more"))
    for broken in (fails, Mock(return_value=Mock(wait=fails))):
        with patch.object(dist, call, broken), pytest.raises(RuntimeError) as caught:
            rank_1_of_3.post([Message(0, torch.ones(2), "values")], [Message(2, torch.ones(2), "keys")]).wait()
        assert str(caught.value) == said


def test_an_empty_batch_is_allowed(rank_1_of_3: ProcessGroupTransport) -> None:
    solo = SoloTransport()
    for transport in (rank_1_of_3, solo, RecordingTransport(solo)):
        pending = transport.post([], [])
        pending.arrive()
        pending.wait()


def _send_early() -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    transport, numbers = ProcessGroupTransport(group), [torch.full((2**18,), float(i)) for i in range(4)]
    if transport.rank == 0:
        pending = [transport.post([Message(1, x, f"message {i}")], []) for i, x in enumerate(numbers)]
        gc.collect()
        time.sleep(0.3)
        for batch in pending:
            batch.wait()
    else:
        time.sleep(0.2)
        for i, x in enumerate(numbers):
            received = torch.empty_like(x)
            transport.post([], [Message(0, received, f"message {i}")]).wait()
            assert received.equal(x)
    dist.destroy_process_group(group)


@pytest.mark.ranks
def test_early_sends_are_not_lost(ranks: Ranks) -> None:
    ranks(2).run(_send_early)


def test_a_group_is_for_its_members(rank_1_of_3: ProcessGroupTransport) -> None:
    within = ProcessGroupTransport(dist.new_group([1, 2]))
    assert (within.rank, within.world_size) == (0, 2)
    others = dist.new_group([0, 2])
    with pytest.raises(ValueError, match="group must contain the calling process; world rank 1 is not a member"):
        ProcessGroupTransport(others)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("cuda:fake", {"cuda": "fake"}),
        ("cpu:gloo,cuda:fake", {"cpu": "gloo", "cuda": "fake"}),
        pytest.param(None, {"cpu": "gloo"}, marks=pytest.mark.skipif(dist.is_nccl_available(), reason="it is taken")),
    ],
)
def test_nccl_groups_agree_on_a_gpu(backend: str | None, said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found, device = backends_of(None), ProcessGroupTransport()._device()
    dist.destroy_process_group()
    assert found == said and device == (torch.device("cpu") if "cpu" in said else torch.device("cuda", 5))
