"""Defects of communication: what is sent to whom, when buffers may be touched, how large they are."""

from __future__ import annotations

from ring import budget
from ring.comm import exchange
from ring.compute import math_kernel
from ring.plan import chunks, needs, schedule, tiling
from verification.mutants.defect import Edit, defect

_TURNS = "            into, before = received[(number - 1) % len(received)], received[number % len(received)]\n"
_ARRIVED = "            pending.arrive()\n            arrival = Arrival("
_POSTED = (
    "            pending = self.transport.post(\n"
    '                _messages(step.sends, before if step.relayed else send_buffer, f"keys and values {number}"),\n'
    '                _messages(step.receives, into, f"keys and values {number}"),\n'
    "            )\n"
)
_LATER = "            if pending is not None:\n                pending.wait()\n"
_LAST_KEYS = "        yield arrival, len(plan.steps)\n        if pending is not None:\n            pending.wait()\n"
_FINISH = "            (_, pending), _ = self._last\n            pending.wait()\n"
_ADDED = (
    "        pending.arrive()\n"
    "        key, value = StridedView.of_slots(returned[:, 0]), StridedView.of_slots(returned[:, 1])\n"
    "        for one in step.scatters:\n"
    "            dk.add(one.rows, one.heads, key.view(one.slots, one.columns))\n"
    "            dv.add(one.rows, one.heads, value.view(one.slots, one.columns))\n"
)
_MESSAGES = "    return [Message(one.peer, buffer[one.start : one.stop], label) for one in transfers]\n"
_RECEIVED = "sizes.receive, dtype) for i in range(sizes.receive_buffers)]\n"

