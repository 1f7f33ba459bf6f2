"""The files that a run leaves behind: whether they can be written is checked before it starts, not after hours."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_folder(argument: str, folder: Path) -> None:
    """Make the folder, and see that files can be made in it. Raises OSError naming the argument."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write to {folder}: {error}") from error


def check_file(argument: str, file: Path) -> None:
    """See that the file can be written, and leave it as it is. Its folder is not made: where there is none, the name is
    likely to be mistyped.

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


def write_json(file: Path | None, record: Mapping[str, Any]) -> None:
    """Nothing where no file was asked for."""
    if file is not None:
        file.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
