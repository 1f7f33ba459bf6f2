"""Peers: a user's own adapter from the working directory, how each kind of fault is reported, what is refused, the
claims of the adapters. None of the packages needs to be installed, and none is run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Pattern
from tests.support.peers_table import disagreements
from tests.support.plain_case import plain
from tests.support.printed import unbroken
from verification.case import Case
from verification.draw.cases import cases
from verification.failures import RankHang, VerificationFailure
from verification.peers import Refused, claims, probe
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer_experiment import claimed, expect, experiment
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS
from verification.report.provenance import commit
from verification.run.backends import GlooBackend
from verification.search.experiment import ToolError

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
EXAMPLES = "tests.support.peer_examples"
PLAIN = plain(1, tokens=5, pattern=Pattern.dense(True), batch=2, seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests/support/peer_examples.py", tmp_path / "mine.py")
    return tmp_path


def verification(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As scripts do it: with -P, so that the working directory is no place to import from."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'shadows'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "verification", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def report(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """(exit status, peers of the JSON report by name, what was printed, warnings included)."""
    done = verification(folder, "peers", *arguments, "--seed", "5", "--json", "report.json")
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    content = json.loads((folder / "report.json").read_text())
    assert content["seed"] == 5 and content["torch"] == torch.__version__ and content["commit"] == commit()
    assert content["command"].startswith("python -m verification peers ")
    listed = content["peers"]
    return done.returncode, {peer["name"]: peer for peer in listed}, done.stdout + done.stderr


def documented() -> str:
    """The module that verification/README.md shows."""
    page = (ROOT / "verification/README.md").read_text()
    (code,) = re.findall(r"```python\n# my_attention\.py\n(.*?)```", page, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    return str(code)


# --- a user's own adapter ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_documented_example_holds(folder: Path) -> None:
    (folder / "my_attention.py").write_text(documented())
    status, found, printed = report(folder, "my_attention:adapter", "--examples", "8")
    mine = found["my_attention:adapter"]
    assert (status, mine["verdict"], mine["examples"]) == (0, "held", 24), printed
    assert "Warning" not in printed
    assert mine["version"] is None and mine["supported"] == "dense causal, fp32, even contiguous shards"
    assert mine["case"] is mine["check"] is mine["message"] is mine["replay"] is None and mine["others"] == []
    assert not list((folder / ".verification/failures").iterdir())


@pytest.mark.slow
def test_a_wrong_one_is_found_shrunk_and_replayed(folder: Path) -> None:
    assert ".tril(start)" in documented()
    (folder / "my_attention.py").write_text(documented().replace(".tril(start)", ".tril()"))  # as if it were alone
    status, found, printed = report(folder, "my_attention:adapter", "--examples", "10", "--failures", "kept")
    mine = found["my_attention:adapter"]
    assert (status, mine["verdict"], mine["check"]) == (1, "counter-example", "output and lse"), printed
    case = Case.from_json(json.dumps(mine["case"]))
    assert (case.world, case.tokens, case.batch, case.heads, case.head_dim) == (2, 2, 1, 1, 1)
    assert (case.values, case.score_scale, case.seed, case.strided) == ("normal", 1.0, 0, False)
    *start, last = shlex.split(mine["replay"])
    replay = shlex.join([*start, os.path.relpath(last, folder)])  # as seen from the working directory
    assert f"replay: {replay}" in unbroken(printed) and mine["message"] in unbroken(printed)
    assert max(map(len, printed.splitlines())) <= 80
    (file,) = [f for f in (folder / "kept").iterdir() if json.loads(f.read_text())["case"] == mine["case"]]
    assert str(file) in mine["replay"]
    again = verification(folder, "replay", str(file))
    assert again.returncode == 1 and mine["message"] in unbroken(again.stdout), again.stdout + again.stderr


FAULTS = {
    **dict.fromkeys(("raises", "aborts", "unconnected", "transposed"), "every rank answers"),
    "spoils": "inputs intact, repeatable",
    "forgets": "inputs intact, repeatable",
    "wide": "types, shapes, finite",
    "infinite": "types, shapes, finite",
    "detached": "gradients",
    "shifted": "output and lse",
    "wrong_lse": "output and lse",
    "leaking": "nothing selected: 0, -inf",
}


@pytest.fixture(scope="module")
def backend() -> Iterator[GlooBackend]:
    one = GlooBackend()
    one.start(1)
    yield one
    one.close()


@pytest.mark.parametrize(("name", "check"), FAULTS.items())
def test_each_fault_is_reported_as_what_it_is(backend: GlooBackend, name: str, check: str) -> None:
    found = experiment(f"{EXAMPLES}:{name}")
    case = claimed(load(f"{EXAMPLES}:{name}"), PLAIN)
    with pytest.raises(VerificationFailure) as caught:
        found.check(backend, case)
    assert found.property_of(case, caught.value) == check, str(caught.value)
    said = {"raises": "never in this life", "aborts": "killed by SIGABRT"}
    said["unconnected"] = "no gradient reaches v: what attend returned does not depend on it"
    said["transposed"] = "attend returned out of shape (2, 2, 5, 4); it must be (2, 5, 2, 4)"
    assert said.get(name, "") in str(caught.value)


def test_a_hang_is_reported_as_one() -> None:
    impatient = GlooBackend(0.5)
    impatient.start(1)
    try:
        with pytest.raises(RankHang, match="no answer within 0.5 s from rank 0"):
            experiment(f"{EXAMPLES}:hangs").check(impatient, claimed(load(f"{EXAMPLES}:hangs"), PLAIN))
    finally:
        impatient.close()


def test_a_sound_one_holds(backend: GlooBackend) -> None:
    found = experiment(f"{EXAMPLES}:sound")
    ratios = found.check(backend, claimed(load(f"{EXAMPLES}:sound"), PLAIN))
    assert set(ratios) == {"every rank answers", "inputs intact, repeatable", *FAULTS.values()}
    assert 0 < ratios["gradients"] < 1 and 0 < ratios["output and lse"] < 1


@pytest.mark.parametrize(
    ("name", "said"),
    (
        ("returns_list", f"the adapter {EXAMPLES}:returns_list: attend returned list as out"),
        ("no_lse", "attend returned no lse, and the claim has lse 'differentiated'"),
    ),
)
def test_an_adapter_that_does_not_keep_to_its_form_is_no_counter_example(
    backend: GlooBackend, name: str, said: str
) -> None:
    spec = f"{EXAMPLES}:{name}"
    with pytest.raises(ToolError, match=said):
        experiment(spec).check(backend, claimed(load(spec), PLAIN))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_run_gives_2_and_the_others_still_run(folder: Path) -> None:
    (folder / "dies.py").write_text("import os; os._exit(3)")
    (folder / "shadows").mkdir()
    (folder / "shadows" / "torchscale.py").write_text("raise ModuleNotFoundError('as if not there', name='torchscale')")
    reasons = {
        "dies:adapter": "ended with exit code 3",
        "mine:number": "it must be a verification.peers.Peer",
        "mine:needy": "the package no-such-distribution is not installed",
        "mine:claims_raise": "claims of mine raised ZeroDivisionError",
        "mine:claims_nothing": "mine:claims_nothing claims nothing that was drawn on 1 rank",
        "torchscale": "releases of torchscale up to 0.3.0 do not have it",
    }
    status, found, printed = report(folder, *reasons, "mine:sound", "mine:shifted", "--examples", "10")
    assert status == 2, printed
    for name, reason in reasons.items():
        assert found[name]["verdict"] == "not run" and reason in found[name]["message"], found[name]
        assert found[name]["examples"] == 0 and found[name]["case"] is None
    assert found["mine:sound"]["verdict"] == "held" and found["mine:shifted"]["verdict"] == "counter-example"
    assert found["torchscale"]["supported"] == load("torchscale").supported


@pytest.mark.parametrize(
    ("spec", "said"),
    (
        ("nowhere.at_all:adapter", "No module named 'nowhere'"),
        (f"{EXAMPLES}:nothing_of_the_kind", "has no attribute 'nothing_of_the_kind'"),
        (f"{EXAMPLES}:number", "it must be a verification.peers.Peer"),
    ),
)
def test_what_is_no_adapter(spec: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        load(spec)


def test_an_import_that_never_ends_is_refused() -> None:
    with pytest.raises(Refused, match="no answer within 0.5 s from rank 0"):
        probe.probe(f"{EXAMPLES}:endless", timeout=0.5)


@pytest.fixture
def modules() -> Iterator[None]:
    """Stand-ins that adapters install are taken out again."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("name", [name for name in KNOWN if not name.startswith("torch")])
