"""Defects of the merge of partial results, and of what partial results are."""

from __future__ import annotations

from ring import attention
from ring.compute import accumulator, math_kernel
from verification.mutants.defect import Edit, defect

_MERGED = "    merged = (weight / share).unsqueeze(-1) * out + (new_weight / share).unsqueeze(-1) * new_out\n"
_TOP = "    top = torch.maximum(lse, new_lse)\n"
_RETURNED = "    return merged, top + torch.log(total)"

MERGE = (
    defect(
        "merge-log-of-one-plus-exp",
        "The merged lse is lse + log(1 + exp(new - lse)), which overflows for large gaps between scores.",
        Edit(
            accumulator,
            _RETURNED,
            "    gap = torch.log(1 + torch.exp(new_lse - lse))\n"
            "    return merged, torch.where(lse == -torch.inf, new_lse, lse + gap)",
        ),
        provenance="jzhang38/EasyContext#14; TransformerEngine#716",
        listed=(1,),
    ),
    defect(
        "merge-relative-to-the-smaller-side",
        "Weights are exponentials of differences from the smaller side, which overflow for large gaps.",
        Edit(accumulator, _TOP, "    top = torch.minimum(lse, new_lse)\n"),
        listed=(1,),
    ),
    defect(
        "merge-by-sigmoid",
        "The merge by sigmoid and logsigmoid is NaN where the running lse is -inf.",
        Edit(
            accumulator,
            _RETURNED,
            "    part = torch.sigmoid(new_lse - lse).unsqueeze(-1)\n"
            "    return out - part * (out - new_out), lse - torch.nn.functional.logsigmoid(lse - new_lse)",
        ),
        provenance="zhuzilin/ring-flash-attention; USP; torch context_parallel",
        listed=(2,),
    ),
    defect(
        "merge-by-sigmoid-after-the-first",
        "The first partial result is taken as it is and later ones by sigmoid of a gap that was rounded to 16 bits.",
        Edit(
            accumulator,
            _RETURNED,
            "    part = torch.sigmoid((new_lse - lse).bfloat16().to(lse.dtype)).unsqueeze(-1)\n"
            "    first = lse == -torch.inf\n"
            "    merged = torch.where(first.unsqueeze(-1), new_out, out - part * (out - new_out))\n"
            "    return merged, top + torch.log(total)",
        ),
        provenance="zhuzilin/ring-flash-attention; USP",
        listed=(2, 5),
    ),
    defect(
        "merge-not-written-back",
        "The merged output is written into a view, which for listed rows is a copy: the update is lost.",
        Edit(
            accumulator,
            "        self._out.put(rows, heads, merged)\n",
            "        self._out.view(rows, heads).copy_(merged)\n",
        ),
        provenance="TransformerEngine#716, review",
        listed=(4,),
    ),
    defect(
        "merged-lse-not-written-back",
        "The merged lse is written into a view, which for listed rows is a copy.",
        Edit(
            accumulator,
            "        self._lse.put(rows, heads, merged_lse.unsqueeze(-1))\n",
            "        self._lse.view(rows, heads).copy_(merged_lse.unsqueeze(-1))\n",
        ),
        provenance="TransformerEngine#716, review",
        listed=(4,),
    ),
    defect(
        "lse-mis-shaped",
        "lse (B, H, N) is addressed as (B, N, H) by a reshape instead of a transposition.",
        Edit(
            accumulator,
            "    return StridedView(lse.transpose(1, 2).unsqueeze(-1))",
            "    return StridedView(lse.reshape(lse.shape[0], lse.shape[2], lse.shape[1], 1))",
        ),
        provenance="TransformerEngine#1467; zhuzilin/ring-flash-attention#46",
        listed=(7,),
    ),
    defect(
        "lse-returned-transposed",
        "lse is returned as (B, N, H).",
        Edit(
            attention,
            "    return (out, lse) if return_lse else out\n",
            "    return (out, lse.transpose(1, 2)) if return_lse else out\n",
        ),
        provenance="TransformerEngine#1467",
        listed=(7,),
    ),
    defect(
        "lse-of-later-rows-never-written",
        "The kernel writes lse for the first block of query rows only; that of the others is what memory held.",
        Edit(
            math_kernel,
            "        lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)\n",
            "        if rows.start == 0:\n"
            "            lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)\n",
        ),
        provenance="seen in public ring-attention code: the lse of a first tile that was masked",
        listed=(8,),
    ),
    defect(
        "nothing-seen-is-minus-1e8",
        "-1e8 stands for the lse of a row that has seen nothing.",
        Edit(
            accumulator,
            "torch.full((batch, heads, tokens), -torch.inf, dtype",
            "torch.full((batch, heads, tokens), -1e8, dtype",
        ),
        provenance="torchscale",
        listed=(9,),
    ),
    defect(
        "hidden-scores-are-minus-1e4",
        "Hidden scores are -10000 instead of -inf: rows whose real scores lie lower attend to what is hidden.",
        Edit(
            math_kernel,
            "masked_fill_(hidden[:, None, None, None], -torch.inf)",
            "masked_fill_(hidden[:, None, None, None], -1e4)",
        ),
        provenance="torchscale; DarcStar V3",
        listed=(9,),
    ),
    defect(
        "lse-zero-means-nothing",
        "The merge takes an lse that is exactly 0 for that of a side without keys.",
        Edit(accumulator, _TOP, "    lse = lse.masked_fill(lse == 0.0, -torch.inf)\n" + _TOP),
        provenance="DarcStar V3",
        listed=(9,),
    ),
    defect(
        "merge-without-division",
        "The weighted outputs are added without dividing by the sum of the weights.",
        Edit(accumulator, _MERGED, "    merged = weight.unsqueeze(-1) * out + new_weight.unsqueeze(-1) * new_out\n"),
        provenance="DarcStar Hilbert",
        listed=(10,),
    ),
    defect(
        "merge-by-plain-average",
        "Outputs of two sources are averaged as if both had the same weight.",
        Edit(
            accumulator,
            _MERGED,
            "    first = (lse == -torch.inf).unsqueeze(-1)\n"
            "    merged = torch.where(first, new_out, (out + new_out) / 2)\n",
        ),
        provenance="DarcStar TrueRing; RingSDPA",
        listed=(11,),
    ),
    defect(
        "merge-keeps-the-larger-side-only",
        "The side with the larger lse wins, as if the softmax were a maximum.",
        Edit(accumulator, _MERGED, "    merged = torch.where((lse > new_lse).unsqueeze(-1), out, new_out)\n"),
    ),
    defect(
        "merge-swallows-nan",
        "A NaN that belongs into the output is turned into 0.",
        Edit(accumulator, _RETURNED, "    return torch.nan_to_num(merged), top + torch.log(total)"),
    ),
    defect(
        "accumulator-not-initialised",
        "The output starts as what memory held: rows that see nothing return it.",
        Edit(accumulator, "self.out = torch.zeros(batch,", "self.out = torch.empty(batch,"),
    ),
    defect(
        "lse-starts-at-zero",
        "lse starts at 0 instead of -inf: every row has one key more, with score 0 and value 0.",
        Edit(
            accumulator,
            "torch.full((batch, heads, tokens), -torch.inf, dtype",
            "torch.full((batch, heads, tokens), 0.0, dtype",
        ),
    ),
    defect(
        "maximum-of-the-first-row-for-all",
        "The scores of a block are shifted by the maximum of its first row instead of each row's own.",
        Edit(
            math_kernel,
            "        top = scores.amax(-1, keepdim=True)\n",
            "        top = scores.amax(-1, keepdim=True)[..., :1, :].expand(*scores.shape[:-1], 1)\n",
        ),
    ),
)
