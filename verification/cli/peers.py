"""`python -m verification peers`: run peers, say of each what held or the minimal counter-example, and as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from verification.case import Case
from verification.cli.arguments import MODULE, add_failures, add_json, add_seed, add_verbose, count, seed_of, typed
from verification.cli.console import say
from verification.cli.outputs import write_json
from verification.cli.peer_outcomes import FAILED, HELD, PeerOutcome, attempt, chosen, exit_status, summary
from verification.peers import peer_rank as observe
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer import Peer, Refused
from verification.peers.peer_experiment import experiment
from verification.peers.probe import probe
from verification.report.counter_example import CounterExample
from verification.report.provenance import processor_run, typed_words
from verification.report.report import Report
from verification.run.backends import GlooBackend, Unavailable
from verification.runner import save
from verification.search.search import TIMEOUT, Search
from verification.wording import counted

EXAMPLES = 150
BUDGET = 20.0  # seconds to shrink a failure, and to look for others after the first one
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
    names = chosen(options.names, KNOWN)
    if options.list:
        _list(names, console)
        return 0
    seed = seed_of(options)
    say(console, f"seed {seed}; repeat this run with --seed {seed}")
    outcomes, started = [PeerOutcome(name) for name in names], time.perf_counter()
    for outcome in outcomes:
        attempt(outcome, lambda outcome: _run(outcome, options, seed, console), console)
    seconds = time.perf_counter() - started
    summary(outcomes, seconds, console, options.verbose, "peers")
    report = processor_run(f"python -m verification peers {typed_words(sys.argv[2:])}".rstrip())
    report |= {"peers": [outcome.to_dict() for outcome in outcomes], "seconds": round(seconds, 3), "seed": seed}
    write_json(options.json, report)
    return exit_status(outcomes)


def _list(names: Sequence[str], console: Console) -> None:
    """Raises Unavailable, before anything is printed, for a peer that cannot be loaded."""
    try:
        peers = [(name, load(name)) for name in names]
    except Refused as error:
        raise Unavailable(str(error)) from error
    for name, peer in peers:
        worlds = ", ".join(map(str, peer.worlds))
        say(console, f"{name} ({peer.version or 'not installed'}; ranks {worlds}): {peer.supported}")


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
