"""Several calls in flight on one or two groups: the program of one rank, and the result of each step.

A program is a list of forwards and backwards of calls. Each call first runs alone, which gives the results that it must
have in the program too, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import Outgoing, Transport
from verification.case import Case
from verification.run.group_argument import user_group
from verification.run.processes.rendezvous import subgroup
from verification.run.rank import RankCall, Tensors, same_bits, shards
from verification.run.recording_transport import RecordingTransport
from verification.run.simulation.simulated_transport import SimulatedTransport

T = TypeVar("T")

DIRECTIONS = ("forward", "backward")
WAIT = 0.01  # seconds for a second thread to begin a call, which it must not


@dataclass(frozen=True)
class FlightStep:
    """One forward or backward of a program.

    way: "own thread"; "second thread", which the own one awaits; "contested": the own thread, while a second one tries
    to begin a forward on the same group."""

    direction: str
    call: int  # number in the program
    way: str = "own thread"


@dataclass(frozen=True)
class CallSpec:
    """A call of the program."""

    group: int  # 0 for the Case's, 1 for the second one
    name: str | None = None  # as in `ring_attention`
    user_group: bool = False  # pass the group as users do, not as a transport


@dataclass
class ProgramResult:
    """The outcome of a rank's program.

    before, after  number of the latest call on each group, None on ranks outside it: before the program, at the end
    done           number of steps completed
    error          (type, text) of the exception of the next step
    wrong          results that differ from those of the call alone, in words
    early          a second thread began a call while another was under way
    """

    before: list[int | None]
    after: list[int | None] = field(default_factory=list)
    done: int = 0
    error: tuple[str, str] | None = None
    wrong: list[str] = field(default_factory=list)
    early: bool = False


def _groups(transport: Transport, members: Sequence[int] | None) -> list[Transport | None]:
    """Return the transport of all ranks and, if there are members, theirs; None on other ranks. Collective."""
    if members is None:
        return [transport]
    if isinstance(transport, SimulatedTransport):
        return [transport, transport.subgroup(members)]
    assert isinstance(transport, ProcessGroupTransport)
    group = subgroup(tuple(members))
    return [transport, None if group is None else transport_of(group)]


def carry_out(
    transport: Transport, case: Case, members: Sequence[int] | None, calls: Sequence[CallSpec],
    programs: Sequence[Sequence[FlightStep]], afterwards: Sequence[FlightStep],
) -> ProgramResult:  # fmt: skip
    """Task: run this rank's program up to the first error, then its part of the common steps afterwards.

    members: of the second group, as indices of the first, which is then the group of all ranks.
    """
    cases = [case]
    transports = [None if group is None else _ContestedTransport(group) for group in _groups(transport, members)]
    if members is not None:
        cases.append(replace(case.for_any_ranks(), group=tuple(case.ranks[member] for member in members), cuts=None))
    flights = {
        number: _Flight.of(gate, cases[call.group], call, number)
        for number, call in enumerate(calls)
        if (gate := transports[call.group]) is not None
    }
    result = ProgramResult(_numbers(transports))
    for step in programs[transport.rank]:
        try:
            _run_step(step, flights[step.call], result)
        except Exception as error:  # of any type: the law checks it
            result.error = type(error).__name__, str(error)
            break
        result.done += 1
    for step in afterwards:
        if step.call in flights:
            _run_step(step, flights[step.call], result)
    result.wrong = [word for flight in flights.values() for word in flight.wrong()]
    result.after = _numbers(transports)
    return result


def _numbers(transports: Sequence[_ContestedTransport | None]) -> list[int | None]:
    return [None if gate is None else gate.calls.number for gate in transports]


@dataclass
class _Flight:
    """A call on this rank: its results alone, and its results in the program."""

    gate: _ContestedTransport
    case: Case
    spec: CallSpec
    number: int
    inputs: Tensors
    alone: dict[str, Tensor | None]
    call: RankCall | None = None
    results: list[dict[str, Tensor | None]] = field(default_factory=list)

    @classmethod
    def of(cls, gate: _ContestedTransport, case: Case, spec: CallSpec, number: int) -> _Flight:
        """Run the call alone. Calls differ in their numbers (the input's seed), groups and names only."""
        whole = replace(case, seed=(case.seed + number) % 2**63).tensors()
        flight = cls(gate, case, spec, number, shards(case, gate.rank, whole), {})
        flight.forward()
        flight.backward()
        # Copy, since later calls may reuse the memory of these results.
        flight.alone = {
            key: None if x is None else x.detach().clone() for step in flight.results for key, x in step.items()
        }
        flight.results.clear()
        return flight

    def forward(self) -> None:
        group = user_group(self.gate.inner) if self.spec.user_group else self.gate
        self.call = RankCall.forward(group, self.case, self.inputs, name=self.spec.name)
        self.results.append({"out": self.call.out, "lse": self.call.lse})

    def backward(self) -> None:
        assert self.call is not None
        grads = self.call.backward(self.inputs[3:5], retain=True)
        self.results.append({f"d{name}": x for name, x in grads.items()})

    def wrong(self) -> list[str]:
        """Name the wrong results. Call it at the end: later steps must not overwrite earlier results."""
        return [
            f"{name} of call {self.number}"
            for step in self.results
            for name, x in step.items()
            if (y := self.alone[name]) is not None and (x is None or not same_bits(x, y))
        ]


def _run_step(step: FlightStep, flight: _Flight, result: ProgramResult) -> None:
    act = flight.forward if step.direction == "forward" else flight.backward
    if step.way == "own thread":
        act()
    elif step.way == "second thread":
        in_second_thread(act)
    else:
        _contested(act, flight, result)


# --- second threads ---------------------------------------------------------------------------------------------------


def in_second_thread(act: Callable[[], T]) -> T:
    """Run `act` in a second thread and wait for it; return its result, or raise its exception."""
    thread = SecondThread(act)
    thread.start()
    return thread.result()


class SecondThread(threading.Thread):
    """A thread that keeps the function's result or exception, of any type: a simulated rank may be unwound."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(name="second thread", daemon=True)
        self._act = act
        self._error: BaseException | None = None
        self._result: Any = None

    def run(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:  # raised again by `result`
            self._error = error

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._result


class _ContestedTransport(RecordingTransport):
    """A wrapper of a transport, with an intruder that may try to begin a call during another one."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.intruder: _Intruder | None = None

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        if self.intruder is not None:
            self.intruder.begin()
        super().prepare(key, outgoing)


class _Intruder(RecordingTransport):
    """The transport of a second thread, which tries to begin a forward while another call is under way.

    It asks the other ranks nothing until that call is over, even if it has begun.
    """

    def __init__(self, inner: Transport, intrude: Callable[[Transport], object]) -> None:
        super().__init__(inner)
        self.early = False  # it began while the other call was under way
        self._began, self._over = threading.Event(), threading.Event()
        self._thread = SecondThread(lambda: intrude(self))

    def begin(self) -> None:
        """Start the second thread, and give it time to begin its call. Called within the other call."""
        if self._thread.ident is None:
            self._thread.start()
            self.early = self._began.wait(WAIT)

    def all_equal(self, payload: bytes) -> bool:
        self._began.set()
        self._over.wait()
        return super().all_equal(payload)

    def end(self) -> None:
        """Let the second thread finish, once the other call is over; raise its exception."""
        self._over.set()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.result()


def _contested(act: Callable[[], object], flight: _Flight, result: ProgramResult) -> None:
    intruder = _Intruder(flight.gate.inner, lambda transport: RankCall.forward(transport, flight.case, flight.inputs))
    flight.gate.intruder = intruder
    try:
        act()
    finally:
        flight.gate.intruder = None
        try:
            intruder.end()
        finally:
            result.early = intruder.early
