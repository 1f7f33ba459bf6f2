"""Several calls in flight at the same time: whatever their order, each has its own results; and where one rank's order
is another one, the ranks concerned find out.
"""

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

# What one rank does otherwise than the others.
#   skips     leaves a step out and begins the next one on the same group: it has another order, or lacks a backward
#   repeats   goes through a backward once more
#   thread    makes a forward in a second thread, while the first one waits
#   siege     has a second thread that begins a forward while a call is under way
MISTAKES = ("skips", "repeats", "thread", "siege")
MOST_CALLS = 4


class Divergence(NamedTuple):
    """kind: one of MISTAKES. culprit: the index of the rank that makes it; at: its place in the order."""

    kind: str
    culprit: int
    at: int


class Schedule(NamedTuple):
    """What is drawn besides the Case. ranks: how many. members: of the second group, by their indices; None without
    one. groups, names: of the calls. order: the steps, the same on all ranks but for the deviation.
    """

    ranks: int
    members: tuple[int, ...] | None
    groups: tuple[int, ...]
    names: tuple[str | None, ...]
    order: tuple[FlightStep, ...]

    @property
    def calls(self) -> list[CallSpec]:
        """At the end one for each group, which all its ranks make."""
        last = [CallSpec(group, user_group=True) for group in range(1 if self.members is None else 2)]
        return [*map(CallSpec, self.groups, self.names), *last]

    def group_of(self, step: FlightStep) -> int:
        return self.calls[step.call].group

    def on(self, group: int) -> tuple[int, ...]:
        """The ranks of a group."""
        return tuple(range(self.ranks)) if group == 0 or self.members is None else self.members

    def last(self, step: FlightStep) -> FlightStep:
        """The forward at the end, on the same group."""
        return FlightStep("forward", len(self.groups) + self.group_of(step))

    def after(self, at: int) -> FlightStep:
        """The next step on the same group."""
        step = self.order[at]
        return next((x for x in self.order[at + 1 :] if self.group_of(x) == self.group_of(step)), self.last(step))

    def backwards_at(self, at: int) -> bool:
        """Whether this step and the next one on the same group are both backwards."""
        return self.order[at].direction == self.after(at).direction == "backward"

    def programs(self, deviation: Divergence | None) -> list[list[FlightStep]]:
        """Of each rank. Nothing follows the step at which a deviation shows."""
        if deviation is None:
            return [self._part(rank, self.order) for rank in range(self.ranks)]
        kind, culprit, at = deviation
        step, after, before = self.order[at], self.after(at), self.order[:at]
        others, culprits = {
            "skips": ([step], [after]),
            "repeats": ([step, after], [step, step]),
            "thread": ([step], [replace(step, way="second thread")]),
            "siege": ([step, self.last(step)], [replace(step, way="besieged")]),
        }[kind]
        return [self._part(rank, (*before, *(culprits if rank == culprit else others))) for rank in range(self.ranks)]

    def afterwards(self, deviation: Divergence | None) -> list[FlightStep]:
        """The calls at the end; and the backwards that no rank, or not every one, came through."""
        last = range(len(self.groups), len(self.calls))
        steps = [FlightStep(direction, call) for call in last for direction in DIRECTIONS]
        if deviation is not None and deviation.kind in ("skips", "repeats"):
            left = [self.order[deviation.at], self.after(deviation.at)][deviation.kind == "repeats" :]
            steps += [step for step in left if step.direction == "backward"]
        return steps

    def _part(self, rank: int, steps: Sequence[FlightStep]) -> list[FlightStep]:
        return [step for step in steps if rank in self.on(self.group_of(step))]

    def deviations(self) -> list[tuple[str, int]]:
        """What one rank can do, and where in the order, so that others can notice."""
        return [(kind, at) for kind in MISTAKES for at in range(len(self.order)) if self._noticeable(kind, at)]

    def _noticeable(self, kind: str, at: int) -> bool:
        step, after = self.order[at], self.after(at)
        if len(self.on(self.group_of(step))) == 1:
            return False
        if kind == "thread":
            return step.direction == "forward"
        if kind == "repeats":
            return step.direction == "backward" and step.call != after.call
        if kind == "skips" and step.direction == after.direction == "forward":
            return self.calls[step.call].name != self.calls[after.call].name
        return kind == "siege" or step.call != after.call


