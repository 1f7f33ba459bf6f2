"""Files of torch's distributed checkpoints: written with errors that name the file, read without running code.

torch unpickles `.metadata` and the values that are no tensors with the full unpickler, which runs what a file says.
Here both are read by unpicklers that know the classes of a checkpoint alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import ReadItem

from ring.whole_file import unwritten

_METADATA = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (*_METADATA, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))),
    "pathlib": ("PosixPath",),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise ValueError(f"it names {module}.{name}, which no checkpoint has")
        return super().find_class(module, name)


class _NamingFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            if "r" in mode:
                raise
            # torch's zip writer answers a failed write with an error of its own, behind which is the disk's.
            cause: BaseException = error
            while not isinstance(cause, OSError) and cause.__context__ is not None:
                cause = cause.__context__
            raise unwritten(Path(path), cause) from error


class Writer(FileSystemWriter):
    """torch's writer, whose errors name the file and the free space of its disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _NamingFileSystem()


class Reader(FileSystemReader):
    """torch's reader of a folder. files: names that its metadata may refer to."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. Raises ValueError if it names other classes or files."""
        file = self._folder / ".metadata"
        with file.open("rb") as stream:
            try:
                metadata = _MetadataUnpickler(stream).load()
                names = {info.relative_path for info in metadata.storage_data.values()}
            except Exception as error:  # a pickle may raise whatever it likes
                raise ValueError(f"{file} is no metadata of a checkpoint: {error}") from error
        if not names <= set(self._files):
            raise ValueError(
                f"{file} names files that the manifest does not have: {', '.join(names - set(self._files))}"
            )
        return metadata


class Planner(DefaultLoadPlanner):
    """torch's planner, which unpickles numbers, text and containers of them, and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for anything else
        value.seek(0)
        super().load_bytes(read_item, value)