COMMUNICATION = (
    # --- buffers in flight
    defect(
        "one-landing-for-sends-and-receives",
        "Receive buffers do not alternate: a hop receives into the buffer that it relays and computes on.",
        Edit(exchange, _TURNS, "            into = before = received[0]\n"),
        provenance="DarcStar V3",
        listed=(35,),
    ),
    defect(
        "returned-gradients-share-the-sent-buffer",
        "Returned gradients are received into the buffer of those that are sent.",
        Edit(
            exchange,
            '            _messages(step.return_receives, returned, f"gradients {number}"),\n',
            "            _messages(step.return_receives, grad if len(grad) >= len(returned) else returned, "
            'f"gradients {number}"),\n',
        ),
        provenance="DarcStar V3",
        listed=(35,),
    ),
    defect(
        "outbox-packed-before-its-send-ended",
        "The next step's rows are packed while the send buffer is still being sent.",
        Edit(
            exchange,
            _ARRIVED,
            "            if number < len(plan.steps):\n"
            "                self._pack(plan.steps[number].gathers, send_buffer)\n" + _ARRIVED,
        ),
        provenance="pytorch#61875",
        listed=(36,),
    ),
    defect(
        "one-gradient-buffer",
        "Gradient buffers do not alternate: the next step zeroes and fills what is still being sent.",
        Edit(exchange, "grads[(number - 1) % len(grads)]", "grads[0]"),
        provenance="pytorch#61875",
        listed=(36,),
    ),
    defect(
        "keys-read-before-they-landed",
        "Tiles are computed on a receive buffer whose messages were not waited for.",
        Edit(exchange, _ARRIVED, "            arrival = Arrival("),
        Edit(exchange, _LATER, ""),
        Edit(exchange, _LAST_KEYS, "        yield arrival, len(plan.steps)\n"),
        provenance="pytorch; Cornstarch#77",
        listed=(37,),
    ),
    defect(
        "keys-waited-for-after-use",
        "The wait for a receive buffer comes after the tiles that read it.",
        Edit(exchange, _ARRIVED, "            arrival = Arrival("),
        provenance="Cornstarch#77",
        listed=(37,),
    ),
    defect(
        "outbox-packed-once-keys-arrived",
        "The next step's rows are packed once the rank's receives arrived, while others may still read the buffer.",
        Edit(exchange, _LATER, ""),
        listed=(36,),
    ),
    defect(
        "sent-gradients-changed-once-others-arrived",
        "A gradient buffer is used again once returned gradients have arrived, though others may still read it.",
        Edit(exchange, "                due[1].wait()\n", ""),
        Edit(exchange, _FINISH, "            pass\n"),
        listed=(36,),
    ),
    defect(
        "relayed-from-elsewhere-than-told",
        "Receivers are told that a relayed message lies in the receive buffer that is filled next. Only a receiver "
        "that copies out of the sender's memory reads there.",
        Edit(
            exchange,
            'f"receive buffer {number % sizes.receive_buffers}", sizes.receive',
            '"receive buffer 0", sizes.receive',
        ),
    ),
    defect(
        "last-gradients-sent-and-left",
        "A backward returns though others may still read the gradients that it sent last.",
        Edit(exchange, _FINISH, "            pass\n"),
        listed=(36,),
    ),
    defect(
        "returned-gradients-read-before-they-landed",
        "Returned gradients are added before they were waited for.",
        Edit(exchange, _ADDED, _ADDED.replace("        pending.arrive()\n", "") + "        pending.arrive()\n"),
        provenance="pytorch",
        listed=(37,),
    ),
    defect(
        "last-returned-gradients-not-waited-for",
        "The gradients of the last step are neither waited for nor added.",
        Edit(exchange, "        if due is not None:\n            self._last = due, returned\n", ""),
        provenance="Cornstarch#77",
        listed=(14, 37),
    ),
    defect(
        "sends-before-receives",
        "Every rank waits for its sends before it posts its receives: a deadlock.",
        Edit(
            exchange,
            _POSTED,
            _POSTED.replace("pending = self.transport.post(\n", "self.transport.post(\n").replace(
                '                _messages(step.receives, into, f"keys and values {number}"),\n            )\n',
                "                (),\n            ).wait()\n"
                "            pending = self.transport.post(\n"
                '                (), _messages(step.receives, into, f"keys and values {number}")\n'
                "            )\n",
            ),
        ),
        provenance="NVIDIA/nccl#479",
        listed=(39,),
    ),
    defect(
        "message-not-contiguous",
        "Messages are views with swapped dimensions.",
        Edit(exchange, _MESSAGES, _MESSAGES.replace("one.stop]", "one.stop].transpose(0, 1)")),
        provenance='seen in public ring-attention code, as "illegal memory access"',
        listed=(40,),
    ),
    defect(
        "outbox-not-packed-again",
        "The send buffer is packed at the first step only: later ones send the rows of the first.",
        Edit(
            exchange,
            "            self._pack(step.gathers, send_buffer)\n",
            "            if number == 1:\n                self._pack(step.gathers, send_buffer)\n",
        ),
        listed=(13,),
    ),
    defect(
        "values-not-packed",
        "The send buffer holds the keys twice, and no values.",
        Edit(
            exchange,
            "value.put(one.slots, one.columns, v.view(one.rows, one.heads))",
            "value.put(one.slots, one.columns, k.view(one.rows, one.heads))",
        ),
    ),
    # --- who, what, how much
    defect(
        "labels-of-sends-one-behind",
        "Sends are labelled with the number of the step before.",
        Edit(
            exchange, 'send_buffer, f"keys and values {number}"),\n', 'send_buffer, f"keys and values {number - 1}"),\n'
        ),
    ),
    defect(
        "relayed-message-one-slot-short",
        "What the ring passes on lacks its last slot: the receiver keeps stale data there.",
        Edit(schedule, "(after, 0, slots(source + 1, t))", "(after, 0, slots(source + 1, t) - (t > 1))"),
    ),
    defect(
        "relay-sends-the-outbox",
        "At every hop the ring sends the own keys instead of those that it received.",
        Edit(schedule, "relayed=t > 1", "relayed=False"),
        listed=(13,),
    ),
    defect(
        "carried-slots-of-this-hop",
        "As many returned slots are carried on as are received at this hop, not at the next.",
        Edit(
            schedule,
            "carried = slots(source - 1, t + 1)",
            "carried = slots(source, t + 1)",
        ),
        listed=(14, 18),
    ),
    defect(
        "onward-slots-of-this-hop",
        "All that was received is passed on as if it travelled farther, and nothing is returned before the last hop.",
        Edit(
            schedule,
            "slots(source, t), slots(source, t + 1)",
            "slots(source, t), slots(source, t if t < p - 1 else p)",
        ),
        listed=(14,),
    ),
    defect(
        "direct-peers-mirrored",
        "The direct exchange takes from the rank t after what it should take from the rank t before.",
        Edit(schedule, "reader=rank, distance=t, peer=(rank - t) % p", "reader=rank, distance=t, peer=(rank + t) % p"),
        Edit(schedule, "% p, distance=t, peer=(rank + t) % p", "% p, distance=t, peer=(rank - t) % p"),
    ),
    defect(
        "direct-rounds-with-room-left-from-before",
        "A short message joins the last part of a longer one, by the room that was left before that.",
        Edit(
            schedule,
            "            rounds += [([t], chunk) for chunk in range(-(-slots // most))]\n            left = 0\n",
            "            rounds += [([t], chunk) for chunk in range(-(-slots // most))]\n",
        ),
    ),
    defect(
        "gathered-shards-in-the-wrong-places",
        "Gathered shards of ranks after the own are looked for one rank too early.",
        Edit(
            tiling,
            "                bases[transfer.peer] = transfer.start\n",
            "                bases[max(transfer.peer - (transfer.peer > rank + 1), 0)] = transfer.start\n",
        ),
    ),
    defect(
        "whole-pieces-sent",
        "Whole ranges are sent where only their leading rows are needed.",
        Edit(
            needs,
            "needs.range[begin], most)\n",
            "needs.range[begin], np.maximum(most, ranges.count[needs.range[begin]]))\n",
        ),
    ),
    defect(
        "ring-goes-all-the-way",
        "Every slot of the ring travels to the last rank, whether that needs it or not.",
        Edit(
            schedule,
            "    rows[needs.range, (needs.rank - ranges.rank[needs.range]) % p] = needs.count\n",
            "    np.maximum.at(rows, (needs.range, p - 1), needs.count)\n",
        ),
    ),
    defect(
        "hidden-keys-sent",
        "Keys are sent to ranks from whose rows causality hides them.",
        Edit(
            needs,
            "    found = pair_up(ranges, everything, everything, causal)\n",
            "    found = pair_up(ranges, everything, everything, False)\n",
        ),
    ),
    # --- memory
    defect(
        "outbox-made-at-every-step",
        "The send buffer is allocated anew at every step and the old ones are kept.",
        Edit(
            exchange,
            "            self._pack(step.gathers, send_buffer)\n",
            '            send_buffer = self._allocate("send buffer", sizes.send, dtype)\n'
            "            self._pack(step.gathers, send_buffer)\n",
        ),
    ),
    defect(
        "one-landing-too-many",
        "One receive buffer more than is used.",
        Edit(
            exchange, _RECEIVED, _RECEIVED.replace("range(sizes.receive_buffers)", "range(sizes.receive_buffers + 1)")
        ),
    ),
    defect(
        "landing-not-bounded-by-the-bucket",
        "Receive and send buffers are as large as whole messages, however small the bucket.",
        Edit(chunks, "return min(slots, most + widest - 1)", "return slots"),
    ),
    defect(
        "rounds-forget-what-they-hold",
        "Distances are put into one stage although together they pass the bucket.",
        Edit(schedule, "            left -= slots\n", "            left -= 0\n"),
    ),
    defect(
        "default-bucket-ignores-the-budget",
        "Without a bucket whole shards are received at a time, whatever the budget.",
        Edit(budget, " else LEAST, int(SHARE * shard / token))", " else LEAST, max(layout.counts))"),
    ),
    defect(
        "bucket-ignored-by-kernel-calls",
        "A kernel call takes all keys of a stage, however small the bucket: its workspace is not bounded.",
        Edit(tiling, "keys.cut(limits.bucket)", "keys.cut(1 << 30)"),
    ),
    defect(
        "quadratic-workspace",
        "The math kernel makes the scores of all rows of a tile at once: O(n^2) memory.",
        Edit(
            math_kernel,
            "    step = max(_LEAST_ROWS, length * q.shape[-1] // keys)\n",
            "    step = max(_LEAST_ROWS, length)\n",
        ),
    ),
)
