"""Numbers and lists in words: singular where there is one, nothing of what there is none."""

from __future__ import annotations

from verification.wording import counted, misfits


def test_one_is_singular_and_only_what_there_is_is_named() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert misfits(["a"], []) == "unknown field a"
    assert misfits(["a", "b"], ["c"]) == "unknown fields a, b, missing field c"
