"""Peers: a user's own adapter, how each fault is reported, what is refused, the bounds."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import Expectation, Pattern
from tests.support import peer_examples
from tests.support.plain_case import PLAIN, plain
from tests.support.printed import unbroken
from verification.__main__ import main
from verification.case import Case, Keys
from verification.check.expectation import inputs_of as inputs_of_case
from verification.failures import VerificationFailure
from verification.peers import Peer, Refused, probe
from verification.peers.adapters import yunchang
from verification.peers.expected_failures import read_expected_failures
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer_experiment import (
    LAWS_OF_ANY,
    TITLES,
    arithmetic_of,
    evaluate_for,
    experiment,
    nearest_claimed,
)
from verification.peers.peer_rank import RUNS
from verification.run.backends import GlooBackend
from verification.search.experiment import ToolError
from verification.training.training_case import TrainingCase

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
FINDINGS = ROOT / "verification/peers/findings"
EXAMPLES = "tests.support.peer_examples"
IMPORTED_AS = {"axolotl-ringmaster": "ringmaster"}


def verification(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as scripts do it: with -P, so that the working directory is no place to import from."""
    python_path = os.pathsep.join(map(str, (ROOT, path or folder / "shadows")))
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "verification", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


NOT_RUN = {
    "dies:adapter": "ended with exit code 3",
    "mine:needy": "the package no-such-distribution is not installed",
    "mine:claims_nothing": "returned None for all 20 Cases",
    "torchscale": "releases of torchscale up to 0.3.0 do not have it",
}


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """The adapter that verification/README.md shows holds, and with another mask is found, shrunk and replayed."""
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
    assert (held["verdict"], held["examples"], held["case"], held["others"]) == ("held", 45, None, [])  # 15 of laws
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
    message = unbroken(found["message"])
    assert f"replay: {replay}" in unbroken(done.stdout) and message in unbroken(done.stdout)
    assert "the mask compared positions of queries within their shard, of keys global ones" in message
    assert json.loads(Path(file).read_text()) == {"peer": "wrong:adapter", "case": found["case"]}
    assert verification(tmp_path, "replay", file).returncode == 2, "a file imports nothing by itself"
    again = verification(tmp_path, "replay", file, "--attention", "wrong:adapter")
    assert again.returncode == 1 and message in unbroken(again.stdout), again.stdout + again.stderr


def run(backend: GlooBackend, name: str, case: Case = PLAIN) -> dict[str, float]:
    spec = f"{EXAMPLES}:{name}"
    return experiment(spec).check(backend, nearest_claimed(load(spec), case))


def expect(peer: Peer, case: Case) -> Expectation:
    return evaluate_for(peer, inputs_of_case(case, case.tensors()), arithmetic_of(peer, case))


SCORED = replace(PLAIN, sinks="some", softcap=2.0, value_dim=3)
PACKED = replace(PLAIN, tokens=7, pattern=Pattern.dense(True, (3, 0, 4)))


