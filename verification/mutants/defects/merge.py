"""Defects of the merge of partial results, and of what partial results are."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

ACCUMULATOR = "ring/compute/accumulator.py"
KERNELS = "ring/compute/kernels.py"
ATTENTION = "ring/attention.py"

_MERGED = "    merged = (weight / share).unsqueeze(-1) * out + (new_weight / share).unsqueeze(-1) * new_out\n"
_TOP = "    top = torch.maximum(lse, new_lse)\n"
_RETURNED = "    return merged, top + torch.log(total)"

MERGE = (
    Defect(
        "merge-log-of-one-plus-exp",
        "jzhang38/EasyContext#14; TransformerEngine#716",
        "The merged lse is lse + log(1 + exp(new - lse)), which overflows for large gaps between scores.",
        (
            Edit(
                ACCUMULATOR,
                _RETURNED,
                "    gap = torch.log(1 + torch.exp(new_lse - lse))\n"
                "    return merged, torch.where(lse == -torch.inf, new_lse, lse + gap)",
            ),
        ),
        (1,),
    ),
    Defect(
        "merge-relative-to-the-smaller-side",
        "own",
        "Weights are exponentials of differences from the smaller side, which overflow for large gaps.",
        (Edit(ACCUMULATOR, _TOP, "    top = torch.minimum(lse, new_lse)\n"),),
        (1,),
    ),
    Defect(
        "merge-by-sigmoid",
        "zhuzilin/ring-flash-attention; USP; torch context_parallel",
        "The merge by sigmoid and logsigmoid is NaN where the running lse is -inf.",
        (
            Edit(
                ACCUMULATOR,
                _RETURNED,
                "    part = torch.sigmoid(new_lse - lse).unsqueeze(-1)\n"
                "    return out - part * (out - new_out), lse - torch.nn.functional.logsigmoid(lse - new_lse)",
            ),
        ),
        (2,),
    ),
    Defect(
        "merge-by-sigmoid-after-the-first",
        "zhuzilin/ring-flash-attention; USP",
        "The first partial result is taken as it is and later ones by sigmoid of a gap that was rounded to 16 bits.",
        (
            Edit(
                ACCUMULATOR,
                _RETURNED,
                "    part = torch.sigmoid((new_lse - lse).bfloat16().to(lse.dtype)).unsqueeze(-1)\n"
                "    first = lse == -torch.inf\n"
                "    merged = torch.where(first.unsqueeze(-1), new_out, out - part * (out - new_out))\n"
                "    return merged, top + torch.log(total)",
            ),
        ),
        (2, 5),
    ),
    Defect(
        "merge-not-written-back",
        "TransformerEngine#716, review",
        "The merged output is written into a view, which for listed rows is a copy: the update is lost.",
        (
            Edit(
                ACCUMULATOR,
                "        self._out.put(rows, heads, merged)\n",
                "        self._out.view(rows, heads).copy_(merged)\n",
            ),
        ),
        (4,),
    ),
    Defect(
        "merged-lse-not-written-back",
        "TransformerEngine#716, review",
        "The merged lse is written into a view, which for listed rows is a copy.",
        (
            Edit(
                ACCUMULATOR,
                "        self._lse.put(rows, heads, merged_lse.unsqueeze(-1))\n",
                "        self._lse.view(rows, heads).copy_(merged_lse.unsqueeze(-1))\n",
            ),
        ),
        (4,),
    ),
    Defect(
        "lse-mis-shaped",
        "TransformerEngine#1467; zhuzilin/ring-flash-attention#46",
        "lse (B, H, N) is addressed as (B, N, H) by a reshape instead of a transposition.",
        (
            Edit(
                ACCUMULATOR,
                "    return Store(lse.transpose(1, 2).unsqueeze(-1))",
                "    return Store(lse.reshape(lse.shape[0], lse.shape[2], lse.shape[1], 1))",
            ),
        ),
        (7,),
    ),
    Defect(
        "lse-returned-transposed",
        "TransformerEngine#1467",
        "lse is returned as (B, N, H).",
        (
            Edit(
                ATTENTION,
                "    return (out, lse) if return_lse else out\n",
                "    return (out, lse.transpose(1, 2)) if return_lse else out\n",
            ),
        ),
        (7,),
    ),
    Defect(
        "lse-of-later-rows-never-written",
        "seen in public ring-attention code: the lse of a first tile that was masked",
        "The kernel writes lse for the first block of query rows only; that of the others is what memory held.",
        (
            Edit(
                KERNELS,
                "        lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)\n",
                "        if rows.start == 0:\n"
                "            lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)\n",
            ),
        ),
        (8,),
    ),
    Defect(
        "nothing-seen-is-minus-1e8",
        "torchscale",
        "-1e8 stands for the lse of a row that has seen nothing.",
        (
            Edit(
                ACCUMULATOR,
                "torch.full((batch, heads, tokens), -torch.inf, dtype",
                "torch.full((batch, heads, tokens), -1e8, dtype",
            ),
        ),
        (9,),
    ),
    Defect(
        "hidden-scores-are-minus-1e4",
        "torchscale; DarcStar V3",
        "Hidden scores are -10000 instead of -inf: rows whose real scores lie lower attend to what is hidden.",
        (
            Edit(
                KERNELS,
                "masked_fill_(hidden[:, None, None, None], -torch.inf)",
                "masked_fill_(hidden[:, None, None, None], -1e4)",
            ),
        ),
        (9,),
    ),
    Defect(
        "lse-zero-means-nothing",
        "DarcStar V3",
        "The merge takes an lse that is exactly 0 for that of a side without keys.",
        (Edit(ACCUMULATOR, _TOP, "    lse = lse.masked_fill(lse == 0.0, -torch.inf)\n" + _TOP),),
        (9,),
    ),
    Defect(
        "merge-without-division",
        "DarcStar Hilbert",
        "The weighted outputs are added without dividing by the sum of the weights.",
        (
            Edit(
                ACCUMULATOR,
                _MERGED,
                "    merged = weight.unsqueeze(-1) * out + new_weight.unsqueeze(-1) * new_out\n",
            ),
        ),
        (10,),
    ),
    Defect(
        "merge-by-plain-average",
        "DarcStar TrueRing; RingSDPA",
        "Outputs of two sources are averaged as if both had the same weight.",
        (
            Edit(
                ACCUMULATOR,
                _MERGED,
                "    first = (lse == -torch.inf).unsqueeze(-1)\n"
                "    merged = torch.where(first, new_out, (out + new_out) / 2)\n",
            ),
        ),
        (11,),
    ),
    Defect(
        "merge-keeps-the-larger-side-only",
        "own",
        "The side with the larger lse wins, as if the softmax were a maximum.",
        (
            Edit(
                ACCUMULATOR,
                _MERGED,
                "    merged = torch.where((lse > new_lse).unsqueeze(-1), out, new_out)\n",
            ),
        ),
    ),
    Defect(
        "merge-swallows-nan",
        "own",
        "A NaN that belongs into the output is turned into 0.",
        (Edit(ACCUMULATOR, _RETURNED, "    return torch.nan_to_num(merged), top + torch.log(total)"),),
    ),
    Defect(
        "accumulator-not-initialised",
        "own",
        "The output starts as what memory held: rows that see nothing return it.",
        (Edit(ACCUMULATOR, "self.out = torch.zeros(batch,", "self.out = torch.empty(batch,"),),
    ),
    Defect(
        "lse-starts-at-zero",
        "own",
        "lse starts at 0 instead of -inf: every row has one key more, with score 0 and value 0.",
        (
            Edit(
                ACCUMULATOR,
                "torch.full((batch, heads, tokens), -torch.inf, dtype",
                "torch.full((batch, heads, tokens), 0.0, dtype",
            ),
        ),
    ),
    Defect(
        "maximum-of-the-first-row-for-all",
        "own",
        "The scores of a block are shifted by the maximum of its first row instead of each row's own.",
        (
            Edit(
                KERNELS,
                "        top = scores.amax(-1, keepdim=True)\n",
                "        top = scores.amax(-1, keepdim=True)[..., :1, :].expand(*scores.shape[:-1], 1)\n",
            ),
        ),
    ),
)
