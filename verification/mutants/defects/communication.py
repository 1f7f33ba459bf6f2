"""Defects of communication: what is sent to whom, when buffers may be touched, how large they are."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

BUDGET = "ring/budget.py"
EXCHANGE = "ring/comm/exchange.py"
MEETINGS = "ring/plan/range_pairs.py"
PLAN = "ring/plan/plan.py"
SCHEDULE = "ring/plan/schedule.py"

_TURNS = "            landing, before = landings[(number - 1) % sizes.turns], landings[number % sizes.turns]\n"
_ARRIVED = "            pending.arrive()\n            arrival = Arrival("
_POSTED = (
    "            pending = self.transport.post(\n"
    '                _messages(step.sends, before if step.relayed else outbox, f"keys and values {number}"),\n'
    '                _messages(step.receives, landing, f"keys and values {number}"),\n'
    "            )\n"
)
_LATER = "            if pending is not None:\n                pending.wait()\n"
_LAST_KEYS = "        yield arrival, len(plan.steps)\n        if pending is not None:\n            pending.wait()\n"
_FINISH = "            (_, pending), _ = self._last\n            pending.wait()\n"
_COLLECT = (
    "        pending.arrive()\n"
    "        key, value = Store.slots(returned[:, 0]), Store.slots(returned[:, 1])\n"
    "        for pack in step.homes:\n"
    "            dk.add(pack.rows, pack.heads, key.view(pack.slots, pack.columns))\n"
    "            dv.add(pack.rows, pack.heads, value.view(pack.slots, pack.columns))\n"
)
_MESSAGES = "    return [Message(move.peer, buffer[move.start : move.stop], label) for move in moves]\n"
_LANDINGS = "self.k.dtype) for i in range(sizes.turns)]\n"

COMMUNICATION = (
    # --- buffers in flight
    Defect(
        "one-landing-for-sends-and-receives",
        "DarcStar V3",
        "Landings do not alternate: a hop receives into the buffer that it relays and that is being computed on.",
        (Edit(EXCHANGE, _TURNS, "            landing = before = landings[0]\n"),),
        (35,),
    ),
    Defect(
        "returned-gradients-share-the-sent-buffer",
        "DarcStar V3",
        "Gradients that come back land in the buffer of those that are sent.",
        (
            Edit(
                EXCHANGE,
                '            _messages(step.return_receives, returned, f"gradients {number}"),\n',
                "            _messages(step.return_receives, grad if len(grad) >= len(returned) else returned, "
                'f"gradients {number}"),\n',
            ),
        ),
        (35,),
    ),
    Defect(
        "outbox-packed-before-its-send-ended",
        "pytorch#61875",
        "The next step's rows are packed while the outbox is still being sent.",
        (
            Edit(
                EXCHANGE,
                _ARRIVED,
                "            if number < len(plan.steps):\n"
                "                self._pack(plan.steps[number].packs, outbox)\n" + _ARRIVED,
            ),
        ),
        (36,),
    ),
    Defect(
        "one-gradient-buffer",
        "pytorch#61875",
        "Gradient buffers do not alternate: the next step zeroes and fills what is still being sent.",
        (Edit(EXCHANGE, "grads[(number - 1) % len(grads)]", "grads[0]"),),
        (36,),
    ),
    Defect(
        "keys-read-before-they-landed",
        "pytorch; Cornstarch#77",
        "Tiles are computed on a landing whose messages were not waited for.",
        (
            Edit(EXCHANGE, _ARRIVED, "            arrival = Arrival("),
            Edit(EXCHANGE, _LATER, ""),
            Edit(EXCHANGE, _LAST_KEYS, "        yield arrival, len(plan.steps)\n"),
        ),
        (37,),
    ),
    Defect(
        "keys-waited-for-after-use",
        "Cornstarch#77",
        "The wait for a landing comes after the tiles that read it.",
        (Edit(EXCHANGE, _ARRIVED, "            arrival = Arrival("),),
        (37,),
    ),
    Defect(
        "outbox-packed-once-keys-arrived",
        "own",
        "The next step's rows are packed once the own receives have arrived, though others may still read the outbox.",
        (Edit(EXCHANGE, _LATER, ""),),
        (36,),
    ),
    Defect(
        "sent-gradients-changed-once-others-arrived",
        "own",
        "A gradient buffer is used again once returned gradients have arrived, though others may still read it.",
        (
            Edit(EXCHANGE, "                due[1].wait()\n", ""),
            Edit(EXCHANGE, _FINISH, "            pass\n"),
        ),
        (36,),
    ),
    Defect(
        "relayed-from-elsewhere-than-told",
        "own",
        "Receivers are told that a relayed message lies in the landing that is filled next. Only who copies out of the "
        "sender's memory would read there.",
        (Edit(EXCHANGE, '(f"landing {number % sizes.turns}", sizes.landing)', '("landing 0", sizes.landing)'),),
    ),
    Defect(
        "last-gradients-sent-and-left",
        "own",
        "A backward returns though others may still read the gradients that it sent last.",
        (Edit(EXCHANGE, _FINISH, "            pass\n"),),
        (36,),
    ),
    Defect(
        "returned-gradients-read-before-they-landed",
        "pytorch",
        "Returned gradients are added before they were waited for.",
        (Edit(EXCHANGE, _COLLECT, _COLLECT.replace("        pending.arrive()\n", "") + "        pending.arrive()\n"),),
        (37,),
    ),
    Defect(
        "last-returned-gradients-not-waited-for",
        "Cornstarch#77",
        "The gradients of the last step are neither waited for nor added.",
        (Edit(EXCHANGE, "        if due is not None:\n            self._last = due, returned\n", ""),),
        (14, 37),
    ),
    Defect(
        "sends-before-receives",
        "NVIDIA/nccl#479",
        "Every rank waits for its sends before it posts its receives: a deadlock.",
        (
            Edit(
                EXCHANGE,
                _POSTED,
                _POSTED.replace("pending = self.transport.post(\n", "self.transport.post(\n").replace(
                    '                _messages(step.receives, landing, f"keys and values {number}"),\n            )\n',
                    "                (),\n            ).wait()\n"
                    "            pending = self.transport.post(\n"
                    '                (), _messages(step.receives, landing, f"keys and values {number}")\n'
                    "            )\n",
                ),
            ),
        ),
        (39,),
    ),
    Defect(
        "message-not-contiguous",
        'seen in public ring-attention code, as "illegal memory access"',
        "Messages are views with swapped dimensions.",
        (
            Edit(
                EXCHANGE,
                _MESSAGES,
                _MESSAGES.replace("move.stop]", "move.stop].transpose(0, 1)"),
            ),
        ),
        (40,),
    ),
    Defect(
        "outbox-not-packed-again",
        "own",
        "The outbox is packed at the first step only: later ones send the rows of the first.",
        (
            Edit(
                EXCHANGE,
                "            self._pack(step.packs, outbox)\n",
                "            if number == 1:\n                self._pack(step.packs, outbox)\n",
            ),
        ),
        (13,),
    ),
    Defect(
        "values-not-packed",
        "own",
        "The outbox holds the keys twice, and no values.",
        (
            Edit(
                EXCHANGE,
                "value.put(pack.slots, pack.columns, v.view(pack.rows, pack.heads))",
                "value.put(pack.slots, pack.columns, k.view(pack.rows, pack.heads))",
            ),
        ),
    ),
    # --- who, what, how much
    Defect(
        "labels-of-sends-one-behind",
        "own",
        "Sends are labelled with the number of the step before.",
        (
            Edit(
                EXCHANGE,
                'outbox, f"keys and values {number}"),\n',
                'outbox, f"keys and values {number - 1}"),\n',
            ),
        ),
    ),
    Defect(
        "relayed-message-one-slot-short",
        "own",
        "What the ring passes on lacks its last slot: the receiver keeps stale data there.",
        (Edit(SCHEDULE, "sends=_moves((after, 0, sent))", "sends=_moves((after, 0, sent - (t > 1)))"),),
    ),
    Defect(
        "relay-sends-the-outbox",
        "own",
        "At every hop the ring sends the own keys instead of those that landed.",
        (Edit(SCHEDULE, "relayed=t > 1", "relayed=False"),),
        (13,),
    ),
    Defect(
        "carried-slots-of-this-hop",
        "own",
        "As many returned slots are carried on as land at this hop, not at the next.",
        (
            Edit(
                SCHEDULE,
                "carried = int(prefix[home_of(t + 1), chunk, t + 1])",
                "carried = int(prefix[home_of(t), chunk, t + 1])",
            ),
        ),
        (14, 18),
    ),
    Defect(
        "onward-slots-of-this-hop",
        "own",
        "All that landed is handed on as if it travelled farther, and nothing goes home before the last hop.",
        (
            Edit(
                SCHEDULE,
                "int(prefix[source, chunk, t]), int(prefix[source, chunk, t + 1])",
                "int(prefix[source, chunk, t]), int(prefix[source, chunk, t if t < p - 1 else p])",
            ),
        ),
        (14,),
    ),
    Defect(
        "direct-peers-mirrored",
        "own",
        "The direct exchange takes from the rank t after what it should take from the rank t before.",
        (
            Edit(SCHEDULE, "incoming.append((t, (rank - t) % p,", "incoming.append((t, (rank + t) % p,"),
            Edit(SCHEDULE, "served.append((t, (rank + t) % p,", "served.append((t, (rank - t) % p,"),
        ),
    ),
    Defect(
        "direct-rounds-with-room-left-from-before",
        "own",
        "A short message joins the last part of a longer one, by the room that was left before that.",
        (
            Edit(
                SCHEDULE,
                "            rounds += [([t], chunk) for chunk in range(-(-slots // cap))]\n            room = 0\n",
                "            rounds += [([t], chunk) for chunk in range(-(-slots // cap))]\n",
            ),
        ),
    ),
    Defect(
        "gathered-shards-in-the-wrong-places",
        "own",
        "Gathered shards of ranks after the own are looked for one rank too early.",
        (
            Edit(
                PLAN,
                "                bases[move.peer] = move.start\n",
                "                bases[max(move.peer - (move.peer > rank + 1), 0)] = move.start\n",
            ),
        ),
    ),
    Defect(
        "whole-pieces-sent",
        "own",
        "Whole pieces are sent where only their leading rows are needed.",
        (
            Edit(
                MEETINGS,
                "    return Needs(reader[begin], piece[begin], most)\n",
                "    return Needs(reader[begin], piece[begin], np.maximum(most, pieces.count[piece[begin]]))\n",
            ),
        ),
    ),
    Defect(
        "ring-goes-all-the-way",
        "own",
        "Every slot of the ring travels to the last rank, whether that needs it or not.",
        (
            Edit(
                SCHEDULE,
                "    reach[needs.piece, (needs.rank - pieces.rank[needs.piece]) % p] = needs.count\n",
                "    np.maximum.at(reach, (needs.piece, p - 1), needs.count)\n",
            ),
        ),
    ),
    Defect(
        "hidden-keys-sent",
        "own",
        "Keys are sent to ranks from whose rows causality hides them.",
        (
            Edit(
                MEETINGS,
                "    found = meet(pieces, everything, everything, causal)\n",
                "    found = meet(pieces, everything, everything, False)\n",
            ),
        ),
    ),
    # --- memory
    Defect(
        "outbox-made-at-every-step",
        "own",
        "The outbox is allocated anew at every step and the old ones are kept.",
        (
            Edit(
                EXCHANGE,
                "            self._pack(step.packs, outbox)\n",
                '            outbox = self._allocate("outbox", sizes.outbox, self.k.dtype)\n'
                "            self._pack(step.packs, outbox)\n",
            ),
        ),
    ),
    Defect(
        "one-landing-too-many",
        "own",
        "One landing more than is used in turn.",
        (Edit(EXCHANGE, _LANDINGS, _LANDINGS.replace("range(sizes.turns)", "range(sizes.turns + 1)")),),
    ),
    Defect(
        "landing-not-bounded-by-the-bucket",
        "own",
        "Landings and outbox are as large as whole messages, however small the bucket.",
        (Edit(SCHEDULE, "lambda slots: min(slots, cap + width - 1)", "lambda slots: slots"),),
    ),
    Defect(
        "rounds-forget-what-they-hold",
        "own",
        "Distances are put into one stage although together they pass the bucket.",
        (Edit(SCHEDULE, "            room -= slots\n", "            room -= 0\n"),),
    ),
    Defect(
        "default-bucket-ignores-the-budget",
        "own",
        "Without a bucket whole shards land at a time, whatever the budget.",
        (
            Edit(
                BUDGET,
                " else LEAST, int(SHARE * shard / token))",
                " else LEAST, max(layout.counts))",
            ),
        ),
    ),
    Defect(
        "bucket-ignored-by-kernel-calls",
        "own",
        "A kernel call takes all keys of a stage, however small the bucket: its workspace is not bounded.",
        (Edit(PLAN, "keys.cut(bucket)", "keys.cut(1 << 30)"),),
    ),
    Defect(
        "quadratic-workspace",
        "own",
        "The math kernel makes the scores of all rows of a tile at once: O(n^2) memory.",
        (
            Edit(
                "ring/compute/kernels.py",
                "    step = max(_LEAST_ROWS, length * q.shape[-1] // keys)\n",
                "    step = max(_LEAST_ROWS, length)\n",
            ),
        ),
    ),
)
