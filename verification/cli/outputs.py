"""Whether what a run is to leave behind can be written: found out before it starts, not after hours."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_folder(argument: str, folder: Path) -> None:
    """Make the folder, and see that files can be made in it. Raises OSError naming the argument."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write to {folder}: {error}") from error


def check_file(argument: str, file: Path) -> None:
    """See that the file can be written, and leave it as it is. Its folder is not made: one that is not there is
    likelier a slip of the pen than a wish.

    Raises OSError naming the argument.
    """
    try:
        if file.exists():
            file.open("a").close()
        else:
            if not file.parent.exists():
                raise FileNotFoundError(f"there is no folder {file.parent.absolute()}")
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write {file}: {error}") from error
