"""The pytest plugin: `pytest --attention my_module:adapter` runs the conformance suite, and ranks for one's own tests.

    pytest --attention my_module:adapter                      # the suite alone, in the folder of my_module
    pytest --attention my_module:adapter tests                # beside one's own tests
    pytest --attention my_module:adapter -k later_tokens      # one property or law; -k "not ..." leaves some out
    pytest --attention my_module:adapter --attention-xfails xfails.txt --examples 300 --hypothesis-seed 5

Nothing is imported before it is used: pytest loads this module in every run of an environment that has this package.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import pytest

if TYPE_CHECKING:
    from verification.testing.conformance import Conformance
    from verification.testing.ranks import Ranks

CONFORMANCE = pytest.StashKey[list["Conformance"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention", "conformance of an attention (ring-dilated-attention)")
    group.addoption(
        "--attention", action="append", metavar="MODULE:ADAPTER", default=[],
        help="check this attention, a verification.peers.Peer; without paths, nothing else is run",
    )  # fmt: skip
    group.addoption(
        "--examples", type=_count, metavar="N", default=None,
        help="plain examples on each number of ranks (default: 100); a law has a tenth",
    )  # fmt: skip
    group.addoption(
        "--attention-xfails",
        metavar="FILE",
        default=None,
        help="properties and laws that are expected to fail: a title in a line, after `MODULE:ADAPTER: ` for one alone",
    )
    group.addoption(
        "--attention-backend", choices=("gloo", "nccl"), default="gloo", help="what joins the ranks (default: gloo)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of examples; it must be an integer from 1 up")
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool | None:
    """Collect no files if the suite alone is asked for."""
    config = session.config
    if not config.option.attention or config.args_source is pytest.Config.ArgsSource.ARGS:
        return None
    session.perform_collect(args=[])
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of each attention, before others select by name."""
    suites = []
    for name in config.option.attention:
        collector = AttentionCollector.from_parent(session, name=name, nodeid=name)
        suites.append(collector.suite)
        items.extend(collector.collect())
    config.stash[CONFORMANCE] = suites


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks of an attention after its last test."""
    if isinstance(item, AttentionItem) and (nextitem is None or nextitem.parent is not item.parent):
        item.suite.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    for suite in session.config.stash.get(CONFORMANCE, []):
        suite.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for suite in config.stash.get(CONFORMANCE, []):
        if suite.coverage.cases:
            terminalreporter.write_line(f"{suite.name}: {suite.coverage.extent()}")


class AttentionCollector(pytest.Collector):
    """The tests of one attention, one for each property and law."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        from verification.hidden_packages import hidden

        if (line := hidden()) is not None:
            raise pytest.UsageError(f"--attention {self.name}: {line}")
        from verification.failures import Refused
        from verification.peers.expected_failures import read_expected_failures
        from verification.run.backends import Unavailable
        from verification.testing.conformance import EXAMPLES, SLUGS, Conformance
        from verification.wording import printable

        option = self.config.option
        try:
            file = option.attention_xfails
            expected = {} if file is None else read_expected_failures(Path(file), SLUGS.values())
            seed = getattr(option, "hypothesis_seed", None) or 0
            self.suite = Conformance(
                self.name,
                option.examples or EXAMPLES,
                random.getrandbits(32) if seed == "random" else int(seed),
                backend=option.attention_backend,
                expected=expected.get(None, set()) | expected.get(self.name, set()),
            )
            self.suite.prepare()
        except (OSError, ValueError) as error:
            raise pytest.UsageError(printable(f"--attention-xfails: {error}")) from error
        except (Refused, Unavailable) as error:
            raise pytest.UsageError(printable(f"--attention {self.name}: {error}")) from error

    def collect(self) -> Iterable[pytest.Item]:
        from verification.testing.conformance import SLUGS

        for slug, title in SLUGS.items():
            item = AttentionItem.from_parent(self, name=slug, title=title)
            if title in self.suite.expected:
                item.add_marker(pytest.mark.xfail(reason=f"named in {self.config.option.attention_xfails}"))
            yield item


class AttentionItem(pytest.Item):
    """The test of one property or law."""

    def __init__(self, title: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.title = title

    @property
    def suite(self) -> Conformance:
        """Suite of the attention."""
        assert isinstance(self.parent, AttentionCollector)
        return self.parent.suite

    def runtest(self) -> None:
        from verification.testing.conformance import NotChecked

        try:
            self.suite.check(self.title, {x.title for x in self.session.items if self._is_beside(x)})
        except NotChecked as error:
            raise pytest.skip.Exception(str(error), _use_item_location=True) from None

    def _is_beside(self, item: pytest.Item) -> TypeGuard[AttentionItem]:
        return isinstance(item, AttentionItem) and item.parent is self.parent

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from verification.run.backends import Unavailable
        from verification.search.experiment import ToolError
        from verification.testing.conformance import CounterExamples
        from verification.wording import printable

        if isinstance(excinfo.value, (CounterExamples, ToolError, Unavailable)):
            return printable(str(excinfo.value))
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return Path(self.parent.name if self.parent else ""), 0, f"{self.nodeid}: {self.title}"


@pytest.fixture(scope="session")
def attention_ranks() -> Iterator[Ranks]:
    """Ranks that live as long as the session: `attention_ranks(4).run(function, *arguments)`."""
    from verification.testing.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.close()
