"""Defects of agreement: a rank that raises, leaves or differs while the others go on."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

AGREEMENT = "ring/agreement.py"
EXCHANGE = "ring/comm/exchange.py"
SCHEDULE = "ring/plan/schedule.py"

_FOUND = "    except Exception as found:  # of any type: the other ranks must hear of it\n        error = found\n"
_STEPS = "            landing, before = landings[(number - 1) % sizes.turns], landings[number % sizes.turns]\n"
_SHAPES = "        if (x.shape[0], x.shape[3]) != (q.shape[0], q.shape[3]):\n"
_JOINT = "    raise _joint_error(collect_json(said, transport))\n"


def _unsaid(name: str, line: str, about: str) -> Defect:
    """A field that is left out of what the ranks compare."""
    return Defect(name, "own", about, (Edit(AGREEMENT, line, ""),), (42,))


AGREEMENTS = (
    Defect(
        "rank-leaves-when-it-has-nothing-to-do",
        "seen in public ring-attention code",
        "A rank that has no tile left to compute ends its walk, though others wait for what it would relay.",
        (
            Edit(
                EXCHANGE,
                _STEPS,
                "            if not any(later.tiles for later in plan.steps[number - 1 :]):\n"
                "                yield arrival, number - 1\n"
                "                return\n" + _STEPS,
            ),
        ),
        (41,),
    ),
    Defect(
        "ring-ends-where-nothing-lands",
        "seen in public ring-attention code",
        "A rank's ring ends at the first hop at which nothing lands on it, though others go on.",
        (
            Edit(
                SCHEDULE,
                "            if not prefix[:, chunk, t].any():\n",
                "            if not prefix[home_of(t), chunk, t]:\n",
            ),
        ),
        (41,),
    ),
    Defect(
        "raises-without-telling",
        "seen in public ring-attention code",
        "A rank that was called wrongly raises at once; the others wait for its word.",
        (Edit(AGREEMENT, _FOUND, _FOUND.replace("error = found", "raise found")),),
        (42,),
    ),
    Defect(
        "only-the-culprit-raises",
        "seen in public ring-attention code",
        "Ranks that were called rightly go on after another one's error.",
        (
            Edit(
                AGREEMENT,
                _JOINT,
                "    said_by_all = collect_json(said, transport)\n"
                "    if error is None and any(isinstance(words, list) for words in said_by_all):\n"
                "        return\n"
                "    raise _joint_error(said_by_all)\n",
            ),
        ),
        (42,),
    ),
    Defect(
        "every-rank-its-own-error",
        "own",
        "A rank that was called wrongly raises its own error, the others one that names the rank.",
        (
            Edit(
                AGREEMENT, _JOINT, "    joint = _joint_error(collect_json(said, transport))\n    raise error or joint\n"
            ),
        ),
        (42,),
    ),
    Defect(
        "disagreement-not-noticed",
        "own",
        "Ranks that were called differently go on.",
        (
            Edit(
                AGREEMENT,
                _JOINT,
                "    said_by_all = collect_json(said, transport)\n"
                "    if all(isinstance(words, dict) for words in said_by_all):\n"
                "        return\n"
                "    raise _joint_error(said_by_all)\n",
            ),
        ),
        (42,),
    ),
    Defect(
        "errors-without-the-argument",
        "own",
        "The error of all ranks does not say which argument is wrong.",
        (
            Edit(
                AGREEMENT,
                '            return ValueError(f"rank {rank}: {what}{words[1]}")\n',
                '            return ValueError(f"rank {rank} was called wrongly")\n',
            ),
        ),
    ),
    Defect(
        "error-of-another-type",
        "own",
        "The joint error is a RuntimeError.",
        (
            Edit(
                AGREEMENT,
                '            return ValueError(f"rank {rank}: {what}{words[1]}")\n',
                '            return RuntimeError(f"rank {rank}: {what}{words[1]}")\n',
            ),
        ),
    ),
    _unsaid(
        "layout-not-compared",
        '        "layout": f"{call.layout.n} tokens, cuts {call.layout.cuts}, order {call.layout.digest.hex()}",\n',
        "Ranks may hold different layouts: shards overlap or are missing.",
    ),
    _unsaid(
        "pattern-not-compared",
        '        "pattern": call.pattern.to_dict(),\n',
        "Ranks may follow different patterns: messages do not fit.",
    ),
    _unsaid("bucket-not-compared", '        "bucket": call.bucket,\n', "Ranks may cut their messages differently."),
    _unsaid("exchange-not-compared", '        "exchange": call.exchange,\n', "Ranks may follow different exchanges."),
    _unsaid(
        "dtype-not-compared", '        "dtype": str(call.q.dtype),\n', "Ranks may send messages of different types."
    ),
    _unsaid(
        "kernel-not-compared",
        '        "kernel": call.kernel,\n',
        "Ranks may choose different kernels, and results differ between them.",
    ),
    _unsaid(
        "scale-not-compared",
        '        "scale": None if call.scale is None else float(call.scale) + 0.0,  # 1 is 1.0, and -0.0 is 0.0\n',
        "Ranks may scale their scores differently.",
    ),
    _unsaid(
        "return-lse-not-compared",
        '        "return_lse": call.return_lse,\n',
        "One rank may return lse and be differentiated through it, others not.",
    ),
    _unsaid(
        "head-dim-not-compared",
        '        "head dim": dim,\n',
        "Ranks may have tensors of different head dims: messages do not fit.",
    ),
    _unsaid(
        "batch-not-compared",
        '        "batch size": batch,\n',
        "Ranks may have tensors of different batch sizes: messages do not fit.",
    ),
    _unsaid(
        "heads-not-compared",
        '        "query heads": heads,\n',
        "Ranks may have different numbers of query heads: their patterns differ.",
    ),
    _unsaid(
        "requires-grad-not-compared",
        '        "requires_grad": call.differentiated,\n',
        "Some ranks may go through backward while others do not: they wait for ever.",
    ),
    Defect(
        "bucket-of-zero-accepted",
        "own",
        "A bucket of 0 is not refused.",
        (Edit(AGREEMENT, "not 1 <= bucket <= _MOST", "not 0 <= bucket <= _MOST"),),
    ),
    Defect(
        "token-count-not-checked",
        "own",
        "A shard that is longer or shorter than the layout says is not refused.",
        (Edit(AGREEMENT, "        if x.shape[1] != tokens:\n", "        if x.shape[1] < tokens:\n"),),
    ),
    Defect(
        "dtypes-not-checked",
        "own",
        "Keys and values of another type than the queries are not refused.",
        (Edit(AGREEMENT, "        if x.dtype != q.dtype:\n", "        if x.dtype.is_complex:\n"),),
    ),
    Defect(
        "head-dim-of-keys-not-checked",
        "own",
        "Keys and values of another head dim than the queries are not refused.",
        (Edit(AGREEMENT, _SHAPES, "        if x.shape[0] != q.shape[0]:\n"),),
    ),
    Defect(
        "batch-of-keys-not-checked",
        "own",
        "Keys and values of another batch size than the queries are not refused.",
        (Edit(AGREEMENT, _SHAPES, "        if x.shape[3] != q.shape[3]:\n"),),
    ),
    Defect(
        "scale-nan-accepted",
        "own",
        "A scale that is NaN is not refused: it is not beyond the largest number.",
        (Edit(AGREEMENT, "not abs(scale) <= _LARGEST", "abs(scale) > _LARGEST"),),
    ),
    Defect(
        "scale-infinite-accepted",
        "own",
        "An infinite scale is not refused.",
        (Edit(AGREEMENT, "not abs(scale) <= _LARGEST", 'not abs(scale) <= float("inf")'),),
    ),
    Defect(
        "uneven-heads-not-checked",
        "own",
        "Query heads that are no multiple of key/value heads are not refused.",
        (Edit(AGREEMENT, "    if q.shape[2] % k.shape[2]:\n", "    if q.shape[2] % k.shape[2] and False:\n"),),
    ),
    Defect(
        "flags-not-checked",
        "own",
        "A return_lse that is no flag is taken for one.",
        (
            Edit(
                AGREEMENT,
                "    if not isinstance(call.return_lse, bool):\n",
                "    if call.return_lse is None:\n",
            ),
        ),
    ),
)
