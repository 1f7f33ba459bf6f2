"""Several calls in flight each have their own results, whatever their order; ranks detect orders that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from reference import validators
from verification.case import Case
from verification.check.laws.law import How, Law, anything, ascending
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.in_flight_calls import DIRECTIONS, CallSpec, FlightStep, ProgramResult, carry_out
from verification.strategies.cases import cases

# Deviations of one rank from the common order.
#   skips     omits a step and begins the next one on the same group: another order, or a missing backward
#   repeats   runs a backward once more
#   thread    runs a forward in a second thread, while the first one waits
#   overlaps  a second thread begins a forward during a call
DEVIATIONS = ("skips", "repeats", "thread", "overlaps")
MAX_CALLS = 4


class Deviation(NamedTuple):
    """Deviation of one rank. kind: one of DEVIATIONS. culprit: index of the rank. at: index of the step."""

    kind: str
    culprit: int
    at: int


class Schedule(NamedTuple):
    """Order of the calls. ranks: number of ranks. members: indices of the second group's ranks; None without one.
    groups, names: of each call. order: the steps, the same on all ranks but for the deviation.
    """

    ranks: int
    members: tuple[int, ...] | None
    groups: tuple[int, ...]
    names: tuple[str | None, ...]
    order: tuple[FlightStep, ...]

    @property
    def calls(self) -> list[CallSpec]:
        """The calls in flight, then a final one on each group, which all its ranks make."""
        last = [CallSpec(group, user_group=True) for group in range(1 if self.members is None else 2)]
        return [*map(CallSpec, self.groups, self.names), *last]

    def group_of(self, step: FlightStep) -> int:
        return self.calls[step.call].group

    def on(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group."""
        return tuple(range(self.ranks)) if group == 0 or self.members is None else self.members

    def last(self, step: FlightStep) -> FlightStep:
        """Return the final forward on the same group."""
        return FlightStep("forward", len(self.groups) + self.group_of(step))

    def after(self, at: int) -> FlightStep:
        """Return the next step on the same group."""
        step = self.order[at]
        return next((x for x in self.order[at + 1 :] if self.group_of(x) == self.group_of(step)), self.last(step))

    def backwards_at(self, at: int) -> bool:
        """Return True if this step and the next one on the same group are both backwards."""
        return self.order[at].direction == self.after(at).direction == "backward"

    def programs(self, deviation: Deviation | None) -> list[list[FlightStep]]:
        """Return the steps of each rank. Nothing follows the step at which a deviation shows."""
        if deviation is None:
            return [self._part(rank, self.order) for rank in range(self.ranks)]
        kind, culprit, at = deviation
        step, after, before = self.order[at], self.after(at), self.order[:at]
        normal, deviant = {
            "skips": ([step], [after]),
            "repeats": ([step, after], [step, step]),
            "thread": ([step], [replace(step, way="second thread")]),
            "overlaps": ([step, self.last(step)], [replace(step, way="contested")]),
        }[kind]
        return [self._part(rank, (*before, *(deviant if rank == culprit else normal))) for rank in range(self.ranks)]

    def afterwards(self, deviation: Deviation | None) -> list[FlightStep]:
        """Return the final calls, and the backwards that did not complete on all ranks."""
        last = range(len(self.groups), len(self.calls))
        steps = [FlightStep(direction, call) for call in last for direction in DIRECTIONS]
        if deviation is not None and deviation.kind in ("skips", "repeats"):
            pending = [self.order[deviation.at], self.after(deviation.at)][deviation.kind == "repeats" :]
            steps += [step for step in pending if step.direction == "backward"]
        return steps

    def _part(self, rank: int, steps: Sequence[FlightStep]) -> list[FlightStep]:
        return [step for step in steps if rank in self.on(self.group_of(step))]

    def deviations(self) -> list[tuple[str, int]]:
        """Return the deviations (kind, index in the order) that other ranks can detect."""
        return [(kind, at) for kind in DEVIATIONS for at in range(len(self.order)) if self._detectable(kind, at)]

    def _detectable(self, kind: str, at: int) -> bool:
        step, after = self.order[at], self.after(at)
        if len(self.on(self.group_of(step))) == 1:
            return False
        if kind == "thread":
            return step.direction == "forward"
        if kind == "repeats":
            return step.direction == "backward" and step.call != after.call
        if kind == "skips" and step.direction == after.direction == "forward":
            return self.calls[step.call].name != self.calls[after.call].name
        return kind == "overlaps" or step.call != after.call