def test_a_package_that_is_not_installed_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, modules: None
) -> None:
    package = load(name).package
    assert package is not None
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)  # so that importing it fails

    def version(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert load(name).version is None
    with pytest.raises(Refused, match=f"the package {package} is not installed"):
        ready(name)


def test_a_table_that_disagrees_with_the_record_is_noticed() -> None:
    names = {text.partition(" ")[0] for text in disagreements("")}
    assert names == set(KNOWN_STEP_PEERS)
    row = "| ring-flash-attn/zigzag, other | 0.1.8 | {} | {} |"
    for results, lacking in ((("held", "held"), ""), (("logits", "held"), "peers"), (("held", "-"), "training_peers")):
        said = [text for text in disagreements(row.format(*results)) if re.match("ring-flash-attn/zigzag[: ]", text)]
        assert [text.partition(" lacks ")[2] for text in said] == [f"'^held' of {lacking}"] * bool(lacking)


def test_names() -> None:
    kinds = ("ring", "zigzag", "stripe", "llama3-varlen", "ring-varlen", "zigzag-varlen")
    assert selected("ring-flash-attn") == [f"ring-flash-attn/{kind}" for kind in kinds]
    assert selected("yunchang/strip") == ["yunchang/strip"]
    assert selected("a.b:c") == ["a.b:c"]
    assert load("verification.peers.adapters.torchscale:adapter") is load("torchscale"), "as older records name it"
    for wrong in ("ring-flash", "a.b", ":c", "a:", "a:b:c", "a.:b", "/", ""):
        with pytest.raises(Refused, match="argument NAME"):
            selected(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ({"name": ""}, "name is ''"),
        ({"supported": None}, "supported is None"),
        ({"attend": 3}, "attend is 3; it must be a function"),
        ({"worlds": ()}, r"worlds is \(\)"),
        ({"worlds": (2, 9)}, r"worlds is \(2, 9\)"),
        ({"worlds": (True,)}, "worlds is"),
        ({"arithmetic": "double"}, "arithmetic is 'double'; it must be one of math, flash, half"),
        ({"merge": "added"}, "merge is 'added'; it must be one of weighted, interpolated"),
    ),
)
def test_a_peer_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(load("torchscale"), **change)


