"""Groups on which nobody has called yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ring.comm.calls import Calls
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import RecordingTransport, Transport

TIMEOUT = timedelta(seconds=60)


class Own(RecordingTransport):
    """Another transport, with calls of its own."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls = Calls()


@contextmanager
def new_group(transport: Transport) -> Iterator[Transport]:
    """Of all ranks, until the end of the block. Every rank calls it. transport: over all ranks."""
    if not isinstance(transport, ProcessGroupTransport):
        yield Own(transport)
        return
    group = dist.new_group(timeout=TIMEOUT)  # one that only its members make has an old name
    try:
        yield type(transport)(group)
    finally:
        dist.destroy_process_group(group)