# --- strategy ---------------------------------------------------------------------------------------------------------


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    ranks = len(case.ranks)
    members: tuple[int, ...] | None = None
    if case.group is None and ranks > 1 and draw(st.booleans()):
        bits = draw(st.integers(1, 2**ranks - 2))
        members = tuple(rank for rank in range(ranks) if bits >> rank & 1)
    count = draw(st.integers(2, MAX_CALLS))
    groups = tuple(draw(st.integers(0, 1)) if members else 0 for _ in range(count))
    names = tuple(draw(st.sampled_from((None, f"layer {number}", f"Schicht ä{number}"))) for number in range(count))
    schedule = Schedule(ranks, members, groups, names, _order(draw, count))
    deviation: Deviation | None = None
    possible = schedule.deviations()
    if possible and draw(st.integers(0, 3)) > 0:
        kinds = sorted({kind for kind, _ in possible}, key=DEVIATIONS.index)
        worst = any(kind == "skips" and schedule.backwards_at(at) for kind, at in possible)
        kind = draw(st.sampled_from([*kinds, *3 * ["skips"]] if worst else kinds))
        indices = [at for other, at in possible if other == kind]
        confused = [at for at in indices if kind == "skips" and schedule.backwards_at(at)]
        # Confused backwards are the rarest deviation, and the worst.
        at: int = draw(st.sampled_from([*indices, *3 * confused]))
        culprit = draw(st.sampled_from(schedule.on(schedule.group_of(schedule.order[at]))))
        deviation = Deviation(kind, culprit, at)
    return case, {
        "members": None if members is None else list(members),
        "groups": list(groups),
        "names": list(names),
        "order": [[step.direction, step.call] for step in schedule.order],
        "deviation": None if deviation is None else list(deviation),
    }


def _order(draw: st.DrawFn, count: int) -> tuple[FlightStep, ...]:
    """Draw the steps, the simplest one call after the other. A call may have two backwards (retain_graph) or none. Half
    of the orders begin with all forwards, as a pipeline does, so that backwards follow backwards."""
    steps: list[FlightStep] = []
    forwards_first = draw(st.booleans())
    begun = 0
    due: list[int] = []  # calls whose backward is still to come
    while begun < count or due:
        possible = [FlightStep("forward", begun)] * (begun < count)
        if not (possible and forwards_first):
            possible = [FlightStep("backward", call) for call in due] + possible
        step = draw(st.sampled_from(possible))
        if step.direction == "forward":
            begun += 1
            due += [step.call] * draw(st.sampled_from((1, 1, 1, 1, 2, 0)))
        else:
            due.remove(step.call)
        steps.append(step)
    return tuple(steps)


def _read(case: Case, how: How) -> tuple[Schedule, Deviation | None]:
    members = None if how["members"] is None else tuple(how["members"])
    order = tuple(FlightStep(direction, call) for direction, call in how["order"])
    schedule = Schedule(len(case.ranks), members, tuple(how["groups"]), tuple(how["names"]), order)
    return schedule, None if how["deviation"] is None else Deviation(*how["deviation"])


# --- check ------------------------------------------------------------------------------------------------------------


def check_orders(backend: Backend, case: Case, how: How) -> float:
    """Each call gives the same bits as by itself. A deviation of one rank raises the same error on all ranks of that
    group, and on no others. The error names both calls, and the group stays usable.
    """
    schedule, deviation = _read(case, how)
    programs = schedule.programs(deviation)
    backend.submit(carry_out, case, schedule.members, schedule.calls, programs, schedule.afterwards(deviation))
    results: list[ProgramResult] = backend.collect()
    for index, result in enumerate(results):
        if result.wrong:
            raise WrongResult(f"on index {index} other results than by themselves: {', '.join(result.wrong)}")
        if result.early:
            raise WrongResult(f"on index {index} a second thread's call began while another one was under way")
    _check_numbers(schedule, results)
    concerned = () if deviation is None else schedule.on(schedule.group_of(schedule.order[deviation.at]))
    for index, result in enumerate(results):
        steps = len(programs[index]) - (index in concerned)
        if (result.error is not None) != (index in concerned) or result.done != steps:
            raise WrongResult(f"index {index} raised {result.error} after {result.done} steps of {programs[index]}")
    if deviation is not None:
        _check_error(schedule, deviation, programs, [results[index] for index in concerned])
    return 0.0


