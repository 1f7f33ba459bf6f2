"""Faults as an Experiment: draw a Case and a fault in it, and judge the pool's failure.

One fault takes two plain examples, to count its posts and to check the pool afterwards, and one set of new ranks. A
SIGSTOP, which only a timeout finds, gets a short timeout.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference import validators
from verification.case import Case
from verification.check.checks import CHECKS, costs
from verification.check.expectation import expect
from verification.experiments import check_case
from verification.failures import RankError, RankFailure, VerificationFailure, name_ranks
from verification.faults.inject import BY_NAME, KINDS, WORDS_SEPARATOR, Fault, FaultKind, LateRank, observe_with_fault
from verification.run.backends import (
    CASES_PER_CROSS_HOST,
    PRELOAD,
    Backend,
    GlooBackend,
    PoolBackend,
    SimBackend,
    Unavailable,
)
from verification.run.processes.process_tree import descendants
from verification.search.diagnose import cause_in
from verification.search.experiment import Experiment
from verification.strategies.cases import cases

How = dict[str, Any]
CONSENSUS_ROUNDS = 2  # of an example: one before the forward, one before the backward
LAST_WORDS = 6.0  # seconds for each rank to find the absent one and to raise
LONG_TIMEOUT = 60.0  # seconds for an example with a late rank, in which ranks only wait for most of the time
SHORT_TIMEOUT = 0.3  # seconds for an example with a stopped rank; longer while another rank computes
WHOLE = "the pool is whole after a fault"
# Errors of ranks that waited in vain.
_ABSENT = r"RuntimeError: ranks? (?=[0-9, ]+ did not come to the )"
_MISSED = (
    rf"({_ABSENT}|RuntimeError: the message '.*' from rank (?=[0-9]+ did not come)|"
    r"RuntimeError: rank (?=[0-9]+ did not take the message))"
)
ENDED = "its process has ended"
IN_VAIN = "RuntimeError: not all ranks came in time to the "
MAX_NUMBER = 2**10  # largest number that chooses a rank or a post


class MishandledFault(VerificationFailure):
    """An injected fault was not reported, or not with its rank, or it left something behind."""

    kind = "mishandled fault"


def faults(world: int) -> st.SearchStrategy[tuple[Case, How]]:
    """Cases whose ranks send something, each with a fault."""
    number = st.integers(0, MAX_NUMBER)
    how = st.fixed_dictionaries(
        {"kind": st.sampled_from([kind.name for kind in KINDS]), "rank": number, "post": number, "send": number}
    )
    return st.tuples(cases(world).filter(has_messages), how).map(_prefer_cross_host)


def _prefer_cross_host(subject: tuple[Case, How]) -> tuple[Case, How]:
    """Change the seed so that half of the faults at a consensus, and half of those that kill, strike ranks that agree
    over the group, not in shared memory. There no rank sees which process has ended."""
    case, how = subject
    kind = BY_NAME[how["kind"]]
    if how["send"] % 2 or not (kind.at_consensus or kind.outcome == "died"):
        return subject
    cross_host = replace(case, seed=case.seed - case.seed % CASES_PER_CROSS_HOST)
    # The seed also orders the tokens: in another order ranks may have nothing to send.
    return (cross_host, how) if has_messages(cross_host) else subject


def has_messages(case: Case) -> bool:
    return bool(costs(case).sent_forward.any())


def validate_fault(case: Case, how: Any) -> None:
    """Raise ValueError for a malformed fault, or a Case without messages."""
    validators.exactly("how", how, ["kind", "rank", "post", "send"])
    validators.choice("kind", how["kind"], BY_NAME)
    for name in ("rank", "post", "send"):
        validators.integer(name, how[name], 0, MAX_NUMBER)
    if not has_messages(case):
        raise ValueError("the ranks of case send no messages; a fault needs a Case whose ranks do")


def choose_fault(how: How, posts: Sequence[Sequence[int]]) -> Fault:
    """Return the fault that these numbers choose. posts: number of sends of each post, by index of the group."""
    senders = [index for index, sends in enumerate(posts) if any(sends)]
    index = senders[how["rank"] % len(senders)]
    if BY_NAME[how["kind"]].at_consensus:
        return Fault(how["kind"], index, how["post"] % CONSENSUS_ROUNDS, how["send"] // 2)
    fitting = [n for n, sends in enumerate(posts[index]) if sends or BY_NAME[how["kind"]].outcome is not None]
    post = fitting[how["post"] % len(fitting)]
    return Fault(how["kind"], index, post, how["send"] % max(1, posts[index][post]))


def check_fault(backend: Backend, case: Case, how: How) -> dict[str, float]:
    """Inject the fault, and judge the failure, the pool, and the next example.

    Raises MishandledFault, errors of `check_case` for that example, Unavailable for a backend without own processes.
    """
    if type(backend) is not GlooBackend:  # torchrun would not start killed ranks again
        raise Unavailable(f"argument --backend: faults need ranks on gloo; got {type(backend).__name__}")
    kind = BY_NAME[how["kind"]]
    backend.submit(observe_with_fault, case, None)
    fault = choose_fault(how, [posts for _, posts in backend.collect()])
    old, before = set(backend.prepared().pids), descendants(os.getpid())
    judge(kind, fault, case, find_failure(backend, case, fault))
    check_whole(backend, old, before, replaced=kind.name != "short")
    check_case(backend, case)
    return {kind.title: 0.0}


def check_whole(backend: PoolBackend, old: set[int], before: set[int], replaced: bool) -> None:
    """Raise MishandledFault unless the ranks are new (or, if every rank answered, the same), without other processes.
    old, before: pids of the ranks, and of all processes, before the fault."""
    new = set(backend.prepared().pids)
    if new & old if replaced else new != old:
        must = "none" if replaced else "all"
        raise MishandledFault(f"{WHOLE}: {must} of {sorted(old)} must still be ranks; {sorted(new & old)} are")
    leftover = descendants(os.getpid()) - (before - old) - new
    if leftover:
        raise MishandledFault(f"{WHOLE}: the processes {sorted(leftover)} were left over")


def find_failure(backend: Backend, case: Case, fault: Fault) -> VerificationFailure | None:
    """Return the failure that the fault causes; its note is the simulation's diagnosis, if only that can tell."""
    try:
        strike_on(backend, case, fault)
    except VerificationFailure as failure:
        if BY_NAME[fault.kind].simulated:
            with closing(SimBackend(preload=backend.preload)) as simulation:  # from the same forkserver
                cause = cause_in(simulation, STRIKING, (case, fault), failure)
            failure.add_note(str(cause))
        return failure
    return None


