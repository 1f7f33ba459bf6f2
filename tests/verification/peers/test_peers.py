"""Peers, alone and in training steps: a user's own adapter, how each fault is reported, what is refused, the bounds."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import Pattern
from tests.support.plain_case import plain
from tests.support.printed import unbroken
from tests.support.training_cases import drawn_from, small_model, small_step
from verification.__main__ import main
from verification.case import Case
from verification.failures import VerificationFailure, WrongResult
from verification.peers import Refused, probe
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer_experiment import claimed, expect, experiment
from verification.peers.training.known_step_peers import load_step_peer
from verification.peers.training.step_peer import call_of, nearest
from verification.peers.training.step_peer_experiment import claimed_step, draw_steps, step_experiment
from verification.peers.training.wrapper_peers import WRAPPER_PEERS
from verification.run.backends import GlooBackend
from verification.runner import PROFILES
from verification.search.experiment import ToolError
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
EXAMPLES = "tests.support.peer_examples"
PLAIN = plain(1, tokens=5, pattern=Pattern.dense(True), batch=2, seed=3)


def verification(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as scripts do it: with -P, so that the working directory is no place to import from."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'shadows'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "verification", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


NOT_RUN = {
    "dies:adapter": "ended with exit code 3",
    "mine:needy": "the package no-such-distribution is not installed",
    "mine:claims_nothing": "drawn on 1 rank",
    "torchscale": "releases of torchscale up to 0.3.0 do not have it",
}


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """Adapters of the working directory: the one that verification/README.md shows holds, the same with another mask is
    found, shrunk and replayed, and what cannot be run does not keep the others."""
    page = (ROOT / "verification/README.md").read_text()
    (code,) = re.findall(r"```python\n# my_attention\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_attention.py").write_text(code)
    (tmp_path / "wrong.py").write_text(code.replace(".tril(start)", ".tril()"))  # as if it were alone
    shutil.copy(ROOT / "tests/support/peer_examples.py", tmp_path / "mine.py")
    (tmp_path / "dies.py").write_text("import os; os._exit(3)")
    (tmp_path / "shadows").mkdir()
    (tmp_path / "shadows/torchscale.py").write_text("raise ModuleNotFoundError('as if not there', name='torchscale')")
    names, where = ("my_attention:adapter", "wrong:adapter", *NOT_RUN), ("--failures", "kept", "--json", "report.json")
    done = verification(tmp_path, "peers", *names, "--examples", "10", "--seed", "5", *where)
    assert done.returncode == 2, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seed"] == 5 and report["command"].startswith("python -m verification peers ")
    held, found, *others = report["peers"]
    assert (held["verdict"], held["examples"], held["case"], held["others"]) == ("held", 30, None, [])
    assert held["supported"] == "dense causal, fp32, even contiguous shards"
    assert (found["name"], found["verdict"], found["check"]) == ("wrong:adapter", "counter-example", "output and lse")
    case = Case.from_json(json.dumps(found["case"]))
    assert case == replace(case, world=2, tokens=2, batch=1, heads=1, head_dim=1, values="normal", strided=False)
    for peer in others:
        assert peer["verdict"] == "not run" and NOT_RUN[peer["name"]] in peer["message"], peer
        assert peer["examples"] == 0 and peer["case"] is None
    assert others[-1]["supported"] == load("torchscale").supported
    *start, file = shlex.split(found["replay"])
    replay = shlex.join([*start, os.path.relpath(file, tmp_path)])  # as seen from the working directory
    assert f"replay: {replay}" in unbroken(done.stdout) and found["message"] in unbroken(done.stdout)
    assert json.loads(Path(file).read_text()) == {"peer": "wrong:adapter", "case": found["case"]}
    again = verification(tmp_path, "replay", file)
    assert again.returncode == 1 and found["message"] in unbroken(again.stdout), again.stdout + again.stderr


@pytest.fixture(scope="module")
def backend() -> Iterator[GlooBackend]:
    with closing(GlooBackend()) as one:
        one.start(1)
        yield one


def run(backend: GlooBackend, name: str, case: Case = PLAIN) -> dict[str, float]:
    spec = f"{EXAMPLES}:{name}"
    return experiment(spec).check(backend, claimed(load(spec), case))


PACKED = replace(PLAIN, tokens=7, pattern=Pattern.dense(True, (3, 0, 4)))
WINDOWED = replace(PLAIN, tokens=12, pattern=Pattern.dense(True, window=3))


@pytest.mark.parametrize(
    "name, case, check, said",
    [
        ("raises", PLAIN, "every rank answers", "never in this life"),
        ("unconnected", PLAIN, "every rank answers", "no gradient reaches v: what attend returned does not depend on"),
        ("transposed", PLAIN, "every rank answers", r"out of shape \(2, 2, 5, 4\); it must be \(2, 5, 2, 4\)"),
        ("spoils", PLAIN, "inputs intact, repeatable", "inputs: changed"),
        ("forgets", PLAIN, "inputs intact, repeatable", "a second run"),
        ("detached", PLAIN, "gradients", "dv is"),
        ("unpacked", PACKED, "output and lse", "out is"),
        ("unwindowed", WINDOWED, "output and lse", "out is"),
        ("wrong_lse", PLAIN, "output and lse", "lse is"),
    ],
)
def test_each_fault_is_reported_as_what_it_is(
    backend: GlooBackend, name: str, case: Case, check: str, said: str
) -> None:
    with pytest.raises(VerificationFailure, match=said) as caught:
        run(backend, name, case)
    assert experiment(f"{EXAMPLES}:{name}").property_of(case, caught.value) == check


@pytest.mark.parametrize(
    "name, case",
    [("sound", PLAIN), ("sound", replace(PLAIN, dtype="float64")), ("packed", PACKED), ("windowed", WINDOWED)],
)
def test_a_sound_one_holds(backend: GlooBackend, name: str, case: Case) -> None:
    ratios = run(backend, name, case)
    assert len(ratios) == 6 and 0 < ratios["gradients"] < 1 and 0 < ratios["output and lse"] < 1


def test_an_adapter_that_does_not_keep_to_its_form_is_no_counter_example(backend: GlooBackend) -> None:
    with pytest.raises(ToolError, match=f"the adapter {EXAMPLES}:returns_list: attend returned list as out"):
        run(backend, "returns_list")
    with pytest.raises(ToolError, match="attend returned no lse, and the claim has lse 'differentiated'"):
        run(backend, "no_lse")


def test_what_is_no_adapter() -> None:
    with pytest.raises(Refused, match="No module named 'nowhere'"):
        load("nowhere.at_all:adapter")
    with pytest.raises(Refused, match="has no attribute 'nothing_of_the_kind'"):
        load(f"{EXAMPLES}:nothing_of_the_kind")
    with pytest.raises(Refused, match="it must be a verification.peers.Peer"):
        load(f"{EXAMPLES}:number")
    with pytest.raises(Refused, match="no answer within 0.5 s from rank 0"):
        probe.probe(f"{EXAMPLES}:endless", timeout=0.5)


@pytest.mark.parametrize("name", [name for name in KNOWN if not name.startswith("torch")])
def test_a_package_that_is_not_installed_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = str(load(name).package)
    monkeypatch.setattr(sys, "modules", sys.modules | {package.replace("-", "_"): None})  # importing it fails
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert load(name).version is None
    with pytest.raises(Refused, match=f"the package {package} is not installed"):
        ready(name)


def test_names() -> None:
    assert selected("ring-flash-attn") == [name for name in KNOWN if name.startswith("ring-flash-attn/")]
    assert selected("yunchang/strip") == ["yunchang/strip"] and selected("a.b:c") == ["a.b:c"] and len(KNOWN) == 14
    assert load("verification.peers.adapters.torchscale:adapter") is load("torchscale"), "as older records name it"
    for wrong in ("ring-flash", "a.b", ":c", "a:", "a:b:c", "a.:b", "/", ""):
        with pytest.raises(Refused, match="argument NAME"):
            selected(wrong)


@pytest.mark.parametrize(
    "field, value",
    [("name", ""), ("attend", 3), ("worlds", ()), ("worlds", (2, 9)), ("arithmetic", "double"), ("merge", "added")],
)
def test_a_peer_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(f'{field} is {value!r}')}; it must be "):
        replace(load("torchscale"), **{field: value})


def interpolated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of float32 (B, N, H, D), one key after another merged as ring codes do it."""
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * q.shape[-1] ** -0.5
    out, lse = v[:, None, 0].expand_as(q), scores[..., :1]
    for j in range(1, k.shape[1]):
        weight = torch.sigmoid(scores[..., j : j + 1] - lse)
        out = out - weight * (out - v[:, None, j])
        lse = lse - torch.nn.functional.logsigmoid(lse - scores[..., j : j + 1])
    return out


