"""Progress: bars on a terminal that vanish, elsewhere a few plain lines that come ever less often."""

from __future__ import annotations

import re

import pytest

from tests.support.printed import printed, recording
from verification.report import progress
from verification.report.progress import RunProgress


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_without_a_terminal_lines_come_ever_less_often(clock: Clock) -> None:
    console = recording()
    with RunProgress(console) as part:
        part.begin("world 2", 600)
        for _ in range(600):
            clock.now += 1.0
            part.advance(0.5)
        part.end()
    lines = printed(console).splitlines()
    when = [int(re.match(r"world 2: (\d+)/600 examples, 1/s, worst error / bound 0.500$", line)[1]) for line in lines]  # type: ignore[index]
    assert when == [5, 15, 35, 75, 135, 195, 255, 315, 375, 435, 495, 555], "and none for the last one"
    assert "\x1b" not in printed(console)


def test_on_a_terminal_a_bar_of_at_most_80_columns_is_drawn_now_and_then(clock: Clock) -> None:
    console = recording(terminal=True)
    with RunProgress(console) as part:
        part.begin("world 1024", 123456)
        for _ in range(100):
            clock.now += 0.1
            part.advance(0.984)
        part.end()
    without_codes = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(console))
    drawn = [line for line in re.split(r"[\r\n]", without_codes) if line.startswith("world 1024 ")]
    assert 15 <= len(drawn) <= 25 and max(map(len, drawn)) <= 80
    assert "worst 0.984" in drawn[-1] and "100/123456" in drawn[-1]
    assert printed(console).endswith(("\x1b[2K", "\x1b[?25h")), "it leaves nothing behind"
