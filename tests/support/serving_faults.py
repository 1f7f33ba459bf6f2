"""The server of verification/serving/README.md, and the same with one fault each: text that is replaced in it."""

from __future__ import annotations

import re
from pathlib import Path

from verification.serving import Server

FAULTS = __name__
PAGE = (Path(__file__).parents[2] / "verification/serving/README.md").read_text()
(CODE,) = re.findall(r"```python\n(# my_server\.py\n.*?)```", PAGE, re.DOTALL)
END = "    return torch.einsum("
RESULTS = '{"out": merged.to(q.dtype), "lse": total, "partial_out": out.to(q.dtype), "partial_lse": lse}'
ONLY_MERGED = {", results)": ', ("out",))', RESULTS: '{"out": merged.to(q.dtype)}'}
GARBAGE = {END: f"    lse = lse.masked_fill(seen[:, None] == 0, 0.4375)\n{END}"}  # as any number left in memory
NANS = {f"{END}\"thn,nhd->thd\", weights, v), lse": "    out = torch.einsum('thn,nhd->thd', weights, v)\n"
        "    return out.masked_fill((seen == 0)[:, None, None], torch.nan), lse"}  # fmt: skip
BELOW = "positions - call.before[slot] + 1"


def seeing(seen: str) -> dict[str, str]:
    """Return the replacement of the places that queries see."""
    own = {"own = seen > places": "own = owned(call, positions + 1) > places"}
    return {"seen = owned(call, positions), owned(call, positions + 1)": f"seen = owned(call, positions), {seen}"} | own


# Replacements by the name of a server.
CHANGES = {
    "right": {},
    # vllm-project/vllm#57260, #36070 and #34355
    "replicated_slots": {"if call.replicated:": "if False:"},
    "stale_lengths": {
        "for x in (k, v)]\n": "for x in (k, v)] + [{}]  # calls that a graph captured\n",
        "zip(cache, new, strict=True)": "zip(cache, new)", "for memory in cache)": "for memory in cache[:2])",
    } | seeing(f"owned(call, cache[2].setdefault(call.new, call).before[slot] + {BELOW})"),
    "lse_of_garbage": GARBAGE,
    # sgl-project/sglang#23415, #32098 and #27276
    "padded_prefix": seeing(
        f"owned(call, max(0, call.lengths[slot] + -call.new[slot] // call.world * call.world) + {BELOW})"
    ),
    "shard_positions": seeing(
        f"(owned(call, torch.tensor(call.lengths[slot])) - call.new[slot] + {BELOW}).clamp(0)"
    ),
    "contiguous_queries": {"results = []\n": "results, q = [], q.as_strided(q.shape, (q[0].numel(), q.shape[2], 1))\n"},
    # NVIDIA/TensorRT-LLM#17795
    "negative_modulo": {
        "turn =": "length, first = (length - 1).clamp(0), (length > 0) * (call.rank == call.world - 1)\n    turn =",
        "clamp(0, call.block)": "clamp(0, call.block) + first",
    },
    # ROCm/ATOM#1832
    "zero_times_nan": NANS,
    "base_2": {RESULTS: RESULTS.replace("lse}", "lse / torch.tensor(2.0).log()}")},
    "merged_in_base_2": {"weights, v), lse": "weights, v), lse / 0.6931471805599453"},
    "only_merged_nan": NANS | ONLY_MERGED,
    "halves": {RESULTS: RESULTS.replace("}", ', "out": merged.to(q.dtype) / 2}')},
    "no_partials": {RESULTS: '{"out": merged}'},
    "heads_first": {RESULTS: RESULTS.replace("}", ', "out": merged.transpose(0, 1)}')},
    "of_integers": {RESULTS: RESULTS.replace("total", "total.long()")},
    "spoils": {"    return cache,": "    q.zero_()\n    return cache,"},
    "of_nothing": {"lambda case: case": "lambda case: None"},
}  # fmt: skip


def written(name: str, text: str = CODE) -> str:
    """Return the program of a server."""
    for old, new in CHANGES[name].items():
        assert old in text, f"the page has no {old!r}, which {name} replaces"
        text = text.replace(old, new)
    return text


for name in CHANGES:
    exec(written(name), names := dict[str, Server]())
    globals()[name] = names["server"]