@pytest.mark.parametrize("seed", range(4))
def test_an_interpolating_merge_is_allowed_what_it_loses_and_no_more(seed: int) -> None:
    case = replace(PLAIN, pattern=Pattern.dense(), tokens=8, bucket=1, values="ties", score_scale=32.0, seed=seed)
    q, k, v, _, _ = case.tensors()
    peer = load("torch-context-parallel")
    allowed, strict = expect(peer, case), expect(replace(peer, merge="weighted"), case)
    error = np.abs(interpolated(q, k, v).double().numpy() - allowed.exact["out"])
    assert (error <= allowed.bound["out"]).all()
    assert (error > strict.bound["out"]).any(), "it does lose something"
    for name in ("out", "dq", "dk"):
        assert (strict.bound[name] <= allowed.bound[name]).all()
        assert (allowed.bound[name] - strict.bound[name]).max() < 1e-2
    assert np.array_equal(strict.bound["dv"], allowed.bound["dv"])


def test_what_is_not_seen_is_allowed_nothing() -> None:
    pattern = Pattern.longnet([2], [2], heads=2)  # odd heads see odd positions only, and their rows others nothing
    allowed = expect(load("torch-context-parallel"), replace(PLAIN, pattern=pattern))
    assert allowed.dead_rows.any() and allowed.dead_keys.any()
    for name, dead in (("out", allowed.dead_rows), ("dq", allowed.dead_rows), ("dk", allowed.dead_keys)):
        assert (allowed.bound[name][:, dead.T] == 0).all() and (allowed.bound[name][:, ~dead.T] > 0).all()