def strike_on(backend: Backend, case: Case, fault: Fault) -> dict[str, float]:
    """Run the example with the fault. Raises its failure; if all ranks answer, that of the check of messages."""
    timeout = backend.timeout
    backend.timeout = {"stop": SHORT_TIMEOUT, "late": LONG_TIMEOUT}.get(fault.kind, timeout)
    if isinstance(backend, PoolBackend):
        backend.last_words = LAST_WORDS if BY_NAME[fault.kind].outcome == "died" else 0.0
    try:
        backend.submit(observe_with_fault, case, fault)
        answers = backend.collect()
    finally:
        backend.timeout = timeout
        if isinstance(backend, PoolBackend):
            backend.last_words = 0.0
    CHECKS["messages"](case, expect(case), [observation for observation, _ in answers])
    return {}


# Runs in the simulation, too. A subject is a Case with its fault.
STRIKING = Experiment("a fault", faults, lambda backend, subject: strike_on(backend, *subject), kind="fault")


def judge(kind: FaultKind, fault: Fault, case: Case, failure: VerificationFailure | None) -> None:
    """Raise MishandledFault unless the failure is of the right kind, and names the ranks that it struck alone."""
    rank, struck = case.ranks[fault.index], [case.ranks[index] for index in fault.struck(len(case.ranks))]
    fault_text = f"{kind.title} at {kind.trigger} {fault.post} of rank {rank}"
    if failure is None:
        raise MishandledFault(f"{fault_text} was not found: every rank answered, and the messages agree")
    if kind.outcome is None:
        _judge_words(kind, rank, fault_text, failure)
        return
    if kind.name == "late":
        _judge_late(fault, case, fault_text, failure)
        return
    if type(failure) is not kind.failure or not isinstance(failure, RankFailure):
        raise MishandledFault(f"{fault_text} must be a {kind.failure.kind}; got a {failure.kind}: {failure}")
    # Ranks that raise since another one did must name it alone.
    told = rf"{_ABSENT}{fault.index} did not"
    told_ranks = {state.rank for state in failure.states if re.search(told, state.detail)} - {rank}
    named = [other for other in failure.ranks(kind.outcome) if kind.outcome != "raised" or other not in told_ranks]
    expected = [other for other in struck if other == rank or other not in failure.ranks("answered")]
    if [*named] != expected or any(name_ranks([other]) not in failure.headline for other in named):
        must, names = name_ranks(expected), name_ranks(named)
        raise MishandledFault(f"{fault_text} must be named with {must}; it names {names}: {failure}")
    if kind.outcome == "died":
        _judge_others(kind, fault, case, fault_text, failure)


