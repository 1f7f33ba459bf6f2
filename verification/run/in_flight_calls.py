"""What one rank does with several calls in flight on one or two groups, and what became of each step.

A program is a list of forwards and backwards of calls. Before it every call is run by itself, which gives the results
that it must have in the program too, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import Outgoing, RecordingTransport, Transport
from verification.case import Case
from verification.run.group_argument import user_group
from verification.run.processes.rendezvous import subgroup
from verification.run.rank import RankCall, Tensors, same_bits, shards
from verification.run.simulation.simulated_transport import SimulatedTransport

T = TypeVar("T")

DIRECTIONS = ("forward", "backward")
WAIT = 0.01  # seconds that a second thread is given to begin a call though it must not


@dataclass(frozen=True)
class FlightStep:
    """call: its number in the program. way: "own thread"; "second thread", while the own one waits; "besieged": the own
    thread, while a second one tries to begin a forward on the same group."""

    direction: str
    call: int
    way: str = "own thread"


@dataclass(frozen=True)
class CallSpec:
    """A call of the program. group: 0, the Case's, or 1, the second one. name: as `ring_attention` has it. bare: made
    as users do who know nothing of transports.
    """

    group: int
    name: str | None = None
    user_group: bool = False


@dataclass
class ProgramResult:
    """What a rank tells of its program. Numbers are those of the latest call on each group, None on ranks outside it.

    before, after  numbers before the program, and when all was over
    done           how many steps came to an end
    error          (type, text) of what the step after these raised
    wrong          results that are not those of the call by itself, in words
    early          a second thread began a call while another was under way
    """

    before: list[int | None]
    after: list[int | None] = field(default_factory=list)
    done: int = 0
    error: tuple[str, str] | None = None
    wrong: list[str] = field(default_factory=list)
    early: bool = False


def _groups(transport: Transport, members: Sequence[int] | None) -> list[Transport | None]:
    """The transports of all ranks and, if there are members, of these, which all ranks ask for; None on the others."""
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
    """Task: this rank's program, up to the first error; then its part of what all ranks do afterwards.

    members: of the second group, as indices of the first, which is then that of all ranks.
    """
    cases, gates = [case], [None if one is None else _Gate(one) for one in _groups(transport, members)]
    if members is not None:
        cases.append(replace(case, group=tuple(case.ranks[member] for member in members), cuts=None))
    flights = {
        number: _Flight.of(gate, cases[call.group], call, number)
        for number, call in enumerate(calls)
        if (gate := gates[call.group]) is not None
    }
    account = ProgramResult(_numbers(gates))
    for step in programs[transport.rank]:
        try:
            _take(step, flights[step.call], account)
        except Exception as error:  # of any type: the law checks which it is
            account.error = type(error).__name__, str(error)
            break
        account.done += 1
    for step in afterwards:
        if step.call in flights:
            _take(step, flights[step.call], account)
    account.wrong = [word for flight in flights.values() for word in flight.wrong()]
    account.after = _numbers(gates)
    return account


def _numbers(gates: Sequence[_Gate | None]) -> list[int | None]:
    return [None if gate is None else gate.calls.number for gate in gates]


@dataclass
class _Flight:
    """A call on this rank: its results by itself, and all those that the program gave."""

    gate: _Gate
    case: Case
    planned: CallSpec
    number: int
    inputs: Tensors
    alone: dict[str, Tensor | None]
    call: RankCall | None = None
    found: list[dict[str, Tensor | None]] = field(default_factory=list)

    @classmethod
    def of(cls, gate: _Gate, case: Case, planned: CallSpec, number: int) -> _Flight:
        """Runs the call by itself. Calls are alike in all but their numbers and names."""
        whole = replace(case, seed=(case.seed + number) % 2**63).tensors()
        made = cls(gate, case, planned, number, shards(case, gate.rank, whole), {})
        made.forward()
        made.backward()
        # Copies, since what later calls give may lie in the same place.
        made.alone = {
            key: None if x is None else x.detach().clone() for found in made.found for key, x in found.items()
        }
        made.found.clear()
        return made

    def forward(self) -> None:
        group = user_group(self.gate.inner) if self.planned.user_group else self.gate
        self.call = RankCall.forward(group, self.case, self.inputs, name=self.planned.name)
        self.found.append({"out": self.call.out, "lse": self.call.lse})

    def backward(self) -> None:
        assert self.call is not None
        found = self.call.backward(self.inputs[3:], retain=True)
        self.found.append({f"d{name}": x for name, x in found.items()})

    def wrong(self) -> list[str]:
        """Asked at the end: what earlier steps gave must stay as it was."""
        return [
            f"{name} of call {self.number}"
            for found in self.found
            for name, x in found.items()
            if (y := self.alone[name]) is not None and (x is None or not same_bits(x, y))
        ]


def _take(step: FlightStep, flight: _Flight, account: ProgramResult) -> None:
    act = flight.forward if step.direction == "forward" else flight.backward
    if step.way == "own thread":
        act()
    elif step.way == "second thread":
        in_second_thread(act)
    else:
        _besieged(act, flight, account)


# --- second threads ---------------------------------------------------------------------------------------------------


def in_second_thread(act: Callable[[], T]) -> T:
    """What `act` returns, or raises, in a thread that this one waits for."""
    thread = SecondThread(act)
    thread.start()
    return thread.result()


class SecondThread(threading.Thread):
    """Keeps what its function returns or raises, of any type: a simulated rank may have to be unwound."""

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


class _Gate(RecordingTransport):
    """Another transport, over which a call can be besieged."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.contended: _Siege | None = None

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        if self.contended is not None:
            self.contended.begin()
        super().prepare(key, outgoing)


class _Siege(RecordingTransport):
    """A second thread's transport, over which it begins a forward while another call is under way. Until that is over
    the second thread asks the other ranks nothing, though it may have begun.
    """

    def __init__(self, inner: Transport, intrude: Callable[[Transport], object]) -> None:
        super().__init__(inner)
        self.early = False  # it has begun, and the other call is under way
        self._began, self._over = threading.Event(), threading.Event()
        self._thread = SecondThread(lambda: intrude(self))

    def begin(self) -> None:
        """Called within the other call: let the second thread go, and give it time to begin its own."""
        if self._thread.ident is None:
            self._thread.start()
            self.early = self._began.wait(WAIT)

    def all_equal(self, payload: bytes) -> bool:
        self._began.set()
        self._over.wait()
        return super().all_equal(payload)

    def end(self) -> None:
        """The other call is over: raise what the second thread raises."""
        self._over.set()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.result()


def _besieged(act: Callable[[], object], flight: _Flight, account: ProgramResult) -> None:
    contended = _Siege(flight.gate.inner, lambda transport: RankCall.forward(transport, flight.case, flight.inputs))
    flight.gate.contended = contended
    try:
        act()
    finally:
        flight.gate.contended = None
        try:
            contended.end()
        finally:
            account.early = contended.early
