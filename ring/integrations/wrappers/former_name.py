"""Former name of the argument `same_tokens` of wrappers and meshes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes_former_name(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function take its argument `same_tokens` as `alike`, too, with a warning."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "alike" in kwargs:
            warnings.warn("alike is now same_tokens", DeprecationWarning, stacklevel=2)
            if "same_tokens" in kwargs:
                raise ValueError("same_tokens must be given alone, got alike, its former name, as well")
            kwargs["same_tokens"] = kwargs.pop("alike")
        return function(*args, **kwargs)

    return call
