"""The conformance suite of an attention for pytest: one test a property and law, on ranks that the session shares."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from verification.console import Console, unstyled
from verification.failures import RankHang, Refused
from verification.peers.known_peers import load, selected
from verification.peers.peer import Peer
from verification.peers.peer_experiment import LAWS_OF_ANY, TITLES, experiments, rehearse
from verification.peers.probe import probe
from verification.report.counter_example import CounterExample
from verification.report.coverage import Coverage
from verification.report.report import Report
from verification.report.summary import in_full
from verification.run.backends import Backend, open_backend
from verification.runner import save
from verification.search.experiment import Experiment
from verification.search.search import Search
from verification.wording import counted

EXAMPLES = 100  # plain ones on each world size
# Share of the plain examples for each law, and the fewest for one, if there are as many plain ones.
LAW_SHARE, FEWEST = 0.1, 10
BUDGET, OTHERS = 20.0, 5.0  # seconds to shrink a failure, and to look for others after it


class CounterExamples(AssertionError):
    """A property or law is broken: its counter-examples, in words."""


class NotChecked(Exception):
    """No example was about the property or law, for this reason."""


def slug(title: str) -> str:
    """Return a title as users type it: `output and lse` is output_and_lse."""
    return "_".join("".join(c if c.isalnum() else " " for c in title).split())


SLUGS = {slug(title): title for title in (*TITLES, *(law.name for law in LAWS_OF_ANY))}


@dataclass
class Outcome:
    """Outcome of a search on all world sizes: counter-examples, examples that held, expected failures by title."""

    failures: list[CounterExample] = field(default_factory=list)
    held: int = 0
    expected: Counter[str] = field(default_factory=Counter)
    without_subjects: str = ""


@dataclass
class Conformance:
    """A run of the suite: the ranks of each world size, and the failures of the plain examples once they were drawn.

    Args:
        name: of the peer: `package.module:adapter`, or a known one.
        examples: plain ones on each world size.
        seed: of the draws.
        failures: folder of counter-examples.
        backend: "gloo" or "nccl".
        expected: titles whose failures are counted, but neither shrunk nor saved.
    """

    name: str
    examples: int = EXAMPLES
    seed: int = 0
    failures: Path = Path(".verification/failures")
    backend: str = "gloo"
    expected: set[str] = field(default_factory=set)
    coverage: Coverage = field(default_factory=Coverage, init=False)
    _backends: dict[int, Backend] = field(default_factory=dict)
    _plain: Outcome | None = None
    _hangs: str | None = None  # title of the property or law whose examples hang

    def prepare(self) -> Peer:
        """Return the Peer, once a process of its own could import it. Raises Refused."""
        try:
            names = selected(self.name)
        except Refused as error:
            raise Refused(str(error).removeprefix("argument NAME: ")) from error
        if names != [self.name]:
            raise Refused(f"{self.name} names several; it must be one of {', '.join(names)}")
        probe(self.name, ready=rehearse)
        return load(self.name)

    def check(self, title: str, selected: set[str]) -> None:
        """Check a property or law. The plain examples are drawn once for all selected properties.

        Args:
            title: of the property or law.
            selected: titles of the session.

        Raises:
            CounterExamples: it is broken. A rank that raises, dies or hangs breaks every property, unless "every rank
                answers" is selected too.
            NotChecked: no example was about it.
        """
        if title in TITLES:
            if self._plain is None:
                self._plain = self._explore(tuple(t for t in TITLES if t in selected))
            outcome = self._plain
        elif self._hangs is not None:
            raise NotChecked(f"not checked: ranks hang, see {slug(self._hangs)}")
        elif self._plain is not None and self._plain.failures and not self._plain.held:
            raise NotChecked(f"not checked: no plain example holds, see {slug(self._plain.failures[0].broken)}")
        else:
            outcome = self._explore((title,))
        if title in outcome.expected:
            raise CounterExamples(f"{counted(outcome.expected[title], 'example')} failed, as expected")
        broken = [f for f in outcome.failures if f.broken == title or f.broken not in selected]
        if broken:
            raise CounterExamples(described(broken))
        if outcome.failures and not outcome.held:
            raise NotChecked(f"not checked: no example got as far, see {slug(outcome.failures[0].broken)}")
        if not outcome.held and outcome.expected:
            raise NotChecked(f"not checked: no example got as far, see {', '.join(map(slug, outcome.expected))}")
        if not outcome.held and not outcome.without_subjects:
            raise CounterExamples(f"{self.name} supports none of the Cases drawn on any number of ranks")
        if not outcome.held:
            raise NotChecked(outcome.without_subjects)

    def _explore(self, titles: tuple[str, ...]) -> Outcome:
        """Draw examples on each world size in turn, up to the first with counter-examples."""
        outcome = Outcome()
        few = max(round(self.examples * LAW_SHARE), min(self.examples, FEWEST))
        for world in sorted(load(self.name).worlds):
            examples = self.examples if titles[0] in TITLES else few
            for experiment, count in experiments(self.name, world, examples, titles, self._device):
                report = Report(Console(io.StringIO()))
                ranks = self._on(world, experiment)
                search = Search(experiment, ranks, report, world, BUDGET, others=OTHERS, expected=self.expected)
                outcome.failures += [
                    save(failure, search, self.failures) for failure in search.explore(count, self.seed)
                ]
                self.coverage.add_all(report.coverage)
                outcome.held += search.examples
                outcome.expected += search.expected_failures
                outcome.without_subjects = experiment.without_subjects
                if outcome.failures:
                    break
            if outcome.failures:
                break
        if any(failure.kind == RankHang.kind for failure in outcome.failures):
            self._hangs = titles[0]
        return outcome

    @property
    def _device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def _on(self, world: int, experiment: Experiment) -> Backend:
        if world not in self._backends:
            self._backends[world] = open_backend(self.backend)
            experiment.prepare(self._backends[world])
            self._backends[world].start(world)
        return self._backends[world]

    def close(self) -> None:
        """End the ranks; a later check starts new ones."""
        while self._backends:
            self._backends.popitem()[1].close()


def described(failures: list[CounterExample]) -> str:
    """Return the counter-examples in words, each with the command that replays it."""
    return "\n\n".join(unstyled("\n".join(in_full(failure))) for failure in failures)
