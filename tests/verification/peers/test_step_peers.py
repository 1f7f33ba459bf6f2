"""Peers in training steps: what is drawn for each, one that holds, one that trains wrong without a word, and those that
cannot be run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reference.pattern import Pattern
from tests.support.training_cases import drawn_from, small_model, small_step
from verification.__main__ import main
from verification.case import Case
from verification.failures import VerificationFailure, WrongResult
from verification.peers.known_peers import KNOWN
from verification.peers.training import attention_in_step
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS, load_step_peer
from verification.peers.training.saved_step_peer import read_step_peer_example
from verification.peers.training.step_peer_experiment import claimed_step, draw_steps, step_experiment
from verification.peers.training.wrapper_peers import WRAPPER_PEERS
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend, Unavailable
from verification.runner import PROFILES
from verification.search.experiment import ToolError
from verification.training.rank.ring_model import LanguageModel
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD

EXAMPLES = "tests.support.peer_examples"
ENGINES = {module for peer in WRAPPER_PEERS for module in peer.preload}


# --- what is claimed --------------------------------------------------------------------------------------------------


def drawn(name: str, world: int, count: int = 40) -> list[TrainingCase]:
    """What a run would draw: all of it is claimed."""
    return drawn_from(draw_steps(load_step_peer(name), world), count)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_drawn_for_an_attention_is_what_it_claims(name: str) -> None:
    peer = KNOWN[name]
    for world in peer.worlds:
        cases = drawn(name, world)
        assert len(cases) >= 20, "a claim takes Cases to the nearest one, and leaves out few"
        for case in cases:
            assert case.model.kind == "sdpa" and case.checkpointing != "selective"
            for part in case.parts:
                for data_rank in range(part.data):
                    call = attention_in_step.call_of(part, data_rank)
                    assert peer.claims(call) == call
        varied = ("wrapper", "accumulation", "optimiser", "labels", "steps", "checkpointing")
        assert all(len({getattr(case, field) for case in cases}) > 1 for field in varied)


def test_a_ring_is_given_several_data_ranks_and_a_second_layout() -> None:
    cases = drawn("torch-context-parallel", 4, 150)
    assert {case.data for case in cases} >= {1, 2}
    assert any(case.resumed == case.order for case in cases)
    assert {case.order for case in cases} == {"zigzag", "contiguous"}
    assert {case.data for case in drawn("yunchang/zigzag", 4)} == {1}, "it takes the default group"


@pytest.mark.parametrize("name", [name for name in KNOWN_STEP_PEERS if name not in KNOWN])
def test_what_is_drawn_for_a_wrapper(name: str) -> None:
    cases = drawn(name, 4)
    for case in cases:
        assert case.wrapper == "none" and case.resumed is None
        if name.startswith("deepspeed"):
            assert case.dtype != "float64"
        else:
            assert case.dtype != "float64" or case.clipping is None
    assert {case.model.kind for case in cases} == {"llama", "longnet", "sdpa"}


@pytest.mark.parametrize("change", [{"scale": 1.0}, {"dtype": "float16"}, {"lse": "returned"}])
def test_what_a_step_cannot_have_is_left_out(change: dict[str, Any]) -> None:
    def claims(case: Case) -> Case:
        found = KNOWN["torch-context-parallel"].claims(case)
        assert found is not None
        return replace(found, **change)

    peer = replace(KNOWN["torch-context-parallel"], claims=claims)
    assert attention_in_step.nearest(peer, small_step(2)) is None


def test_models_whose_norms_are_steps_are_widened_in_lower_precisions() -> None:
    """As they are drawn, in fp64 alone, for this project's own."""
    model = small_model(kind="longnet", norm="layer", bias=True, dim=2)
    case = small_step(2, model=model, pattern=Pattern.longnet([4], [1], 1, True, "torchscale"))
    assert model.has_steps
    for name in ("yunchang/basic", "deepspeed/zero3"):
        found = claimed_step(load_step_peer(name), case)
        assert found is not None and found.dtype != "float64" and (found.model.dim, found.model.head_dim) == (4, 4)
    found = claimed_step(load_step_peer("fairscale/guarded"), case)
    assert found is not None and found.dtype == "float64" and found.model == model