def drawn(name: str, world: int, count: int = 40) -> list[TrainingCase]:
    return drawn_from(draw_steps(load_step_peer(name), world), count)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_drawn_for_an_attention_is_what_it_claims(name: str) -> None:
    peer = KNOWN[name]
    for world in peer.worlds:
        cases = drawn(name, world)
        assert len(cases) >= 20, "a claim takes Cases to the nearest one, and leaves out few"
        for case in cases:
            assert case.model.kind == "sdpa" and case.checkpointing != "selective"
            calls = [call_of(part, data_rank) for part in case.parts for data_rank in range(part.data)]
            assert all(peer.claims(call) == call for call in calls)
        varied = ("wrapper", "accumulation", "optimiser", "labels", "steps", "checkpointing")
        assert all(len({getattr(case, field) for case in cases}) > 1 for field in varied)


@pytest.mark.parametrize("name", [peer.name for peer in WRAPPER_PEERS])
def test_what_is_drawn_for_a_wrapper(name: str) -> None:
    cases = drawn(name, 4)
    for case in cases:
        assert case.wrapper == "none" and case.resumed is None
        assert case.dtype != "float64" or (case.clipping is None and name.startswith("fairscale"))
    assert {case.model.kind for case in cases} == {"llama", "longnet", "sdpa"}


@pytest.mark.parametrize("change", [{"scale": 1.0}, {"dtype": "float16"}, {"lse": "returned"}])
def test_what_a_step_cannot_have_is_left_out(change: dict[str, Any]) -> None:
    peer = KNOWN["torch-context-parallel"]
    changed = replace(peer, claims=lambda case: replace(peer.claims(case), **change))  # type: ignore[type-var]
    assert nearest(peer, small_step(2)) is not None and nearest(changed, small_step(2)) is None


