"""Numbers and lists in words: singular where there is one, nothing of what there is none."""

from __future__ import annotations

import pytest

from verification.case import Case
from verification.wording import counted, misfits


def test_one_is_singular() -> None:
    assert [counted(number, "counter-example") for number in (0, 1, 2)] == [
        "0 counter-examples", "1 counter-example", "2 counter-examples",
    ]  # fmt: skip


def test_only_what_there_is_is_named() -> None:
    assert misfits(["a"], []) == "unknown field a"
    assert misfits([], ["b", "c"]) == "missing fields b, c"
    assert misfits(["a", "b"], ["c"]) == "unknown fields a, b, missing field c"
    with pytest.raises(ValueError, match="^Case: missing fields batch, bucket, .*, world$"):
        Case.from_json("{}")
