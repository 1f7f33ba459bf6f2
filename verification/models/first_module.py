"""First module of a failing example that differs from the one process: in its output, or in the gradient of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ring.nn.module_calls import calls_around, first_difference
from verification.models.model_case import ModelCase
from verification.models.observation import TRACED, Entry, ModelExpectation, ModelObservation
from verification.models.results import Array, largest, size
from verification.models.whole_batch import Ints, Rows


@dataclass(frozen=True, eq=False)
class Place:
    """Tokens of a rank's micro-batch in the one process: row and column of each, (B, N). sequences: its sequences."""

    row: Ints
    column: Ints
    sequences: Ints
    rows: Rows

    @classmethod
    def of(cls, case: ModelCase, rows: Rows, seen: ModelObservation, number: int) -> Place:
        sequences = rows.sequences(case, seen.data_rank, number)
        held = seen.held[number]
        return cls(rows.row[sequences][:, held], rows.column[held], sequences, rows)

    def expected(self, whole: Array, shape: tuple[int, ...], summed: bool = False) -> Array | None:
        """Return the entries of an array of the one process that belong to a rank's array of that shape; None if no
        dimension of it runs along the tokens, and it belongs to no sequences. summed: the array is a gradient, so
        without a dimension of sequences or tokens it is a sum over this micro-batch's, or this rank's: None too, unless
        those are all."""
        rows, length, (b, n) = self.rows.rows, self.rows.length, self.row.shape
        all_rows, all_tokens = b == rows or not summed, n == length or not summed
        for along in range(1, whole.ndim):
            if whole.shape[along] == length and whole.shape[0] in (rows, 1):
                batch = b if whole.shape[0] == rows and shape[:1] == (b,) else 1
                if shape == (batch, *whole.shape[1:along], n, *whole.shape[along + 1 :]):
                    by_row = whole.shape[0] == rows and batch == b
                    if not (by_row or all_rows):
                        return None
                    row = self.row if by_row else np.zeros((1, 1), np.int64)
                    chosen = np.moveaxis(whole, along, 1)[row, np.broadcast_to(self.column, (batch, n))]
                    return np.moveaxis(chosen, 1, along)
        rest = whole.shape[1:]
        if whole.shape[:1] == (length,) and shape == (n, *rest):
            return whole[self.column] if all_rows else None
        if whole.shape[:1] == (rows * length,) and shape == (b * n, *rest):
            return whole.reshape(rows, length, *rest)[self.row, self.column].reshape(shape)
        if rows == len(self.rows.row) and whole.shape[:1] == (rows,) and shape == (b, *rest):
            return whole[self.sequences] if all_tokens else None
        return whole if whole.shape == shape and all_rows and all_tokens else None


