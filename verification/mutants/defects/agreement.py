"""Defects of agreement: a rank that raises, leaves or differs while the others go on."""

from __future__ import annotations

from ring import agreement
from ring.comm import exchange
from ring.plan import schedule
from verification.mutants.defect import Defect, Edit, defect

_FOUND = "    except Exception as found:  # of any type: the other ranks must hear of it\n        error = found\n"
_STEPS = "            into, before = received[(number - 1) % len(received)], received[number % len(received)]\n"
_SHAPES = "        if (x.shape[0], x.shape[3]) != (q.shape[0], q.shape[3]):\n"
_JOINT = "    raise _joint_error(all_gather_json(said, transport))\n"


def _unsaid(name: str, line: str, about: str) -> Defect:
    """A field that is left out of what the ranks compare."""
    return defect(
        name,
        about,
        Edit(agreement, line, ""),
        listed=(42,),
    )


AGREEMENTS = (
    defect(
        "rank-leaves-when-it-has-nothing-to-do",
        "A rank that has no tile left to compute ends its walk, though others wait for what it would relay.",
        Edit(
            exchange,
            _STEPS,
            "            if not any(later.tiles for later in plan.steps[number - 1 :]):\n"
            "                yield arrival, number - 1\n"
            "                return\n" + _STEPS,
        ),
        provenance="seen in public ring-attention code",
        listed=(41,),
    ),
    defect(
        "ring-ends-where-nothing-lands",
        "A rank's ring ends at the first hop at which it receives nothing, though others go on.",
        Edit(
            schedule,
            "            if not travelling.prefix[:, chunk, t].any():\n",
            "            if not travelling.prefix[(rank - t) % p, chunk, t]:\n",
        ),
        provenance="seen in public ring-attention code",
        listed=(41,),
    ),
    defect(
        "raises-without-telling",
        "A rank that was called wrongly raises at once; the others wait for its word.",
        Edit(agreement, _FOUND, _FOUND.replace("error = found", "raise found")),
        provenance="seen in public ring-attention code",
        listed=(42,),
    ),
    defect(
        "only-the-culprit-raises",
        "Ranks that were called rightly go on after another one's error.",
        Edit(
            agreement,
            _JOINT,
            "    said_by_all = all_gather_json(said, transport)\n"
            "    if error is None and any(isinstance(words, list) for words in said_by_all):\n"
            "        return\n"
            "    raise _joint_error(said_by_all)\n",
        ),
        provenance="seen in public ring-attention code",
        listed=(42,),
    ),
    defect(
        "every-rank-its-own-error",
        "A rank that was called wrongly raises its own error, the others one that names the rank.",
        Edit(
            agreement, _JOINT, "    joint = _joint_error(all_gather_json(said, transport))\n    raise error or joint\n"
        ),
        listed=(42,),
    ),
    defect(
        "disagreement-not-noticed",
        "Ranks that were called differently go on.",
        Edit(
            agreement,
            _JOINT,
            "    said_by_all = all_gather_json(said, transport)\n"
            "    if all(isinstance(words, dict) for words in said_by_all):\n"
            "        return\n"
            "    raise _joint_error(said_by_all)\n",
        ),
        listed=(42,),
    ),
    defect(
        "errors-without-the-argument",
        "The error of all ranks does not say which argument is wrong.",
        Edit(
            agreement,
            '            return ValueError(f"rank {rank}: {what}{words[1]}")\n',
            '            return ValueError(f"rank {rank} was called wrongly")\n',
        ),
    ),
    defect(
        "error-of-another-type",
        "The joint error is a RuntimeError.",
        Edit(
            agreement,
            '            return ValueError(f"rank {rank}: {what}{words[1]}")\n',
            '            return RuntimeError(f"rank {rank}: {what}{words[1]}")\n',
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
    defect(
        "bucket-of-zero-accepted",
        "A bucket of 0 is not refused.",
        Edit(agreement, "not 1 <= bucket <= _MOST", "not 0 <= bucket <= _MOST"),
    ),
    defect(
        "token-count-not-checked",
        "A shard that is longer or shorter than the layout says is not refused.",
        Edit(agreement, "        if x.shape[1] != tokens:\n", "        if x.shape[1] < tokens:\n"),
    ),
    defect(
        "dtypes-not-checked",
        "Keys and values of another type than the queries are not refused.",
        Edit(agreement, "        if x.dtype != q.dtype:\n", "        if x.dtype.is_complex:\n"),
    ),
    defect(
        "head-dim-of-keys-not-checked",
        "Keys and values of another head dim than the queries are not refused.",
        Edit(agreement, _SHAPES, "        if x.shape[0] != q.shape[0]:\n"),
    ),
    defect(
        "batch-of-keys-not-checked",
        "Keys and values of another batch size than the queries are not refused.",
        Edit(agreement, _SHAPES, "        if x.shape[3] != q.shape[3]:\n"),
    ),
    defect(
        "scale-nan-accepted",
        "A scale that is NaN is not refused: it is not beyond the largest number.",
        Edit(agreement, "not abs(scale) <= _LARGEST", "abs(scale) > _LARGEST"),
    ),
    defect(
        "scale-infinite-accepted",
        "An infinite scale is not refused.",
        Edit(agreement, "not abs(scale) <= _LARGEST", 'not abs(scale) <= float("inf")'),
    ),
    defect(
        "uneven-heads-not-checked",
        "Query heads that are no multiple of key/value heads are not refused.",
        Edit(agreement, "    if q.shape[2] % k.shape[2]:\n", "    if q.shape[2] % k.shape[2] and False:\n"),
    ),
    defect(
        "flags-not-checked",
        "A return_lse that is no flag is taken for one.",
        Edit(agreement, "    if not isinstance(call.return_lse, bool):\n", "    if call.return_lse is None:\n"),
    ),
)
