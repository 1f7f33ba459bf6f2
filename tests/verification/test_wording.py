"""Text of files and exceptions never reaches a terminal as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.plain_case import plain
from verification.__main__ import main
from verification.console import BOLD, RED
from verification.failures import WrongResult
from verification.report.counter_example import counter_example
from verification.report.summary import in_full
from verification.wording import printable

ACTING = "\x00\x07\x08\r\x1b[2J\x7f\x85\x9b31m\xad\u061c\u200f\u2028\u202e\u2066\ufeff\ud800\U000e0001"


@pytest.mark.parametrize(
    "text, shown",
    [("a\tb\nc é 中 \\x1b", "a\tb\nc é 中 \\x1b"), ("\x1b[31mred\u202e\r\ud800", "\\x1b[31mred\\u202e\\r\\ud800")],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_acting_character_is_escaped() -> None:
    assert all(x.isprintable() for x in printable(ACTING)) and printable(printable(ACTING)) == printable(ACTING)


def test_a_counter_example_is_printed_without_them() -> None:
    failure, record = WrongResult(f"{ACTING} is wrong"), {"peer": ACTING, "case": plain(2).to_dict()}
    lines = in_full(counter_example(failure, "values", 2, record, Path("/\x1b\u202e"), "gloo"))
    own_styles = re.compile("|".join(map(re.escape, (BOLD, RED, "\x1b[0m"))))
    assert all(own_styles.sub("", line).isprintable() for line in lines)


@pytest.mark.parametrize("content", ('{"peer": "%s:x"}', '{"%s": 1}', '{"case": "%s"}', '{"links": {"world": "%s"}}'))
def test_a_refusal_is_printed_without_them(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "\x1b[2J\u202e.json"
    file.write_text(content % "\\u001b[31m\\u202e\\ud800\u202e")
    assert main(("replay", str(file))) == 2
    error = capsys.readouterr().err
    assert error.endswith("\n") and error[:-1].isprintable() and "\\x1b" in error