# --- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN)
@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_claims(name: str, data: st.DataObject) -> None:
    """A claim is settled: asked again it changes nothing. It keeps what the implementation says it takes."""
    peer = load(name)
    case = data.draw(cases(data.draw(st.sampled_from(peer.worlds))))
    found = claimed(peer, case)
    assert found is not None and found.world == case.world and claimed(peer, found) == found
    assert (found.kernel, found.again, found.measured) == ("math", "alike", False)
    if peer.worlds == (1,):
        assert found.order == "contiguous" and found.cuts is None and found.heads == found.kv_heads
    else:
        assert len(set(found.shards().counts)) == 1 and found.tokens > 0
        window = claims.window(found)
        assert found.pattern == Pattern.dense(found.pattern.causal, found.pattern.documents, window)
        assert found.pattern.documents is None or name.endswith("-varlen")
        assert window is None or (name == "ring-flash-attn/llama3-varlen" and found.pattern.causal)
    if not found.order.startswith("contiguous"):
        assert found.pattern.causal


def test_a_claim_that_is_none_is_the_adapters_fault() -> None:
    with pytest.raises(ToolError, match="it must be a Case with world 1, or None"):
        claimed(load(f"{EXAMPLES}:claims_other_world"), PLAIN)
    with pytest.raises(ToolError, match="claims of mine raised ZeroDivisionError"):
        claimed(load(f"{EXAMPLES}:claims_raise"), PLAIN)
    assert claimed(dataclasses.replace(load(f"{EXAMPLES}:sound"), claims=lambda case: None), PLAIN) is None


# --- bounds -----------------------------------------------------------------------------------------------------------


def interpolated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of float32 (B, N, H, D), one key after another merged as ring codes do it."""
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * q.shape[-1] ** -0.5
    out, lse = v[:, None, 0].expand_as(q), scores[..., :1]
    for j in range(1, k.shape[1]):
        weight = torch.sigmoid(scores[..., j : j + 1] - lse)
        out = out - weight * (out - v[:, None, j])
        lse = lse - torch.nn.functional.logsigmoid(lse - scores[..., j : j + 1])
    return out


@pytest.mark.parametrize("seed", range(20))
def test_an_interpolating_merge_is_allowed_what_it_loses_and_no_more(seed: int) -> None:
    case = dataclasses.replace(
        PLAIN, pattern=Pattern.dense(), tokens=8, bucket=1, values="ties", score_scale=32.0, seed=seed
    )
    q, k, v, _, _ = case.tensors()
    out = interpolated(q, k, v).double().numpy()
    peer = load("torch-context-parallel")
    allowed = expect(peer, case)
    error = np.abs(out - allowed.exact["out"])
    assert (error <= allowed.bound["out"]).all()
    strict = expect(dataclasses.replace(peer, merge="weighted"), case)
    assert (error > strict.bound["out"]).any(), "it does lose something"
    for name in ("out", "dq", "dk"):
        assert (strict.bound[name] <= allowed.bound[name]).all()
        assert (allowed.bound[name] - strict.bound[name]).max() < 1e-2
    assert np.array_equal(strict.bound["dv"], allowed.bound["dv"])


def test_what_is_not_seen_is_allowed_nothing() -> None:
    pattern = Pattern.longnet([2], [2], heads=2)  # odd heads see odd positions only, and their rows others nothing
    case = dataclasses.replace(PLAIN, pattern=pattern)
    found = expect(load("torch-context-parallel"), case)
    assert found.dead_rows.any() and found.dead_keys.any()
    for name, dead in (("out", found.dead_rows), ("dq", found.dead_rows), ("dk", found.dead_keys)):
        assert (found.bound[name][:, dead.T] == 0).all() and (found.bound[name][:, ~dead.T] > 0).all()
