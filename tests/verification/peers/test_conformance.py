"""`python -m verification conformance`: cells judged on their own, their replays, the record and its page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.commands import ROOT
from tests.support.peer_examples import EXAMPLES
from tests.support.printed import unbroken
from verification.__main__ import main
from verification.case import Case
from verification.case_line import read_case_line
from verification.check.attention_on_ranks import any_case
from verification.cli.conformance import PROFILE
from verification.peers.conformance import memory, traffic
from verification.peers.conformance.columns import COLUMNS, Column
from verification.peers.conformance.memory import peak_of_arrays, peak_of_tensors
from verification.peers.conformance.page import page
from verification.peers.conformance.row import FAILED, HELD, MEASURES, NAMES, NOT_CLAIMED, NOT_RUN, RING, Row, run_row
from verification.runner import RunPlan

pytestmark = pytest.mark.ranks

MISTAKES = "tests.support.ring_with_mistakes"
MEMORY, BYTES = MEASURES
SEARCHED = tuple(column.name for column in COLUMNS)
OUTPUT, GRADIENTS, LSE, GROUPED, REPEATABLE = "output", "gradients", "lse", "GQA", "repeatable"
CLAIMED = {OUTPUT, GRADIENTS, LSE, GROUPED, REPEATABLE}  # by the ring with mistakes, besides what is measured


def row(name: str, failures: Path, only: tuple[str, ...] = SEARCHED, worlds: tuple[int, ...] = (2,)) -> Row:
    return run_row(name, RunPlan(worlds, PROFILE, 10, 3, "gloo", failures, only=only))


def columns(done: Row, verdict: str) -> set[str]:
    return {cell.column for cell in done.cells.values() if cell.verdict == verdict}


@pytest.mark.parametrize("column", COLUMNS[:-1], ids=lambda column: column.name)
def test_columns_draw_cases_with_their_feature_alone(column: Column) -> None:
    assert column.name in {GRADIENTS, REPEATABLE} or not column.has(read_case_line("world=2"))

    @settings(
        max_examples=15, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(column.draw(3, any_case))
    def features(case: Case) -> None:
        with_it = {x.name for x in COLUMNS if x.name not in {GRADIENTS, REPEATABLE} and x.law is None and x.has(case)}
        assert column.has(case) and with_it <= {column.name, OUTPUT, LSE}, "a forward is of both"

    features()


def test_right_ring_holds_all_that_it_claims(tmp_path: Path) -> None:
    done = row(f"{MISTAKES}:right", tmp_path)
    assert columns(done, HELD) == CLAIMED and columns(done, NOT_CLAIMED) == set(SEARCHED) - CLAIMED
    assert all(done.cells[name].examples == 10 for name in CLAIMED)
    assert done.cells["sinks"].reason == "the claim leaves no Case with a sink for each head"


@pytest.mark.parametrize(
    "name, wrong",
    [
        (f"{MISTAKES}:partial_lse", {GRADIENTS, GROUPED}),
        (f"{MISTAKES}:shared_buffer", {REPEATABLE}),
        (f"{MISTAKES}:halved_lse", {LSE, GROUPED}),
        (f"{EXAMPLES}:drops_sinks", {"sinks"}),
    ],
)
def test_mistakes_fail_in_their_cells_and_replay(
    name: str, wrong: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = row(name, tmp_path, (OUTPUT, GRADIENTS, LSE, GROUPED, REPEATABLE, "sinks"), (1, 2))
    assert columns(done, FAILED) == wrong and {OUTPUT} <= columns(done, HELD), done.to_dict()
    for failed in wrong:
        cell = done.cells[failed]
        assert cell.case is not None and cell.case["tokens"] <= 8 and cell.replay is not None
        python, _, _, *command = shlex.split(cell.replay)
        command += ["--failures", str(tmp_path)] if command[0] == "peers" else []
        assert (python, main(command)) == ("python", 1)
        assert f"counter-example: {cell.check} (" in unbroken(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, holds", [(f"{MISTAKES}:right", True), (RING, True), ("verification.peers.example:adapter", False)]
)
def test_gathered_keys_are_no_memory_of_n_over_p(name: str, holds: bool, tmp_path: Path) -> None:
    cell = row(name, tmp_path, (MEMORY,), ()).cells[MEMORY]
    assert (cell.verdict, "not O(n/p)" in (cell.message or "")) == ((HELD, False) if holds else (FAILED, True))
    (same, grown) = map(float, re.findall(r"x(\d+\.\d\d) ", cell.reason))
    assert same < 0.7 and grown == 1 if holds else same > 0.8 and grown > 1.2
    assert holds or cell.replay == f"python -m verification conformance {name} --only memory"


@pytest.mark.parametrize(
    "name, verdict, said",
    [
        (f"{MISTAKES}:right", HELD, "x2.0, x4.0; x6.0, x12.0"),  # its blocks go once more, home, on any ranks
        (f"{MISTAKES}:sent_twice", FAILED, "x2.0, x6.0; x6.0, x18.0"),
        (f"{MISTAKES}:sends_nothing", NOT_RUN, "keys take a way that is not seen"),
    ],
)
def test_bytes_grow_as_those_of_a_ring_or_fail(name: str, verdict: str, said: str, tmp_path: Path) -> None:
    cell = row(name, tmp_path, (BYTES,), ()).cells[BYTES]
    assert cell.verdict == verdict and said in (cell.shown or cell.reason), cell
    assert (cell.message or "").startswith("more than a ring: ") == (verdict == FAILED) == bool(cell.replay)


def test_peaks_are_those_of_what_lives_at_once() -> None:
    def call(ones: Any) -> Any:
        for _ in range(3):
            first, second = ones(10**5), ones(2 * 10**5)  # the earlier two live until both are there
            del first
        return second

    peaks = peak_of_tensors(lambda: call(torch.ones)), peak_of_arrays(lambda: call(np.ones))
    assert peaks[0] == 4 * 5 * 10**5 and 0 <= peaks[1] - 8 * 5 * 10**5 < 10**4, peaks


@pytest.mark.parametrize(
    "peer, reason",
    [
        ("needy", "the package no-such-distribution is not installed"),
        ("claims_nothing", "claims of mine returned None for all 20 Cases that it was given; it must return"),
        ("sound", "mine supports 1 ranks, none of which --world names"),
        ("number", f"{EXAMPLES}:number is 7; it must be a verification.peers.Peer"),
    ],
)
def test_all_cells_say_why_they_are_not_run(peer: str, reason: str, tmp_path: Path) -> None:
    done = row(f"{EXAMPLES}:{peer}", tmp_path, NAMES, (2,))
    assert {cell.verdict for cell in done.cells.values()} == {NOT_RUN} and list(done.cells) == list(NAMES)
    assert all(reason in cell.reason for cell in done.cells.values())


def test_the_command_writes_its_record_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{EXAMPLES}:{name}" for name in ("sound", "no_lse", "raises")]
    files = ("--json", str(tmp_path / "record.json"), "--page", str(tmp_path / "page.md"), "--failures", str(tmp_path))
    assert main(("conformance", *names, "zz.adapter", "--examples", "2", "--seed", "1", *files)) == 2
    record = json.loads((tmp_path / "record.json").read_text())
    assert (tmp_path / "page.md").read_text() == page(record, "record.json")
    assert (record["seed"], record["examples"], record["columns"]) == (1, 2, list(NAMES))
    assert {"date", "commit", "command", "torch", "python", "device", "worlds", "rows"} <= set(record)
    sound, no_lse, raises, unknown = ({cell["column"]: cell for cell in x["cells"]} for x in record["rows"])
    assert sound[OUTPUT]["verdict"] == HELD and sound["uneven shards"]["verdict"] == NOT_CLAIMED
    for name, fewest in ((MEMORY, 3), (BYTES, 2)):
        assert f"two numbers of ranks from {fewest} on are compared" in sound[name]["reason"]
    assert no_lse[OUTPUT]["verdict"] == NOT_RUN and "backward is False" in no_lse[OUTPUT]["reason"]
    assert "returned no lse" in no_lse[GRADIENTS]["message"], "a cell that cannot be run leaves the others"
    assert all("never in this life" in raises[name]["message"] for name in (OUTPUT, GRADIENTS, REPEATABLE))
    assert "'zz.adapter' is no peer" in unknown[OUTPUT]["reason"]
    assert "sinks: - the claim leaves no Case with a sink" in unbroken(capsys.readouterr().out)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("conformance", "ringg", "--only", "memory")) == 2
    assert "argument NAME: 'ringg' is no peer, close to it: ring" in unbroken(capsys.readouterr().err)


def test_the_page_is_that_of_its_record() -> None:
    record = json.loads((ROOT / "notebooks/data/conformance.json").read_text())
    text = (ROOT / "verification/CONFORMANCE.md").read_text()
    assert text == page(record, "../notebooks/data/conformance.json"), (
        "write it again: python -m verification conformance --page"
    )
    assert re.match(r"# Conformance, 20\d\d-\d\d-\d\d\n", text) and record["date"] in text
    assert "/tmp/" not in text and str(Path.home()) not in text


def test_the_busiest_rank_is_judged() -> None:
    """A ring's bytes, and the largest peak, on all ranks but one."""
    few, many = (read_case_line(f"world={p} tokens={16 * p} heads=1 head_dim=256 causal=true") for p in (2, 4))
    shard = 2 * 16 * 256 * 4  # bytes of its keys and values
    ring, double = ((shard, 3 * shard), (3 * shard, 9 * shard)), (6 * shard, 18 * shard)
    assert traffic.judged([(few, [ring[0]] * 2), (many, [ring[1]] * 4)]).broken == ""
    assert traffic.judged([(few, [ring[0]] * 2), (many, [*[ring[1]] * 3, double])]).broken == "more than a ring"
    cases = [read_case_line(f"world={p} tokens={n} heads=11 head_dim=256 causal=true")
             for p, n in ((3, 6), (3, 24), (4, 8), (4, 24))]  # fmt: skip
    head = 2 * 256 * 4  # bytes of one head of the further keys
    for more, broken in ((head - 1, ""), (head, "not O(n/p)")):
        peaks = [[9 * head] * case.world for case in cases]
        peaks[2][3] += more
        assert memory.judged(list(zip(cases, peaks, strict=True))).broken == broken
