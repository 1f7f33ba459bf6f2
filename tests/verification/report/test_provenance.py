"""A record names the commit that it was made with, and says where the tree differs from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from verification.report import provenance


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        done = subprocess.run(("git", "-C", str(tmp_path), *who, *words), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "nothing")
    head = git("rev-parse", "HEAD")
    assert provenance.commit() == head and len(head) == 40
    (tmp_path / "more").write_text("more")
    assert provenance.commit() == head + "+"
