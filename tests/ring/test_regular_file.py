"""Files that a user names: read, or refused at once, whatever they are."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ring.estimate.__main__ import main as estimate
from ring.regular_file import MAX_BYTES, read_regular
from verification.__main__ import main


def test_a_regular_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * MAX_BYTES)
    assert len(read_regular(file)) == MAX_BYTES
    (tmp_path / "link").symlink_to(file)
    assert len(read_regular(tmp_path / "link")) == MAX_BYTES
    os.truncate(file, 2**40)
    with pytest.raises(ValueError, match="it has more than 1048576 bytes; at most that many are read"):
        read_regular(file)


@pytest.mark.parametrize("kind", ("fifo", "socket", "folder", "/dev/zero", "/dev/null", "missing"))
def test_irregular_files_are_refused_in_a_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as end:
        if kind == "socket":
            end.bind(kind)
        elif kind in ("fifo", "folder"):
            {"fifo": os.mkfifo, "folder": os.mkdir}[kind](kind)
        for words in (("replay", kind), ("peers", "torchscale", "--xfails", kind)):
            assert main(words) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and kind in error, error
        sizes = ("--tokens", "64", "--ranks", "2", "--heads", "1", "--head-dim", "8", "--pattern", kind)
        with pytest.raises(SystemExit, match="2"):
            estimate(sizes)
        assert kind in capsys.readouterr().err.splitlines()[-1]