@pytest.mark.parametrize(
    "name, case, check, said",
    [
        ("raises", PLAIN, "every rank answers", "never in this life"),
        ("returns_list", PLAIN, "every rank answers", r"returned list as out; it must be a tensor of shape \(2, 5"),
        ("returns_none", PLAIN, "every rank answers", "attend returned None as out; it must be a tensor of shape"),
        ("no_lse", PLAIN, "every rank answers", "attend returned no lse, and the claim has lse 'differentiated'"),
        ("unconnected", PLAIN, "every rank answers", "no gradient reaches v: the result of attend does not depend on"),
        (
            "drops_sinks",
            SCORED,
            "every rank answers",
            "no gradient reaches sinks: the result of attend does not depend",
        ),
        ("transposed", PLAIN, "every rank answers", r"out of shape \(2, 2, 5, 4\); it must be \(2, 5, 2, 4\)"),
        ("spoils", PLAIN, "inputs intact, repeatable", "inputs: changed"),
        ("forgets", PLAIN, "inputs intact, repeatable", "a second run"),
        ("detached", PLAIN, "gradients", "dv is"),
        ("of_last_call", replace(PLAIN, again="between"), "inputs intact, repeatable", "a second run"),
        ("of_last_call", replace(PLAIN, again="pipelined"), "inputs intact, repeatable", "a second run"),
        ("only_in_training", replace(PLAIN, again="no_grad"), "output and lse", "out is"),
        ("only_in_training", replace(PLAIN, again="kv"), "output and lse", "out is"),
        ("leaves_autocast", PLAIN, "every rank answers", "changed settings of torch: autocast on CPUs False -> True"),
        ("in_integers", PLAIN, "every rank answers", "returned out in int32 with layout strided on cpu; it must be"),
        ("unpacked", PACKED, "output and lse", "out is"),
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
    [
        ("sound", PLAIN),
        ("sound", replace(PLAIN, dtype="float64")),
        ("with_scores", SCORED),
        ("with_scores", replace(SCORED, again="pipelined")),
        ("with_scores", replace(SCORED, keys=Keys(9))),
        ("with_scores", replace(SCORED, again="kv", softcap=None)),
        ("packed", PACKED),
        ("heads_first", PLAIN),
        *(("sound", replace(PLAIN, again=again)) for again in RUNS),
    ],
)
def test_a_sound_one_holds(backend: GlooBackend, name: str, case: Case) -> None:
    ratios = run(backend, name, case)
    assert len(ratios) == 6 and 0 < ratios["gradients"] < 1 and 0 < ratios["output and lse"] < 1


@pytest.mark.parametrize("name", ("forward_only", "in_numpy"))
def test_forward_alone_has_no_gradients_to_check(backend: GlooBackend, name: str) -> None:
    ratios = run(backend, name, replace(PLAIN, lse="differentiated"))
    assert "gradients" not in ratios and 0 < ratios["output and lse"] < 1
    with pytest.raises(VerificationFailure, match="NumPy arrays have no gradients; the claim must return"):
        experiment(f"{EXAMPLES}:in_numpy").check(backend, PLAIN)


def test_an_error_of_a_claim_names_its_line() -> None:
    with pytest.raises(ToolError, match=r"ZeroDivisionError: .* \(.*peer_examples\.py, line \d+, in <lambda>\)"):
        nearest_claimed(peer_examples.claims_raise, PLAIN)


def test_a_result_with_heads_first_is_told_what_to_do(backend: GlooBackend) -> None:
    with pytest.raises(
        VerificationFailure, match="heads first, return out.transpose.1, 2., or set heads_first=True"
    ) as e:
        run(backend, "transposed")
    assert "Traceback" not in str(e.value) and "verification/" not in str(e.value)


def test_a_ring_in_jax_holds(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    done = verification(tmp_path, "peers", "jax_ring:adapter", "--examples", "8", "--seed", "1", path=ROOT / "scripts")
    assert done.returncode == 0, done.stdout + done.stderr


def test_expected_failures_leave_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "xfails").write_text("# known\ngradients\n\ntests.support.peer_examples:sound: output and lse  # not\n")
    arguments = ("--examples", "4", "--only", "gradients", "--failures", str(tmp_path), "--xfails")
    names = [f"{EXAMPLES}:detached", f"{EXAMPLES}:sound"]
    assert main(("peers", *names, *arguments, str(tmp_path / "xfails"))) == 0
    said = unbroken(capsys.readouterr().out)
    assert f"{names[0]}: failed as --xfails expects: gradients (" in said
    assert f"{names[1]}: held, though --xfails names it: gradients" in said
    (tmp_path / "xfails").write_text("gradient\n")
    assert main(("peers", *names, *arguments, str(tmp_path / "xfails"))) == 2
    assert "argument --xfails: line 1 of" in capsys.readouterr().err


def test_titles_of_expected_failures(tmp_path: Path) -> None:
    title, file = "nothing selected: 0, -inf", tmp_path / "xfails"
    file.write_text(f"\ufeff{title}\nmine:sound: {title}  # with two colons\n", encoding="utf-8")
    assert read_expected_failures(file, TITLES) == {None: {title}, "mine:sound": {title}}
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="xfails must be text in UTF-8"):
        read_expected_failures(file, TITLES)


