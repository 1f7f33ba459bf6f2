"""The runner finds planted defects, shrinks them, saves them and replays them; and it says when nothing is
wrong.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_case import plain
from rich.console import Console

from reference.pattern import Branch, Pattern
from ring.transport import RecordingTransport
from verification import execute, hunt, laws, properties, runner
from verification.backends import GlooBackend, SimBackend, Unavailable, open_backend
from verification.case import Case
from verification.failures import RankHang, WrongResult
from verification.replay import replay
from verification.report import Report

SHORT = runner.Profile("for tests", 100, budget=20)


# --- defects, planted in every rank before its first task
# --------------------------------------------------------------


def plant(spoil: Callable[..., Any]) -> None:
    """Replace the ring_attention that ranks call by `spoil(the real one, arguments, options)`."""
    real = execute.ring_attention
    execute.ring_attention = lambda *args, **kwargs: spoil(real, args, kwargs)


def plant_wrong_result() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        pattern, layout = args[3], args[4]
        if layout.n < 6 or not pattern.causal:
            return result
        return (result[0] * 1.01, result[1]) if isinstance(result, tuple) else result * 1.01

    plant(spoil)


def plant_hang() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if args[4].n >= 4 and kwargs["exchange"] == "direct" and kwargs["group"].rank == 1:
            time.sleep(3600)
        return real(*args, **kwargs)

    plant(spoil)


class ReceiveFirst(RecordingTransport):
    """A transport that sends nothing before what it is to receive is there: a ring of such ranks waits for ever."""

    def post(self, sends: Any, receives: Any) -> Any:
        self.inner.post([], receives).wait()
        return self.inner.post(sends, [])


def plant_receive_first() -> None:
    """On three ranks or more."""
    from ring.exchange import Exchange

    real = Exchange.__init__

    def init(self: Any, plan: Any, transport: Any, *args: Any) -> None:
        chosen: Any = ReceiveFirst(transport) if transport.world_size > 2 else transport
        real(self, plan, chosen, *args)

    Exchange.__init__ = init  # type: ignore[method-assign, assignment]


def plant_crash() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if args[0].dtype == torch.bfloat16 and kwargs["group"].rank == 1:
            os.abort()
        return real(*args, **kwargs)

    plant(spoil)


def plant_exception() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if args[0].shape[0] == 3:
            raise RuntimeError("three is too many")
        return real(*args, **kwargs)

    plant(spoil)


def plant_two_defects() -> None:
    plant_exception()
    plant_wrong_result()


def plant_16_bit_accumulator() -> None:
    from ring.accumulator import Accumulator

    real = Accumulator.merge

    def merge(self: Any, *args: Any) -> None:
        real(self, *args)
        self.out.copy_(self.out.bfloat16())

    Accumulator.merge = merge  # type: ignore[method-assign, assignment]


def plant_swallowed_error() -> None:
    """The rank that is called wrongly gives back something instead of raising; the others are called rightly."""
    from ring import agreement

    agreement.validate = lambda call, transport: None


def plant_zigzag_back_to_front() -> None:
    from ring.layout import Layout

    real = Layout.zigzag

    def zigzag(n: int, p: int) -> Layout:
        layout = real(n, p)
        order = torch.cat([layout.positions(rank) for rank in range(p)])
        return Layout.from_cuts(order.flip(0), layout.cuts) if n >= 5 else layout

    Layout.zigzag = zigzag  # type: ignore[method-assign]


# --- helpers
# ----------------------------------------------------------------------------------------------------------


def found_by(
    prepare: Callable[[], None] | None,
    world: int = 2,
    examples: int = 150,
    patience: float = 3.0,
    workshop: bool = False,
    budget: float = 120.0,
) -> list[tuple[Any, Case]]:
    """What is found on gloo, shrunk there or, with `workshop`, in a simulation that has the same defect."""
    backend, simulation = GlooBackend(patience, prepare), SimBackend(patience, prepare)
    backend.start(world)
    try:
        report = Report(Console(quiet=True))
        report.start_world(world, examples)
        workplace = simulation if workshop else None
        search = hunt.Hunt(runner.EXAMPLES, backend, report, world, budget, workshop=workplace)
        found = search.explore(examples, 1)
    finally:
        backend.close()
        simulation.close()
    assert all(one.backend == "gloo" for one in found)
    return [(one.failure, one.subject) for one in found]


@pytest.fixture(scope="module")
def ranks() -> Any:
    backend = GlooBackend(10.0)
    backend.start(3)
    yield backend
    backend.close()


# --- examples
# ---------------------------------------------------------------------------------------------------------


def test_a_wrong_result_is_found_and_shrunk() -> None:
    (failure, case), *others = found_by(plant_wrong_result)
    assert not {failure.kind for failure, _ in others} - {"wrong result"}
    assert failure.kind == "wrong result" and "out" in str(failure)
    assert case.tokens == 6 and case.pattern == Pattern.dense(causal=True)
    assert (case.dtype, case.heads, case.batch, case.exchange, case.group) == ("float32", 1, 1, "ring", None)


def test_a_layout_that_is_not_as_defined_is_named_before_what_follows_from_it() -> None:
    (failure, case), *_ = found_by(plant_zigzag_back_to_front)
    assert "layout: rank 0 holds positions [2, 1, 4]; the zigzag order gives it [0, 3, 4]" in str(failure), str(failure)
    assert properties.broken_by(failure) == "layout as defined"
    assert (case.tokens, case.order, case.heads, case.batch) == (5, "zigzag", 1, 1)


def test_a_hang_is_found_shrunk_quickly_and_shown_with_stacks() -> None:
    ((failure, case),) = found_by(plant_hang)
    assert failure.kind == "rank hang" and "time.sleep(3600)" not in str(failure) and "spoil" in str(failure)
    assert "within 3 s" in str(failure), "the minimal case is shown once with all the patience"
    assert case.tokens == 4 and case.exchange == "direct" and len(case.ranks) == 2


def test_a_hang_of_three_ranks_found_on_four_is_shrunk_in_simulation_and_confirmed_where_it_was_found() -> None:
    ((failure, case),) = found_by(plant_receive_first, world=4, workshop=True)
    assert failure.kind == "rank hang" and "within 3 s" in str(failure) and "(world of 3)" in str(failure)
    assert (case.world, case.group, case.tokens, case.exchange) == (3, None, 3, "ring")
    assert (case.pattern, case.batch, case.heads, case.dtype) == (Pattern.dense(), 1, 1, "float32")


def test_a_wrong_result_found_on_gloo_is_shrunk_in_simulation_alike() -> None:
    (failure, case), *_ = found_by(plant_wrong_result, workshop=True)
    assert failure.kind == "wrong result" and case.tokens == 6 and case.pattern == Pattern.dense(causal=True)
    assert case.world == 1, "on the fewest ranks that show it"


def test_a_crash_is_found_and_the_next_world_is_as_good_as_new() -> None:
    ((failure, case),) = found_by(plant_crash)
    assert failure.kind == "rank crash" and "SIGABRT" in str(failure)
    assert case.dtype == "bfloat16" and case.tokens == 1


def test_distinct_defects_are_all_reported() -> None:
    found = found_by(plant_two_defects, workshop=True, budget=30)
    assert {failure.kind for failure, _ in found} == {"wrong result", "rank error"}
    assert all(case.batch == 3 for failure, case in found if failure.kind == "rank error")


def test_examples_are_as_many_as_asked_for_and_repeat_with_the_seed(ranks: GlooBackend) -> None:
    drawn: list[list[str]] = []
    for seed in (1, 1, 2):
        seen: list[str] = []

        def check(backend: Any, case: Case, seen: list[str] = seen) -> dict[str, float]:
            seen.append(case.to_json())
            return {"anything": 0.5}

        report = Report(Console(quiet=True))
        report.start_world(3, 40)
        experiment = replace(runner.EXAMPLES, check=check)
        assert hunt.Hunt(experiment, ranks, report, 3).explore(40, seed) == []
        assert report.examples == len(seen) == 40
        drawn.append(seen)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_failure_that_does_not_come_back_is_still_a_failure(ranks: GlooBackend) -> None:
    calls: list[str] = []

    def check(backend: Any, case: Case) -> dict[str, float]:
        calls.append(case.to_json())
        if len(calls) == 5:
            raise WrongResult("values: out is wrong, this once")
        return {}

    report = Report(Console(quiet=True))
    report.start_world(3, 40)
    found = hunt.Hunt(replace(runner.EXAMPLES, check=check), ranks, report, 3).explore(40, 1)
    ((failure, case),) = ((one.failure, one.subject) for one in found)
    assert str(failure) == "values: out is wrong, this once" and case.to_json() == calls[4]
    assert calls.count(calls[4]) == 1, "a failing example is never run again"


@pytest.mark.parametrize("shrinks", (True, False))
def test_a_hang_is_shrunk_only_where_it_may(ranks: GlooBackend, shrinks: bool) -> None:
    seen: list[Case] = []

    def check(backend: Any, case: Case) -> dict[str, float]:
        seen.append(case)
        if case.tokens >= 4:
            raise RankHang("no answer")
        return {}

    search = hunt.Hunt(
        replace(runner.EXAMPLES, check=check), ranks, Report(Console(quiet=True)), 3, shrinks_hangs=shrinks
    )
    patience = ranks.patience
    found = search.find(100, "hang")
    ranks.patience = patience
    first = next(number for number, case in enumerate(seen) if case.tokens >= 4)
    assert found is not None and search.examples == first
    assert (len(seen) > first + 1) == shrinks and (found.subject.tokens == 4 or not shrinks)
    assert shrinks or found.subject is seen[first]


def test_a_strategy_that_lets_nothing_through_ends_the_search(ranks: GlooBackend) -> None:
    nothing = replace(runner.EXAMPLES, draw=lambda world: runner.EXAMPLES.draw(world).filter(lambda case: False))
    search = hunt.Hunt(nothing, ranks, Report(Console(quiet=True)), 3)
    assert search.explore(100, 1) == [] and search.examples == 0


def test_a_fault_of_the_machinery_is_no_counter_example(ranks: GlooBackend) -> None:
    def check(backend: Any, case: Case) -> dict[str, float]:
        raise KeyError("not the ranks' fault")

    report = Report(Console(quiet=True))
    report.start_world(3, 40)
    with pytest.raises(hunt.ToolError):
        hunt.Hunt(replace(runner.EXAMPLES, check=check), ranks, report, 3).explore(40, 1)


# --- the whole run
# ----------------------------------------------------------------------------------------------------


def small_plan(folder: Path, worlds: tuple[int, ...], examples: int) -> runner.Plan:
    return runner.Plan(worlds, SHORT, examples, seed=5, backend="gloo", failures=folder)


def test_a_run_saves_what_a_replay_finds_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.real_size, "run", lambda *args: None)
    monkeypatch.setattr(runner, "LAWS", ())
    report = runner.run(
        small_plan(tmp_path, (2, 3), 60), Report(Console(quiet=True)), GlooBackend(3.0, plant_wrong_result)
    )
    assert {failure.world for failure in report.failures} == {2, 3}, "the run goes on after a failure"
    data = report.to_dict()
    assert data["held"] is False and len(data["failures"]) == len(report.failures)
    for entry in data["failures"]:
        assert entry["backend"] == "gloo"
        file = Path(shlex.split(entry["replay"])[-1])
        assert json.loads(file.read_text()) == entry["case"]
        assert Case.from_json(file.read_text()).pattern.causal
        again = replay(file, Report(Console(quiet=True)), GlooBackend(3.0, plant_wrong_result))
        assert [failure.kind for failure in again.failures] == ["wrong result"]
        assert not replay(file, Report(Console(quiet=True)), GlooBackend()).failures, "without the defect it holds"


def test_a_file_that_is_no_counter_example_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", '{"world": 1}', '{"law": "gravity", "case": {}, "how": {}}'):
        file = tmp_path / "case.json"
        file.write_text(content)
        with pytest.raises(Unavailable, match="argument FILE: cannot read a counter-example"):
            replay(file, Report(Console(quiet=True)), GlooBackend())


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="there are GPUs for all these ranks")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(Unavailable, match="nccl needs 8 GPUs for 8 ranks, there are"):
        open_backend("nccl").start(8)


def test_the_profile_quick_draws_enough() -> None:
    plan = runner.Plan(runner.WORLDS, runner.PROFILES["quick"], None, 0, "gloo", Path("."))
    counts = {world: plan.examples_for(world) for world in plan.worlds}
    assert sum(count for world, count in counts.items() if world > 1) >= 3000
    assert min(counts.values()) >= 100


# --- laws
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.name)
def test_laws_hold(law: laws.Law, ranks: GlooBackend) -> None:
    report = Report(Console(quiet=True))
    report.start_world(3, 8)
    found = hunt.Hunt(runner.law_experiment(law), ranks, report, 3).explore(min(8, law.most), 1)
    assert not found, str(found)


def broken(prepare: Callable[[], None], law: Callable[..., float], case: Case, how: laws.How) -> str:
    backend = GlooBackend(10.0, prepare)
    backend.start(case.world)
    try:
        with pytest.raises(WrongResult) as caught:
            law(backend, case, how)
    finally:
        backend.close()
    return str(caught.value)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
def test_a_16_bit_accumulator_makes_the_error_grow(exchange: str) -> None:
    case = plain(8, tokens=512, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16", exchange=exchange)
    message = broken(plant_16_bit_accumulator, laws.check_growth, case, {"shift": 1})
    assert "the RMS error of out" in message


def test_a_rank_that_does_not_refuse_is_found() -> None:
    case = plain(2)
    how = {"mistakes": [["one token too many in q", 1]]}
    backend = GlooBackend(2.0, plant_swallowed_error)
    backend.start(2)
    try:
        with pytest.raises(AssertionError):
            laws.check_misused(backend, case, how)
    finally:
        backend.close()


def test_patterns_are_permuted_with_their_heads() -> None:
    pattern = Pattern((Branch(8, 2, (0, 1, 1, 0)), Branch(4, 1, 0, range(0, 2))))
    assert laws.permuted(pattern, (2, 3, 0, 1)) == Pattern((Branch(8, 2, (1, 0, 0, 1)), Branch(4, 1, 0, range(2, 4))))
    assert laws.permuted(pattern, (0, 2, 1, 3)) is None, "heads 0 and 1 would be no range"


def test_a_case_of_gpus_is_replayed_where_there_are_none(tmp_path: Path) -> None:
    """On the CPU it has the bounds and the bytes of the CPU, and it is said."""
    case = plain(2, device="cuda", kernel="cudnn", dtype="bfloat16", exchange="direct", head_dim=8)
    (tmp_path / "case.json").write_text(case.to_json())
    console = Console(record=True, width=200)
    report = replay(tmp_path / "case.json", Report(console), SimBackend())
    assert not report.failures and report.examples == 1
    assert "the Case has device 'cuda'; on sim it runs on 'cpu'" in console.export_text()
