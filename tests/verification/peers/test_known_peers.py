"""Peers by their names, saved findings of them, and what is refused."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.peer_examples import EXAMPLES
from verification.case import Case
from verification.peers import Refused, probe
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer_experiment import LAWS_OF_ANY
from verification.training.training_case import TrainingCase

pytestmark = pytest.mark.ranks

FINDINGS = Path(__file__).parents[3] / "verification/peers/findings"
ENGINE = [f"verification.peers.adapters.transformer_engine:{x}" for x in ("p2p", "all_gather", "a2a", "a2a_p2p")]
IMPORTED_AS = {"axolotl-ringmaster": "ringmaster"}


def test_names() -> None:
    assert selected("ring-flash-attn") == [name for name in KNOWN if name.startswith("ring-flash-attn/")]
    assert selected("yunchang/strip") == ["yunchang/strip"] and selected("a.b:c") == ["a.b:c"] and len(KNOWN) == 34
    assert load("verification.peers.adapters.torchscale:adapter") is load("torchscale"), "as older records name it"
    for wrong in ("ring-flash", "a.b", ":c", "a:", "a:b:c", "a.:b", "/", ""):
        with pytest.raises(Refused, match="argument NAME"):
            selected(wrong)


def test_malformed_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("name", [*(name for name in KNOWN if not name.startswith(("torch", "formula/"))), *ENGINE])
def test_missing_packages_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = str(load(name).package)
    module = IMPORTED_AS.get(package, package.replace("-", "_"))
    monkeypatch.setattr(sys, "modules", sys.modules | {module: None})  # importing it fails
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert load(name).version is None
    with pytest.raises(Refused, match=f"the package {package} is not installed"):
        ready(name)


@pytest.mark.parametrize(
    "field, value",
    [
        ("name", ""),
        ("attend", 3),
        ("worlds", ()),
        ("worlds", (2, 9)),
        ("arithmetic", "double"),
        ("merge", "added"),
        ("attend", lambda q, k, v: q),
        ("attend", lambda q, k, v, case, group, more: q),
        ("claims", lambda: None),
        ("prepare", lambda name: None),
    ],
)
def test_impossible_peers_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}( of '.*')? is {re.escape(repr(value))}; it must be "):
        replace(load("torchscale"), **{field: value})


@pytest.mark.parametrize("file", sorted(FINDINGS.glob("*.json")), ids=lambda file: file.stem)
def test_saved_findings_replay_and_have_a_page(file: Path) -> None:
    record = json.loads(file.read_text())
    peer = load(record.pop("peer", None) or record.pop("step_peer"))
    if "law" in record:
        law = next(law for law in LAWS_OF_ANY if law.name == record["law"])
        law.validate(Case.from_json(json.dumps(record["case"])), record["how"])
    case = record.get("case") or record["training_case"]
    assert (Case.from_json(json.dumps(case)) if "case" in record else TrainingCase.from_dict(case)).world in peer.worlds
    replay = rf"replay (--device cuda )?verification/peers/findings/{file.name}"
    assert any(re.search(replay, page.read_text()) for page in FINDINGS.glob("*.md"))