def _judge_others(kind: FaultKind, fault: Fault, case: Case, fault_text: str, failure: RankFailure) -> None:
    """Raise MishandledFault unless every rank that raised names an index of the group that was struck as missing.

    At a consensus, no rank may answer or name itself, and at least one must raise: ranks without a connection to the
    dead one may wait until the group's timeout, but one rank has a connection."""
    raised, struck = 0, {*fault.struck(len(case.ranks))}
    missing = f"index {', '.join(map(str, struck))} of the group"
    for index, rank in enumerate(case.ranks):
        state = next(state for state in failure.states if state.rank == rank)
        if index in struck or state.outcome == "blocked" or (state.outcome != "raised" and not kind.at_consensus):
            continue
        match = re.search(f"{_ABSENT if kind.at_consensus else _MISSED}(?P<ranks>[0-9, ]+)", state.detail)
        missed = set() if match is None else {int(number) for number in re.findall("[0-9]+", match["ranks"])}
        at_fault = missed & struck and (ENDED not in state.detail or missed <= struck)
        if state.outcome != "raised" or not at_fault or (kind.at_consensus and index in missed):
            raise MishandledFault(f"{fault_text}: rank {rank} must say that it missed {missing}; it {state.detail}")
        raised += 1
    if kind.at_consensus and not raised:
        raise MishandledFault(f"{fault_text}: no rank said that it missed {missing}: {failure}")


def _judge_late(fault: Fault, case: Case, fault_text: str, failure: VerificationFailure) -> None:
    """Raise MishandledFault unless the ranks in time name this index of the group alone, and the late one nobody.

    A rank that learns from another that it has given up may say only that not all came in time."""
    details = [state.detail for state in failure.states] if isinstance(failure, RankError) else []
    texts = [text for detail in details if (text := detail.partition(f"{LateRank.__name__}: ")[2])]
    said = dict(words.split(": ", 1) for words in texts[0].split(WORDS_SEPARATOR)) if texts else {}
    named = f"RuntimeError: rank {fault.index} did not come to the "
    for index in range(len(case.ranks)):
        words = said.get(str(index), "nothing")
        allowed = (IN_VAIN,) if index == fault.index else (IN_VAIN, named)
        if not words.startswith(allowed):
            raise MishandledFault(
                f"{fault_text}: index {index} of the group must say {' or '.join(allowed)!r}: {words}; {failure}"
            )
    if not any(words.startswith(named) for words in said.values()):
        raise MishandledFault(f"{fault_text}: nobody named index {fault.index} of the group: {failure}")


def _judge_words(kind: FaultKind, rank: int, fault_text: str, failure: VerificationFailure) -> None:
    """Raise MishandledFault unless the text names this rank as the sender."""
    text = " ".join(getattr(failure, "__notes__", ())) if kind.simulated else str(failure)
    right = kind.failure.kind in text if kind.simulated else type(failure) is kind.failure
    sender = rf"rank {rank} sends " if kind.simulated else rf"from rank {rank}( \(index \d+ of the group\))? to rank "
    if not right or not re.search(sender, text):
        raise MishandledFault(f"{fault_text} must be named as {kind.named_as}, with that rank; got: {failure}; {text}")


FAULTS = Experiment(
    "faults",
    faults,
    check=lambda backend, subject: check_fault(backend, *subject),
    preload=(*PRELOAD, observe_with_fault.__module__),
    kind="fault",
    property_of=lambda subject, failure: BY_NAME[subject[1]["kind"]].title,
    validate=lambda subject: validate_fault(*subject),
)
