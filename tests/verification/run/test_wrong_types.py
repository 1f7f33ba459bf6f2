"""Arguments of another type are refused after a call that equals them was found right; who takes them is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from ring import agreement
from tests.support.plain_case import plain
from verification.check.laws.mistakes import check_refused
from verification.failures import WrongResult
from verification.run.backends import SimBackend
from verification.run.wrong_types import WRONG_TYPES

pytestmark = pytest.mark.ranks


def how(*names: str, culprit: int | None = 1) -> dict[str, list[list[str | int | None]]]:
    return {"mistakes": [[name, None if WRONG_TYPES[name].together else culprit] for name in names]}


def test_all_are_refused() -> None:
    with closing(SimBackend(10.0)) as backend:
        backend.start(2)
        for case in (plain(2), plain(2, lse="returned", bucket=3)):
            check_refused(backend, case, how(*WRONG_TYPES))


def _settled_by_value() -> None:
    real = agreement.Call.key
    agreement.Call.key = lambda self: real(self)[:-1]  # type: ignore[method-assign]


def _loose() -> None:
    agreement._validate_options = lambda call: None


@pytest.mark.parametrize(
    ("prepare", "name"),
    [(_settled_by_value, name) for name in WRONG_TYPES if "1 that equals" in name or "is NumPy's" in name]
    + [(_loose, "scale that equals that of the call before, but is a tensor"), (_loose, "bucket beyond all tokens")],
)
def test_who_takes_them_is_found(prepare: Callable[[], None], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.Call, "key", agreement.Call.key)  # simulated ranks are threads: it comes back
    monkeypatch.setattr(agreement, "_validate_options", agreement._validate_options)
    with closing(SimBackend(10.0, prepare)) as backend:
        backend.start(2)
        with pytest.raises(WrongResult, match="raised nothing"):
            check_refused(backend, plain(2), how(name, culprit=None))  # one alone differs from the others, too
