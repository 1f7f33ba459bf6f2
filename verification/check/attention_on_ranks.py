"""The attention under test, on ranks: what each rank runs for a Case, and the bounds of its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import reject
from torch import Tensor

from reference import fast_oracle
from reference.fast_oracle import QUANTITIES, Expectation, Inputs
from reference.roundoff import Arithmetic
from verification.case import Case
from verification.check import expectation
from verification.check.expectation import inputs_of
from verification.run.backends import Backend, Task
from verification.run.observation import Observation
from verification.run.rank import InputEdit, observe

Claims = Callable[[Case], Case | None]


def any_case(case: Case) -> Case:
    """Claim of an attention that supports every Case."""
    return case


def claimed(claims: Claims, case: Case) -> Case:
    """Return `claims(case)`, for strategies: Hypothesis draws again where it is None."""
    nearest = claims(case)
    return reject() if nearest is None else nearest


@dataclass(frozen=True)
class Implementation:
    """An attention under test; by default this project's own.

    task        work of a rank: (transport, case, *arguments, edit, repeat) -> Observation
    arguments   further arguments of the task
    claims      any Case -> the nearest one of the same world that the attention supports, or None
    arithmetic  arithmetic that a Case allows it
    evaluate    exact results, with the bounds of such an arithmetic
    same_bits   results of a Case that are promised to have the same bits on any ranks
    """

    task: Task = observe
    arguments: tuple[Any, ...] = ()
    claims: Claims = any_case
    arithmetic: Callable[[Case], Arithmetic] = expectation.arithmetic_of
    evaluate: Callable[[Inputs, Arithmetic], Expectation] = fast_oracle.evaluate
    same_bits: Callable[[Case], tuple[str, ...]] = lambda case: () if case.same_bits is None else QUANTITIES


OURS = Implementation()


@dataclass(frozen=True)
class AttentionOnRanks:
    """An attention under test, and the ranks on which it runs."""

    backend: Backend
    attention: Implementation = OURS

    def submit(self, case: Case, edit: InputEdit | None = None, repeat: bool = False) -> None:
        """Start forward and backward on every rank of the Case's group, twice if `repeat`; return without waiting."""
        self.backend.submit(self.attention.task, case, *self.attention.arguments, edit, repeat)

    def observe(self, case: Case, edit: InputEdit | None = None, repeat: bool = False) -> list[Observation]:
        """Return the Observation of each rank, in the group's order. Raises VerificationFailure."""
        self.submit(case, edit, repeat)
        return self.backend.collect()

    def expect(self, case: Case, tensors: tuple[Tensor, ...] | None = None) -> Expectation:
        """Return exact results and bounds of the Case, or of these tensors in place of its own."""
        return self.evaluate(case, inputs_of(case, case.tensors() if tensors is None else tensors))

    def evaluate(self, case: Case, inputs: Inputs) -> Expectation:
        """Return exact results of the inputs, with bounds for the arithmetic that the Case allows."""
        return self.attention.evaluate(inputs, self.attention.arithmetic(case))

    def observe_and_expect(
        self, case: Case, edit: InputEdit | None = None, repeat: bool = False
    ) -> tuple[list[Observation], Expectation]:
        """Return the Observations, and the expectation without the edit, computed while the ranks work."""
        self.submit(case, edit, repeat)
        expected = self.expect(case)
        return self.backend.collect(), expected
