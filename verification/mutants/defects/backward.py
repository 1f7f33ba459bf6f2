"""Defects of the backward pass."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

ATTENTION = "ring/attention.py"
EXCHANGE = "ring/comm/exchange.py"
KERNELS = "ring/compute/kernels.py"
PLAN = "ring/plan/plan.py"
SCHEDULE = "ring/plan/schedule.py"
STORE = "ring/strided_view.py"

_WEIGHTS = "_scores(query, k, tile, scale, rows).sub_(lse.unsqueeze(-1)).exp_()"
_DSCORES = "        dscores = (dout @ v.mT).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(scale)\n"
_CARRIED = "                grad[: due[0].carried] += self._collect(due, returned, dk, dv)\n"
_STEP_AND_GRAD = "            step, grad = plan.steps[number - 1], grads[(number - 1) % len(grads)]\n"
_LANDED = "            with _summed(step, grad) as (key_grad, value_grad):\n"
_ZEROED = "    sums = grad.zero_() if grad.dtype == work else torch.zeros_like(grad, dtype=work)\n"
_LAST = "            self._collect(*self._last, dk, dv)\n"

BACKWARD = (
    Defect(
        "backward-with-the-lse-of-the-partial",
        "tenstorrent/tt-metal#53205",
        "Probabilities are recomputed with each tile's own lse instead of the global one.",
        (Edit(KERNELS, _WEIGHTS, "_scores(query, k, tile, scale, rows).softmax(-1)"),),
        (12,),
    ),
    Defect(
        "backward-with-the-output-of-the-partial",
        "tenstorrent/tt-metal#53205; torchscale",
        "D is taken from each tile's own output, as if the weights of the mixture were constants: dV is exact.",
        (
            Edit(
                KERNELS,
                _DSCORES,
                "        own = (weights @ v) / weights.sum(-1, keepdim=True)\n"
                "        delta -= (dout * saved.out[..., rows, :].to(work).flatten(3, 4)).sum(-1)\n"
                "        delta += (dout * own).sum(-1)\n" + _DSCORES,
            ),
        ),
        (12, 20),
    ),
    Defect(
        "backward-reuses-the-first-hop",
        "huggingface/diffusers#14265",
        "The keys and values of the first hop are used at every hop of the backward pass.",
        (
            Edit(
                EXCHANGE,
                _LANDED,
                "            if number == 1:\n"
                "                found = (arrival.key, arrival.value)\n"
                "                kept = (x.x.squeeze(2).transpose(0, 1).contiguous().clone() for x in found)\n"
                "                first = [Store.slots(x) for x in kept]\n"
                "            elif first[0].x.shape == arrival.key.x.shape:\n"
                "                arrival = Arrival(arrival.tiles, *first)\n" + _LANDED,
            ),
        ),
        (13,),
    ),
    Defect(
        "gradients-one-rank-past-their-owner",
        "seen in public ring-attention code",
        "The ring's last user of a slot sends its gradient to the owner's neighbour.",
        (
            Edit(
                SCHEDULE,
                "_moves((after, 0, onward), (source, onward, here))",
                "_moves((after, 0, onward), ((source - 1) % p if p > 2 and t < p - 1 else source, onward, here))",
            ),
            Edit(
                SCHEDULE,
                "_moves((before, 0, carried), ((rank + t) % p, carried",
                "_moves((before, 0, carried), ((rank + t + (p > 2 and t < p - 1)) % p, carried",
            ),
        ),
        (14,),
    ),
    Defect(
        "carried-gradients-dropped",
        "seen in public ring-attention code",
        "Partial sums of gradients that a neighbour hands on are received and not added: they end one hop short.",
        (Edit(EXCHANGE, _CARRIED, "                self._collect(due, returned, dk, dv)\n"),),
        (14,),
    ),
    Defect(
        "sent-and-received-swapped",
        "lucidrains/ring-attention-pytorch",
        "The direct exchange returns what it should receive and expects what it should return.",
        (
            Edit(
                SCHEDULE,
                "Stage(packed, sends, False, receives, landed, receives, sends, 0, packed)",
                "Stage(packed, sends, False, receives, landed, sends, receives, 0, packed)",
            ),
        ),
        (15,),
    ),
    Defect(
        "returned-keys-and-values-swapped",
        "lucidrains/ring-attention-pytorch",
        "Of gradients that come home, those of keys are added to dv and those of values to dk.",
        (
            Edit(
                EXCHANGE,
                "        key, value = Store.slots(returned[:, 0]), Store.slots(returned[:, 1])\n",
                "        value, key = Store.slots(returned[:, 0]), Store.slots(returned[:, 1])\n",
            ),
        ),
        (15,),
    ),
    Defect(
        "gather-without-reduction",
        "DarcStar V2 collective; lucidrains zig-zag",
        "The gathering exchange receives the gradients of the own keys and adds none of them: remote dk, dv are lost.",
        (
            Edit(
                PLAN,
                "_whole_packs(layout, rank, kv_heads, layout.world_size - 1) if route.whole",
                "() if route.whole",
            ),
        ),
        (16,),
    ),
    Defect(
        "gather-reduces-all-but-one",
        "own",
        "The gathering exchange leaves out the gradients that the last of the other ranks returns.",
        (
            Edit(
                PLAN,
                "_whole_packs(layout, rank, kv_heads, layout.world_size - 1) if route.whole",
                "_whole_packs(layout, rank, kv_heads, layout.world_size - 2) if route.whole",
            ),
        ),
        (16,),
    ),
    Defect(
        "delta-off-by-one-percent",
        "tenstorrent/tt-metal#53205",
        "D is taken from an output that is 1 % too large.",
        (Edit(ATTENTION, "self.out.x.to(work)).sum(-1)", "self.out.x.to(work) * 1.01).sum(-1)"),),
        (17,),
    ),
    Defect(
        "delta-in-bfloat16",
        "seen in public ring-attention code",
        "D is rounded to bfloat16, whatever the type of the inputs.",
        (Edit(ATTENTION, "sum(-1).transpose(1, 2)  #", "sum(-1).transpose(1, 2).bfloat16().to(work)  #"),),
        (17,),
    ),
    Defect(
        "delta-mis-shaped",
        "TransformerEngine#1467",
        "D (B, N, H) is reshaped to (B, H, N) instead of transposed.",
        (
            Edit(
                ATTENTION,
                "sum(-1).transpose(1, 2)  #",
                "sum(-1).flatten().view_as(self.lse.x[..., 0].transpose(1, 2))  #",
            ),
        ),
        (7, 17),
    ),
    Defect(
        "length-of-the-last-step-everywhere",
        "pytorch#163075",
        "At every step as many carried gradients are added as at the last.",
        (
            Edit(
                EXCHANGE,
                _CARRIED,
                "                came = self._collect(due, returned, dk, dv)[: plan.steps[-1].carried]\n"
                "                grad[: len(came)] += came\n",
            ),
        ),
        (18,),
    ),
    Defect(
        "gradients-in-bfloat16",
        "zhuzilin/ring-flash-attention#87",
        "Gradients are rounded to bfloat16, whatever the type of the inputs.",
        (
            Edit(
                ATTENTION,
                "        return [one.result(x.dtype) for one in sums]\n",
                "        return [one.result(torch.bfloat16).to(x.dtype) for one in sums]\n",
            ),
        ),
        (19,),
    ),
    Defect(
        "scale-missing-in-backward",
        "seen in public ring-attention code",
        "dq and dk of the math kernel lack the factor of the scores.",
        (Edit(KERNELS, ".mul_(weights).mul_(scale)\n", ".mul_(weights)\n"),),
        (21,),
    ),
    Defect(
        "scale-twice-in-backward",
        "seen in public ring-attention code",
        "dq and dk of the math kernel have the factor of the scores twice.",
        (Edit(KERNELS, ".mul_(weights).mul_(scale)\n", ".mul_(weights).mul_(scale).mul_(scale)\n"),),
        (21,),
    ),
    Defect(
        "fused-backward-with-the-default-scale",
        "own",
        "The fused kernel's backward takes head dim ** -0.5, whatever scale was given.",
        (
            Edit(
                KERNELS,
                "dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=scale\n",
                "dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=None\n",
            ),
        ),
        (21,),
    ),
    Defect(
        "gradient-of-lse-dropped",
        "own",
        "The gradient that comes in through lse is left out.",
        (Edit(ATTENTION, "else delta - self.dlse)", "else delta - 0 * self.dlse)"),),
    ),
    Defect(
        "gradient-of-lse-with-the-wrong-sign",
        "own",
        "The gradient that comes in through lse is subtracted.",
        (Edit(ATTENTION, "else delta - self.dlse)", "else delta + self.dlse)"),),
    ),
    Defect(
        "gradient-of-lse-by-the-fused-kernel",
        "own",
        "Tiles go to the fused kernel although lse is differentiated, which it cannot.",
        (
            Edit(
                ATTENTION,
                "walk.scale, rows.dlse is not None,",
                "walk.scale, False,",
            ),
        ),
    ),
    Defect(
        "gradient-of-lse-alone",
        "own",
        "Where only lse is used, the missing gradient of the output counts as ones instead of zeros.",
        (
            Edit(
                ATTENTION,
                "torch.zeros_like(out) if dout is None else dout",
                "torch.ones_like(out) if dout is None else dout",
            ),
        ),
    ),
    Defect(
        "double-backward-is-silent",
        "own",
        "A derivative of the gradients is zero instead of an error that names it.",
        (
            Edit(
                ATTENTION,
                "        raise NotImplementedError(\n"
                '            "ring_attention: double backward is not supported; got a derivative of its gradient, '
                'allowed are first ones"\n'
                "        )\n",
                "        return (*grads[:3], *(None for _ in ctx.needs_input_grad[3:]))\n",
            ),
        ),
    ),
    Defect(
        "gradients-of-own-keys-lost",
        "own",
        "dk and dv of the tiles of the own keys are summed into tensors that nobody returns.",
        (
            Edit(
                EXCHANGE,
                "yield Arrival(arrival.tiles, arrival.key, arrival.value, dk, dv)",
                "yield Arrival(arrival.tiles, arrival.key, arrival.value, "
                "Store(torch.zeros_like(dk.x)), Store(torch.zeros_like(dv.x)))",
            ),
        ),
        (16,),
    ),
    Defect(
        "gradient-buffer-not-zeroed",
        "own",
        "The buffer of landed gradients starts with those of two steps before.",
        (
            Edit(
                EXCHANGE,
                _LANDED,
                "            if number <= len(grads):\n                grad.zero_()\n" + _LANDED,
            ),
            Edit(
                EXCHANGE,
                _ZEROED,
                "    sums = grad\n",
            ),
        ),
    ),
    Defect(
        "gradient-buffer-never-zeroed",
        "own",
        "The buffer of landed gradients starts as what memory held.",
        (Edit(EXCHANGE, _ZEROED, "    sums = grad\n"),),
    ),
    Defect(
        "returned-gradients-added-twice",
        "own",
        "dk that comes home is added twice.",
        (
            Edit(
                EXCHANGE,
                "            dk.add(pack.rows, pack.heads, key.view(pack.slots, pack.columns))\n",
                "            dk.add(pack.rows, pack.heads, 2 * key.view(pack.slots, pack.columns))\n",
            ),
        ),
    ),
    Defect(
        "last-returned-gradients-not-added",
        "own",
        "What the last step returns is waited for and not added.",
        (Edit(EXCHANGE, _LAST, "            self._last[0][1].wait()\n"),),
        (14,),
    ),
    Defect(
        "gradients-of-listed-rows-overwritten",
        "own",
        "Where rows or heads are listed, a tile's gradients replace what was summed before.",
        (
            Edit(
                STORE,
                "            self.put(rows, heads, self.view(rows, heads) + tile)\n",
                "            self.put(rows, heads, tile)\n",
            ),
        ),
    ),
    Defect(
        "dq-of-the-last-tile-only",
        "own",
        "dq of a row is that of the last tile that saw it instead of the sum.",
        (Edit(ATTENTION, "        rows.dq.add(*where, dq)\n", "        rows.dq.put(*where, dq)\n"),),
    ),
    Defect(
        "dv-of-the-last-rows-only",
        "own",
        "dv of a tile is that of its last block of query rows instead of the sum.",
        (Edit(KERNELS, "        dv += weights.mT @ dout\n", "        dv = weights.mT @ dout\n"),),
    ),
    Defect(
        "home-slots-not-shifted",
        "own",
        "In the ring's returned box, gradients that are home are read where those to be carried on lie.",
        (Edit(SCHEDULE, "home=cut.packed(back).shifted(carried - kept)", "home=cut.packed(back).shifted(-kept)"),),
        (14,),
    ),
)
