"""What became of each peer of a run: its verdict, the same as JSON, and the summary that is printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from verification.cli.arguments import MODULE, typed
from verification.cli.console import say
from verification.peers.known_peers import selected
from verification.peers.peer import Refused
from verification.report.counter_example import CounterExample
from verification.report.summary import in_full
from verification.run.backends import Unavailable
from verification.search.experiment import ToolError
from verification.wording import counted

HELD, FAILED, NOT_RUN = "held", "counter-example", "not run"


@dataclass
class PeerOutcome:
    """Of one peer. case_of: the field of a saved record that has the Case."""

    name: str
    case_of: str = "case"
    version: str | None = None
    supported: str = ""
    verdict: str = NOT_RUN
    examples: int = 0
    seconds: float = 0.0
    reason: str = ""  # for which it was not run
    failures: list[CounterExample] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The first counter-example in the peer's own fields, others of other properties under "others"."""
        shown = [
            {"case": dict(f.record)[self.case_of], "check": f.broken, "message": f.message, "replay": f.replay}
            for f in self.failures
        ] or [{"case": None, "check": None, "message": self.reason or None, "replay": None}]
        return {
            "name": self.name,
            "version": self.version,
            "verdict": self.verdict,
            "supported": self.supported,
            "examples": self.examples,
            **shown[0],
            "others": shown[1:],
            "seconds": round(self.seconds, 3),
        }


def chosen(names: Sequence[str], among: Mapping[str, Any]) -> list[str]:
    """All peers that these names stand for, each once; without a name, all that are known.

    Raises Unavailable for a name that stands for none.
    """
    try:
        return list(dict.fromkeys(name for given in names for name in selected(given, among))) or list(among)
    except Refused as error:
        raise Unavailable(str(error)) from error


def attempt(outcome: PeerOutcome, run: Callable[[PeerOutcome], None], console: Console) -> None:
    """Have `run` fill in the outcome. What keeps this peer from being run does not keep the others."""
    started = time.perf_counter()
    try:
        run(outcome)
    except (Refused, Unavailable, ToolError) as error:
        outcome.reason = str(error)
    outcome.seconds = time.perf_counter() - started
    if outcome.reason:
        say(console, f"{outcome.name}: not run: {outcome.reason}")


def exit_status(outcomes: Sequence[PeerOutcome]) -> int:
    """0 all held, 1 a counter-example was found, 2 a peer could not be run."""
    verdicts = {outcome.verdict for outcome in outcomes}
    return 2 if NOT_RUN in verdicts else 1 if FAILED in verdicts else 0


def summary(outcomes: Sequence[PeerOutcome], seconds: float, console: Console, verbose: bool, command: str) -> None:
    """A row for each peer, the first counter-example of each that has one, and the verdict."""
    say(console, f"{'peer':<32}{'version':<12}{'verdict':<16}{'examples':>8}{'seconds':>8}")
    for o in outcomes:
        say(console, f"{o.name:<32}{o.version or '-':<12}{o.verdict:<16}{o.examples:>8}{o.seconds:>8.1f}")
    for o in outcomes:
        for number, failure in enumerate(o.failures):
            if not number or verbose:
                say(console, f"{o.name}:")
                for line in in_full(failure):
                    console.print(line, soft_wrap=True)
            else:
                say(console, f"{o.name}: also {failure.broken} ({failure.kind}): {failure.file}")
    counts = {verdict: sum(o.verdict == verdict for o in outcomes) for verdict in (HELD, FAILED, NOT_RUN)}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    say(console, f"{counted(len(outcomes), 'peer')} in {seconds:.1f} s: {words}")
    if counts[NOT_RUN]:
        print(f"{typed(f'{MODULE} {command}')}: some peers could not be run, see above", file=sys.stderr)
