"""`python -m verification peers`, and `training --peer`: run peers, say of each what held or the minimal
counter-example, and as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from verification.cli.arguments import MODULE, STATUS, add_outputs, add_seed, count, say, seed_of, typed, write_json
from verification.peers.known_peers import KNOWN, load, ready, selected
from verification.peers.peer import Refused
from verification.peers.peer_experiment import experiment
from verification.peers.peer_rank import prepare
from verification.peers.probe import probe
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS, load_step_peer, ready_step_peer
from verification.peers.training.saved_step_peer import TIMEOUT as STEP_TIMEOUT
from verification.peers.training.step_peer_experiment import prepare_step_peer, step_experiment
from verification.report.counter_example import CounterExample
from verification.report.coverage import Coverage
from verification.report.provenance import processor_run, typed_words
from verification.report.report import Report
from verification.report.summary import in_full
from verification.run.backends import PRELOAD, GlooBackend, Unavailable
from verification.runner import Profile, RunPlan, explore
from verification.search.experiment import Experiment, ToolError
from verification.search.search import TIMEOUT, Search
from verification.training.training_coverage import TRAINING_GROUPS
from verification.training.training_run import TRAINING_PRELOAD
from verification.wording import counted

PROFILE = Profile("for each world size", 150, budget=20.0)
HELD, FAILED, NOT_RUN = "held", "counter-example", "not run"
INSTALL = 'scripts/peers installs the packages of attentions, pip install -e ".[training]" those of frameworks'
HELP = "run other implementations on the same Cases"
ABOUT = """\
Runs other implementations of attention on the Cases that they claim to support,
and compares them with the fp64 oracle, within derived bounds. A NAME is one of
--list, or a package of several of them, or `package.module:adapter` for one of
your own, found in the working directory or installed: verification/README.md
has an example of twenty lines. Without a NAME, all are run."""
STATUS = f"""\
{STATUS}
A peer that cannot be run (not installed, cannot be imported, no adapter) gives
2, whatever the others did: their report is printed all the same."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a peer, its package, or package.module:adapter")
    parser.add_argument(
        "--examples", type=count, default=PROFILE.examples, metavar="N",
        help="for each world size (default: %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    parser.add_argument("--list", action="store_true", help="print these peers and what they claim, and run none")
    add_outputs(parser, "every counter-example in full, and what else a run has with --verbose")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """The exit status, as STATUS has it.

    Raises Unavailable, before anything is run or printed, for a name that stands for no peer, and for one to be listed
    that cannot be loaded.
    """
    if options.list:
        try:
            listed = [(name, load(name)) for name in chosen(options.names, KNOWN)]
        except Refused as error:
            raise Unavailable(str(error)) from error
        for name, peer in listed:
            worlds = ", ".join(map(str, peer.worlds))
            say(console, f"{name} ({peer.version or 'not installed'}; ranks {worlds}): {peer.supported}")
        return 0
    plan = RunPlan((), PROFILE, options.examples, seed_of(options), "gloo", options.failures)
    return run_peers(ATTENTIONS, options.names, plan, console, options)


def chosen(names: Sequence[str], among: Mapping[str, Any]) -> list[str]:
    """All peers that these names stand for, each once; without a name, all. Raises Unavailable for a name of none."""
    try:
        return list(dict.fromkeys(name for given in names for name in selected(given, among))) or list(among)
    except Refused as error:
        raise Unavailable(str(error)) from error


@dataclass(frozen=True)
class Kind:
    """What peers of one kind are run by. command: that runs them. case_of: the field of a saved record that has the
    Case. load, ready: find a peer by its name; have it import what it needs, too."""

    command: str
    case_of: str
    known: Mapping[str, Any]
    load: Callable[[str], Any]
    ready: Callable[[str], object]
    experiment: Callable[[str], Experiment]
    prepare: Callable[[str], object]
    preload: tuple[str, ...]
    timeout: float  # seconds for an example
    coverage: Callable[[], Coverage]


ATTENTIONS = Kind("peers", "case", KNOWN, load, ready, experiment, prepare, PRELOAD, TIMEOUT, Coverage)
STEPS = Kind(
    "training", "training_case", KNOWN_STEP_PEERS, load_step_peer, ready_step_peer, step_experiment, prepare_step_peer,
    TRAINING_PRELOAD, STEP_TIMEOUT, partial(Coverage, groups=TRAINING_GROUPS),
)  # fmt: skip


@dataclass
class Outcome:
    """What became of one peer."""

    name: str
    version: str | None = None
    supported: str = ""
    verdict: str = NOT_RUN
    examples: int = 0
    seconds: float = 0.0
    reason: str = ""  # for which it was not run
    failures: list[CounterExample] = field(default_factory=list)

    def to_dict(self, case_of: str) -> dict[str, Any]:
        """The first counter-example in the peer's own fields, others of other properties under "others"."""
        shown = [
            {"case": dict(f.record)[case_of], "check": f.broken, "message": f.message, "replay": f.replay}
            for f in self.failures
        ] or [{"case": None, "check": None, "message": self.reason or None, "replay": None}]
        return {
            "name": self.name, "version": self.version, "verdict": self.verdict, "supported": self.supported,
            "examples": self.examples, **shown[0], "others": shown[1:], "seconds": round(self.seconds, 3),
        }  # fmt: skip


def run_peers(kind: Kind, names: Sequence[str], plan: RunPlan, console: Console, options: argparse.Namespace) -> int:
    """Run these peers, or all: the exit status. plan: its world sizes, () for those that each peer is for.

    Raises Unavailable for a name that stands for no peer, before anything is run or printed.
    """
    outcomes, started = [Outcome(name) for name in chosen(names, kind.known)], time.perf_counter()
    say(console, f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    for outcome in outcomes:
        begun = time.perf_counter()
        try:
            _run(kind, outcome, plan, console, options)
        except (Refused, Unavailable, ToolError) as error:  # what keeps this peer from being run keeps no other
            outcome.reason = str(error)
            say(console, f"{outcome.name}: not run: {outcome.reason}")
        outcome.seconds = time.perf_counter() - begun
    seconds = time.perf_counter() - started
    _summary(kind, outcomes, seconds, console, options.verbose)
    record = processor_run(f"python -m verification {kind.command} {typed_words(sys.argv[2:])}".rstrip())
    record |= {"peers": [outcome.to_dict(kind.case_of) for outcome in outcomes]}
    write_json(options.json, record | {"seconds": round(seconds, 3), "seed": plan.seed})
    verdicts = {outcome.verdict for outcome in outcomes}
    return 2 if NOT_RUN in verdicts else 1 if FAILED in verdicts else 0


def _run(kind: Kind, outcome: Outcome, plan: RunPlan, console: Console, options: argparse.Namespace) -> None:
    """World sizes in turn, up to the first with a counter-example: its Cases have the fewest ranks.

    Raises Refused, Unavailable or ToolError where the peer cannot be run.
    """
    name = outcome.name
    if name in kind.known:  # what it claims is known whether its package is there or not
        outcome.version, outcome.supported = kind.load(name).version, kind.load(name).supported
    probe(name, ready=kind.ready)
    peer = kind.load(name)
    outcome.version, outcome.supported = peer.version, peer.supported
    say(console, f"{name} {peer.version or ''}: {peer.supported}")
    report = Report(console, verbose=options.verbose)
    report.coverage = kind.coverage()
    backend = GlooBackend(kind.timeout, partial(kind.prepare, name), (*kind.preload, *getattr(peer, "preload", ())))
    try:
        with report:
            for world in _worlds(peer, plan, options):
                backend.start(world)
                examples = plan.examples_for(world)
                report.start_world(world, examples)
                remembers = plan.profile.remembers
                search = Search(kind.experiment(name), backend, report, world, plan.profile.budget, remembers)
                failures = explore(plan, report, search, examples)
                if not failures and not search.examples:
                    raise Refused(f"{name} claims nothing that was drawn on {counted(world, 'rank')}")
                report.end_world(name)
                if failures:
                    break
    finally:
        backend.close()
    outcome.examples, outcome.failures = report.examples, report.failures
    outcome.verdict = FAILED if outcome.failures else HELD


def _worlds(peer: Any, plan: RunPlan, options: argparse.Namespace) -> list[int]:
    """Those of the plan that the adapter is for; all that it is for where it has none of them, unless these were asked
    for. Raises Refused."""
    worlds = [world for world in sorted(plan.worlds) if world in peer.worlds]
    if not worlds and getattr(options, "world", None) is not None:
        raise Refused(f"{peer.name} is for {', '.join(map(str, peer.worlds))} ranks, none of which --world names")
    return worlds or sorted(peer.worlds)


def _summary(kind: Kind, outcomes: Sequence[Outcome], seconds: float, console: Console, verbose: bool) -> None:
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
    words = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    say(console, f"{counted(len(outcomes), 'peer')} in {seconds:.1f} s: {words}")
    if counts[NOT_RUN]:
        program = typed(f"{MODULE} {kind.command}")
        print(f"{program}: some peers could not be run, see above; {INSTALL}", file=sys.stderr)
