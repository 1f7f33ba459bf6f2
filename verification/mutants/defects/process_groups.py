"""Defects of the road through real process groups. A simulation has a transport of its own, and does not show them."""

from __future__ import annotations

from functools import partial

from ring.comm import process_group
from verification.mutants.defect import Edit, defect

on_gloo = partial(defect, backend="gloo")

_RECEIVE = "        found = [dist.irecv(m.tensor, group=self.group, group_src=m.peer) for m in receives]\n"
_SEND = "        found += [dist.isend(m.tensor, group=self.group, group_dst=m.peer) for m in sends]\n"
_WAIT_ALL = "        for work in self._receives:\n            work.wait()\n"

PROCESS_GROUPS = (
    on_gloo(
        "group-rank-as-world-rank-in-receives",
        "The peer's rank in the group is used as its rank in the world, so a subgroup reaches others.",
        Edit(process_group, _RECEIVE, _RECEIVE.replace("group_src=", "src=")),
        provenance="pytorch#187924; DeepSpeed#7672",
        listed=(38,),
    ),
    on_gloo(
        "group-rank-as-world-rank-in-sends",
        "The peer's rank in the group is used as its rank in the world, so a subgroup sends to others.",
        Edit(process_group, _SEND, _SEND.replace("group_dst=", "dst=")),
        provenance="pytorch#187924; DeepSpeed#7672",
        listed=(38,),
    ),
    on_gloo(
        "own-rank-in-the-world",
        "A member of a subgroup takes its rank in the world for its rank in the group.",
        Edit(process_group, "        self.rank = dist.get_rank(self.group)\n", "        self.rank = dist.get_rank()\n"),
        provenance="DeepSpeed#7672",
        listed=(38,),
    ),
    on_gloo(
        "blocking-send-on-a-process-group",
        "Sends of a batch block before its receives are posted.",
        Edit(process_group, _RECEIVE, "        found = []\n"),
        Edit(
            process_group,
            _SEND,
            _SEND + "        for work in found:\n            work.wait()\n" + _RECEIVE.replace("found = ", "found += "),
        ),
        provenance="NVIDIA/nccl#479",
        listed=(39,),
    ),
    on_gloo(
        "only-the-first-handle-waited-for",
        "Of what a batch receives only the first message is waited for.",
        Edit(process_group, _WAIT_ALL, _WAIT_ALL.replace("self._receives:", "self._receives[:1]:")),
        provenance="seen in public ring-attention code",
        listed=(36, 37),
    ),
    on_gloo(
        "handles-of-sends-dropped",
        "Handles of sends are dropped: gloo loses such messages.",
        Edit(
            process_group,
            "        assert len(works) == len(sends) + len(receives)\n",
            "        works = works[: len(receives)]\n        found = []\n",
        ),
        provenance="pytorch#61875",
        listed=(36,),
    ),
    on_gloo(
        "peers-of-receives-off-by-one",
        "Receives are posted for the rank after the peer.",
        Edit(process_group, _RECEIVE, _RECEIVE.replace("group_src=m.peer", "group_src=(m.peer + 1) % self.world_size")),
        listed=(38,),
    ),
    on_gloo(
        "unanimous-if-nobody-says-more",
        "A rank whose words sort last believes that all said the same.",
        Edit(process_group, "        both = torch.cat((mine, ~mine))\n", "        both = mine.clone()\n"),
        listed=(42,),
    ),
    on_gloo(
        "words-collected-from-the-world",
        "The words of the ranks are collected from the default group, whose other ranks do not take part.",
        Edit(
            process_group,
            "        dist.all_gather(everyone, mine, group=self.group)\n",
            "        dist.all_gather(everyone, mine)\n",
        ),
        provenance="pytorch#187924",
        listed=(38,),
    ),
    on_gloo(
        "agreement-of-the-world",
        "A subgroup asks the default group whether all agree, whose other ranks do not answer.",
        Edit(
            process_group,
            "dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self.group)",
            "dist.all_reduce(greatest, op=dist.ReduceOp.MAX)",
        ),
        provenance="pytorch#187924",
        listed=(38,),
    ),
)
