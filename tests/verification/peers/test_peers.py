"""Peers, alone and in training steps: a user's own adapter, how each fault is reported, what is refused, the bounds."""

from __future__ import annotations

import importlib.metadata
import json
import math
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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Expectation, Pattern, attention, gradients
from reference.fast_oracle import multiplicity
from tests.support import peer_examples
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from tests.support.printed import unbroken
from tests.support.training_cases import drawn_from, small_model, small_step
from verification.__main__ import main
from verification.case import Case
from verification.check.expectation import inputs_of as inputs_of_case
from verification.check.laws.law import changed
from verification.failures import VerificationFailure, WrongResult
from verification.peers import Peer, Refused, claims, probe
from verification.peers.adapters import flash_attn_shim, with_windows, yunchang
from verification.peers.adapters.over_flash_attn import window_size
from verification.peers.adapters.ring_flash_attn_varlen import lengths
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer_experiment import (
    LAWS_OF_ANY,
    arithmetic_of,
    evaluate_for,
    experiment,
    experiments,
    law_of,
    nearest_claimed,
)
from verification.peers.peer_rank import RUNS
from verification.peers.training.known_step_peers import load_step_peer
from verification.peers.training.step_peer import call_of, nearest
from verification.peers.training.step_peer_experiment import claimed_step, draw_steps, step_experiment
from verification.peers.training.wrapper_peers import WRAPPER_PEERS
from verification.replay import records
from verification.run.backends import GlooBackend
from verification.runner import PROFILES
from verification.search.experiment import ToolError
from verification.strategies.cases import cases
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
FINDINGS = ROOT / "verification/peers/findings"
EXAMPLES = "tests.support.peer_examples"
WINDOWED = {name: peer for name, peer in vars(with_windows).items() if isinstance(peer, Peer)}
LLAMA3 = "ring-flash-attn/llama3-varlen"
WITH_WINDOWS = {"ringmaster/ring-varlen", "ringmaster/ulysses-varlen", "ringmaster/usp-varlen", LLAMA3}  # if causal
IMPORTED_AS = {"axolotl-ringmaster": "ringmaster"}
SCALE, TOKENS = 0.7, 9
PLAIN = plain(1, tokens=5, pattern=Pattern.dense(True), batch=2, seed=3)


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


@pytest.fixture(scope="module")
def backend() -> Iterator[GlooBackend]:
    with closing(GlooBackend()) as one:
        one.start(1)
        yield one


def run(backend: GlooBackend, name: str, case: Case = PLAIN) -> dict[str, float]:
    spec = f"{EXAMPLES}:{name}"
    return experiment(spec).check(backend, nearest_claimed(load(spec), case))


def expect(peer: Peer, case: Case) -> Expectation:
    return evaluate_for(peer, inputs_of_case(case, case.tensors()), arithmetic_of(peer, case))


PACKED = replace(PLAIN, tokens=7, pattern=Pattern.dense(True, (3, 0, 4)))


