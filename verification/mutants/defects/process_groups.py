"""Defects of the road through real process groups. A simulation has a transport of its own, and does not show them."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

TRANSPORT = "ring/comm/transport.py"

_RECEIVE = "        found = [dist.irecv(m.tensor, group=self.group, group_src=m.peer) for m in receives]\n"
_SEND = "        found += [dist.isend(m.tensor, group=self.group, group_dst=m.peer) for m in sends]\n"
_WAIT_ALL = "        for work in self._receives:\n            work.wait()\n"

PROCESS_GROUPS = (
    Defect(
        "group-rank-as-world-rank-in-receives",
        "pytorch#187924; DeepSpeed#7672",
        "The peer's rank in the group is used as its rank in the world, so a subgroup reaches others.",
        (Edit(TRANSPORT, _RECEIVE, _RECEIVE.replace("group_src=", "src=")),),
        (38,),
        "gloo",
    ),
    Defect(
        "group-rank-as-world-rank-in-sends",
        "pytorch#187924; DeepSpeed#7672",
        "The peer's rank in the group is used as its rank in the world, so a subgroup sends to others.",
        (Edit(TRANSPORT, _SEND, _SEND.replace("group_dst=", "dst=")),),
        (38,),
        "gloo",
    ),
    Defect(
        "own-rank-in-the-world",
        "DeepSpeed#7672",
        "A member of a subgroup takes its rank in the world for its rank in the group.",
        (
            Edit(
                TRANSPORT,
                "        self.rank = dist.get_rank(self.group)\n",
                "        self.rank = dist.get_rank()\n",
            ),
        ),
        (38,),
        "gloo",
    ),
    Defect(
        "blocking-send-on-a-process-group",
        "NVIDIA/nccl#479",
        "Sends of a batch block before its receives are posted.",
        (
            Edit(TRANSPORT, _RECEIVE, "        found = []\n"),
            Edit(
                TRANSPORT,
                _SEND,
                _SEND + "        for work in found:\n"
                "            work.wait()\n" + _RECEIVE.replace("found = ", "found += "),
            ),
        ),
        (39,),
        "gloo",
    ),
    Defect(
        "only-the-first-handle-waited-for",
        "seen in public ring-attention code",
        "Of what a batch receives only the first message is waited for.",
        (Edit(TRANSPORT, _WAIT_ALL, _WAIT_ALL.replace("self._receives:", "self._receives[:1]:")),),
        (36, 37),
        "gloo",
    ),
    Defect(
        "handles-of-sends-dropped",
        "pytorch#61875",
        "Handles of sends are dropped: gloo loses such messages.",
        (
            Edit(
                TRANSPORT,
                "        assert len(works) == len(sends) + len(receives)\n",
                "        works = works[: len(receives)]\n        found = []\n",
            ),
        ),
        (36,),
        "gloo",
    ),
    Defect(
        "peers-of-receives-off-by-one",
        "own",
        "Receives are posted for the rank after the peer.",
        (
            Edit(
                TRANSPORT,
                _RECEIVE,
                _RECEIVE.replace("group_src=m.peer", "group_src=(m.peer + 1) % self.world_size"),
            ),
        ),
        (38,),
        "gloo",
    ),
    Defect(
        "unanimous-if-nobody-says-more",
        "own",
        "A rank whose words sort last believes that all said the same.",
        (Edit(TRANSPORT, "        both = torch.cat((mine, ~mine))\n", "        both = mine.clone()\n"),),
        (42,),
        "gloo",
    ),
    Defect(
        "words-collected-from-the-world",
        "pytorch#187924",
        "The words of the ranks are collected from the default group, whose other ranks do not take part.",
        (
            Edit(
                TRANSPORT,
                "        dist.all_gather(everyone, mine, group=self.group)\n",
                "        dist.all_gather(everyone, mine)\n",
            ),
        ),
        (38,),
        "gloo",
    ),
    Defect(
        "agreement-of-the-world",
        "pytorch#187924",
        "A subgroup asks the default group whether all agree, whose other ranks do not answer.",
        (
            Edit(
                TRANSPORT,
                "dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self.group)",
                "dist.all_reduce(greatest, op=dist.ReduceOp.MAX)",
            ),
        ),
        (38,),
        "gloo",
    ),
)
