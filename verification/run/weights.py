"""What entries of caches take, beside what they are said to take: bounds in bytes hold only as far as that is so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from reference.documents import Documents
from ring.agreement import CallSetting
from ring.caching.bounded import Bounded
from ring.layout import Layout

LEAST, PART = 1024, 0.5  # bytes that are worth a word, and the part of them that must be said
_A_LENGTH = 8  # bytes of an entry in a tuple, without what it refers to


@contextmanager
def weighed() -> Iterator[list[str]]:
    """Of all that is kept inside: what is said to take much less than its arrays do, or than its list of documents."""
    found: list[str] = []
    real = Bounded.keep

    def keep(self: Any, key: Any, value: Any, nbytes: int = 0) -> Any:
        takes = weight(value)
        if takes > LEAST and nbytes < PART * takes:
            kind = type(value).__name__
            found.append(f"a {kind} of {takes} bytes is kept as one of {nbytes}, must be about as many")
        return real(self, key, value, nbytes)

    Bounded.keep = keep  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Bounded.keep = real  # type: ignore[method-assign]


def weight(of: object) -> int:
    """Bytes of the arrays and tensors in an object; of a setting, which has none, those of its list of documents."""
    seen: set[int] = set()
    total, rest = 0, [of]
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (np.ndarray, torch.Tensor)):
            total += one.nbytes
        elif isinstance(one, Documents):
            total += _A_LENGTH * len(one) if isinstance(of, CallSetting) else 0  # which a plan shares with its key
        elif isinstance(one, Layout):
            continue  # likewise, and with its user
        elif isinstance(one, (tuple, list)):
            rest += one
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
        elif hasattr(one, "__dict__") and type(one).__module__.startswith("ring."):
            rest += vars(one).values()
    return total
