"""Parsing of a rank's stack, as faulthandler writes it.

A dump has a block for each thread, with its frames from the innermost on: `File "...", line 7 in name`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verification.run.processes import flight_record, worker

_FRAME = re.compile(r'^  File "', re.MULTILINE)


def _frame_pattern(function: Callable[..., Any]) -> re.Pattern[str]:
    """Return a pattern for frames of that function, in any folder: the rank may be on another machine."""
    file = re.escape(Path(function.__code__.co_filename).name)
    return re.compile(rf'^  File ".*{file}", line \d+ in {function.__name__}$', re.MULTILINE)


_WATCHERS = _frame_pattern(worker.exit_with_parent), _frame_pattern(flight_record.serve)
_DESCRIBE = _frame_pattern(worker.describe)
_MAIN, _CALL = _frame_pattern(worker.main), _frame_pattern(worker.run_request)


def is_answering(dump: str) -> bool:
    """True if the rank has left the function that it was called with, and is about to answer.

    True also for a stack that is cut off before `main`: such a rank may have run on while its frames were listed.
    """
    for block in dump.split("\n\n"):
        if _MAIN.search(block):
            call, innermost = _CALL.search(block), _FRAME.search(block)
            assert innermost is not None
            return call is None or innermost.start() == call.start() or bool(_DESCRIBE.search(block))
    return True


def tidy_stack(dump: str) -> str:
    """Return the dump without what every rank has: its watchers' threads, and the frames that lead to the call, of this
    package too unless there are no others."""
    threads = []
    for block in dump.strip().split("\n\n"):
        if any(watcher.search(block) for watcher in _WATCHERS) or block.startswith("Extension modules: "):
            continue
        threads.append(_without_own(block[: call.start()].rstrip()) if (call := _CALL.search(block)) else block)
    return "\n\n".join(threads)


def _without_own(block: str) -> str:
    """Return the thread without its outermost frames of this package."""
    lines = block.split("\n")
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    while frames and lines[frames[-1]].startswith(f'  File "{worker.PACKAGE}'):
        del lines[frames.pop() :]
    return "\n".join(lines) if frames else block
