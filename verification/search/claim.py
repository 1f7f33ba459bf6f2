"""Applies the claim of a peer, or of a user's Setup, to a drawn Case."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from verification.protocols import CaseLike
from verification.run.processes.worker import PACKAGE
from verification.search.experiment import ToolError

AnyCase = TypeVar("AnyCase", bound=CaseLike)


def apply_claim(name: str, claims: Callable[[AnyCase], AnyCase | None], case: AnyCase) -> AnyCase | None:
    """Return `claims(case)`. Raises ToolError, which names the claim and the Case, for a claim that raises, returns
    anything but a Case of that world, or changes its own result: faults of the adapter, not counter-examples."""
    nearest = _answer(name, claims, case)
    if nearest is not None and _answer(name, claims, nearest) != nearest:
        raise ToolError(f"claims of {name} changes its own result: {nearest!r}; it must return that unchanged")
    return nearest


def _answer(name: str, claims: Callable[[AnyCase], AnyCase | None], case: AnyCase) -> AnyCase | None:
    try:
        nearest = claims(case)
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error} ({_find_place(error)})"
        raise ToolError(f"claims of {name} raised {raised}, given {case!r}") from None
    if nearest is not None and (not isinstance(nearest, type(case)) or nearest.world != case.world):
        must = f"it must be a {type(case).__name__} with world {case.world}, or None"
        raise ToolError(f"claims of {name} gave {nearest!r}; {must}; it was given {case!r}")
    return nearest


def _find_place(error: BaseException) -> str:
    """Return where the innermost frame outside this package raised, or called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [f for f in frames if not f.filename.startswith(PACKAGE)][-1:] or frames[-1:]
    return ", ".join(f"{f.filename}, line {f.lineno}, in {f.name}" for f in frame)
