"""The conformance suite of an attention for pytest: one test a property and law, on ranks that the session shares."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from verification.check import properties
from verification.peers.known_peers import load
from verification.peers.peer import Peer
from verification.peers.peer_experiment import LAWS_OF_ANY, TITLES, experiments, rehearse
from verification.peers.peer_rank import prepare
from verification.peers.probe import probe
from verification.report.counter_example import CounterExample
from verification.report.report import Report
from verification.report.summary import in_full
from verification.run.backends import Backend, GlooBackend, NcclBackend
from verification.runner import save
from verification.search.search import Search

EXAMPLES = 100  # plain ones on each world size; laws get a tenth each
BUDGET, OTHERS = 20.0, 5.0  # seconds to shrink a failure, and to look for others after it


def slug(title: str) -> str:
    """Return a title as users type it: `output and lse` is output_and_lse."""
    return "_".join("".join(c if c.isalnum() else " " for c in title).split())


SLUGS = {slug(title): title for title in (*TITLES, *(law.name for law in LAWS_OF_ANY))}


@dataclass
class Conformance:
    """A run of the suite: the ranks of each world size, and the failures of the plain examples once they were drawn.

    Args:
        name: of the peer: `package.module:adapter`, or a known one.
        examples: plain ones on each world size.
        seed: of the draws.
        failures: folder of counter-examples.
        backend: "gloo" or "nccl".
    """

    name: str
    examples: int = EXAMPLES
    seed: int = 0
    failures: Path = Path(".verification/failures")
    backend: str = "gloo"
    _backends: dict[int, Backend] = field(default_factory=dict)
    _plain: list[CounterExample] | None = None

    def prepare(self) -> Peer:
        """Return the Peer, once a process of its own could import it. Raises Refused or Unavailable."""
        probe(self.name, ready=rehearse)
        return load(self.name)

    def counter_examples(self, title: str, selected: set[str]) -> list[CounterExample]:
        """Return the counter-examples to a property or law. selected: titles of the session; the plain examples are
        drawn once for all properties among them."""
        if title not in TITLES:
            return self._explore((title,))
        if self._plain is None:
            self._plain = self._explore(tuple(t for t in TITLES if t in selected))
        answers = properties.EVERY_RANK_ANSWERS.title
        return [
            failure
            for failure in self._plain
            if failure.broken == title or (failure.broken not in selected and title == answers)
        ]

    def _explore(self, titles: tuple[str, ...]) -> list[CounterExample]:
        """Draw examples on each world size in turn, and return the counter-examples of the first with any."""
        for world in sorted(load(self.name).worlds):
            failures = []
            examples = self.examples if titles[0] in TITLES else max(1, self.examples // 10)
            for experiment, count in experiments(self.name, world, examples, titles, self._device):
                report = Report(Console(file=io.StringIO()))
                search = Search(experiment, self._on(world), report, world, BUDGET, others=OTHERS)
                found = search.explore(count, self.seed)
                failures += [save(failure, search, self.failures) for failure in found]
            if failures:
                return failures
        return []

    @property
    def _device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def _on(self, world: int) -> Backend:
        if world not in self._backends:
            make: Any = NcclBackend if self.backend == "nccl" else GlooBackend
            self._backends[world] = make(load(self.name).timeout, partial(prepare, self.name))
            self._backends[world].start(world)
        return self._backends[world]

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()


def described(failures: list[CounterExample]) -> str:
    """Return the counter-examples in words, each with the command that replays it."""
    return "\n\n".join("\n".join(map(str, in_full(failure))) for failure in failures)
