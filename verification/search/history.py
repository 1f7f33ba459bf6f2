"""Earlier calls that a failure needs: state that they leave on the ranks, such as a mask kept by its shape. New ranks,
and so replays, have none of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace

from verification.run.backends import Backend
from verification.search.experiment import Experiment, FoundFailure, PastExample
from verification.search.shrinking import check_subject, signature
from verification.wording import counted

MAX_RUNS = 40  # each on new ranks


@dataclass
class EarlierCalls:
    """Search for the calls that must precede a failure on new ranks. deadline: as of `time.perf_counter`."""

    experiment: Experiment
    backend: Backend
    found: FoundFailure
    deadline: float
    runs: int = 0

    def added(self) -> FoundFailure:
        """Return the failure with these calls; None in their place if none are found after which it fails again."""
        if self._fails(()):
            return self.found
        before = self._before()
        if before is None:
            said = f"in {counted(self.runs, 'run')} no earlier calls were found after which it fails again"
        else:
            said = f"it fails after {counted(len(before), 'earlier call')}, which the record has in `before`"
        said = f"alone on new ranks the example holds; {said}"
        self.found.failure.add_note(said if before is None else f"cause: earlier calls: {said}")
        return replace(self.found, before=before)

    def _before(self) -> tuple[PastExample, ...] | None:
        """Return the calls that suffice, in their order, out of those most like the example; None if none do."""
        past, case = self.found.earlier, self.experiment.case_of(self.found.subject)
        if self._fails(twice := ((self.experiment, self.found.subject),)):
            return twice
        others = [experiment.case_of(subject) for experiment, subject in past]
        unlike = [sum(getattr(x, f.name, None) != getattr(case, f.name) for f in fields(case)) for x in others]
        nearest = sorted(range(len(past)), key=lambda at: (unlike[at], -at))
        for length in (2**power for power in range(len(past).bit_length() + 1)):
            if self._fails(calls := tuple(past[at] for at in sorted(nearest[:length]))):
                return self._needed(calls)
        return None

    def _needed(self, rest: tuple[PastExample, ...]) -> tuple[PastExample, ...]:
        """Return those of the calls that are needed, as far as there is time: `needed` and `rest` together suffice."""
        needed: tuple[PastExample, ...] = ()
        while rest and not self._fails(needed):
            holds, fails = 0, len(rest)  # calls at the end of `rest`: the fewest that suffice begin with a needed one
            while fails - holds > 1 and not self._ended:
                middle = (holds + fails) // 2
                holds, fails = (holds, middle) if self._fails(needed + rest[-middle:]) else (middle, fails)
            if self._ended:
                return needed + rest[-fails:]
            needed, rest = (*needed, rest[-fails]), rest[len(rest) - fails + 1 :]
        return needed

    @property
    def _ended(self) -> bool:
        return self.runs >= MAX_RUNS or time.perf_counter() > self.deadline

    def _fails(self, before: tuple[PastExample, ...]) -> bool:
        """Return True if the example fails in the same way after these calls on new ranks; False without time left."""
        if self.runs and self._ended:
            return False
        self.runs += 1
        self.backend.close()
        self.backend.start(self.experiment.case_of(self.found.subject).world)
        for experiment, subject in (*before, (self.experiment, self.found.subject)):
            failure = check_subject(experiment, self.backend, subject)[1]
        expected = signature(self.experiment, self.found)
        return failure is not None and signature(self.experiment, replace(self.found, failure=failure)) == expected
