"""What the pool reads from a stack."""

from __future__ import annotations

import pytest

from verification.run.processes.stacks import is_answering

HEAD = 'Thread 0x01 (most recent call first):\n  File "worker.py", line 9 in exit_with_parent\n\nCurrent thread 0x02:\n'
MAIN = '  File "/x/verification/worker.py", line 277 in main\n  File "<string>", line 1 in <module>\n'
CALL = '  File "/x/verification/worker.py", line 335 in run_request\n'
DESCRIBE = '  File "/usr/traceback.py", line 2 in format\n  File "/x/verification/worker.py", line 344 in describe\n'


@pytest.mark.parametrize(
    ("frames", "answering"),
    [
        ('  File "/usr/threading.py", line 1 in barrier\n  File "tasks.py", line 3 in task\n' + CALL, False),
        (CALL, True),  # between the exception and its description, or done and not yet back in main
        (DESCRIBE + CALL, True),
        ('  File "/usr/connection.py", line 5 in send_bytes\n', True),  # back in main
    ],
)
def test_a_rank_that_has_left_its_call_is_about_to_answer(frames: str, answering: bool) -> None:
    assert is_answering(HEAD + frames + MAIN) is answering


@pytest.mark.parametrize("dump", ["", HEAD + '  File "/usr/threading.py", line 1 in barrier\n'])
def test_a_stack_that_breaks_off_may_be_of_a_rank_that_runs_on(dump: str) -> None:
    assert is_answering(dump)
