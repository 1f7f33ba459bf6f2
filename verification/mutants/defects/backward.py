"""Defects of the backward pass."""

from __future__ import annotations

from ring import attention, strided_view
from ring.comm import exchange
from ring.compute import fused_kernels, math_kernel
from ring.plan import plan, schedule
from verification.mutants.defect import Edit, defect

_WEIGHTS = "_scores(query, k, tile, scale, rows).sub_(lse.unsqueeze(-1)).exp_()"
_DSCORES = "        dscores = (dout @ v.mT).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(scale)\n"
_CARRIED = "                grad[: due[0].carried] += self._add_returned(due, returned, dk, dv)\n"
_STEP_AND_GRAD = "            step, grad = plan.steps[number - 1], grads[(number - 1) % len(grads)]\n"
_SUMMED = "            with _summed(step, grad) as (key_grad, value_grad):\n"
_ZEROED = "    sums = grad.zero_() if grad.dtype == work else torch.zeros_like(grad, dtype=work)\n"
_LAST = "            self._add_returned(*self._last, dk, dv)\n"

BACKWARD = (
    defect(
        "backward-with-the-lse-of-the-partial",
        "Probabilities are recomputed with each tile's own lse instead of the global one.",
        Edit(math_kernel, _WEIGHTS, "_scores(query, k, tile, scale, rows).softmax(-1)"),
        provenance="tenstorrent/tt-metal#53205",
        listed=(12,),
    ),
    defect(
        "backward-with-the-output-of-the-partial",
        "D is taken from each tile's own output, as if the weights of the mixture were constants: dV is exact.",
        Edit(
            math_kernel,
            _DSCORES,
            "        own = (weights @ v) / weights.sum(-1, keepdim=True)\n"
            "        delta -= (dout * saved.out[..., rows, :].to(work).flatten(3, 4)).sum(-1)\n"
            "        delta += (dout * own).sum(-1)\n" + _DSCORES,
        ),
        provenance="tenstorrent/tt-metal#53205; torchscale",
        listed=(12, 20),
    ),
    defect(
        "backward-reuses-the-first-hop",
        "The keys and values of the first hop are used at every hop of the backward pass.",
        Edit(
            exchange,
            _SUMMED,
            "            if number == 1:\n"
            "                found = (arrival.key, arrival.value)\n"
            "                kept = (x.x.squeeze(2).transpose(0, 1).contiguous().clone() for x in found)\n"
            "                first = [StridedView.of_slots(x) for x in kept]\n"
            "            elif first[0].x.shape == arrival.key.x.shape:\n"
            "                arrival = Arrival(arrival.tiles, *first)\n" + _SUMMED,
        ),
        provenance="huggingface/diffusers#14265",
        listed=(13,),
    ),
    defect(
        "gradients-one-rank-past-their-owner",
        "The ring's last user of a slot sends its gradient to the owner's neighbour.",
        Edit(
            schedule,
            "_transfers((after, 0, onward), (source, onward, here))",
            "_transfers((after, 0, onward), ((source - 1) % p if p > 2 and t < p - 1 else source, onward, here))",
        ),
        Edit(
            schedule,
            "_transfers((before, 0, carried), ((rank + t) % p, carried",
            "_transfers((before, 0, carried), ((rank + t + (p > 2 and t < p - 1)) % p, carried",
        ),
        provenance="seen in public ring-attention code",
        listed=(14,),
    ),
    defect(
        "carried-gradients-dropped",
        "Partial sums of gradients that a neighbour hands on are received and not added: they end one hop short.",
        Edit(exchange, _CARRIED, "                self._add_returned(due, returned, dk, dv)\n"),
        provenance="seen in public ring-attention code",
        listed=(14,),
    ),
    defect(
        "sent-and-received-swapped",
        "The direct exchange returns what it should receive and expects what it should return.",
        Edit(
            schedule,
            "return_sends=receives, return_receives=sends",
            "return_sends=sends, return_receives=receives",
        ),
        provenance="lucidrains/ring-attention-pytorch",
        listed=(15,),
    ),
    defect(
        "returned-keys-and-values-swapped",
        "Of returned gradients, those of keys are added to dv and those of values to dk.",
        Edit(
            exchange,
            "        key, value = StridedView.of_slots(returned[:, 0]), StridedView.of_slots(returned[:, 1])\n",
            "        value, key = StridedView.of_slots(returned[:, 0]), StridedView.of_slots(returned[:, 1])\n",
        ),
        provenance="lucidrains/ring-attention-pytorch",
        listed=(15,),
    ),
    defect(
        "gather-without-reduction",
        "The gathering exchange receives the gradients of the own keys and adds none of them: remote dk, dv are lost.",
        Edit(plan, "_shard_maps(tokens, kv_heads, others) if route.whole", "() if route.whole"),
        provenance="DarcStar V2 collective; lucidrains zig-zag",
        listed=(16,),
    ),
    defect(
        "gather-reduces-all-but-one",
        "The gathering exchange leaves out the gradients that the last of the other ranks returns.",
        Edit(
            plan,
            "_shard_maps(tokens, kv_heads, others) if route.whole",
            "_shard_maps(tokens, kv_heads, others - 1) if route.whole",
        ),
        listed=(16,),
    ),
    defect(
        "delta-off-by-one-percent",
        "D is taken from an output that is 1 % too large.",
        Edit(attention, "self.out.x.to(work)).sum(-1)", "self.out.x.to(work) * 1.01).sum(-1)"),
        provenance="tenstorrent/tt-metal#53205",
        listed=(17,),
    ),
    defect(
        "delta-in-bfloat16",
        "D is rounded to bfloat16, whatever the type of the inputs.",
        Edit(attention, "sum(-1).transpose(1, 2)  #", "sum(-1).transpose(1, 2).bfloat16().to(work)  #"),
        provenance="seen in public ring-attention code",
        listed=(17,),
    ),
    defect(
        "delta-mis-shaped",
        "D (B, N, H) is reshaped to (B, H, N) instead of transposed.",
        Edit(
            attention, "sum(-1).transpose(1, 2)  #", "sum(-1).flatten().view_as(self.lse.x[..., 0].transpose(1, 2))  #"
        ),
        provenance="TransformerEngine#1467",
        listed=(7, 17),
    ),
    defect(
        "length-of-the-last-step-everywhere",
        "At every step as many carried gradients are added as at the last.",
        Edit(
            exchange,
            _CARRIED,
            "                came = self._add_returned(due, returned, dk, dv)[: plan.steps[-1].carried]\n"
            "                grad[: len(came)] += came\n",
        ),
        provenance="pytorch#163075",
        listed=(18,),
    ),
    defect(
        "gradients-in-bfloat16",
        "Gradients are rounded to bfloat16, whatever the type of the inputs.",
        Edit(
            attention,
            "        return [one.result(x.dtype) for one in sums]\n",
            "        return [one.result(torch.bfloat16).to(x.dtype) for one in sums]\n",
        ),
        provenance="zhuzilin/ring-flash-attention#87",
        listed=(19,),
    ),
    defect(
        "scale-missing-in-backward",
        "dq and dk of the math kernel lack the factor of the scores.",
        Edit(math_kernel, ".mul_(weights).mul_(scale)\n", ".mul_(weights)\n"),
        provenance="seen in public ring-attention code",
        listed=(21,),
    ),
    defect(
        "scale-twice-in-backward",
        "dq and dk of the math kernel have the factor of the scores twice.",
        Edit(math_kernel, ".mul_(weights).mul_(scale)\n", ".mul_(weights).mul_(scale).mul_(scale)\n"),
        provenance="seen in public ring-attention code",
        listed=(21,),
    ),
    defect(
        "fused-backward-with-the-default-scale",
        "The fused kernel's backward takes head dim ** -0.5, whatever scale was given.",
        Edit(
            fused_kernels,
            "dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=scale\n",
            "dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=None\n",
        ),
        listed=(21,),
    ),
    defect(
        "gradient-of-lse-dropped",
        "The gradient that comes in through lse is left out.",
        Edit(attention, "else delta - self.dlse)", "else delta - 0 * self.dlse)"),
    ),
    defect(
        "gradient-of-lse-with-the-wrong-sign",
        "The gradient that comes in through lse is subtracted.",
        Edit(attention, "else delta - self.dlse)", "else delta + self.dlse)"),
    ),
    defect(
        "gradient-of-lse-by-the-fused-kernel",
        "Tiles go to the fused kernel although lse is differentiated, which it cannot.",
        Edit(attention, "walk.scale, rows.dlse is not None,", "walk.scale, False,"),
    ),
    defect(
        "gradient-of-lse-alone",
        "Where only lse is used, the missing gradient of the output counts as ones instead of zeros.",
        Edit(
            attention,
            "torch.zeros_like(out) if dout is None else dout",
            "torch.ones_like(out) if dout is None else dout",
        ),
    ),
    defect(
        "double-backward-is-silent",
        "A derivative of the gradients is zero instead of an error that names it.",
        Edit(
            attention,
            "        raise NotImplementedError(\n"
            '            "ring_attention: double backward is not supported; got a derivative of its gradient, '
            'allowed are first ones"\n'
            "        )\n",
            "        return (*grads[:3], *(None for _ in ctx.needs_input_grad[3:]))\n",
        ),
    ),
    defect(
        "gradients-of-own-keys-lost",
        "dk and dv of the tiles of the own keys are summed into tensors that nobody returns.",
        Edit(
            exchange,
            "yield Arrival(arrival.tiles, arrival.key, arrival.value, dk, dv)",
            "yield Arrival(arrival.tiles, arrival.key, arrival.value, "
            "StridedView(torch.zeros_like(dk.x)), StridedView(torch.zeros_like(dv.x)))",
        ),
        listed=(16,),
    ),
    defect(
        "gradient-buffer-not-zeroed",
        "The buffer of gradients of received keys starts with those of two steps before.",
        Edit(exchange, _SUMMED, "            if number <= len(grads):\n                grad.zero_()\n" + _SUMMED),
        Edit(exchange, _ZEROED, "    sums = grad\n"),
    ),
    defect(
        "gradient-buffer-never-zeroed",
        "The buffer of gradients of received keys starts as what memory held.",
        Edit(exchange, _ZEROED, "    sums = grad\n"),
    ),
    defect(
        "returned-gradients-added-twice",
        "Returned dk is added twice.",
        Edit(
            exchange,
            "            dk.add(one.rows, one.heads, key.view(one.slots, one.columns))\n",
            "            dk.add(one.rows, one.heads, 2 * key.view(one.slots, one.columns))\n",
        ),
    ),
    defect(
        "last-returned-gradients-not-added",
        "What the last step returns is waited for and not added.",
        Edit(exchange, _LAST, "            self._last[0][1].wait()\n"),
        listed=(14,),
    ),
    defect(
        "gradients-of-listed-rows-overwritten",
        "Where rows or heads are listed, a tile's gradients replace what was summed before.",
        Edit(
            strided_view,
            "            self.put(rows, heads, self.view(rows, heads) + tile)\n",
            "            self.put(rows, heads, tile)\n",
        ),
    ),
    defect(
        "dq-of-the-last-tile-only",
        "dq of a row is that of the last tile that saw it instead of the sum.",
        Edit(attention, "        rows.dq.add(*where, dq)\n", "        rows.dq.put(*where, dq)\n"),
    ),
    defect(
        "dv-of-the-last-rows-only",
        "dv of a tile is that of its last block of query rows instead of the sum.",
        Edit(math_kernel, "        dv += weights.mT @ dout\n", "        dv = weights.mT @ dout\n"),
    ),
    defect(
        "home-slots-not-shifted",
        "In the ring's buffer of returned gradients, the rank's own are read where those to be carried on lie.",
        Edit(
            schedule,
            ".shifted(carried - kept)",
            ".shifted(-kept)",
        ),
        listed=(14,),
    ),
)
