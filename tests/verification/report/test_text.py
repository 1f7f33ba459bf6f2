"""Lines of 80 columns: a copy of broken JSON is JSON, and of a broken command line the same command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from verification.report.text import command_lines, json_lines, listing, paragraph


def test_paragraphs() -> None:
    lines = paragraph("word " * 40 + "\nnext", indent="  ", hanging="    ")
    assert max(map(len, lines)) <= 80 and " ".join(" ".join(lines).split()) == "word " * 40 + "next"
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, *[4] * (len(lines) - 1)]
    assert paragraph("a\n\nb") == ["a", "", "b"]
    assert paragraph("x" * 100) == ["x" * 100], "a path stays whole"


def test_json_is_broken_between_values_only() -> None:
    record = {
        "law": "a title of several words " * 2,
        "how": {"mistakes": [["a wrong call", None]] * 9, "quote": 'a "b c" d'},
    }
    lines = json_lines("Case: ", record)
    assert max(map(len, lines)) <= 80 and len(lines) > 3
    assert json.loads("\n".join(lines).removeprefix("Case: ")) == record


def test_a_command_line_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["python", "-m", "verification", "replay", "a b.json"]
    assert command_lines("replay: ", short) == ["replay: python -m verification replay 'a b.json'"]
    words = ["/usr/bin/python", *(f"--option-{n}" for n in range(20)), str(tmp_path / "folder" / "a b.json")]
    lines = command_lines("replay: ", words)
    assert max(map(len, lines)) <= 80 and all(line.endswith(" \\") for line in lines[:-1]) and len(lines) > 3
    copied = "\n".join(lines).removeprefix("replay: ").replace("\\\n", "")
    assert shlex.split(copied) == [*words[:-1], "folder/a b.json"], "files beneath the working directory are shortened"


def test_a_listing_counts_what_has_no_room() -> None:
    names = [f"feature number {n}" for n in range(100)]
    assert listing("few: ", names[:2], 2) == ["few: feature number 0, feature number 1"]
    lines = listing("few: ", names, 2)
    shown = " ".join(lines).count("feature number")
    assert len(lines) == 2 and max(map(len, lines)) <= 80 and lines[-1].endswith(f"and {100 - shown} more")
