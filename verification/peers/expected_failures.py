"""Expected failures: a user's file of properties and laws that an implementation is known to break, one in a line.

    # my_attention masks with -1e9
    scores of -inf have no weight
    my_attention:windowed: NaN and inf propagate

A line names a property or law by its title, for all peers or, after `name: `, for one. (data-apis/array-api-tests has
such files.)
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ring.regular_file import read_regular

MAX_SHOWN = 100  # characters of a wrong line


def read_expected_failures(file: Path, titles: Collection[str]) -> dict[str | None, set[str]]:
    """Return the titles of the file by the name of a peer; None: of all. Raises OSError; ValueError as
    `read_regular`, and naming the line that has no title of these."""
    expected: dict[str | None, set[str]] = {}
    try:
        lines = read_regular(file).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        name, _, title = ("", "", line) if line in titles else line.partition(": ")  # a title may have one, too
        if title not in titles:
            raise ValueError(
                f"line {number} of {file} is {line[:MAX_SHOWN]!r}; it must be [name: ]title, one of {', '.join(titles)}"
            )
        expected.setdefault(name or None, set()).add(title)
    return expected