@pytest.mark.parametrize("name, width", [("yunchang/basic", 4), ("deepspeed/zero3", 4), ("fairscale/guarded", 2)])
def test_models_whose_norms_are_steps_are_widened_in_lower_precisions(name: str, width: int) -> None:
    """As they are drawn, in fp64 alone, for this project's own."""
    model = small_model(kind="longnet", norm="layer", bias=True, dim=2)
    case = small_step(2, model=model, pattern=Pattern.longnet([4], [1], 1, True, "torchscale"))
    found = claimed_step(load_step_peer(name), case)
    assert model.has_steps and found is not None and (found.dtype == "float64") == (width == 2)
    assert (found.model.dim, found.model.head_dim) == (width, width)


@pytest.fixture(scope="module")
def two() -> Iterator[GlooBackend]:
    engines = {module for peer in WRAPPER_PEERS for module in peer.preload}
    with closing(GlooBackend(60.0, preload=(*TRAINING_PRELOAD, *engines))) as ranks:
        ranks.start(2)
        yield ranks


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


def test_fairscale_holds_as_guarded_here_and_not_as_a_user_writes_it(two: GlooBackend) -> None:
    case = small_step(2, model=LARGER, accumulation=2, steps=2, labels="some", checkpointing="reentrant")
    guarded, as_written = step_experiment("fairscale/guarded").check, step_experiment("fairscale/as-written").check
    assert max(guarded(two, case).values()) < 1e-3
    guarded(two, replace(case, dtype="float32", clipping=0.1))
    as_written(two, replace(case, steps=1))
    with pytest.raises(WrongResult) as caught:
        as_written(two, case)
    assert caught.value.broken == "parameters after the last" and (caught.value.ratio or 0) > 1e6


def training(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, record of the first peer)."""
    where = ("--seed", "3", "--failures", str(folder / "kept"), "--json", str(folder / "report.json"))
    status = main(["training", "--peer", *arguments, *where])
    record = json.loads((folder / "report.json").read_text())
    assert record["seed"] == 3 and record["commit"] and record["command"].startswith("python -m verification training")
    return status, record["peers"][0]


@pytest.mark.slow
def test_what_trains_wrong_is_found_shrunk_saved_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "ci", replace(PROFILES["ci"], budget=600))  # whatever shrinks, shrinks to its end
    status, peer = training(tmp_path, "fairscale/as-written", "--world", "2", "--examples", "20", "--profile", "ci")
    assert (status, peer["verdict"]) == (1, "counter-example")
    case = TrainingCase.from_dict(peer["case"])
    assert (case.world, case.wrapper, case.model.layers) == (2, "none", 1)
    # The first step is right. The gradients of the second are wrong: their norm shows it, or the parameters, or the
    # loss of a third.
    assert case.steps == {"norms": 2, "parameters": 2, "losses": 3}[peer["message"].partition(":")[0]]
    file = Path(shlex.split(peer["replay"])[-1])
    assert json.loads(file.read_text()) == {"step_peer": "fairscale/as-written", "training_case": peer["case"]}
    assert main(["replay", str(file)]) == 1
    file.write_text(json.dumps({"step_peer": "fairscale/guarded", "training_case": peer["case"]}))
    assert main(["replay", str(file)]) == 0


@pytest.mark.slow
def test_a_peer_is_run_on_the_ranks_of_its_adapter(tmp_path: Path) -> None:
    sound = (f"{EXAMPLES}:sound", "--examples", "2")
    status, peer = training(tmp_path, *sound)  # on one rank, since it is for no more
    assert (status, peer["verdict"], peer["examples"], peer["message"]) == (0, "held", 2, None)
    status, peer = training(tmp_path, *sound, "--world", "2")
    assert (status, peer["verdict"], peer["examples"]) == (2, "not run", 0)
    assert "mine is for 1 ranks, none of which --world names" in peer["message"]