def _check_numbers(schedule: Schedule, results: Sequence[ProgramResult]) -> None:
    for group in range(1 if schedule.members is None else 2):
        for when in ("before", "after"):
            numbers = [getattr(results[index], when)[group] for index in schedule.on(group)]
            if len(set(numbers)) > 1:
                raise WrongResult(f"{when} the calls in flight the ranks of group {group} are at the calls {numbers}")


def _check_error(
    schedule: Schedule,
    deviation: Deviation,
    programs: Sequence[Sequence[FlightStep]],
    concerned: Sequence[ProgramResult],
) -> None:
    errors = [result.error for result in concerned]
    if len(set(errors)) > 1 or errors[0] is None or errors[0][0] != "ValueError":
        raise WrongResult(f"the ranks of the group raised {errors}; must be one ValueError")
    group = schedule.group_of(schedule.order[deviation.at])
    begun = concerned[0].before[group]
    assert begun is not None
    other = next(index for index in schedule.on(group) if index != deviation.culprit)
    deviating = list(programs[deviation.culprit])
    if deviation.kind == "overlaps":
        deviating.append(schedule.last(deviating[-1]))
    texts = [_where(schedule, program, begun) for program in (deviating, programs[other])]
    if deviation.kind in ("thread", "overlaps"):
        texts = ["calls on a group must come from one thread: got " + texts[0].removeprefix("the forward of ")]
    for text in texts:
        if text not in errors[0][1]:
            raise WrongResult(f"the error does not name {text!r}: {errors[0][1]}")


def _where(schedule: Schedule, program: Sequence[FlightStep], begun: int) -> str:
    """Return the call and direction of a program's last step, in words. begun: number of the call before it."""
    last, backwards = program[-1], 0
    numbers: dict[int, int] = {}
    for step in program:
        if schedule.group_of(step) == schedule.group_of(last):
            if step.direction == "forward":
                numbers[step.call] = begun = begun + 1
            elif step.call == last.call:
                backwards += 1
    name = schedule.calls[last.call].name
    call = f"call {numbers[last.call]}" + ("" if name is None else f" ({name!r})")
    if last.direction == "backward" and backwards > 1:
        return f"backward {backwards} of {call}"
    return f"the {last.direction} of {call}"


# --- validation of records ----------------------------------------------------------------------------------------


def _members(case: Case, name: str, value: Any) -> None:
    if value is None:
        return
    members = ascending(name, value, len(case.ranks))
    if case.group is not None or not 0 < len(members) < len(case.ranks):
        raise ValueError(f"{name} is {value}; it must be some ranks of a Case whose group is null")


def _names(case: Case, name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(call is None or isinstance(call, str) for call in value):
        raise ValueError(f"{name} is {value!r}; it must be a list of texts and nulls")


def _steps(case: Case, name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(step, list) and len(step) == 2 for step in value):
        raise ValueError(f"{name} is {value!r}; it must be a list of [direction, call]")
    begun: list[int] = []
    for direction, call in value:
        validators.choice("a direction of how", direction, DIRECTIONS)
        validators.integer("a call of how", call, 0)
        if (direction == "forward") == (call in begun):
            raise ValueError(f"{name} is {value!r}; a call must have one forward, before its backwards")
        begun += [call] * (direction == "forward")


def _precondition(case: Case, how: How) -> None:
    groups, most = how["groups"], 0 if how["members"] is None else 1
    if not 1 <= len(groups) <= MAX_CALLS or max(groups) > most or len(how["names"]) != len(groups):
        raise ValueError(
            f"groups and names of how are {groups} and {how['names']}; they must be of 1 to {MAX_CALLS} calls, groups "
            f"numbers up to {most}"
        )
    if max((call for _, call in how["order"]), default=0) >= len(groups):
        raise ValueError(f"order of how is {how['order']}; its calls must be numbers below {len(groups)}")
    if how["deviation"] is not None:
        schedule, _ = _read(case, how | {"deviation": None})
        possible = [
            [kind, culprit, at]
            for kind, at in schedule.deviations()
            for culprit in schedule.on(schedule.group_of(schedule.order[at]))
        ]
        if how["deviation"] not in possible:
            raise ValueError(f"deviation of how is {how['deviation']!r}; it must be null or one of {possible}")


CALLS_ARE_NOT_CONFUSED = Law(
    "calls are not confused", _draw, check_orders, _precondition, share=0.1,
    how={
        "members": _members,
        "groups": lambda case, name, value: validators.integers(name, value),
        "names": _names,
        "order": _steps,
        "deviation": anything,
    },
)  # fmt: skip
