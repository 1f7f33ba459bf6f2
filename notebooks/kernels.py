"""Kernels of Jupyter that are reached by socket files, for notebooks that run while other processes open TCP ports.

Jupyter looks for free TCP ports, lets them go, and the kernel takes them later: another kernel, or ranks of a notebook,
may have one by then, and the kernel dies ("Address already in use"). A socket file has a name that is nobody else's.
"""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager
from traitlets import default


class SocketFileKernelManager(AsyncKernelManager):
    """Starts a kernel whose five sockets are files in the folder for temporary files; they are removed with it."""

    @default("transport")
    def _socket_files(self) -> str:
        return "ipc"

    @default("ip")
    def _unique_prefix(self) -> str:
        """Of the socket files; Jupyter's own default is the same for all kernels. Paths of sockets must be short."""
        return str(Path(tempfile.gettempdir()) / f"kernel-{uuid.uuid4().hex[:16]}")
