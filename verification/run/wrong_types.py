"""Arguments of ring_attention that are nearly right: equal to those of a right call before, but of another type, or of
no type that it takes. What is settled for a call is found again by what equals its arguments, so types must count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ring import ring_attention
from verification.case import Case

Arguments = dict[str, Any]  # of ring_attention, by name
Change = Callable[[Arguments, Case], None]


class WrongType(NamedTuple):
    """argument: what the refusal names. together: whether all ranks have to make it. everyone: what all do before."""

    argument: str
    spoil: Change
    together: bool = False
    everyone: Change = lambda arguments, case: None


def _set(name: str, value: Any) -> Change:
    return lambda arguments, case: arguments.update({name: value})


def _of(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments, case: arguments.update({name: change(arguments[name])})


def _called_before(**given: Any) -> Change:
    def everyone(arguments: Arguments, case: Case) -> None:
        arguments.update(given)
        ring_attention(**arguments)

    return everyone


def _other_device(arguments: Arguments, case: Case) -> None:
    arguments.update({name: arguments[name].to("meta") for name in "kv"})


_BEFORE = "that of the call before, but"
WRONG_TYPES: dict[str, WrongType] = {
    f"bucket of 1 that equals {_BEFORE} is a flag": WrongType(
        "bucket", _set("bucket", True), everyone=_called_before(bucket=1)
    ),
    f"bucket that equals {_BEFORE} is NumPy's": WrongType(
        "bucket", _of("bucket", np.int64), everyone=_called_before(bucket=2)
    ),
    f"bucket that equals {_BEFORE} is complex": WrongType(
        "bucket", _of("bucket", complex), everyone=_called_before(bucket=2)
    ),
    f"scale of 1 that equals {_BEFORE} is a flag": WrongType(
        "scale", _set("scale", True), everyone=_called_before(scale=1.0)
    ),
    f"scale of 0 that equals {_BEFORE} is a flag": WrongType(
        "scale", _set("scale", False), everyone=_called_before(scale=0)
    ),
    f"scale that equals {_BEFORE} is NumPy's": WrongType(
        "scale", _of("scale", np.float32), everyone=_called_before(scale=0.5)
    ),
    f"scale that equals {_BEFORE} is complex": WrongType(
        "scale", _of("scale", complex), everyone=_called_before(scale=0.5)
    ),
    f"scale that equals {_BEFORE} is a tensor": WrongType(
        "scale", _of("scale", torch.tensor), everyone=_called_before(scale=0.5)
    ),
    f"return_lse that equals {_BEFORE} is NumPy's": WrongType(
        "return_lse", _of("return_lse", np.bool_), everyone=_called_before()
    ),
    "exchange in a list": WrongType("exchange", _of("exchange", lambda x: [x])),
    "no exchange": WrongType("exchange", _set("exchange", None)),
    "kernel in a list": WrongType("kernel", _of("kernel", lambda x: [x])),
    "no kernel": WrongType("kernel", _set("kernel", None)),
    "bucket beyond all tokens": WrongType("bucket", _set("bucket", 2**40 + 1)),
    "bucket of too many digits": WrongType("bucket", _set("bucket", 10**5000)),
    "scale of too many digits": WrongType("scale", _set("scale", 10**5000)),
    "name of bytes": WrongType("name", _set("name", b"layer")),
    "pattern as JSON has it": WrongType("pattern", _of("pattern", lambda pattern: pattern.to_dict())),
    "one branch in place of a pattern": WrongType("pattern", _of("pattern", lambda pattern: pattern.branches[0])),
    "cuts in place of a layout": WrongType("layout", _of("layout", lambda layout: layout.cuts)),
    "q as an array": WrongType("q must be", _of("q", lambda q: np.zeros(q.shape))),
    "complex q": WrongType("q must be a dense real", _of("q", lambda q: q.to(torch.complex64))),
    "q of five dimensions": WrongType("q must be", _of("q", lambda q: q.unsqueeze(0))),
    "k and v on another device": WrongType("device", _other_device),
    "a group that is none": WrongType("group", _set("group", "mine"), together=True),
}