@dataclass
class _Comparison:
    """The calls of a module on all ranks beside those in the one process, in its order."""

    case: ModelCase
    expectation: ModelExpectation
    observations: Sequence[ModelObservation]

    def __post_init__(self) -> None:
        rows = Rows.of(self.case)
        self.on_ranks: dict[tuple[str, int], list[tuple[int, Place, Entry]]] = {}
        for rank, seen in enumerate(self.observations):
            for entry in seen.entries:
                place = Place.of(self.case, rows, seen, entry.number)
                self.on_ranks.setdefault((entry.name, entry.call), []).append((rank, place, entry))

    def pairs(
        self, entry: Entry, value: Callable[[Entry], Array | None], summed: bool = False
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (rank, its array, that of the one process), where both can be compared. summed: as `Place.expected`."""
        whole = value(entry)
        for rank, place, other in self.on_ranks.get((entry.name, entry.call), ()):
            seen = value(other)
            if whole is not None and seen is not None:
                expected = place.expected(whole, seen.shape, summed)
                if expected is not None:
                    yield rank, seen, expected

    def differing(
        self, entry: Entry, value: Callable[[Entry], Array | None], factor: float = 1.0, summed: bool = False
    ) -> list[int]:
        """Ranks on which the array differs."""
        whole = value(entry)
        limit = TRACED[self.case.dtype] * abs(factor) * float(np.abs(whole).max(initial=0)) if whole is not None else 0
        pairs = self.pairs(entry, value, summed)
        wrong = {rank for rank, seen, x in pairs if seen.size and not float(np.abs(seen - factor * x).max()) <= limit}
        return sorted(wrong)

    def changed_output(self, entry: Entry) -> list[int]:
        """Ranks on which the output of a call differs."""
        return self.differing(entry, lambda x: x.output)

    def other_gradient(self, entry: Entry, factor: float) -> bool:
        """Return True if the gradient of the output is not the factor times that of the one process."""
        return bool(self.differing(entry, lambda x: x.gradient, factor, summed=True))

    def changed_inputs(self, entry: Entry) -> list[str]:
        """Arguments of a call that differ on some rank."""
        return [name for name in entry.inputs if self.differing(entry, lambda x, at=name: x.inputs.get(at))]  # type: ignore[misc]


def describe_first_difference(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> str:
    """Return a sentence on the first module that differs in step one, or on what differs beside the modules."""
    for name, x in expectation.exact["start"].items():
        if any(not np.array_equal(seen.start.get(name), x) for seen in observations):  # type: ignore[arg-type]
            return f"build(context) draws other initial parameters than build(None): {name}"
    comparison = _Comparison(case, expectation, observations)
    path = first_difference(expectation.entries, comparison.changed_output, comparison.changed_inputs)
    if path:
        return _describe_output(comparison, path)
    entries = [entry for entry in expectation.entries if entry.gradient is not None]
    if not entries:
        return "in step one the outputs of all modules agree"
    loss = entries[-1]
    pairs = list(comparison.pairs(loss, lambda x: x.gradient, summed=True))
    square = sum(float((expected**2).sum()) for _, _, expected in pairs)
    factor = sum(float((seen * expected).sum()) for _, seen, expected in pairs) / square if square else 1.0
    if comparison.other_gradient(loss, factor):
        return (
            "in step one the outputs of all modules agree; the gradient of the loss with respect to the model's output "
            "differs, by more than a factor: the loss, not a module"
        )
    for entry in reversed(entries):
        if comparison.other_gradient(entry, factor):
            right = (
                outer
                for outer in calls_around(entry, expectation.entries)
                if outer.gradient is not None and not comparison.other_gradient(outer, factor)
            )
            return (
                f"in step one the outputs of all modules agree; the first module, in the order of the backward, whose "
                f"output has another gradient is {named(entry.name)}: the cause is in the backward of "
                f"{named(next(right, loss).name)}"
            )
    return _describe_parameters(case, expectation, observations)


def _describe_output(comparison: _Comparison, path: list[Entry]) -> str:
    """Return a sentence on the first output that differs. path: from `first_difference` of `ring.nn`."""
    ranks = comparison.changed_output(path[0])
    where = "all ranks" if len(ranks) == len(comparison.observations) > 1 else f"rank {', '.join(map(str, ranks))}"
    called = any(seen.rings for seen in comparison.observations)
    first = "" if called else "no rank called ring_attention: was `prepare` called? "
    first += f"the first module, in the order of the forward, whose output differs is {named(path[0].name)}, on {where}"
    *changed, last = [" and ".join(comparison.changed_inputs(entry)) for entry in path]
    if last:
        return f"{first}: the model is called with other {last}"
    if not changed:
        return f"{first}; its inputs agree"
    return (
        f"{first}, since its {changed[-1]} does: the cause is in the forward of {named(path[-1].name)}, beside its "
        "submodules"
    )


def _describe_parameters(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> str:
    """Return a sentence on the gradients of parameters, where those of all outputs agree."""
    exact, allowed = expectation.exact["gradients"], expectation.allowed["gradients"]
    agree = "in step one the outputs of all modules and their gradients agree"

    def differs(factor: float, seen: ModelObservation, name: str) -> bool:
        x, grad = exact[name], seen.gradients.get(name)
        limit = allowed[name] * max(1.0, abs(factor))
        return grad is None or grad.shape != x.shape or not float(np.abs(grad - factor * x).max(initial=0.0)) <= limit

    wrong = [name for name in exact if any(differs(1.0, seen, name) for seen in observations)]
    if not wrong:
        accumulated = _includes_step_one(case, expectation, observations)
        question = "; step two's gradients include step one's: are they zeroed?" if accumulated else ""
        return f"{agree}, and the gradients of the parameters too{question}"
    used = [name for name, x in exact.items() if float(np.abs(x).max(initial=0.0)) > allowed[name]]
    if not set(used) <= set(wrong):
        module = named(wrong[-1].rpartition(".")[0])  # parameters are listed in the order of the forward
        return (
            f"{agree}; the first module, in the order of the backward, whose parameter has another gradient is "
            f"{module} ({wrong[-1]})"
        )
    factor = 1.0
    if used and exact[used[-1]].shape == observations[0].gradients.get(used[-1], np.zeros(0)).shape:
        x = exact[used[-1]]
        factor = float((observations[0].gradients[used[-1]] * x).sum() / (x**2).sum())
    if not any(differs(factor, seen, name) for seen in observations for name in exact):
        return (
            f"{agree}; the gradients of all parameters are {factor:.6g} times the expected ones: no single module"
            f"{_meaning(case, factor)}"
        )
    return f"{agree}; the gradients of all parameters differ, after the backward: their reduction or clipping"


def _includes_step_one(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> bool:
    """Return True if the gradients of step two are the sum of those of both steps, on every rank."""
    first = expectation.exact["gradients"]
    both = {name: x + first[name] for name, x in expectation.second.items()}
    limit = TRACED[case.dtype] * largest(both)
    if not both or largest(first) <= limit:
        return False
    return all(
        name in seen.second and size(seen.second[name] - x) <= limit
        for seen in observations
        for name, x in both.items()
    )


def _meaning(case: ModelCase, factor: float) -> str:
    """Return the numbers of the Case that the factor, or 1 / factor, may be."""
    numbers = {
        "micro-batches": case.accumulation, "ranks": case.world, "ranks that share a sequence": case.context,
        "data ranks": case.data,
    }  # fmt: skip
    if min(case.accumulation, case.world) > 1:
        numbers["micro-batches of all ranks"] = case.accumulation * case.world
    number = max(factor, 1 / factor) if factor > 0 else 1.0
    may_be = [name for name, value in numbers.items() if value > 1 and abs(number - value) < 1e-3]
    return f"; {number:.0f} is the number of {', or of '.join(may_be)}" if may_be else ""


def named(name: str) -> str:
    return name or "the model itself"
