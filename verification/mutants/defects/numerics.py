"""Defects of precision: what is rounded too early, or computed in too small a type."""

from __future__ import annotations

from ring import attention, precision
from ring.comm import exchange
from ring.compute import accumulator, fused_kernels, kernels, math_kernel
from verification.mutants.defect import Edit, defect

_PUT = "        self._out.put(rows, heads, merged)\n"
_PUT_LSE = "        self._lse.put(rows, heads, merged_lse.unsqueeze(-1))\n"
_SCORES = "    scores = (q.flatten(3, 4) @ k.mT).mul_(scale)\n"
_SCALE = "dim**-0.5 if scale is None else float(scale))"
_TOTAL = "        total = weights.sum(-1, keepdim=True)\n"
_CHOOSE = '    if kernel == "math" or dlse or scale <= 0 or tile.mask is Mask.POSITION:\n'

NUMERICS = (
    defect(
        "lse-in-bfloat16",
        "The running lse is rounded to bfloat16 at every merge.",
        Edit(accumulator, _PUT_LSE, _PUT_LSE.replace("merged_lse.", "merged_lse.bfloat16().")),
        provenance="tenstorrent/tt-metal#41683",
        listed=(5,),
    ),
    defect(
        "lse-in-float16",
        "The running lse is rounded to float16 at every merge.",
        Edit(accumulator, _PUT_LSE, _PUT_LSE.replace("merged_lse.", "merged_lse.half().")),
        provenance="tenstorrent/tt-metal#41683",
        listed=(5,),
    ),
    defect(
        "row-sums-in-the-input-type",
        "The sum of a row's weights is rounded to the type of the inputs.",
        Edit(math_kernel, _TOTAL, "        total = weights.sum(-1, keepdim=True).to(q.dtype).to(work)\n"),
        provenance="tenstorrent/tt-metal#41683",
        listed=(5,),
    ),
    defect(
        "accumulator-in-bfloat16",
        "The running output is rounded to bfloat16 at every merge.",
        Edit(accumulator, _PUT, _PUT.replace("merged)", "merged.bfloat16())")),
        provenance="zhuzilin/ring-flash-attention#42",
        listed=(6,),
    ),
    defect(
        "accumulator-in-the-input-type",
        "The running output is kept in the type of the inputs: in 16 bits the error grows with the number of ranks.",
        Edit(
            accumulator,
            "self.out = torch.zeros(batch, tokens, heads, dim, dtype=dtype, device",
            "self.out = torch.zeros(batch, tokens, heads, dim, dtype=query.dtype, device",
        ),
        provenance="zhuzilin/ring-flash-attention#42",
        listed=(6,),
    ),
    defect(
        "partials-in-the-input-type",
        "Partial outputs are rounded to the type of the inputs before they are merged.",
        Edit(
            attention,
            "accumulator.merge(tile.query_rows, tile.query_heads, out, lse)",
            "accumulator.merge(tile.query_rows, tile.query_heads, out.to(q.dtype).to(out.dtype), lse)",
        ),
        provenance="zhuzilin/ring-flash-attention#42",
        listed=(6,),
    ),
    defect(
        "scale-off-by-a-thousandth",
        "The default factor of the scores is 0.1 % too large.",
        Edit(attention, _SCALE, "1.001 * " + _SCALE),
        listed=(21,),
    ),
    defect(
        "scale-forgets-the-root",
        "The default factor of the scores is 1 / head dim instead of its root.",
        Edit(attention, _SCALE, _SCALE.replace("-0.5", "-1.0")),
    ),
    defect(
        "scale-of-zero-is-no-scale",
        "A scale of 0 counts as not given.",
        Edit(attention, _SCALE, "float(scale or dim**-0.5))"),
    ),
    defect(
        "scores-in-bfloat16",
        "Scores are rounded to bfloat16.",
        Edit(math_kernel, _SCORES, _SCORES.replace(".mul_(scale)", ".mul_(scale).bfloat16().to(q.dtype)")),
    ),
    defect(
        "scores-in-float16",
        "Scores are rounded to float16: beyond 65504 they are infinite.",
        Edit(math_kernel, _SCORES, _SCORES.replace(".mul_(scale)", ".mul_(scale).half().to(q.dtype)")),
    ),
    defect(
        "products-clamped-to-float16",
        "Scores beyond the largest number of float16 are cut off there.",
        Edit(math_kernel, _SCORES, _SCORES.replace(".mul_(scale)", ".clamp_(-65504, 65504).mul_(scale)")),
    ),
    defect(
        "probabilities-in-bfloat16",
        "Weights are rounded to bfloat16 before they meet the values.",
        Edit(math_kernel, "(weights @ v).div_", "(weights.bfloat16().to(work) @ v).div_"),
    ),
    defect(
        "gradient-scores-in-bfloat16",
        "The gradient of the scores is rounded to bfloat16.",
        Edit(math_kernel, ".mul_(weights).mul_(scale)\n", ".mul_(weights).mul_(scale).bfloat16().to(work)\n"),
    ),
    defect(
        "gradient-sums-in-the-input-type",
        "dq, dk and dv are summed in the type of the inputs.",
        Edit(
            accumulator,
            "torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype)",
            "torch.zeros(like.shape, dtype=like.dtype",
        ),
        listed=(19,),
    ),
    defect(
        "returned-gradients-in-the-input-type",
        "Gradients travel to their owner, and are summed on the way, in the type of the inputs.",
        Edit(exchange, 'complete = self.plan.exchange == "direct" and self.k.is_cuda', "complete = True"),
        listed=(19,),
    ),
    defect(
        "float64-computed-in-float32",
        "Everything is computed in fp32, for fp64 inputs too.",
        Edit(precision, "return torch.float64 if dtype == torch.float64 else torch.float32", "return torch.float32"),
    ),
    defect(
        "float64-scores-in-float32",
        "Queries and keys of fp64 are rounded to fp32 for the scores.",
        Edit(math_kernel, _SCORES, "    scores = (q.flatten(3, 4).float() @ k.mT.float()).to(q.dtype).mul_(scale)\n"),
    ),
    defect(
        "fused-kernel-in-16-bits",
        "The fused kernel is given 16-bit operands, on which it rounds probabilities and sums gradients in 16 bits.",
        Edit(
            fused_kernels,
            "in 16 bits.\n    work = accumulator_dtype(q.dtype)\n",
            "in 16 bits.\n    work = q.dtype\n",
        ),
    ),
    defect(
        "fused-kernel-with-any-scale",
        "The fused kernel is given negative scales, which turn its hidden scores into +inf.",
        Edit(kernels, _CHOOSE, _CHOOSE.replace(" or scale <= 0", "")),
    ),
    defect(
        "fused-kernel-on-few-keys",
        "The fused kernel is given fewer keys than fill a vector, where it hides NaN.",
        Edit(kernels, "if tile.key_rows.length >= VECTOR else", "if tile.key_rows.length else"),
    ),
    defect(
        "fused-kernel-on-masks-by-position",
        "The fused kernel, which knows no mask by position, is given such tiles and shows them whole.",
        Edit(kernels, " or scale <= 0 or tile.mask is Mask.POSITION:", " or scale <= 0:"),
        listed=(25,),
    ),
    defect(
        "queries-scaled-in-place",
        "Scaling is done on the queries themselves, which are the caller's where no cast is needed.",
        Edit(
            math_kernel,
            "scores = _scores(q[..., rows, :].to(work), k, tile, scale, rows)\n        top",
            "scores = _scores(q[..., rows, :].to(work).mul_(scale), k, tile, 1.0, rows)\n        top",
        ),
    ),
    defect(
        "sum-order-by-address",
        "Tiles are computed in an order that depends on where memory lies: two runs differ in their last bits.",
        Edit(
            attention,
            "            accumulator.merge(tile.query_rows",
            "            lse = lse + (accumulator.out.data_ptr() // 64 % 2) * 2.0**-22 * lse.abs()\n"
            "            accumulator.merge(tile.query_rows",
        ),
    ),
)