def test_a_claim_that_does_not_keep_to_its_form_is_no_counter_example() -> None:
    peer = load_step_peer(f"{EXAMPLES}:claims_raise")
    with pytest.raises(ToolError, match="claims of mine raised ZeroDivisionError"):
        claimed_step(peer, small_step(1))
    growing = replace(peer, claims=lambda case: replace(case, tokens=case.tokens + 1))
    with pytest.raises(ToolError, match="does not support what it made itself"):
        claimed_step(growing, small_step(1))


def test_the_peer_is_in_every_layer_of_a_plain_model() -> None:
    case = small_step(2, model=small_model(layers=2))
    model = LanguageModel(
        case, lambda case, name: attention_in_step.PeerAttention(KNOWN["yunchang/zigzag"], case, name)
    )
    assert sum(isinstance(module, attention_in_step.PeerAttention) for module in model.modules()) == 2


# --- on ranks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooBackend]:
    backend = GlooBackend(60.0, preload=(*TRAINING_PRELOAD, *ENGINES))
    backend.start(2)
    yield backend
    backend.close()


def checked(backend: GlooBackend, name: str, case: TrainingCase) -> dict[str, float]:
    return step_experiment(name).check(backend, case)


LARGER = small_model(layers=2, dim=8, heads=4, kv_heads=4, head_dim=4, positions="rotary", tied=True)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("wrapper", ("none", "ddp", "fsdp2"))
def test_an_attention_that_is_right_holds(ranks: GlooBackend, wrapper: str) -> None:
    case = small_step(
        2, order="zigzag", dtype="float32", model=LARGER, accumulation=2, steps=2, clipping=0.1, exchange="ring",
        wrapper=wrapper, checkpointing="non-reentrant", labels="some",
    )  # fmt: skip
    ratios = checked(ranks, "torch-context-parallel", case)
    assert 0 < ratios["gradients after step one"] < 1
    assert "bytes of the steps" not in ratios, "messages of a peer are not counted"


@pytest.mark.ranks
def test_an_attention_is_given_its_layout_after_a_resume(ranks: GlooBackend) -> None:
    """From rings of one rank to one of both."""
    case = small_step(2, data=2, order="zigzag", dtype="float32", exchange="ring", steps=2, resumed="zigzag")
    checked(ranks, "torch-context-parallel", case)


@pytest.mark.slow
@pytest.mark.ranks
def test_an_attention_that_is_wrong_is_found() -> None:
    backend = GlooBackend(60.0, preload=TRAINING_PRELOAD)
    backend.start(1)
    case = small_step(1, pattern=Pattern.dense(True), exchange="ring")
    try:
        checked(backend, f"{EXAMPLES}:sound", case)
        with pytest.raises(WrongResult) as caught:
            checked(backend, f"{EXAMPLES}:shifted", case)
        assert caught.value.broken == "logits"
        with pytest.raises(VerificationFailure, match="attend returned out of shape"):
            checked(backend, f"{EXAMPLES}:transposed", case)
    finally:
        backend.close()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_zero_holds(ranks: GlooBackend, stage: int, dtype: str) -> None:
    case = small_step(
        2, dtype=dtype, model=LARGER, accumulation=2, steps=2, clipping=0.02, optimiser="adamw", labels="shards",
        checkpointing="selective",
    )  # fmt: skip
    ratios = checked(ranks, f"deepspeed/zero{stage}", case)
    assert 0 < ratios["gradients after step one"] < 1 and 0 < ratios["norm of the gradients"] < 1


UNCLIPPED = small_step(2, model=LARGER, accumulation=2, steps=2, labels="some", checkpointing="reentrant")


