"""Finds a user's Setup by `package.module:attribute`, and names its functions in their failures."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from traceback import extract_tb
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ring.extras import how_to_install
from ring.nn import ContextParallel
from verification.failures import RankFailure, Refused
from verification.models.model_case import ModelCase
from verification.models.setup import Misuse, Setup, described

OURS = tuple(str(Path(__file__).parents[2] / package) for package in ("verification", "ring"))
LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
FORM = "it must be a function build(context), or a verification.models.Setup"


class UserError(Exception):
    """An exception of a function of the user's, with its name."""


class BuildOnly(Setup):
    """A function `build(context)` as a Setup."""

    def __init__(self, build: Any) -> None:
        self.build = build  # type: ignore[method-assign]


def import_from_here() -> None:
    """Make modules of the working directory importable, here and in new processes: Python's -P omits it."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


@lru_cache(maxsize=64)
def load(name: str) -> Setup:
    """Import `package.module:attribute`. Raises Refused for one that cannot be imported, or is no Setup."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise Refused(f"argument NAME: {name!r} is no model; it must be package.module:attribute")
    import_from_here()
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        where = (
            f"there is no module {missing}" if module.startswith(missing) else f"it imports {missing}, not installed"
        )
        raise Refused(f"{name} cannot be imported: {where}{how_to_install(missing)}") from error
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        raise Refused(f"{name} cannot be imported: {module} {_raised(error)}") from error
    if not hasattr(imported, attribute):
        raise Refused(f"{name} cannot be imported: {module} has no {attribute!r}; {FORM}")
    return _setup(name, getattr(imported, attribute))


def _setup(name: str, value: Any) -> Setup:
    if isinstance(value, type) and issubclass(value, Setup):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise Refused(f"{name}() {_raised(error)}; it must take no argument") from error
    if isinstance(value, Setup):
        return value
    if isinstance(value, (type, nn.Module, ModuleType)) or not callable(value):
        raise Refused(f"{name} is {described(value)}; {FORM}")
    try:
        inspect.signature(value).bind(None)
    except TypeError as error:
        raise Refused(f"{name} is {described(value)}, which takes no single argument ({error}); {FORM}") from error
    return BuildOnly(value)


def import_name(setup: object) -> str:
    """Return the name under which other processes import the Setup. Raises Refused if there is none."""
    if isinstance(setup, str):
        return setup
    module = sys.modules.get(setup.__module__ if isinstance(setup, (type, FunctionType)) else type(setup).__module__)
    names = [name for name, value in vars(module).items() if value is setup] if module is not None else []
    if module is None or module.__name__ == "__main__" or not names:
        raise Refused(
            f"setup is {described(setup)}; it must be an attribute of a module that other processes can import"
        )
    return f"{module.__name__}:{names[0]}"


@contextmanager
def calling(function: str) -> Iterator[None]:
    """Name the user's function in its exceptions."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (Misuse, UserError)):
            raise
        raise UserError(f"{function} {_raised(error)}") from error


def _raised(error: BaseException) -> str:
    """Describe an exception in a line, with the last place in the user's own files."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((*OURS, *LIBRARIES))]
    where = ""
    if frames:
        function = f", in {frames[-1].name}" if frames[-1].name != "<module>" else ""
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}{function})"
    return f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}{where}"


def built(setup: Setup, case: ModelCase, context: ContextParallel | None) -> nn.Module:
    """Build the model with the Case's seed, dtype and, on ranks, device. Raises UserError and Misuse."""
    argument = "None" if context is None else "context"
    torch.manual_seed(case.seed)
    with calling(f"build({argument})"):
        model: object = setup.build(context)
    if not isinstance(model, nn.Module):
        raise Misuse(f"build({argument}) returned {described(model)}; it must return a torch.nn.Module")
    return model.to("cpu" if context is None else case.device, case.parameter_dtype)


def told(failure: RankFailure) -> str:
    """Return the failure's first message without the name of our function."""
    return re.sub(r" in verification\.[\w.]+ \(world of \d+\)", "", failure.headline).replace(
        "verification.models.loading.UserError: ", ""
    )


def with_users_frames(failure: RankFailure) -> RankFailure:
    """Return the failure with stacks of the user's functions only."""
    ours = r"verification\.models\.\w+\."
    states = [
        replace(state, detail=re.sub(ours, "", state.detail), trace=_cut(state.trace)) for state in failure.states
    ]
    return type(failure)(told(failure), states)


def _cut(trace: str) -> str:
    """Return the stack without frames in this project's folder `verification`, and without what they raised."""
    first = trace.partition("\nThe above exception was the direct cause")[0]
    frame = rf'^  File "{re.escape(OURS[0])}/[^\n]*\n(?:    [^\n]*\n)*'
    return re.sub(frame, "", first, flags=re.MULTILINE)
