"""Defects of precision: what is rounded too early, or computed in too small a type."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

ACCUMULATOR = "ring/compute/accumulator.py"
ATTENTION = "ring/attention.py"
KERNELS = "ring/compute/kernels.py"

_PUT = "        self._out.put(rows, heads, merged)\n"
_PUT_LSE = "        self._lse.put(rows, heads, merged_lse.unsqueeze(-1))\n"
_SCORES = "    scores = (q.flatten(3, 4) @ k.mT).mul_(scale)\n"
_SCALE = "dim**-0.5 if scale is None else float(scale))"
_TOTAL = "        total = weights.sum(-1, keepdim=True)\n"
_CHOOSE = '    if kernel == "math" or dlse or scale <= 0 or tile.mask is Mask.POSITION:\n'

NUMERICS = (
    Defect(
        "lse-in-bfloat16",
        "tenstorrent/tt-metal#41683",
        "The running lse is rounded to bfloat16 at every merge.",
        (Edit(ACCUMULATOR, _PUT_LSE, _PUT_LSE.replace("merged_lse.", "merged_lse.bfloat16().")),),
        (5,),
    ),
    Defect(
        "lse-in-float16",
        "tenstorrent/tt-metal#41683",
        "The running lse is rounded to float16 at every merge.",
        (Edit(ACCUMULATOR, _PUT_LSE, _PUT_LSE.replace("merged_lse.", "merged_lse.half().")),),
        (5,),
    ),
    Defect(
        "row-sums-in-the-input-type",
        "tenstorrent/tt-metal#41683",
        "The sum of a row's weights is rounded to the type of the inputs.",
        (Edit(KERNELS, _TOTAL, "        total = weights.sum(-1, keepdim=True).to(q.dtype).to(work)\n"),),
        (5,),
    ),
    Defect(
        "accumulator-in-bfloat16",
        "zhuzilin/ring-flash-attention#42",
        "The running output is rounded to bfloat16 at every merge.",
        (Edit(ACCUMULATOR, _PUT, _PUT.replace("merged)", "merged.bfloat16())")),),
        (6,),
    ),
    Defect(
        "accumulator-in-the-input-type",
        "zhuzilin/ring-flash-attention#42",
        "The running output is kept in the type of the inputs: in 16 bits the error grows with the number of ranks.",
        (
            Edit(
                ACCUMULATOR,
                "self.out = torch.zeros(batch, tokens, heads, dim, dtype=dtype, device",
                "self.out = torch.zeros(batch, tokens, heads, dim, dtype=query.dtype, device",
            ),
        ),
        (6,),
    ),
    Defect(
        "partials-in-the-input-type",
        "zhuzilin/ring-flash-attention#42",
        "Partial outputs are rounded to the type of the inputs before they are merged.",
        (
            Edit(
                ATTENTION,
                "accumulator.merge(tile.query_rows, tile.query_heads, out, lse)",
                "accumulator.merge(tile.query_rows, tile.query_heads, out.to(q.dtype).to(out.dtype), lse)",
            ),
        ),
        (6,),
    ),
    Defect(
        "scale-off-by-a-thousandth",
        "own",
        "The default factor of the scores is 0.1 % too large.",
        (Edit(ATTENTION, _SCALE, "1.001 * " + _SCALE),),
        (21,),
    ),
    Defect(
        "scale-forgets-the-root",
        "own",
        "The default factor of the scores is 1 / head dim instead of its root.",
        (Edit(ATTENTION, _SCALE, _SCALE.replace("-0.5", "-1.0")),),
    ),
    Defect(
        "scale-of-zero-is-no-scale",
        "own",
        "A scale of 0 counts as not given.",
        (Edit(ATTENTION, _SCALE, "float(scale or dim**-0.5))"),),
    ),
    Defect(
        "scores-in-bfloat16",
        "own",
        "Scores are rounded to bfloat16.",
        (Edit(KERNELS, _SCORES, _SCORES.replace(".mul_(scale)", ".mul_(scale).bfloat16().to(q.dtype)")),),
    ),
    Defect(
        "scores-in-float16",
        "own",
        "Scores are rounded to float16: beyond 65504 they are infinite.",
        (Edit(KERNELS, _SCORES, _SCORES.replace(".mul_(scale)", ".mul_(scale).half().to(q.dtype)")),),
    ),
    Defect(
        "products-clamped-to-float16",
        "own",
        "Scores beyond the largest number of float16 are cut off there.",
        (
            Edit(
                KERNELS,
                _SCORES,
                _SCORES.replace(".mul_(scale)", ".clamp_(-65504, 65504).mul_(scale)"),
            ),
        ),
    ),
    Defect(
        "probabilities-in-bfloat16",
        "own",
        "Weights are rounded to bfloat16 before they meet the values.",
        (Edit(KERNELS, "(weights @ v).div_", "(weights.bfloat16().to(work) @ v).div_"),),
    ),
    Defect(
        "gradient-scores-in-bfloat16",
        "own",
        "The gradient of the scores is rounded to bfloat16.",
        (Edit(KERNELS, ".mul_(weights).mul_(scale)\n", ".mul_(weights).mul_(scale).bfloat16().to(work)\n"),),
    ),
    Defect(
        "gradient-sums-in-the-input-type",
        "own",
        "dq, dk and dv are summed in the type of the inputs.",
        (
            Edit(
                ACCUMULATOR,
                "torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype)",
                "torch.zeros(like.shape, dtype=like.dtype",
            ),
        ),
        (19,),
    ),
    Defect(
        "returned-gradients-in-the-input-type",
        "own",
        "Gradients travel home, and are summed on the way, in the type of the inputs.",
        (
            Edit(
                "ring/comm/exchange.py",
                'complete = self.plan.exchange == "direct" and self.k.is_cuda',
                "complete = True",
            ),
        ),
        (19,),
    ),
    Defect(
        "float64-computed-in-float32",
        "own",
        "Everything is computed in fp32, for fp64 inputs too.",
        (
            Edit(
                ACCUMULATOR,
                "return torch.float64 if dtype == torch.float64 else torch.float32",
                "return torch.float32",
            ),
        ),
    ),
    Defect(
        "float64-scores-in-float32",
        "own",
        "Queries and keys of fp64 are rounded to fp32 for the scores.",
        (Edit(KERNELS, _SCORES, "    scores = (q.flatten(3, 4).float() @ k.mT.float()).to(q.dtype).mul_(scale)\n"),),
    ),
    Defect(
        "fused-kernel-in-16-bits",
        "own",
        "The fused kernel is given 16-bit operands, on which it rounds probabilities and sums gradients in 16 bits.",
        (
            Edit(
                KERNELS,
                "in 16 bits.\n    work = accumulator_dtype(q.dtype)\n",
                "in 16 bits.\n    work = q.dtype\n",
            ),
        ),
    ),
    Defect(
        "fused-kernel-with-any-scale",
        "own",
        "The fused kernel is given negative scales, which turn its hidden scores into +inf.",
        (Edit(KERNELS, _CHOOSE, _CHOOSE.replace(" or scale <= 0", "")),),
    ),
    Defect(
        "fused-kernel-on-few-keys",
        "own",
        "The fused kernel is given fewer keys than fill a vector, where it hides NaN.",
        (Edit(KERNELS, "if tile.key_rows.length >= VECTOR else", "if tile.key_rows.length else"),),
    ),
    Defect(
        "fused-kernel-on-masks-by-position",
        "own",
        "The fused kernel, which knows no mask by position, is given such tiles and shows them whole.",
        (Edit(KERNELS, " or scale <= 0 or tile.mask is Mask.POSITION:", " or scale <= 0:"),),
        (25,),
    ),
    Defect(
        "queries-scaled-in-place",
        "own",
        "Scaling is done on the queries themselves, which are the caller's where no cast is needed.",
        (
            Edit(
                KERNELS,
                "scores = _scores(q[..., rows, :].to(work), k, tile, scale, rows)\n        top",
                "scores = _scores(q[..., rows, :].to(work).mul_(scale), k, tile, 1.0, rows)\n        top",
            ),
        ),
    ),
    Defect(
        "sum-order-by-address",
        "own",
        "Tiles are computed in an order that depends on where memory lies: two runs differ in their last bits.",
        (
            Edit(
                ATTENTION,
                "            accumulator.merge(tile.query_rows",
                "            lse = lse + (accumulator.out.data_ptr() // 64 % 2) * 2.0**-22 * lse.abs()\n"
                "            accumulator.merge(tile.query_rows",
            ),
        ),
    ),
)
