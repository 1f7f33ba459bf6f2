"""The settings of a call: its arguments besides tensors, pattern, layouts and group.

An argument is one field. From the fields come its validation, the key by which programs are cached, the comparison
between ranks, and the arguments of the operators of a compiled graph.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from reference.documents import describe
from ring.compute.kernels import NAMES
from ring.layout import MAX_TOKENS
from ring.plan.exchange import check_name
from ring.plan.exchanges import RING
from ring.plan.whole_chunks import STEP

_LARGEST = sys.float_info.max
_LARGEST_SOFTCAP = 1e30  # scores are divided by it, and multiplied, in fp32
_SCHEMA = {"str": "str", "int | None": "SymInt?", "float | None": "float?", "bool": "bool", "str | None": "str?"}


def check_softcap(softcap: object) -> None:
    """Raise ValueError for a softcap that is neither None nor a number within fp32's reach."""
    if softcap is not None:
        real = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
        if not real or not 1 / _LARGEST_SOFTCAP <= softcap <= _LARGEST_SOFTCAP:  # type: ignore[operator]
            raise ValueError(f"softcap must be None or a number from 1e-30 to 1e30, got {describe(softcap)}")


def _check_bucket(bucket: object) -> None:
    valid = isinstance(bucket, int) and not isinstance(bucket, bool) and 1 <= bucket <= MAX_TOKENS
    if bucket is not None and not valid:
        raise ValueError(f"bucket must be None or a number of tokens from 1 to 2**40, got {describe(bucket)}")


def _check_kernel(kernel: object) -> None:
    if kernel not in NAMES:
        raise ValueError(f"kernel must be one of {NAMES}, got {kernel!r}")


def _check_scale(scale: object) -> None:
    if scale is not None:
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not abs(scale) <= _LARGEST:
            raise ValueError(f"scale must be None or a finite number, got {describe(scale)}")


def _check_return_lse(return_lse: object) -> None:
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False, got {return_lse!r}")


def _check_same_bits(chunk: object) -> None:
    valid = isinstance(chunk, int) and not isinstance(chunk, bool) and 1 <= chunk <= MAX_TOKENS and not chunk % STEP
    if chunk is not None and not valid:
        raise ValueError(
            f"same_bits must be None or the tokens of a chunk, a multiple of {STEP} up to 2**40, got {describe(chunk)}"
        )


def _compared(default: Any, validate: Any) -> Any:
    """Return a field that must be equal on all ranks. validate: raises ValueError for a wrong value."""
    return field(default=default, metadata={"validate": validate})


@dataclass(frozen=True)
class Settings:
    """The settings of a call, not yet validated. See `ring.ring_attention`; `check` and `name` change no result."""

    exchange: str = _compared(RING.name, check_name)
    bucket: int | None = _compared(None, _check_bucket)
    kernel: str = _compared("auto", _check_kernel)
    scale: float | None = _compared(None, _check_scale)
    softcap: float | None = _compared(None, check_softcap)
    return_lse: bool = _compared(False, _check_return_lse)
    same_bits: int | None = _compared(None, _check_same_bits)
    check: bool = True
    name: str | None = None

    def validate(self) -> None:
        """Raise ValueError that names the argument, its value and the allowed ones."""
        for name, check in _VALIDATORS.items():
            check(getattr(self, name))

    @property
    def key(self) -> tuple[object, ...]:
        """The values that results depend on, with their types, because 1, 1.0 and True are equal."""
        values = _values(self)
        return values, tuple(map(type, values))

    def entries(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, by name. 1 equals 1.0, and -0.0 equals 0.0."""
        values = zip(_VALIDATORS, _values(self), strict=True)
        return {name: float(x) + 0.0 if name in _FLOATS and x is not None else x for name, x in values}

    def named(self) -> dict[str, Any]:
        """Return the values by name. Not `vars`: torch 2.11 cannot compile it."""
        return {name: getattr(self, name) for name in _ARGUMENTS}

    def for_operator(self) -> dict[str, Any]:
        """Return the arguments of an operator, by its names."""
        return {argument: getattr(self, name) for name, argument in _ARGUMENTS.items()}

    @classmethod
    def of_operator(cls, arguments: dict[str, Any]) -> Settings:
        """Return the settings that were passed to an operator."""
        return cls(**{name: arguments[argument] for name, argument in _ARGUMENTS.items()})


_VALIDATORS = {x.name: x.metadata["validate"] for x in fields(Settings) if x.metadata}
_FLOATS = {x.name for x in fields(Settings) if x.type == "float | None"}
_values = attrgetter(*_VALIDATORS)
# The underscore: Inductor passes arguments by name, beside a `kernel` of its own.
_ARGUMENTS = {x.name: f"{x.name}_" for x in fields(Settings)}
OPERATOR_SCHEMA = ", ".join(f"{_SCHEMA[str(x.type)]} {_ARGUMENTS[x.name]}" for x in fields(Settings))
