"""What can be left out of a failing example, one thing at a time.

Hypothesis shrinks what was drawn, draw by draw. Where a failure needs a sequence cut somewhere, and was found with a
document that ends there, it makes the documents fewer, but may never come to an example without any that fails as well:
that would need another draw to grow at the same time. So what an example can do without is tried by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from reference.pattern import Branch
from verification.example import Example

# Fields that may be left out, and what they are then, of Cases of every kind that have them.
OPTIONAL: dict[str, Any] = {
    "group": None,
    "cuts": None,
    "bucket": None,
    "scale": None,
    "clipping": None,
    "resumed": None,
    "later_documents": None,
    "strided": False,
    "measured": False,
    "again": "alike",
}


def with_less(case: Example) -> Iterator[Example]:
    """The Case without its documents; without its windows, all or one; then without each of the other fields that it
    could do without. What makes no Case is left out.
    """
    changed: Any = case  # a dataclass, of whatever kind
    pattern = getattr(case, "pattern", None)
    if pattern is not None and pattern.documents is not None:
        yield from _made(changed, pattern=replace(pattern, documents=None))
    if pattern is not None:
        for branches in _without_windows(pattern.branches):
            yield from _made(changed, pattern=replace(pattern, branches=branches))
    known = {field.name for field in fields(changed)}
    for name, without in OPTIONAL.items():
        if name in known and getattr(case, name) != without:
            yield from _made(changed, **{name: without})


def _without_windows(branches: tuple[Branch, ...]) -> Iterator[tuple[Branch, ...]]:
    """The branches without any window; then, where several have one, without that of one of them."""
    limited = [at for at, branch in enumerate(branches) if branch.window is not None]
    if limited:
        yield tuple(replace(branch, window=None) for branch in branches)
    if len(limited) > 1:
        for left_out in limited:
            yield tuple(replace(b, window=None) if at == left_out else b for at, b in enumerate(branches))


def _made(case: Any, **changes: Any) -> Iterator[Example]:
    """The Case with these changes, if there is one: cuts are for so many ranks, say."""
    try:
        yield replace(case, **changes)
    except ValueError:
        return
