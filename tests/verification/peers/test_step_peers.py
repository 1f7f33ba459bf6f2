"""Peers in training steps: what is drawn for them, right ones hold, wrong ones are found and replayed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import shared
from tests.support.peer_examples import EXAMPLES
from tests.support.training_cases import drawn_from, small_model, small_step
from verification.__main__ import main
from verification.failures import VerificationFailure, WrongResult
from verification.peers.known_peers import KNOWN
from verification.peers.training.known_step_peers import load_step_peer
from verification.peers.training.step_peer import attention_case
from verification.peers.training.step_peer_experiment import draw_steps, step_experiment
from verification.peers.training.wrapper_peers import WRAPPER_PEERS
from verification.run.backends import GlooBackend
from verification.runner import PROFILES
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD

pytestmark = pytest.mark.ranks


def drawn(name: str, world: int, count: int = 40) -> list[TrainingCase]:
    return drawn_from(draw_steps(load_step_peer(name), world), count)


@pytest.mark.parametrize("name", KNOWN)
def test_drawn_attention_cases_fit_the_claim(name: str) -> None:
    peer = KNOWN[name]
    for world in peer.worlds:
        found = drawn(name, world)
        assert len(found) >= 20, "a claim takes Cases to the nearest one, and leaves out few"
        for case in found:
            assert case.model.kind == "sdpa" and case.checkpointing != "selective"
            calls = [attention_case(part, data_rank) for part in case.parts for data_rank in range(part.data)]
            assert all(peer.claims(call) == call for call in calls)
        varied = ("wrapper", "accumulation", "optimiser", "labels", "steps", "checkpointing")
        assert all(len({getattr(case, field) for case in found}) > 1 for field in varied)


ENGINES = {module for peer in WRAPPER_PEERS for module in peer.preload}
two = shared(lambda: GlooBackend(60.0, preload=(*TRAINING_PRELOAD, *ENGINES)), 2)


LARGER = small_model(layers=2, dim=8, heads=4, kv_heads=4, head_dim=4, positions="rotary", tied=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": 2, "clipping": 0.1, "wrapper": "fsdp2", "checkpointing": "non-reentrant", "labels": "some"},
        {"data": 2, "resumed": "zigzag"},  # from rings of one rank to one of both: the attention has its new layout
    ],
    ids=str,
)
def test_an_attention_that_is_right_holds(two: GlooBackend, changes: dict[str, Any]) -> None:
    case = small_step(2, order="zigzag", dtype="float32", model=LARGER, steps=2, exchange="ring", **changes)
    ratios = step_experiment("torch-context-parallel").check(two, case)
    assert 0 < ratios["parameters after the last"] < 1
    assert "bytes of the steps" not in ratios, "messages of a peer are not counted"


@pytest.mark.parametrize("name, said", [("detached", "gradients"), ("transposed", "attend returned out of shape")])
def test_an_attention_that_is_wrong_is_found(two: GlooBackend, name: str, said: str) -> None:
    case = small_step(2, data=2, exchange="ring")  # each rank has a whole sequence
    step_experiment(f"{EXAMPLES}:sound").check(two, case)
    with pytest.raises(VerificationFailure, match=said):
        step_experiment(f"{EXAMPLES}:{name}").check(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("stage, dtype", [(1, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")])
def test_zero_holds(two: GlooBackend, stage: int, dtype: str) -> None:
    case = small_step(
        2, dtype=dtype, model=LARGER, accumulation=2, steps=2, clipping=0.02, optimiser="adamw", labels="shards",
        checkpointing="selective",
    )  # fmt: skip
    ratios = step_experiment(f"deepspeed/zero{stage}").check(two, case)
    assert 0 < ratios["gradients after step one"] < 1 and 0 < ratios["norm of the gradients"] < 1


def test_fairscale_holds_only_as_guarded(two: GlooBackend) -> None:
    case = small_step(2, model=LARGER, accumulation=2, steps=2, labels="some", checkpointing="reentrant")
    guarded, as_written = step_experiment("fairscale/guarded").check, step_experiment("fairscale/as-written").check
    assert max(guarded(two, case).values()) < 1e-3
    guarded(two, replace(case, dtype="float32", clipping=0.1))
    as_written(two, replace(case, steps=1))
    with pytest.raises(WrongResult) as caught:
        as_written(two, case)
    assert caught.value.broken == "parameters after the last" and (caught.value.ratio or 0) > 1e6


def training(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    where = ("--seed", "3", "--failures", str(folder / "kept"), "--json", str(folder / "report.json"))
    status = main(["training", "--peer", *arguments, *where])
    record = json.loads((folder / "report.json").read_text())
    assert record["seed"] == 3 and record["commit"] and record["command"].startswith("python -m verification training")
    return status, record["peers"][0]


@pytest.mark.slow
def test_wrong_training_is_shrunk_saved_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "ci", replace(PROFILES["ci"], budget=600))  # whatever shrinks, shrinks to its end
    status, peer = training(tmp_path, "fairscale/as-written", "--world", "2", "--examples", "20", "--profile", "ci")
    assert (status, peer["verdict"]) == (1, "counter-example")
    case = TrainingCase.from_dict(peer["case"])
    assert (case.world, case.wrapper, case.model.layers) == (2, "none", 1)
    # The gradients of the second step are wrong: their norm shows it, or the parameters, or the loss of a third.
    assert case.steps == {"norms": 2, "parameters": 2, "losses": 3}[peer["message"].partition(":")[0]]
    file = Path(shlex.split(peer["replay"])[-1])
    record = {"kind": "step peer", "step_peer": "fairscale/as-written", "training_case": peer["case"]}
    assert json.loads(file.read_text()) == record
    assert main(["replay", str(file)]) == 1
    file.write_text(json.dumps({"step_peer": "fairscale/guarded", "training_case": peer["case"]}))
    assert main(["replay", str(file)]) == 0


@pytest.mark.slow
def test_peers_run_on_their_adapters_ranks(tmp_path: Path) -> None:
    sound = (f"{EXAMPLES}:sound", "--examples", "2")
    status, peer = training(tmp_path, *sound)  # on one rank, since it is for no more
    assert (status, peer["verdict"], peer["examples"], peer["message"]) == (0, "held", 2, None)
    status, peer = training(tmp_path, *sound, "--world", "2")
    assert (status, peer["verdict"], peer["examples"]) == (2, "not run", 0)
    assert "mine supports 1 ranks, none of which --world or --case names" in peer["message"]