@pytest.mark.ranks
def test_fairscale_holds_as_guarded_here_and_not_as_a_user_writes_it(ranks: GlooBackend) -> None:
    assert max(checked(ranks, "fairscale/guarded", UNCLIPPED).values()) < 1e-3
    checked(ranks, "fairscale/guarded", replace(UNCLIPPED, dtype="float32", clipping=0.1))
    checked(ranks, "fairscale/as-written", replace(UNCLIPPED, steps=1))
    with pytest.raises(WrongResult) as caught:
        checked(ranks, "fairscale/as-written", UNCLIPPED)
    assert caught.value.broken == "parameters after the last" and (caught.value.ratio or 0) > 1e6


# --- the command ------------------------------------------------------------------------------------------------------


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, record of the first peer)."""
    where = ("--seed", "3", "--failures", str(folder / "kept"), "--json", str(folder / "report.json"))
    status = main(["training", "--peer", *arguments, *where])
    record = json.loads((folder / "report.json").read_text())
    assert record["seed"] == 3 and record["commit"] and record["command"].startswith("python -m verification training")
    return status, record["peers"][0]


@pytest.mark.ranks
@pytest.mark.slow
def test_what_trains_wrong_is_found_shrunk_saved_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "ci", replace(PROFILES["ci"], budget=600))  # whatever shrinks, shrinks to its end
    status, found = run(tmp_path, "fairscale/as-written", "--world", "2", "--examples", "20", "--profile", "ci")
    assert (status, found["verdict"]) == (1, "counter-example")
    case = TrainingCase.from_dict(found["case"])
    assert (case.world, case.wrapper, case.model.layers) == (2, "none", 1)
    # The first step is right. The gradients of the second are wrong: their norm shows it, or the parameters, or the
    # loss of a third.
    assert case.steps == {"norms": 2, "parameters": 2, "losses": 3}[found["message"].partition(":")[0]]
    file = shlex.split(found["replay"])[-1]
    assert json.loads(Path(file).read_text()) == {"step_peer": "fairscale/as-written", "training_case": found["case"]}
    assert main(["replay", file]) == 1
    guarded = tmp_path / "guarded.json"
    guarded.write_text(json.dumps({"step_peer": "fairscale/guarded", "training_case": found["case"]}))
    assert main(["replay", str(guarded)]) == 0


@pytest.mark.ranks
def test_a_peer_that_is_not_installed_is_not_run(tmp_path: Path) -> None:
    status, found = run(tmp_path, f"{EXAMPLES}:needy", "--examples", "2")
    assert (status, found["verdict"]) == (2, "not run")
    assert "the package no-such-distribution is not installed" in found["message"]


@pytest.mark.ranks
def test_a_peer_is_run_on_the_ranks_of_its_adapter(tmp_path: Path) -> None:
    status, found = run(tmp_path, f"{EXAMPLES}:sound", "--examples", "2")
    assert (status, found["verdict"], found["examples"]) == (0, "held", 2), "on one rank, since it is for no more"
    status, found = run(tmp_path, f"{EXAMPLES}:sound", "--examples", "2", "--world", "2")
    assert (status, found["verdict"]) == (2, "not run")
    assert found["message"] == "mine is for 1 ranks, none of which --world names"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "nobody"], "argument NAME: 'nobody' is no peer; it must be one of ring-attention-pytorch, "),
        (["--peer", "yunchang", "--backend", "nccl"], "argument --peer: peers run on gloo, got --backend nccl"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["training", *arguments]) == 2
    assert said in capsys.readouterr().err


SAVED = {"step_peer": "fairscale/guarded", "training_case": small_step(2).to_dict()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_peer": 3}, "step_peer is 3; it must be package.module:adapter, or one of "),
        ({"step_peer": "no.such:peer"}, "no.such:peer cannot be imported"),
        ({"training_case": {}}, "a TrainingCase: missing fields"),
        ({"more": 1}, "a counter-example of a peer in a training step"),
    ],
)
def test_a_malformed_record_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_step_peer_example(SAVED | changes)


def test_a_replay_in_a_simulation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(SAVED))
    with pytest.raises(Unavailable, match="argument --backend: a peer needs torch.distributed, on gloo; got sim"):
        replay(file, Report(Console(quiet=True)), SimBackend())
