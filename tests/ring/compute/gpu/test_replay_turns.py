"""Threads whose calls are replayed on one stream: what each gets is its own. A stand-in for graphs runs on CPUs."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring.caching.bounded import Bounded
from ring.compute.gpu import replay

ROUNDS = 2000


def test_threads_on_one_stream_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls are on one stream, and captured after the first, with the same memory."""
    inputs, outputs, turn = [torch.empty(4)], [torch.empty(4)], threading.Lock()
    graph = SimpleNamespace(replay=lambda: torch.mul(inputs[0], 2.0, out=outputs[0]))

    def captured(*_: Any) -> replay._Replay:
        return replay._Replay(graph, inputs, outputs, [], turn)

    for name, value in (("_captured", captured), ("BEFORE", 0), ("_seen", Bounded(2)), ("_replays", Bounded(2))):
        monkeypatch.setattr(replay, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))

    def wrong(number: float) -> list[float]:
        x, found = torch.full((4,), number), list[float]()
        for _ in range(ROUNDS):
            (doubled,) = replay.replayed(f"call {number}", [x], [((4,), torch.float32)], lambda x: [2 * x])
            found += [y for y in doubled.tolist() if y != 2 * number]
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(wrong, (1.0, 2.0))) == [[], []]
    finally:
        sys.setswitchinterval(before)
