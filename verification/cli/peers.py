"""`python -m verification peers`: run peers, say of each what held or the minimal counter-example, and as JSON."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console

from verification.case import Case
from verification.cli.arguments import MODULE, add_failures, add_json, add_seed, add_verbose, count, seed_of, typed
from verification.cli.console import say
from verification.cli.outputs import write_json
from verification.peers import peer_rank as observe
from verification.peers.known_peers import KNOWN, load, selected
from verification.peers.peer import Peer, Refused
from verification.peers.peer_experiment import experiment
from verification.peers.probe import probe
from verification.report.counter_example import CounterExample
from verification.report.provenance import processor_run
from verification.report.report import Report
from verification.report.summary import in_full
from verification.run.backends import GlooBackend, Unavailable
from verification.runner import save
from verification.search.experiment import ToolError
from verification.search.search import TIMEOUT, Search
from verification.wording import counted

EXAMPLES = 150
BUDGET = 20.0  # seconds to shrink a failure, and to look for others after the first one
HELD, FAILED, NOT_RUN = "held", "counter-example", "not run"
ABOUT = """\
Runs other implementations of attention on the Cases that they claim to support,
and compares them with the fp64 oracle, within derived bounds. A NAME is one of
--list, or a package of several of them, or `package.module:adapter` for one of
your own, found in the working directory or installed: verification/README.md
has an example of twenty lines. Without a NAME, all are run."""
STATUS = """\
exit status: 0 all held; 1 a counter-example was found; 2 a peer could not be
run (not installed, cannot be imported, no adapter), whatever the others did:
their report is printed all the same."""


@dataclass
class PeerOutcome:
    """Of one peer."""

    name: str
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
            {"case": dict(f.record)["case"], "check": f.broken, "message": f.message, "replay": f.replay}
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


def add_parser(commands: Any, epilog: str = STATUS) -> None:
    """`commands`: what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "peers", help="run other implementations on the same Cases", description=ABOUT, epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter, prog=typed(f"{MODULE} peers"),
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="a peer, its package, or package.module:adapter")
    parser.add_argument(
        "--examples", type=count, default=EXAMPLES, metavar="N", help="for each world size (default: %(default)s)"
    )
    add_seed(parser)
    add_json(parser)
    add_failures(parser)
    parser.add_argument("--list", action="store_true", help="print these peers and what they claim, and run none")
    add_verbose(parser, "every counter-example in full, and what else a run has with --verbose")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 all held, 1 a counter-example was found, 2 a peer could not be run.

    Raises Unavailable for a name that stands for no peer, before anything is run or printed.
    """
    try:
        chosen = _chosen(options.names)
        listed = {name: load(name) for name in chosen} if options.list else {}
    except Refused as error:
        raise Unavailable(str(error)) from error
    if options.list:
        _list(listed, console)
        return 0
    seed = seed_of(options)
    say(console, f"seed {seed}; repeat this run with --seed {seed}")
    outcomes, started = [PeerOutcome(name) for name in chosen], time.perf_counter()
    for outcome in outcomes:
        _attempt(outcome, options, seed, console)
    seconds = time.perf_counter() - started
    _summary(outcomes, seconds, console, options.verbose)
    report = processor_run(f"python -m verification peers {shlex.join(sys.argv[2:])}".rstrip())
    report |= {"peers": [outcome.to_dict() for outcome in outcomes], "seconds": round(seconds, 3), "seed": seed}
    write_json(options.json, report)
    verdicts = {outcome.verdict for outcome in outcomes}
    return 2 if NOT_RUN in verdicts else 1 if FAILED in verdicts else 0


def _chosen(names: Sequence[str]) -> list[str]:
    """All peers that these names stand for, each once; without a name, all that are known.

    Raises Refused for a name that stands for none.
    """
    return list(dict.fromkeys(name for given in names for name in selected(given))) or list(KNOWN)


def _list(peers: Mapping[str, Peer], console: Console) -> None:
    for name, peer in peers.items():
        worlds = ", ".join(map(str, peer.worlds))
        say(console, f"{name} ({peer.version or 'not installed'}; ranks {worlds}): {peer.supported}")


def _attempt(outcome: PeerOutcome, options: argparse.Namespace, seed: int, console: Console) -> None:
    """Fill in the outcome. What keeps this peer from being run does not keep the others."""
    started = time.perf_counter()
    try:
        _run(outcome, options, seed, console)
    except (Refused, Unavailable, ToolError) as error:
        outcome.reason = str(error)
    outcome.seconds = time.perf_counter() - started
    if outcome.reason:
        say(console, f"{outcome.name}: not run: {outcome.reason}")


def _run(outcome: PeerOutcome, options: argparse.Namespace, seed: int, console: Console) -> None:
    """World sizes in turn, up to the first with a counter-example: its Cases have the fewest ranks.

    Raises Refused, Unavailable or ToolError where the peer cannot be run.
    """
    if outcome.name in KNOWN:  # its adapter can be imported whether its package is there or not
        outcome.version, outcome.supported = load(outcome.name).version, load(outcome.name).supported
    probe(outcome.name)
    peer = load(outcome.name)
    outcome.version, outcome.supported = peer.version, peer.supported
    say(console, f"{outcome.name} {peer.version or ''}: {peer.supported}")
    report = Report(console, verbose=options.verbose)
    backend = GlooBackend(TIMEOUT, partial(observe.prepare, outcome.name))
    try:
        with report:
            for world in sorted(peer.worlds):
                backend.start(world)
                outcome.failures = _search(outcome.name, peer, backend, report, world, options, seed)
                outcome.examples = report.examples
                if outcome.failures:
                    break
    finally:
        backend.close()
    outcome.verdict = FAILED if outcome.failures else HELD


def _search(
    spec: str, peer: Peer, backend: GlooBackend, report: Report, world: int, options: argparse.Namespace, seed: int
) -> list[CounterExample]:
    report.start_world(world, options.examples)
    asked = 0

    def claims(case: Case) -> Case | None:
        nonlocal asked
        asked += 1
        return peer.claims(case)

    search = Search(experiment(spec, replace(peer, claims=claims)), backend, report, world, BUDGET)
    found = [save(failure, search, options.failures) for failure in search.explore(options.examples, seed)]
    if not found and not search.examples:
        raise Refused(f"{peer.name} claims no Case of {asked} drawn on {counted(world, 'rank')}")
    for failure in found:
        report.failed(failure)
    report.end_world(peer.name)
    return found


def _summary(outcomes: Sequence[PeerOutcome], seconds: float, console: Console, verbose: bool) -> None:
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
        print(f"{typed(f'{MODULE} peers')}: some peers could not be run, see above", file=sys.stderr)