# --- drawn ------------------------------------------------------------------------------------------------------------


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    ranks = len(case.ranks)
    members: tuple[int, ...] | None = None
    if case.group is None and ranks > 1 and draw(st.booleans()):
        bits = draw(st.integers(1, 2**ranks - 2))
        members = tuple(rank for rank in range(ranks) if bits >> rank & 1)
    count = draw(st.integers(2, MOST_CALLS))
    groups = tuple(draw(st.integers(0, 1)) if members else 0 for _ in range(count))
    names = tuple(draw(st.sampled_from((None, f"layer {number}", f"Schicht ä{number}"))) for number in range(count))
    flights = Schedule(ranks, members, groups, names, _order(draw, count))
    deviation: Divergence | None = None
    possible = flights.deviations()
    if possible and draw(st.integers(0, 3)) > 0:
        kinds = sorted({kind for kind, _ in possible}, key=MISTAKES.index)
        worst = any(kind == "skips" and flights.backwards_at(at) for kind, at in possible)
        kind = draw(st.sampled_from([*kinds, *3 * ["skips"]] if worst else kinds))
        found = [at for other, at in possible if other == kind]
        confused = [at for at in found if kind == "skips" and flights.backwards_at(at)]
        at: int = draw(st.sampled_from([*found, *3 * confused]))  # the rarest, and the worst
        culprit = draw(st.sampled_from(flights.on(flights.group_of(flights.order[at]))))
        deviation = Divergence(kind, culprit, at)
    return case, {
        "members": None if members is None else list(members),
        "groups": list(groups),
        "names": list(names),
        "order": [[step.direction, step.call] for step in flights.order],
        "deviation": None if deviation is None else list(deviation),
    }


def _order(draw: st.DrawFn, count: int) -> tuple[FlightStep, ...]:
    """One call after the other is simplest. A backward may come twice, since a graph may be kept, or not at all. Every
    other time all forwards come first, as in a pipeline: backwards follow backwards then."""
    steps: list[FlightStep] = []
    forwards_first = draw(st.booleans())
    begun = 0
    due: list[int] = []  # calls whose backward comes
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


def _read(case: Case, how: How) -> tuple[Schedule, Divergence | None]:
    members = None if how["members"] is None else tuple(how["members"])
    order = tuple(FlightStep(direction, call) for direction, call in how["order"])
    flights = Schedule(len(case.ranks), members, tuple(how["groups"]), tuple(how["names"]), order)
    return flights, None if how["deviation"] is None else Divergence(*how["deviation"])


# --- checked ----------------------------------------------------------------------------------------------------------


def check_orders(backend: Backend, case: Case, how: How) -> float:
    """Each call gives, bit for bit, what it gives by itself. One rank's deviation raises the same error on all ranks of
    that group, and on no others; it names both calls, and the group works on.
    """
    flights, deviation = _read(case, how)
    programs = flights.programs(deviation)
    backend.submit(carry_out, case, flights.members, flights.calls, programs, flights.afterwards(deviation))
    accounts: list[ProgramResult] = backend.collect()
    for index, account in enumerate(accounts):
        if account.wrong:
            raise WrongResult(f"on index {index} other results than by themselves: {', '.join(account.wrong)}")
        if account.early:
            raise WrongResult(f"on index {index} a second thread's call began while another one was under way")
    _check_numbers(flights, accounts)
    concerned = () if deviation is None else flights.on(flights.group_of(flights.order[deviation.at]))
    for index, account in enumerate(accounts):
        steps = len(programs[index]) - (index in concerned)
        if (account.error is not None) != (index in concerned) or account.done != steps:
            raise WrongResult(f"index {index} raised {account.error} after {account.done} steps of {programs[index]}")
    if deviation is not None:
        _check_error(flights, deviation, programs, [accounts[index] for index in concerned])
    return 0.0