def test_a_case_of_ones_own_is_checked_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = f"{EXAMPLES}:sound", ("--failures", str(tmp_path), "--json", str(tmp_path / "report"), "--case")
    assert main(("peers", name, *arguments, "world=1 tokens=40 heads=4 head_dim=32 causal=true")) == 0
    assert json.loads((tmp_path / "report").read_text())["peers"][0]["examples"] == 1
    assert main(("peers", name, *arguments, "world=1 kv_heads=1 heads=2")) == 2
    assert "argument --case: the claim changes the Case to" in unbroken(capsys.readouterr().out)
    for more in (("--only", "gradients"), ("--examples", "3"), ("--world", "2")):
        assert main(("peers", name, *arguments, "world=1", *more)) == 2
        assert "argument --case: it is one example; leave out --only, --world" in capsys.readouterr().err


def test_what_is_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="'nowhere' is no peer; it must be package.module:adapter"):
        load("nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "on_meta.py").write_text("import torch; torch.set_default_device('meta')\n")
    (tmp_path / "stops.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(Refused, match="importing on_meta set torch's default device to meta"):
        probe.probe("on_meta:adapter")
    with pytest.raises(Refused, match="importing stops:adapter raised KeyboardInterrupt"):
        probe.probe("stops:adapter")
    with pytest.raises(Refused, match="No module named 'nowhere'"):
        load("nowhere.at_all:adapter")
    with pytest.raises(Refused, match=f"{EXAMPLES}:nothing_of_the_kind does not exist; .* {EXAMPLES} has sound, "):
        load(f"{EXAMPLES}:nothing_of_the_kind")
    with pytest.raises(Refused, match="it must be a verification.peers.Peer"):
        load(f"{EXAMPLES}:number")
    # While its process computes, which an endless import does, it has twice the time: the error may say so.
    with pytest.raises(Refused, match="no answer within 0.5 s"):
        probe.probe(f"{EXAMPLES}:endless", timeout=0.5)


@pytest.mark.parametrize("name", [name for name in KNOWN if not name.startswith("torch")])
def test_a_package_that_is_not_installed_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = str(load(name).package)
    module = IMPORTED_AS.get(package, package.replace("-", "_"))
    monkeypatch.setattr(sys, "modules", sys.modules | {module: None})  # importing it fails
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert load(name).version is None
    with pytest.raises(Refused, match=f"the package {package} is not installed"):
        ready(name)


def test_names() -> None:
    assert selected("ring-flash-attn") == [name for name in KNOWN if name.startswith("ring-flash-attn/")]
    assert selected("yunchang/strip") == ["yunchang/strip"] and selected("a.b:c") == ["a.b:c"] and len(KNOWN) == 32
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


@pytest.mark.parametrize("file", sorted(FINDINGS.glob("*.json")), ids=lambda file: file.stem)
def test_a_saved_finding_replays_a_known_peer_and_is_named_by_a_page(file: Path) -> None:
    record = json.loads(file.read_text())
    peer = load(record.pop("peer", None) or record.pop("step_peer"))
    if "law" in record:
        law = next(law for law in LAWS_OF_ANY if law.name == record["law"])
        law.validate(Case.from_json(json.dumps(record["case"])), record["how"])
    case = record.get("case") or record["training_case"]
    assert (Case.from_json(json.dumps(case)) if "case" in record else TrainingCase.from_dict(case)).world in peer.worlds
    replay = rf"replay (--device cuda )?verification/peers/findings/{file.name}"
    assert any(re.search(replay, page.read_text()) for page in FINDINGS.glob("*.md"))


def test_yunchang_joins_as_many_ranks_as_leave_a_ring() -> None:
    for world, heads, wanted in ((2, 2, 1), (3, 3, 1), (4, 1, 1), (4, 2, 2), (4, 4, 2), (4, 3, 1)):
        assert yunchang.all_to_all_ranks(plain(world, heads=heads, kv_heads=heads)) == wanted
