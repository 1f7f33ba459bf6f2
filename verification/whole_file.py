"""Text files that are written whole or not at all: a full disk or a kill leaves the file as it was before."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def write(file: Path, text: str) -> None:
    """Write a text file, or replace it in one step. A device or a pipe, such as /dev/stdout, is written to as it is.

    A kill may leave a hidden file beside it, `.ring-*.new`, which blocks nothing.

    Raises:
        OSError: with the file, the reason and the free space of its disk.
    """
    if file.exists() and not file.is_file():
        file.write_text(text)
        return
    target = file.resolve()  # a link stays a link
    new = target.with_name(f".ring-{secrets.token_hex(8)}.new")  # other threads and hosts have other names
    try:
        with new.open("x", encoding="utf-8") as stream:
            try:
                stream.write(text)
                stream.flush()
                if target.exists():
                    shutil.copymode(target, new)
                os.fsync(stream.fileno())
                new.replace(target)
            except BaseException:
                with suppress(OSError):
                    new.unlink()
                raise
        sync_folder(target.parent)
    except OSError as error:
        raise unwritten(file, error) from error


def unwritten(path: Path, error: BaseException) -> OSError:
    """Return the error of a path that could not be written, with the free space of its disk."""
    reason = error.strerror if isinstance(error, OSError) else None
    there = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free / 2**20
    return OSError(f"cannot write {path}: {reason or error}; {free:,.1f} MiB are free on its disk")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
