"""`python -m verification peers` and `training --peer`: run peers, report each one's verdict and counter-examples."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ring.extras import DISTRIBUTION
from verification.case import Case
from verification.case_line import read_case_line
from verification.cli import arguments as cli
from verification.cli.arguments import MODULE, STATUS, prog_name, say
from verification.console import Console
from verification.failures import Refused
from verification.peers.expected_failures import read_expected_failures
from verification.peers.known_peers import KNOWN, load, selected
from verification.peers.peer_experiment import (
    LAWS_OF_ANY,
    TITLES,
    experiment,
    experiments,
    implementation,
    must_be_claimed,
    rehearse,
)
from verification.peers.probe import probe
from verification.record_kinds import Record
from verification.report.counter_example import CounterExample
from verification.report.coverage import NOT_LOOKED_AT, Coverage
from verification.report.provenance import command_run
from verification.report.report import Report
from verification.report.summary import in_full
from verification.run.backends import Unavailable, open_backend
from verification.runner import Profile, RunPlan, explore
from verification.search.experiment import Experiment, ToolError
from verification.search.search import Search
from verification.wording import counted

PROFILE = Profile("for each world size", 150, budget=20.0)
OTHERS = 5.0  # seconds to look for other failures after the first one
TITLES_OF_ANY = (*TITLES, *(law.name for law in LAWS_OF_ANY))
HELD, FAILED, NOT_RUN, INAPPLICABLE = "held", "counter-example", "not run", "does not apply"
INSTALL = f'pip install "{DISTRIBUTION}[peers,training]" brings most of them, scripts/peers of a clone the others'
HELP = "test other implementations on the same Cases"
ABOUT = """\
Runs other implementations of attention on the Cases that they claim to support
and compares them with the fp64 oracle, within derived rounding bounds. NAME is
one of --list, or a package of several of them. It may also be an adapter of
your own, `package.module:adapter`, in the working directory or installed:
--example prints one to copy. Without a NAME, all peers are run."""
STATUS = f"""\
{STATUS}
If a peer cannot run (not installed, import error, no adapter), the status is 2;
the others are still run and reported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a peer, its package, or package.module:adapter")
    cli.add_examples(parser, "number of examples per world size (default: %(default)s)", PROFILE.examples)
    cli.add_only(parser)
    parser.add_argument(
        "--case",
        type=case_line,
        metavar="LINE",
        help='check this Case alone, such as "world=2 tokens=64 heads=4 kv_heads=2 head_dim=32 causal=true"',
    )
    parser.add_argument(
        "--xfails",
        type=Path,
        metavar="FILE",
        help="expected failures, one in a line: the title of a property or law, after `NAME: ` for one peer alone",
    )
    cli.add_world(parser, "those that the adapter names")
    add_placement(parser)
    cli.add_seed(parser)
    parser.add_argument("--list", action="store_true", help="list the peers with the Cases that they support, and exit")
    parser.add_argument("--example", action="store_true", help="print an adapter to copy and change, and exit")
    cli.add_outputs(parser, "every counter-example in full, progress and coverage")


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Add --backend and --device."""
    joins = "what joins the ranks (default: gloo)"
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help=joins)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the tensors (default: cpu; on nccl cuda)")


def check_placement(options: argparse.Namespace) -> None:
    """Raise Unavailable for a device that does not fit the backend, or does not exist."""
    if options.backend == "nccl" and options.device == "cpu":
        raise Unavailable("argument --device: nccl joins GPUs; got cpu")
    cli.must_exist(options.device)


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return the exit status (see STATUS).

    Raises Unavailable for an unknown name, or a peer to be listed that cannot be loaded, before any output.
    """
    if options.example:
        if options.names or options.list:
            raise Unavailable("argument --example: it prints an adapter and runs nothing; leave out NAME and --list")
        print(resources.files("verification.peers").joinpath("example.py").read_text(), end="")
        return 0
    if options.list:
        names = peer_names(options.names, KNOWN)
        if wrong := next(filter(None, names.values()), None):
            raise Unavailable(wrong)
        try:
            peers = [(name, load(name)) for name in names]
        except Refused as error:
            raise Unavailable(str(error)) from error
        for name, peer in peers:
            sizes = ", ".join(map(str, peer.worlds))
            say(console, f"{name} ({peer.version or 'not installed'}; ranks {sizes}): {peer.supported}")
        return 0
    check_placement(options)
    only = cli.only_of(options, TITLES_OF_ANY)
    if options.case is not None:
        if only or options.world or options.examples != PROFILE.examples:
            raise Unavailable("argument --case: it is one example; leave out --only, --world and --examples")
        options.world = (options.case.world,)
    return run_peers(ATTENTIONS, options.names, cli.make_run_plan(options, (), {"": PROFILE}, only), console, options)


