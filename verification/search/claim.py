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
    """Return `claims(case)`. Raises ToolError for a claim that raises, returns anything but a Case of that world, or
    changes its own result: these are faults of the adapter, not counter-examples."""
    try:
        nearest = claims(case)
        settled = None if nearest is None else claims(nearest)
    except (Exception, SystemExit) as error:
        raise ToolError(f"claims of {name} raised {type(error).__name__}: {error} ({_place_of(error)})") from error
    if nearest is None:
        return None
    if not isinstance(nearest, type(case)) or nearest.world != case.world:
        kind = type(case).__name__
        raise ToolError(f"claims of {name} gave {nearest!r}; it must be a {kind} with world {case.world}, or None")
    if settled != nearest:
        raise ToolError(f"claims of {name} changes its own result: {nearest!r}; it must return that unchanged")
    return nearest


def _place_of(error: BaseException) -> str:
    """Return where the innermost frame outside this package raised, or called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [f for f in frames if not f.filename.startswith(PACKAGE)][-1:] or frames[-1:]
    return ", ".join(f"{f.filename}, line {f.lineno}, in {f.name}" for f in frame)
