"""Files are replaced whole or stay as they were."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from ring import whole_file


def test_a_file_is_replaced_and_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("new\n", "replaced\n"):
        whole_file.write(link, text)
        assert file.read_text() == text and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    whole_file.write(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("most", (0, 10, 5000))
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, most: int) -> None:
    file = tmp_path / "record.json"
    file.write_text("as it was")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"cannot write {file}: File too large; [0-9,.]+ MiB are free on its disk"):
            whole_file.write(file, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/no/record: No such file or directory"):
        whole_file.write(tmp_path / "no" / "record", "text")