@pytest.mark.parametrize(
    "name, case, check, said",
    [
        ("raises", PLAIN, "every rank answers", "never in this life"),
        ("returns_list", PLAIN, "every rank answers", r"returned list as out; it must be a tensor of shape \(2, 5"),
        ("returns_none", PLAIN, "every rank answers", "attend returned None as out; it must be a tensor of shape"),
        ("no_lse", PLAIN, "every rank answers", "attend returned no lse, and the claim has lse 'differentiated'"),
        ("unconnected", PLAIN, "every rank answers", "no gradient reaches v: the result of attend does not depend on"),
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


FAULTS_OF_LAWS = [
    ("later tokens change nothing", "peeks", {"position": 1}, "was .* when the tokens after position 1 change"),
    ("batches and heads permute", "numbers_heads", {"batch": [1, 0], "kv_heads": [1, 0]}, "sum of their bounds"),
    ("equal values come out", "adds_up_to_more", {"keys_too": False}, "all values of that head are equal"),
    ("NaN and inf propagate", "hides_nan", {"token": 0, "tensor": "v", "infinite": False}, "which sees NaN in v"),
    ("scores of -inf have no weight", "weighs_hidden", {"hidden": [1], "heads": [0]}, "no query sees this key"),
]


@pytest.mark.parametrize("title, name, how, said", FAULTS_OF_LAWS, ids=[name for name, *_ in FAULTS_OF_LAWS])
def test_a_peer_that_breaks_a_law_is_found(
    backend: GlooBackend, title: str, name: str, how: dict[str, Any], said: str
) -> None:
    case = replace(PLAIN, lse="unused", kernel="math")
    law = next(law for law in LAWS_OF_ANY if law.name == title)
    law.validate(case, how)
    assert law_of(f"{EXAMPLES}:sound", law).check(backend, (case, how))[title] <= 1.0
    broken = law_of(f"{EXAMPLES}:{name}", law)
    with pytest.raises(VerificationFailure, match=said):
        broken.check(backend, (case, how))
    record = json.loads(json.dumps(broken.record_of((case, how))))
    with pytest.raises(ValueError, match=f"imports no module that a file names; .* --attention {EXAMPLES}:{name}"):
        records.parse(record)
    saved: Any = records.parse(record, attention=f"{EXAMPLES}:{name}")
    assert saved.subject == (case, how) and saved.experiment.name == broken.name


def test_all_laws_of_any_attention_are_drawn_for_a_peer_as_far_as_its_claim_goes(backend: GlooBackend) -> None:
    drawn = experiments(f"{EXAMPLES}:sound", 1, 150)
    assert [examples for _, examples in drawn] == [150, *[15] * len(LAWS_OF_ANY)] and len(LAWS_OF_ANY) == 7
    unsuitable = {"same on any ranks, layout, exchange", "error does not grow with ranks"}  # one process, fp32
    for (one, _), law in zip(drawn[1:], LAWS_OF_ANY, strict=True):
        if law.name not in unsuitable:
            for case, how in draw_many(one.draw(1), 5):
                law.validate(case, how)
                assert nearest_claimed(peer_examples.sound, case) == case
    (only,) = experiments(f"{EXAMPLES}:sound", 1, 30, only=("NaN and inf propagate",))
    assert only[1] == 30 and only[0].name == "peer mine, NaN and inf propagate"


@pytest.mark.parametrize("name", ("ring-flash-attn/zigzag", "ringmaster/ring-varlen"))
@pytest.mark.parametrize("title", ("same on any ranks, layout, exchange", "scores of -inf have no weight"))
def test_a_law_asks_only_what_is_claimed(name: str, title: str) -> None:
    (law,) = (law for law in LAWS_OF_ANY if law.name == title)
    subjects = draw_many(law_of(name, law).draw(3), 30)
    assert len(subjects) == 30
    for case, how in subjects:
        if law.name.startswith("same"):
            other = changed(case, how)
            assert nearest_claimed(load(name), other) == other
            assert (case.ranks, case.order, case.exchange) != (other.ranks, other.order, other.exchange)
        else:
            share = case.heads // case.kv_heads
            sees = np.asarray(multiplicity(case.pattern, case.heads, case.tokens) > 0)
            keeps = np.delete(sees, how["hidden"], axis=2).any(2)
            served = [head for head in range(case.heads) if head // share in how["heads"]]
            assert np.asarray(keeps | ~sees.any(2))[served].all()


def test_a_law_without_subjects_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, title = f"{EXAMPLES}:sound", "error does not grow with ranks"
    report = tmp_path / "report"
    status = main(("peers", name, "--only", title, "--failures", str(tmp_path), "--json", str(report)))
    said = f"{title}: does not apply: the claim has no bfloat16 on all ranks, in even shards, without lse"
    printed = unbroken(capsys.readouterr().out)
    assert status == 0 and f"world 1: {said}" in printed, printed
    (peer,) = json.loads(report.read_text())["peers"]
    assert (peer["verdict"], peer["examples"], peer["does_not_apply"]) == ("does not apply", 0, [f"1 rank: {said}"])


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


def test_a_case_of_ones_own_is_checked_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = f"{EXAMPLES}:sound", ("--failures", str(tmp_path), "--json", str(tmp_path / "report"), "--case")
    assert main(("peers", name, *arguments, "world=1 tokens=40 heads=4 head_dim=32 causal=true")) == 0
    assert json.loads((tmp_path / "report").read_text())["peers"][0]["examples"] == 1
    assert main(("peers", name, *arguments, "world=1 kv_heads=1 heads=2")) == 2
    assert "argument --case: the claim changes the Case to" in unbroken(capsys.readouterr().out)
    for more in (("--only", "gradients"), ("--examples", "3"), ("--world", "2")):
        assert main(("peers", name, *arguments, "world=1", *more)) == 2
        assert "argument --case: it is one example; leave out --only, --world" in capsys.readouterr().err


def test_sizes_of_a_claim() -> None:
    sizes: dict[str, Any] = {"tokens": (8, 32), "heads": ((2, 2), (4, 2)), "head_dims": (16,), "batches": (1,)}
    for case in (plain(1, tokens=3), plain(1, tokens=9, heads=3, kv_heads=3), plain(1, tokens=40, batch=3)):
        found = claims.of_sizes(case, **sizes)
        assert found.tokens in (8, 32) and found.tokens == (8 if case.tokens < 8 else 32)
        assert (found.heads, found.kv_heads) in ((2, 2), (4, 2)) and (found.head_dim, found.batch) == (16, 1)
        assert claims.of_sizes(found, **sizes) == found
    assert claims.of_sizes(plain(1), tokens=(12,)) == plain(1)


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


def drawn(name: str, world: int, count: int = 40) -> list[TrainingCase]:
    return drawn_from(draw_steps(load_step_peer(name), world), count)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_drawn_for_an_attention_is_what_it_claims(name: str) -> None:
    peer = KNOWN[name]
    for world in peer.worlds:
        found = drawn(name, world)
        assert len(found) >= 20, "a claim takes Cases to the nearest one, and leaves out few"
        for case in found:
            assert case.model.kind == "sdpa" and case.checkpointing != "selective"
            calls = [call_of(part, data_rank) for part in case.parts for data_rank in range(part.data)]
            assert all(peer.claims(call) == call for call in calls)
        varied = ("wrapper", "accumulation", "optimiser", "labels", "steps", "checkpointing")
        assert all(len({getattr(case, field) for case in found}) > 1 for field in varied)


@pytest.mark.parametrize("name", [peer.name for peer in WRAPPER_PEERS])
def test_what_is_drawn_for_a_wrapper(name: str) -> None:
    found = drawn(name, 4)
    for case in found:
        assert case.wrapper == "none" and case.resumed is None
        assert case.dtype != "float64" or (case.clipping is None and name.startswith("fairscale"))
    assert {case.model.kind for case in found} == {"llama", "longnet", "sdpa"}


@pytest.mark.parametrize("change", [{"scale": 1.0}, {"dtype": "float16"}, {"lse": "returned"}])
def test_what_a_step_cannot_have_is_left_out(change: dict[str, Any]) -> None:
    peer = KNOWN["torch-context-parallel"]
    changed = replace(peer, claims=lambda case: replace(peer.claims(case), **change))  # type: ignore[type-var]
    assert nearest(peer, small_step(2)) is not None and nearest(changed, small_step(2)) is None


@pytest.mark.parametrize("name, width", [("yunchang/basic", 4), ("deepspeed/zero3", 4), ("fairscale/guarded", 2)])
def test_models_whose_norms_are_steps_are_widened_in_lower_precisions(name: str, width: int) -> None:
    """Cases as drawn, for this project's own attention in fp64 alone."""
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


@pytest.mark.parametrize(
    "name, said",
    [
        ("detached", "gradients"),
        ("transposed", "attend returned out of shape"),
        ("returns_none", "attend returned None as out"),
    ],
)
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
    # The gradients of the second step are wrong: their norm shows it, or the parameters, or the loss of a third.
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
    assert "mine supports 1 ranks, none of which --world or --case names" in peer["message"]


@pytest.mark.parametrize("peer", [*KNOWN.values(), *WINDOWED.values()], ids=lambda peer: peer.name)
@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_a_claim_is_settled_and_keeps_what_the_implementation_takes(peer: Peer, data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(peer.worlds))))
    found = nearest_claimed(peer, case)
    assert found is not None and found.world == case.world and nearest_claimed(peer, found) == found
    assert (found.kernel, found.measured) == ("math", False)
    assert found.again == (case.again if case.again in RUNS else "alike")
    if not found.order.startswith("contiguous"):
        assert found.pattern.causal
    if peer.worlds == (1,):
        assert found.order == "contiguous" and found.cuts is None and found.heads == found.kv_heads
        return
    assert len(set(found.shards().counts)) == 1 and found.tokens > 0
    before, after, window = case.pattern.documents, found.pattern.documents, claims.window(found)
    assert found.pattern == Pattern.dense(found.pattern.causal, after, window)
    if peer.name.endswith(" with windows"):
        assert window == claims.window(with_windows.with_a_window(case)) is not None
    elif peer.name == "diffusers/ulysses-flash":
        assert not found.pattern.causal
    else:
        assert window is None or (peer.name in WITH_WINDOWS and found.pattern.causal)
    if "-varlen" not in peer.name:
        assert after is None
    elif not found.order.endswith("by document"):  # they are as drawn, but for the last, which ends the last shard
        assert before == after or (before is not None and after is not None and before[:-1] == after[:-1])
    else:
        edges, longest = lengths(found, len(found.ranks))
        unit = len(found.ranks) * (2 if found.order == "zigzag by document" else 1)
        assert found.batch == 1 and all(length % unit == 0 for length in after or (found.tokens,))
        assert edges[-1] == found.shards().counts[0] and edges.diff().max() == longest


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


@pytest.mark.parametrize(
    "documents, chunks, wanted",
    [
        ((1, 1, 1), 1, (2, 2)),  # edges 0, 2 and the end at 4: nothing is left of the first
        ((0, 3, 0, 5, 0), 1, (0, 2, 0, 6, 0)),  # the edge at 3 goes to 2; those that were drawn empty stay
        ((3, 5), 2, (8,)),
        ((4, 0, 8), 2, (4, 0, 8)),
    ],
)
def test_parts_of_documents(documents: tuple[int, ...], chunks: int, wanted: tuple[int, ...]) -> None:
    order = "zigzag by document" if chunks == 2 else "contiguous by document"
    found = claims.even_parts(plain(2, tokens=sum(documents), pattern=Pattern.dense(True, documents)), order, chunks)
    assert found.pattern.documents == wanted and found.tokens == sum(wanted) and found.cuts is None
    assert claims.even_parts(found, order, chunks) == found and len(set(found.shards().counts)) == 1


def test_the_window_of_a_case_is_that_of_the_first_branch_that_has_one() -> None:
    case = plain(2, pattern=Pattern((Branch(4), Branch(window=3), Branch(window=5)), True, (5, 7)))
    assert claims.window(case) == 3 and window_size(case) == (3, 3)
    assert claims.dense(case).pattern == Pattern.dense(True)
    assert claims.dense(case, False, windows=True).pattern == Pattern.dense(False, window=3)
    assert claims.packed(case).pattern == Pattern.dense(True, (5, 7))
    assert claims.packed(case, windows=True).pattern == Pattern.dense(True, (5, 7), 3)
    assert claims.window(plain(2)) is None and window_size(plain(2)) == (-1, -1)
    for causal in (False, True):
        found = nearest_claimed(KNOWN[LLAMA3], replace(case, pattern=Pattern.dense(causal, (5, 7), 3), dtype="float16"))
        assert found is not None and claims.window(found) == (3 if causal else None)
    for name, peer in WINDOWED.items():
        assert load(f"{with_windows.__name__}:{name}") is peer and peer.name not in KNOWN


def test_a_claim_that_is_none_is_the_adapters_fault() -> None:
    with pytest.raises(ToolError, match="claims of mine raised ZeroDivisionError"):
        nearest_claimed(peer_examples.claims_raise, plain(1))
    with pytest.raises(ToolError, match="it must be a Case with world 1, or None"):
        nearest_claimed(peer_examples.claims_other_world, plain(1))
    with pytest.raises(ToolError, match="changes its own result"):
        nearest_claimed(peer_examples.claims_unsettled, plain(1))


def test_yunchang_joins_as_many_ranks_as_leave_a_ring() -> None:
    for world, heads, wanted in ((2, 2, 1), (3, 3, 1), (4, 1, 1), (4, 2, 2), (4, 4, 2), (4, 3, 1)):
        assert yunchang.all_to_all_ranks(plain(world, heads=heads, kv_heads=heads)) == wanted


def inputs_of(kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    draw = torch.Generator().manual_seed(kv_heads)
    return [torch.randn(1, TOKENS, heads, 3, generator=draw) for heads in (4, kv_heads, kv_heads, 4)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
@pytest.mark.parametrize("window", (None, 0, 2, 9))
def test_the_stand_in_for_flash_attn(causal: bool, kv_heads: int, window: int | None) -> None:
    """The rows are cut in two: masks are aligned to the last query and the last key, by which a window is shifted."""
    q, k, v, dout = inputs_of(kv_heads)
    pattern = Pattern.dense(causal, window=window)
    exact, exact_lse = attention(q, k, v, pattern, scale=SCALE)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in (slice(0, 3), slice(3, TOKENS)):
        keys = slice(0, rows.stop if causal else TOKENS if window is None else min(TOKENS, rows.stop + window))
        behind = keys.stop - rows.stop
        sides = (-1, -1) if window is None else (window + behind, window - behind)
        inputs: Any = q[:, rows], k[:, keys], v[:, keys]
        how: Any = 0.0, SCALE, causal, *sides
        out, lse, _, _ = flash_attn_shim.forward(*inputs, *how)
        torch.testing.assert_close((out, lse), (exact[:, rows].float(), exact_lse[:, :, rows].float()))
        grads: Any = [torch.full_like(x, math.nan) for x in inputs]
        given: Any = dout[:, rows], *inputs, out, lse, *grads, *how
        flash_attn_shim.backward(*given)
        for total, part, where in zip(sums, grads, (rows, keys, keys), strict=True):
            total[:, where] += part
    wanted = gradients(q, k, v, pattern, dout, scale=SCALE)
    torch.testing.assert_close(sums, [x.float() for x in wanted])


@pytest.mark.parametrize("causal", (False, True))
def test_the_stand_in_for_flash_attn_of_varying_lengths(causal: bool) -> None:
    q, k, v, dout = inputs_of(2)
    pattern, edges = Pattern.dense(causal, (3, 0, 4, 2)), torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32)
    how: Any = edges, edges, 4, 4, 0.0, SCALE, causal
    inputs = q[0], k[0], v[0]
    out, lse, _, _ = flash_attn_shim.varlen_forward(*inputs, *how)
    exact = attention(q, k, v, pattern, scale=SCALE)
    torch.testing.assert_close((out, lse), tuple(x[0].float() for x in exact))
    grads: Any = [torch.full_like(x, math.nan) for x in inputs]
    flash_attn_shim.varlen_backward(dout[0], *inputs, out, lse, *grads, *how)
    torch.testing.assert_close(grads, [x[0].float() for x in gradients(q, k, v, pattern, dout, scale=SCALE)])


@pytest.mark.parametrize(
    "edges, longest, said",
    [
        ([1, 3], 2, r"cu_seqlens must ascend from 0 to 3 in int32, got \[1, 3\]"),
        ([0, 2], 2, "must ascend from 0"),
        ([0, 2, 1, 3], 3, "must ascend from 0"),
        ([0, 1, 3], 1, "max_seqlen must be at least the longest sequence, 2, got 1"),
    ],
)
def test_lengths_that_a_kernel_would_take_on_trust_are_checked(edges: list[int], longest: int, said: str) -> None:
    q, sound, wrong = torch.ones(3, 1, 1), torch.tensor([0, 3]).int(), torch.tensor(edges).int()
    for at in ((wrong, sound, longest, 3), (sound, wrong, 3, longest)):
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_forward(q, q, q, *at, 0.0, 1.0, False)
        with pytest.raises(ValueError, match=said):
            flash_attn_shim.varlen_backward(q, q, q, q, q, q[:, 0].T, q, q, q, *at, 0.0, 1.0, False)
    with pytest.raises(ValueError, match=r"in torch.int64"):
        flash_attn_shim.varlen_forward(q, q, q, sound.long(), sound, 3, 3, 0.0, 1.0, False)


def test_what_the_stand_in_does_not_have_is_refused() -> None:
    q, edges = torch.ones(1, 2, 1, 1), torch.tensor([0, 2]).int()
    unusual = {"dropout_p": 0.1, "softcap": 1.0, "alibi_slopes": torch.ones(1), "return_softmax": True}
    for name, value in (*unusual.items(), ("block_table", edges)):
        options: Any = {"dropout_p": 0.0, "softmax_scale": 1.0, "causal": False} | {name: value}
        with pytest.raises(NotImplementedError, match=f"has no dropout, soft cap, ALiBi, .* or keys in pages.*{name}="):
            flash_attn_shim.varlen_forward(q[0], q[0], q[0], edges, edges, 2, 2, **options)
        if name in unusual:
            with pytest.raises(NotImplementedError, match=f"{name}="):
                flash_attn_shim.forward(q, q, q, **options)
    with pytest.raises(NotImplementedError):
        flash_attn_shim.refused(q)


def test_the_stand_in_on_rows_that_see_nothing_and_under_autocast() -> None:
    q = torch.ones(1, 2, 1, 1)
    out, lse, _, _ = flash_attn_shim.forward(q, q[:, :1], q[:, :1], 0.0, 1.0, True)
    assert out[0, 0, 0, 0] == 0 and lse[0, 0, 0] == math.inf and lse[0, 0, 1] == 1
    given: Any = *(x.bfloat16() for x in inputs_of(4)[:3]), 0.5, True
    with torch.autocast("cpu", torch.bfloat16):
        under = flash_attn_shim.attention(*given)
    torch.testing.assert_close(under, flash_attn_shim.attention(*given), rtol=0, atol=0)
