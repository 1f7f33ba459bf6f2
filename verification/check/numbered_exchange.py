"""The exchange of a Case, with numbers, where it depends on hosts: all that is expected follows from it.

"auto" is judged as the exchange that `ring.estimate.choose` puts first, to the byte. So ranks that choose otherwise are
found; a choice that is not the fastest is not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from reference.head_groups import AUTO, BY_HOST, numbered
from verification.case import Case
from verification.run.layouts import key_layout_of, layout_of


def with_number(case: Case) -> Case:
    """Return the Case with the exchange that its ranks use; the Case itself if its exchange depends on no hosts."""
    if case.exchange == AUTO:
        return _with_choice(case)
    if case.exchange in BY_HOST:
        return replace(case, exchange=numbered(case.exchange, len(case.ranks), case.hosts))
    return case


@lru_cache(maxsize=64)
def _with_choice(case: Case) -> Case:
    from ring.estimate.choice import choose  # few Cases need estimates

    dim, value_dim = case.dims
    first, *_ = choose(
        case.pattern, layout_of(case), key_layout=None if case.keys is None else key_layout_of(case), heads=case.heads,
        kv_heads=case.kv_heads, head_dim=dim, value_dim=value_dim, batch=case.batch, dtype=case.torch_dtype,
        bucket=case.bucket, device=case.device,
    )  # fmt: skip
    return replace(case, exchange=first.exchange)
