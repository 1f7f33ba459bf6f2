"""Tables that a captured graph reads: written once, in memory that no graph writes. They need a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring.caching import graph_keepalive
from ring.caching.graph_keepalive import keep_alive_for_one_graph
from ring.caching.graph_table import graph_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def tabled(numbers: np.ndarray) -> torch.Tensor:
    return graph_table(numbers, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("ours", [False, True], ids=["a user's graph", "a graph of ours"])
def test_replays_read_a_table_written_once(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    monkeypatch.setattr(graph_keepalive, "_forever", [])
    numbers, start, graph = np.arange(1000), torch.zeros(1000, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()

    def capture() -> torch.Tensor:
        with torch.cuda.graph(graph):
            total = start + 1
            total += tabled(numbers)
            numbers[:] = -1  # the copy is made: nobody reads these again
        return total

    if ours:
        with keep_alive_for_one_graph(current) as kept:
            total = capture()
    else:
        total, kept = capture(), graph_keepalive._forever
    assert len(kept) == 1
    taken = [torch.full((1000,), -7, device="cuda") for _ in range(100)]  # the table's memory too, if it were free
    for number in range(3):
        start.fill_(number)
        graph.replay()
        assert torch.equal(total, torch.arange(1000, device="cuda") + number + 1)
    assert all(bool((x == -7).all()) for x in taken)


def test_a_capture_stays_as_strict_as_it_was() -> None:
    """A table waits for another stream, which a capture refuses to the rest of the thread."""
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tabled(np.zeros(1, np.int64))
        torch.zeros(1).to("cuda")