def _check_numbers(flights: Schedule, accounts: Sequence[ProgramResult]) -> None:
    for group in range(1 if flights.members is None else 2):
        for when in ("before", "after"):
            numbers = [getattr(accounts[index], when)[group] for index in flights.on(group)]
            if len(set(numbers)) > 1:
                raise WrongResult(f"{when} the calls in flight the ranks of group {group} are at the calls {numbers}")


def _check_error(
    flights: Schedule,
    deviation: Divergence,
    programs: Sequence[Sequence[FlightStep]],
    concerned: Sequence[ProgramResult],
) -> None:
    errors = [account.error for account in concerned]
    if len(set(errors)) > 1 or errors[0] is None or errors[0][0] != "ValueError":
        raise WrongResult(f"the ranks of the group raised {errors}; must be one ValueError")
    group = flights.group_of(flights.order[deviation.at])
    begun = concerned[0].before[group]
    assert begun is not None
    other = next(index for index in flights.on(group) if index != deviation.culprit)
    mine = list(programs[deviation.culprit])
    if deviation.kind == "siege":
        mine.append(flights.last(mine[-1]))
    names = [_where(flights, program, begun) for program in (mine, programs[other])]
    if deviation.kind in ("thread", "siege"):
        names = ["calls on a group must come from one thread: got " + names[0].removeprefix("the forward of ")]
    for name in names:
        if name not in errors[0][1]:
            raise WrongResult(f"the error does not name {name!r}: {errors[0][1]}")


def _where(flights: Schedule, program: Sequence[FlightStep], begun: int) -> str:
    """In which call, and direction, the last step of a program is. begun: the number of the call before it."""
    last, backwards = program[-1], 0
    numbers: dict[int, int] = {}
    for step in program:
        if flights.group_of(step) == flights.group_of(last):
            if step.direction == "forward":
                numbers[step.call] = begun = begun + 1
            elif step.call == last.call:
                backwards += 1
    name = flights.calls[last.call].name
    call = f"call {numbers[last.call]}" + ("" if name is None else f" ({name!r})")
    if last.direction == "backward" and backwards > 1:
        return f"backward {backwards} of {call}"
    return f"the {last.direction} of {call}"


# --- what records may say -----------------------------------------------------------------------------------------


def _members(case: Case, name: str, value: Any) -> None:
    if value is None:
        return
    members = ascending(name, value, len(case.ranks))
    if case.group is not None or not 0 < len(members) < len(case.ranks):
        raise ValueError(f"{name} is {value}; it must be some ranks of a Case whose group is null")


def _names(case: Case, name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(one is None or isinstance(one, str) for one in value):
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


def _premise(case: Case, how: How) -> None:
    groups, most = how["groups"], 0 if how["members"] is None else 1
    if not 1 <= len(groups) <= MOST_CALLS or max(groups) > most or len(how["names"]) != len(groups):
        raise ValueError(
            f"groups and names of how are {groups} and {how['names']}; they must be of 1 to {MOST_CALLS} calls, groups "
            f"numbers up to {most}"
        )
    if max((call for _, call in how["order"]), default=0) >= len(groups):
        raise ValueError(f"order of how is {how['order']}; its calls must be numbers below {len(groups)}")
    if how["deviation"] is not None:
        flights, _ = _read(case, how | {"deviation": None})
        possible = [
            [kind, culprit, at]
            for kind, at in flights.deviations()
            for culprit in flights.on(flights.group_of(flights.order[at]))
        ]
        if how["deviation"] not in possible:
            raise ValueError(f"deviation of how is {how['deviation']!r}; it must be null or one of {possible}")


CALLS_ARE_NOT_CONFUSED = Law(
    "calls are not confused", _draw, check_orders, _premise, share=0.1,
    how={
        "members": _members,
        "groups": lambda case, name, value: validators.integers(name, value),
        "names": _names,
        "order": _steps,
        "deviation": anything,
    },
)  # fmt: skip