def case_line(text: str) -> Case:
    """Parse a Case written in a line. Raises ArgumentTypeError."""
    try:
        return read_case_line(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def peer_names(names: Sequence[str], known: Mapping[str, Any], *words: str) -> dict[str, str]:
    """Return the peers of these names or packages, each once, all without a name; and names that are no peer's, with
    the reason. Raises Unavailable if there are only such names. words: as for `selected`."""
    reasons: dict[str, str] = {}
    for name in names:
        try:
            reasons |= dict.fromkeys(selected(name, known, *words), "")
        except Refused as error:
            reasons[name] = str(error)
    if reasons and all(reasons.values()):
        raise Unavailable(next(iter(reasons.values())))
    return reasons or dict.fromkeys(known, "")


@dataclass(frozen=True)
class Kind:
    """Peers of attention, or of training steps (`verification.cli.training`), and how to run them.

    command      of `python -m verification`
    load, ready  find a peer by its name; `ready` does its imports and looks for faults of the adapter
    experiments  of a peer on a world size, each with its number of examples
    words        for peers in errors, as for `selected`
    """

    command: str
    known: Mapping[str, Any]
    load: Callable[[str], Any]
    ready: Callable[[str], object]
    experiments: Callable[[str, int, RunPlan, argparse.Namespace], list[tuple[Experiment, int]]]
    coverage: Callable[[], Coverage]
    words: tuple[str, str] = ("Peer", "adapter")


def attention_experiments(
    name: str, world: int, plan: RunPlan, options: argparse.Namespace
) -> list[tuple[Experiment, int]]:
    """Return the Experiments of an attention; with --case, that Case alone. Raises Refused if it is not claimed."""
    device = options.device or ("cuda" if plan.backend == "nccl" else "cpu")
    if options.case is None:
        return experiments(name, world, plan.examples_for(world), plan.only, device)
    case = replace(options.case, device=device)
    try:
        must_be_claimed(implementation(name, device), case)
    except ValueError as error:
        raise Refused(f"argument --case: {error}") from error
    return [(replace(experiment(name, device), draw=lambda world: st.just(case)), 1)]


ATTENTIONS = Kind("peers", KNOWN, load, rehearse, attention_experiments, Coverage)


@dataclass
class PeerOutcome:
    """Outcome of one peer."""

    name: str
    version: str | None = None
    supported: str = ""
    verdict: str = NOT_RUN
    examples: int = 0
    seconds: float = 0.0
    reason: str = ""  # why it was not run
    expected: dict[str, int] = field(default_factory=dict)  # failures by title in --xfails
    inapplicable: list[str] = field(default_factory=list)  # world sizes and laws without subjects
    failures: list[CounterExample] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON with the first counter-example inline, those of other properties under "others"."""
        failures = [
            {"case": Record.from_dict(f.record).case, "check": f.broken, "message": f.message, "replay": f.replay}
            for f in self.failures
        ] or [{"case": None, "check": None, "message": self.reason or None, "replay": None}]
        return {
            "name": self.name, "version": self.version, "verdict": self.verdict, "supported": self.supported,
            "examples": self.examples, **failures[0], "others": failures[1:], "expected_failures": self.expected,
            "does_not_apply": self.inapplicable, "largest": self.coverage.largest, "none_had": self.coverage.missing(),
            "not_looked_at": NOT_LOOKED_AT, "seconds": round(self.seconds, 3),
        }  # fmt: skip


def run_peers(kind: Kind, names: Sequence[str], plan: RunPlan, console: Console, options: argparse.Namespace) -> int:
    """Run these peers, or all, and return the exit status.

    Without world sizes in the plan, each peer runs on all those that it supports. Raises Unavailable for an unknown
    name, before any output.
    """
    expected, started = expected_failures(options), time.perf_counter()
    named = peer_names(names, kind.known, *kind.words).items()
    outcomes = [PeerOutcome(name, reason=reason) for name, reason in named]
    for outcome in outcomes:
        titles = expected.get(None, set()) | expected.get(outcome.name, set())
        outcome.expected = {title: 0 for title in sorted(titles) if not plan.only or title in plan.only}
    say(console, f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    for outcome in outcomes:
        peer_started = time.perf_counter()
        try:
            if outcome.reason:
                raise Refused(outcome.reason)
            _run(kind, outcome, plan, console, options)
        except (Refused, Unavailable, ToolError) as error:  # go on with the next peer
            outcome.reason = str(error)
            say(console, f"{outcome.name}: not run: {outcome.reason}")
        outcome.seconds = time.perf_counter() - peer_started
    seconds = time.perf_counter() - started
    _summary(kind, outcomes, seconds, console, options.verbose)
    record = command_run(kind.command) | {"peers": [outcome.to_dict() for outcome in outcomes]}
    cli.write_json(options.json, record | {"seconds": round(seconds, 3), "seed": plan.seed})
    verdicts = {outcome.verdict for outcome in outcomes}
    return 2 if NOT_RUN in verdicts else 1 if FAILED in verdicts else 0


def _run(kind: Kind, outcome: PeerOutcome, plan: RunPlan, console: Console, options: argparse.Namespace) -> None:
    """Run world sizes in ascending order and stop at the first counter-example, which then has the fewest ranks.

    Raises Refused, Unavailable or ToolError if the peer cannot run.
    """
    name = outcome.name
    if name in kind.known:  # its claim is known even if its package is not installed
        outcome.version, outcome.supported = kind.load(name).version, kind.load(name).supported
    probe(name, ready=kind.ready)
    peer = kind.load(name)
    outcome.version, outcome.supported = peer.version, peer.supported
    say(console, f"{name} {peer.version or ''}: {peer.supported}")
    report = Report(console, verbose=options.verbose)
    report.coverage = outcome.coverage = kind.coverage()
    backend = open_backend(plan.backend)
    backend.device = getattr(options, "device", None) or backend.device
    try:
        worlds = _worlds(peer, plan, options)
        for number, world in enumerate(worlds, 1):
            drawn = kind.experiments(name, world, plan, options)
            for experiment, _ in drawn[:1]:
                experiment.prepare(backend)
            backend.start(world)
            report.start_world(world, sum(examples for _, examples in drawn))
            for experiment, examples in drawn:
                search = Search(
                    experiment, backend, report, world, plan.profile.budget, plan.profile.remembers,
                    expected=outcome.expected, others=OTHERS,
                )  # fmt: skip
                failures = explore(plan, report, search, examples)
                drew_none = not (failures or search.examples or search.expected_failures)
                if drew_none and experiment.without_subjects:
                    outcome.inapplicable.append(f"{counted(world, 'rank')}: {experiment.without_subjects}")
                    report.say(f"world {world}: {experiment.without_subjects}")
                outcome.expected |= {t: outcome.expected[t] + n for t, n in search.expected_failures.items()}
                if report.failures:  # plain examples come before the laws between them
                    break
            report.end_world(name)
            if report.failures:
                report.not_run(worlds[number:], "fewer ranks have a counter-example")
                break
            nothing = not report.examples and not any(outcome.expected.values())
            if nothing and not (plan.only and outcome.inapplicable):  # a law alone may have no subject
                raise Refused(f"{name} supports none of the Cases drawn on {counted(world, 'rank')}")
    finally:
        backend.close()
    outcome.examples = report.examples
    outcome.failures = sorted(report.failures, key=lambda failure: not failure.cause)  # one with a cause says most
    checked = report.examples or any(outcome.expected.values())
    outcome.verdict = FAILED if outcome.failures else HELD if checked else INAPPLICABLE


def expected_failures(options: argparse.Namespace) -> dict[str | None, set[str]]:
    """Return the titles of --xfails by the name of a peer, None for all. Raises Unavailable."""
    if getattr(options, "xfails", None) is None:
        return {}
    try:
        return read_expected_failures(options.xfails, TITLES_OF_ANY)
    except (OSError, ValueError) as error:
        raise Unavailable(f"argument --xfails: {error}") from error


def _worlds(peer: Any, plan: RunPlan, options: argparse.Namespace) -> list[int]:
    """Return the planned world sizes that the adapter supports, or all that it supports if none is planned.

    Raises Refused if --world has only others.
    """
    worlds = [world for world in sorted(plan.worlds) if world in peer.worlds]
    if not worlds and getattr(options, "world", None) is not None:
        raise Refused(
            f"{peer.name} supports {', '.join(map(str, peer.worlds))} ranks, none of which --world or --case names"
        )
    return worlds or sorted(peer.worlds)


def _summary(kind: Kind, outcomes: Sequence[PeerOutcome], seconds: float, console: Console, verbose: bool) -> None:
    """Print a row per peer, the first counter-example of each, and the verdict."""
    noun = kind.words[0].lower()
    width = max(31, *(len(outcome.name) for outcome in outcomes))
    say(console, f"{noun:<{width}} {'version':<12}{'verdict':<16}{'examples':>8}{'seconds':>8}")
    for o in outcomes:
        say(console, f"{o.name:<{width}} {o.version or '-':<12}{o.verdict:<16}{o.examples:>8}{o.seconds:>8.1f}")
    for o in outcomes:
        for number, failure in enumerate(o.failures):
            if not number or verbose:
                say(console, f"{o.name}:")
                for line in in_full(failure):
                    console.print(line)
            else:
                say(console, f"{o.name}: also {failure.broken} ({failure.kind}): {failure.cause or failure.file}")
        if o.coverage.cases:
            say(console, f"{o.name}: {o.coverage.extent()}")
        if listed := [f"{title} ({count})" for title, count in o.expected.items() if count]:
            say(console, f"{o.name}: failed as --xfails expects: {', '.join(listed)}")
        if unneeded := [title for title, count in o.expected.items() if not count and o.verdict == HELD]:
            say(console, f"{o.name}: held, though --xfails names it: {', '.join(unneeded)}")
    counts = {verdict: sum(o.verdict == verdict for o in outcomes) for verdict in (HELD, FAILED, INAPPLICABLE, NOT_RUN)}
    words = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    say(console, f"{counted(len(outcomes), noun)} in {seconds:.1f} s: {words}")
    if counts[NOT_RUN]:
        program = prog_name(f"{MODULE} {kind.command}")
        packaged = any(o.verdict == NOT_RUN and o.name in kind.known for o in outcomes)
        print(f"{program}: some {noun}s could not run, see above{'; ' + INSTALL if packaged else ''}", file=sys.stderr)
