"""Files are replaced whole or stay as they were."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.faults_of_disks import file_limit, steps_until_lost
from verification import whole_file


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
    said = rf"cannot write {file}: File too large; [0-9,.]+ MiB are free on its disk"
    with file_limit(most), pytest.raises(OSError, match=said):
        whole_file.write(file, "x" * 10_000)
    assert file.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/no/record: No such file or directory"):
        whole_file.write(tmp_path / "no" / "record", "text")


def test_each_step_of_a_writing_can_be_its_last(tmp_path: Path) -> None:
    """Remains of a kill block no later writing, also of a process with the same number."""
    file = tmp_path / ("x" * 255)
    file.write_text("old")
    file.chmod(0o600)
    contents, last = set(), 1
    while steps_until_lost(tmp_path, lambda: whole_file.write(file, "new"), last) == last:
        contents.add(file.read_text())
        last += 1
    assert contents == {"old", "new"} and last > 4
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o600


def test_threads_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    theirs = tmp_path / f".record.json.{os.getpid()}.new"
    theirs.touch()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: whole_file.write(file, str(number) * 9), range(200))) == [None] * 200
    assert file.read_text() in {str(number) * 9 for number in range(200)}
    assert set(tmp_path.iterdir()) == {file, theirs}
