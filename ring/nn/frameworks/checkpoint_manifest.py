"""The manifest of a checkpoint: a digest of each file, the types of the tensors, the ranks that saved it, the progress.

A digest finds damage. It is no signature: whoever can write the folder can write another manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
_DIGEST = "sha256"  # the fastest of hashlib where CPUs have instructions for it


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    files      size in bytes and digest of each file, by name
    tensors    dtype and whole shape of each tensor, by name
    progress   the caller's values
    world      number of ranks that saved it
    """

    files: dict[str, tuple[int, str]]
    tensors: dict[str, tuple[str, list[int]]]
    progress: dict[str, Any]
    world: int
    format: int = FORMAT

    def encoded(self) -> str:
        """Return the text of the file. Its first entry is a digest of the others."""
        rest = json.dumps(asdict(self), sort_keys=True)
        return f'{{"digest": "{hashlib.new(_DIGEST, rest.encode()).hexdigest()}", {rest[1:]}\n'

    def check_files(self, folder: Path, names: Collection[str]) -> None:
        """Raise ValueError for the first of these files that is missing or damaged."""
        for name in names:
            size, digest = self.files[name]
            file = folder / name
            if not file.is_file():
                raise ValueError(f"the checkpoint {folder} is damaged: {file} is missing")
            if file.stat().st_size != size or entry(file)[1] != digest:
                raise ValueError(
                    f"the checkpoint {folder} is damaged: {file}, of {file.stat().st_size} bytes, is not the file of "
                    f"{size} bytes that was saved; take an earlier checkpoint"
                )


def entry(file: Path) -> tuple[int, str]:
    """Return size and digest of a file."""
    with file.open("rb") as stream:
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, _DIGEST).hexdigest()


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, with every field validated.

    Raises:
        ValueError: no checkpoint, a damaged manifest, or one of another format.
    """
    file = folder / NAME
    if not file.is_file():
        raise ValueError(f"folder must be a checkpoint of `checkpoint.save`, got {folder}, which has no {NAME}")
    content = file.read_bytes()
    try:
        data = json.loads(content)
        data.pop("digest")
        if data["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {data['format']!r}: {file} is of another version")
        _check_fields(data)
        manifest = Manifest(**data)
        whole = manifest.encoded().encode() == content
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"the checkpoint {folder} is damaged: {file} is no manifest ({reason})") from error
    if not whole:
        raise ValueError(f"the checkpoint {folder} is damaged: {file} does not agree with its own digest")
    return manifest


def _check_fields(data: dict[str, Any]) -> None:
    """Raise ValueError for a field that is missing, unknown or of another type."""
    names = {field.name for field in fields(Manifest)}
    if set(data) != names:
        raise ValueError(f"fields must be {', '.join(sorted(names))}, got {', '.join(sorted(data))}")
    if type(data["world"]) is not int or data["world"] < 1:
        raise ValueError(f"world must be an integer of at least 1, got {data['world']!r}")
    for name in ("files", "tensors", "progress"):
        if not isinstance(data[name], dict):
            raise ValueError(f"{name} must be an object, got {data[name]!r}")
    for name, value in data["files"].items():
        if Path(name).name != name or name == NAME or not _is_pair(value, int, str):
            raise ValueError(f"files must have names within the folder with size and digest, got {name!r}: {value!r}")
    for name, value in data["tensors"].items():
        if not _is_pair(value, str, list):
            raise ValueError(f"tensors must have a dtype and a shape each, got {name!r}: {value!r}")


def _is_pair(value: object, first: type, second: type) -> bool:
    return isinstance(value, list) and [type(x) for x in value] == [first, second]
