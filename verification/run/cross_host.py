"""Consensus of ranks on one machine as if they were on several, so that both ways are checked."""

from __future__ import annotations

from ring.comm import process_group
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.shared_page import Meeting, StoreNote


class CrossHostTransport(ProcessGroupTransport):
    """A transport whose ranks agree through the group's backend, as ranks of several machines without common memory do.
    Nor do they see there which process has ended: they leave their notes in the group's store.

    All ranks must use the same way, so a group is used either always through this transport or never.
    """

    def meet(self) -> Meeting:
        met = super().meet()
        if met.page is not None:
            met = process_group._meetings[self.group] = met._replace(page=None)
            fresh = process_group._new_meeting(self.group)
            process_group._notes[self.group] = StoreNote(fresh, self.rank)
        return met
