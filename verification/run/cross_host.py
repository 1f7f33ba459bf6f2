"""Consensus of ranks on one machine as if they were on several, so that both ways are checked."""

from __future__ import annotations

from ring.comm.process_group import ProcessGroupTransport


class CrossHostTransport(ProcessGroupTransport):
    """A transport whose ranks agree through the group's backend, as ranks of several machines without common memory do.

    All ranks must use the same way, so a group is used either always through this transport or never.
    """

    def all_equal(self, payload: bytes) -> bool:
        if self.world_size == 1:
            return True
        number = self.calls.next_round()
        self.meet()
        return self.all_equal_by_group(payload, number)
