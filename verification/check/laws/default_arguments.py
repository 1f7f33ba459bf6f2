"""An argument that is left out is the one that documentation names, in results, messages and memory."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from reference import defaults, fields
from reference.pattern import Branch, Pattern
from verification.case import EXCHANGES, Case
from verification.check.laws.law import How, Law
from verification.check.supported import check_supported
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.left_out import calls, made, unlike_names

ARGUMENTS = ("exchange", "bucket", "kernel", "scale", "return_lse", "check", "name")
# (query heads, key/value heads, dtype). With the last ones the default bucket of a shard of 1300 tokens lies between
# the least one and the whole shard, so messages show what it was made of.
_BETWEEN = ((40, 1, "float32"), (64, 1, "float16"))
_SHAPES = ((1, 1, "float32"), (4, 2, "float64"), (2, 1, "bfloat16"), *_BETWEEN * 4)


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """One rank holds nearly all of a sequence that is longer than the least default bucket, and the others see it. Of
    many heads only the first is served: the others count for the bucket, and cost nothing.
    """
    heads, kv_heads, dtype = draw(st.sampled_from(_SHAPES))
    tokens = draw(st.integers(1400, 1800))
    holder = draw(st.integers(0, world - 1))
    few = 1 + draw(st.integers(0, 7))  # tokens of each of the others
    before, after = [few * rank for rank in range(holder + 1)], [few * rank for rank in range(world - holder)]
    cuts = (*before, *(tokens - left for left in reversed(after)))
    case = Case(
        world=world, group=None, tokens=tokens, order="contiguous", cuts=cuts,
        pattern=Pattern((Branch(heads=range(1)),), False), batch=1, heads=heads, kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((4, 2, 3))), dtype=dtype, scale=draw(st.sampled_from((0.5, -1.0))),
        score_scale=1.0, values="normal", seed=draw(st.integers(0, 255)), exchange=draw(st.sampled_from(EXCHANGES)),
        bucket=draw(st.integers(300, 2000)), kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    every: tuple[tuple[str, ...], ...] = (*(ARGUMENTS,) * 12, *((name,) for name in ARGUMENTS[:4]))
    return case, {"left_out": list(draw(st.sampled_from(every)))}


def check_left_out(backend: Backend, case: Case, how: How) -> float:
    """On GPUs a bucket that is given bounds own keys, too, and one that is not does not: there it is given."""
    names = [name for name in how["left_out"] if name != "bucket" or case.device == "cpu"]
    largest, itemsize = max(case.shards().counts), case.torch_dtype.itemsize
    documented = defaults.call(largest, case.heads, case.kv_heads, case.head_dim, itemsize)
    backend.submit(calls, case, names, documented)
    stated = {name: documented[name] for name in names}
    _refuse_any(backend, f"ring_attention without {', '.join(names)} differs from one with {stated}")
    backend.submit(made, case)
    _refuse_any(backend, "with arguments left out, these differ from those with the documented values")
    if case.world > 1:
        backend.submit(unlike_names, case)
        for rank, said in enumerate(backend.collect()):
            if not said.startswith("ValueError: ") or "must" not in said:
                raise WrongResult(f"rank {rank}: without check=, names that differ must be refused, got {said!r}")
    return 0.0


def _refuse_any(backend: Backend, what: str) -> None:
    for rank, differing in enumerate(backend.collect()):
        if differing:
            raise WrongResult(f"rank {rank}: {what}: {', '.join(differing)}")


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", how, ["left_out"])
    if not isinstance(how["left_out"], list) or not how["left_out"]:
        raise ValueError(f"left_out of how is {how['left_out']!r}; it must be a list of arguments, at least one")
    for name in how["left_out"]:
        fields.choice("an entry of left_out of how", name, ARGUMENTS)
    if case.lse != "unused":
        raise ValueError(f"lse is {case.lse!r}; it must be 'unused', which is what a call without return_lse has")
    check_supported(case)


DEFAULTS_ARE_AS_DOCUMENTED = Law("defaults are as documented", _draw, check_left_out, _premise, share=0.04, most=40)
