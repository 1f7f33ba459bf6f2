"""An error of one rank as all ranks raise it: of its kind, with the rank's number. It travels as two strings."""

from __future__ import annotations

import builtins

# Python's own kinds that are made of one text. Of `Exception` itself no caller can say what it catches.
_KINDS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
    if not issubclass(kind, UnicodeError | ExceptionGroup)
}


def described(error: BaseException) -> tuple[str, str]:
    """Return the nearest of Python's kinds, RuntimeError if there is none, and the text, with the name of another."""
    own = type(error)
    kind = next((kind.__name__ for kind in own.__mro__ if _KINDS.get(kind.__name__) is kind), "RuntimeError")
    return kind, str(error) if own is _KINDS[kind] else f"{own.__name__}: {error}"


def make_error(rank: int, kind: str, text: str) -> Exception:
    """Return the error that a rank described."""
    return of_kind(kind, f"rank {rank}: {text}")


def of_kind(kind: str, text: str) -> Exception:
    """Return an error of one of Python's kinds."""
    return _KINDS[kind](text)
