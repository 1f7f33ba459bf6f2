"""The causes of a failing example: the usual mistakes that reproduce its numbers to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from reference.fast_oracle import Expectation
from verification.case import Case
from verification.causes import backward, merges, places, rounding, weights
from verification.causes.example import Candidate, Example
from verification.run.observation import Observations

Hypothesis = Callable[[Example], Iterator[Candidate]]

# The plainest first: of mistakes that predict the same numbers, the first is named.
HYPOTHESES: tuple[Hypothesis, ...] = (
    places.misplaced, backward.factors, backward.swapped, backward.sent_back, weights.wrong_weights,
    weights.wrong_sinks, merges.rows_that_see_nothing, merges.wrong_lse, merges.axes, backward.saved_results,
    backward.groups, merges.merges, rounding.rounding,
)  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """A mistake that explains an example. name: whatever the example; sentence: on the example."""

    name: str
    sentence: str


def explain(
    case: Case, expectation: Expectation, observations: Observations, earlier: Case | None = None
) -> list[Cause]:
    """Return the mistakes that explain all results of an example, wrong and right ones; the plainest first.
    There are no hypotheses about keys with a sequence of their own. earlier: a Case of the same sizes that the ranks
    ran just before."""
    if case.keys is not None:
        return []
    x = Example(case, expectation, observations, earlier)
    with one_thread():
        return [Cause(c.name, c.sentence) for c in candidates(x) if x.shown_by(c)] if x.told else []


def tells(case: Case, expectation: Expectation, observations: Observations) -> bool:
    """Return True if errors of an example are far larger than those of rounding, so that they tell causes apart."""
    return case.keys is None and bool(Example(case, expectation, observations).told)


def agree(
    causes: Sequence[Cause], case: Case, expectation: Expectation, observations: Observations,
    earlier: Case | None = None,
) -> list[Cause]:  # fmt: skip
    """Return those of the causes that a further example allows: they explain it if it fails, and predict the exact
    results if it holds. An example whose errors are small allows all."""
    if case.keys is not None:
        return list(causes)
    x = Example(case, expectation, observations, earlier)
    if x.wrong and not x.told:
        return list(causes)
    names = {cause.name for cause in causes}
    with one_thread():
        shown = {c.name: x.shown_by(c) for c in candidates(x) if c.name in names}
    # A mistake without a candidate does not concern the example, such as one about documents where there are none.
    return [cause for cause in causes if shown.get(cause.name, not x.wrong)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: tensors are small, and waiting for others costs more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def candidates(x: Example) -> Iterator[Candidate]:
    for hypothesis in HYPOTHESES:
        yield from hypothesis(x)
