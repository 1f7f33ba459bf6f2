"""Groups on which no call has been made yet."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest.mock import patch

import torch.distributed as dist

from ring.comm import shared_page
from ring.comm.call_order import Calls
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Transport
from verification.run.recording_transport import RecordingTransport

TIMEOUT = timedelta(seconds=60)


class FreshCalls(RecordingTransport):
    """A wrapper of a transport, with its own numbering of calls."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls = Calls()


@contextmanager
def new_group(transport: Transport, without_page: int | None = None) -> Iterator[Transport]:
    """Make a group of all ranks, as `transport` has, and destroy it at the end of the block. Collective.

    without_page: the rank on which the host's shared page fails to open, as if too many files were open.
    """
    if not isinstance(transport, ProcessGroupTransport):
        yield FreshCalls(transport)
        return
    group = dist.new_group(timeout=TIMEOUT)  # a group created by its members only would reuse an old name
    refused = patch.object(shared_page, "SharedPage", side_effect=OSError(errno.EMFILE, "Too many open files"))
    try:
        with refused if transport.rank == without_page else nullcontext():
            yield type(transport)(group)
    finally:
        dist.destroy_process_group(group)
