"""`python -m verification peers`: a user's own adapter, expected failures, one Case."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import ROOT, verification
from tests.support.peer_examples import EXAMPLES
from tests.support.printed import unbroken
from verification.__main__ import main
from verification.case import Case
from verification.cli import peers
from verification.peers.known_peers import load

pytestmark = pytest.mark.ranks

NOT_RUN = {
    "dies:adapter": "ended with exit code 3",
    "mine:needy": "the package no-such-distribution is not installed",
    "mine:claims_nothing": "returned None for all 20 Cases",
    "torchscale": "releases of torchscale up to 0.3.0 do not have it",
}


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """The adapter that --example prints holds, and with another mask is found, shrunk and replayed."""
    (tmp_path / "my_attention.py").write_text(verification(tmp_path, "peers", "--example").stdout)
    shutil.copy(ROOT / "tests/support/peer_examples.py", tmp_path / "mine.py")
    (tmp_path / "dies.py").write_text("import os; os._exit(3)")
    (tmp_path / "shadows").mkdir()
    (tmp_path / "shadows/torchscale.py").write_text("raise ModuleNotFoundError('as if not there', name='torchscale')")
    names, where = (
        ("my_attention:adapter", "my_attention:wrong", *NOT_RUN),
        ("--failures", "kept", "--json", "report.json"),
    )
    done = verification(tmp_path, "peers", *names, "--examples", "10", "--seed", "5", *where, path=tmp_path / "shadows")
    assert done.returncode == 2, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seed"] == 5 and report["command"].startswith("python -m verification peers ")
    held, found, *others = report["peers"]
    assert (held["verdict"], held["examples"], held["case"], held["others"]) == ("held", 45, None, [])  # 15 of laws
    assert held["supported"] == "dense causal, fp32, even contiguous shards"
    assert (found["name"], found["verdict"], found["check"]) == (
        "my_attention:wrong",
        "counter-example",
        "output and lse",
    )
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
    assert json.loads(Path(file).read_text()) == {"kind": "peer", "peer": "my_attention:wrong", "case": found["case"]}
    assert verification(tmp_path, "replay", file).returncode == 2, "a file imports nothing by itself"
    again = verification(tmp_path, "replay", file, "--attention", "my_attention:wrong")
    assert again.returncode == 1 and message in unbroken(again.stdout), again.stdout + again.stderr


@pytest.mark.slow
def test_a_ring_in_jax_holds(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    done = verification(tmp_path, "peers", "jax_ring:adapter", "--examples", "8", "--seed", "1", path=ROOT / "scripts")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_is_printed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("peers", "--example")) == 0 and not list(tmp_path.iterdir())
    assert capsys.readouterr().out == (ROOT / "verification/peers/example.py").read_text()
    for more in ("mine:sane", "--list"):
        assert main(("peers", "--example", more)) == 2
        assert "argument --example: it prints an adapter and runs nothing" in capsys.readouterr().err


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


@pytest.mark.parametrize("name", ("causal_by_heads", "worse_at_third", "worse_after_fp64"))
def test_replays_the_earlier_calls_that_a_failure_needs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PROFILE", replace(peers.PROFILE, budget=math.inf))  # runs are limited, not seconds
    attention, file = f"{EXAMPLES}:{name}", tmp_path / "without.json"
    assert main(("peers", attention, "--examples", "30", "--seed", "2", "--failures", str(tmp_path))) == 1
    assert "cause: earlier calls: alone on new ranks the example holds; it fails after" in unbroken(
        capsys.readouterr().out
    )
    for saved in tmp_path.glob("*.json"):
        assert main(("replay", "--attention", attention, str(saved))) == 1
    record = json.loads(saved.read_text())
    assert len(record["before"]) < 4
    file.write_text(json.dumps(record | {"before": None}))
    assert main(("replay", "--attention", attention, str(file))) == 2, "not known to be mended"
    assert "it failed when it was found" in unbroken(capsys.readouterr().err)
    file.write_text(json.dumps(record | {"before": [record]}))
    assert main(("replay", "--attention", attention, str(file))) == 2
    assert "an entry of before must be an example on 1 ranks" in unbroken(capsys.readouterr().err)


def test_given_cases_are_checked_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = f"{EXAMPLES}:sound", ("--failures", str(tmp_path), "--json", str(tmp_path / "report"), "--case")
    assert main(("peers", name, *arguments, "world=1 tokens=40 heads=4 head_dim=32 causal=true")) == 0
    assert json.loads((tmp_path / "report").read_text())["peers"][0]["examples"] == 1
    assert main(("peers", name, *arguments, "world=1 kv_heads=1 heads=2")) == 2
    assert "argument --case: the claim changes 1 field of the Case: kv_heads=2, not 1" in unbroken(
        capsys.readouterr().out
    )
    assert main(("peers", name, "zz.sane", *arguments, "world=1")) == 2, "the others run"
    assert f"{name} - held 1 " in " ".join(capsys.readouterr().out.split())
    for more in (("--only", "gradients"), ("--examples", "3"), ("--world", "2")):
        assert main(("peers", name, *arguments, "world=1", *more)) == 2
        assert "argument --case: it is one example; leave out --only, --world" in capsys.readouterr().err
