"""Mutated records of every kind are refused in one line, or replayed, and no module that they name is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.drawing import draw_many
from verification.__main__ import main
from verification.check.laws import LAWS
from verification.experiments import EXAMPLES, law_experiment
from verification.faults.fault_experiment import FAULTS
from verification.models.strategies import model_cases
from verification.peers.peer_experiment import LAWS_OF_ANY, experiment, peer_law
from verification.peers.training.step_peer_experiment import step_experiment
from verification.record_kinds import KINDS, Record, kind_of
from verification.run.backends import GlooBackend
from verification.serving.strategies import serving_cases
from verification.training.training_run import TRAINING

MARK = '"a mark that stands for raw text"'
VALUES = (
    "null", "true", "-1", "1.5", '""', "[[]]", "[0, null]", '{"a": 0}', "NaN", "-Infinity", "1e400", "1e-320",
    "9" * 5000, "1" + "0" * 4000, "[" * 10**5, "[" * 900 + "]" * 900, r'"\u001b[2J\r\u0000"', r'"\u202e\u2028\ud800"',
    '"trap"', '"trap:adapter.x"', '"os:system"', '"./trap.py:x"', '"verification.peers.adapters.trap:x"',
)  # fmt: skip


@cache
def stock() -> list[dict[str, Any]]:
    """Return a record of each kind that runs save, of each law too, on 2 ranks."""
    peer = "ring-attention-pytorch"
    experiments = [EXAMPLES, FAULTS, TRAINING, *map(law_experiment, LAWS), step_experiment("fairscale/guarded")]
    experiments += [experiment(peer), peer_law(peer, LAWS_OF_ANY[0])]
    return [
        *(x.record_of(next(filter(None, draw_many(x.draw(2), 10)))) for x in experiments),
        Record("model", draw_many(model_cases(2), 1)[0].to_dict(), names={"model": "trap:adapter"}).to_dict(),
        Record("server", draw_many(serving_cases(2), 1)[0].to_dict(), names={"server": "trap:adapter"}).to_dict(),
        Record("real size", {"world": 2, "tokens": 512, "seed": 0}).to_dict(),
        {"links": {"world": 2}},  # as an older record
        Record("links", {"world": 2}).to_dict(),
        Record("long", {"world": 2, "tokens": 64, "kind": "own", "line": "tokens=64 causal=true"}).to_dict(),
    ]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a record with each of its keys or indices."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw a record with a value or a name of a field replaced, with flipped bits, or with the end of another one."""
    record, other = (json.loads(json.dumps(draw(st.sampled_from(stock())))) for _ in range(2))
    kind = draw(st.sampled_from(("value", "field", "bits", "splice")))
    container, key = draw(st.sampled_from(list(places(record))))
    if kind == "value":
        container[key] = json.loads(MARK)
    elif kind == "field":
        moved = container.pop(key)
        if isinstance(container, dict):
            container[str(draw(st.sampled_from(list(places(other))))[1])] = moved
    text = json.dumps(record).replace(MARK, draw(st.sampled_from(VALUES))).encode()
    at = draw(st.integers(0, len(text) - 1))
    if kind == "bits":
        return text[:at] + bytes([text[at] ^ draw(st.integers(1, 255))]) + text[at + 1 :]
    return text[:at] + json.dumps(other).encode()[draw(st.integers(0, 50)) :] if kind == "splice" else text


class Started(BaseException):
    """The file was read, and its ranks would start."""


@given(text=mutated())
@settings(max_examples=150, derandomize=True, deadline=20_000, database=None, suppress_health_check=list(HealthCheck))
def test_a_mutated_record_is_refused_or_read(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {*KINDS} == {kind_of(record) for record in stock()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("trap.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    Path("case.json").write_bytes(text)
    with patch.object(GlooBackend, "start", side_effect=Started):
        try:
            assert main(("replay", "case.json")) == 2
            error = capsys.readouterr().err
            assert error.startswith("python -m verification: error: ") and len(error) < 1500
            assert error.count("\n") == 1 and error[:-1].isprintable()
        except Started:
            assert isinstance(json.loads(text), dict)
    assert {path.name for path in tmp_path.iterdir()} == {"case.json", "trap.py"}
