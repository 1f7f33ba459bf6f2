"""Threads whose calls are replayed on one stream: what each gets is its own. A stand-in for graphs runs on CPUs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring.compute.gpu import replay

ROUNDS = 2000


class Doubling:
    """In place of a CUDA graph."""

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs

    def replay(self) -> None:
        torch.mul(self.inputs[0], 2.0, out=self.outputs[0])


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All calls are on one stream, and captured after the first, with the same memory."""
    memory, turn = [torch.empty(4), torch.empty(4)], threading.Lock()

    def captured(*_: Any) -> replay._Replay:
        inputs, outputs = memory[:1], memory[1:]
        return replay._Replay(Doubling(inputs, outputs), inputs, outputs, [], turn)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(replay, "_captured", captured)
    monkeypatch.setattr(replay, "BEFORE", 0)
    replay._seen.clear()
    replay._replays.clear()
    yield
    replay._seen.clear()
    replay._replays.clear()


@pytest.mark.usefixtures("one_stream")
def test_threads_on_one_stream_take_turns() -> None:
    wrong: list[float] = []

    def calls(number: float) -> None:
        x = torch.full((4,), number)
        for _ in range(ROUNDS):
            (found,) = replay.replayed(f"call {number}", [x], [((4,), torch.float32)], lambda x: [2 * x])
            wrong.extend(y for y in found.tolist() if y != 2 * number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=calls, args=(float(number),)) for number in (1, 2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


@pytest.mark.usefixtures("one_stream")
def test_a_setting_is_computed_plainly_just_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BEFORE", 3)
    computed = []

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        computed.append(x)
        return [x + 1]

    captured = replay._captured

    def captured_later(*arguments: Any) -> replay._Replay:
        assert len(computed) == 3, "what the last of them made is there for the capture"
        return captured(*arguments)

    monkeypatch.setattr(replay, "_captured", captured_later)
    x = torch.ones(4)
    found = [replay.replayed("one", [x], [((4,), torch.float32)], compute)[0][0].item() for _ in range(5)]
    assert len(computed) == 3 and found == [2.0] * 5
    assert len(replay._replays) == 1
