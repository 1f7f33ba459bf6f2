"""`python -m verification training --peer`: other people's attention and wrappers in the same training steps."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

from rich.console import Console

from verification.cli.console import say
from verification.cli.outputs import write_json
from verification.cli.peer_outcomes import FAILED, HELD, PeerOutcome, attempt, chosen, exit_status, summary
from verification.peers.peer import Refused
from verification.peers.probe import probe
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS, load_step_peer, ready_step_peer
from verification.peers.training.saved_step_peer import TIMEOUT
from verification.peers.training.step_peer import StepPeer
from verification.peers.training.step_peer_experiment import prepare_step_peer, step_experiment
from verification.report.coverage import Coverage
from verification.report.provenance import processor_run, typed_words
from verification.report.report import Report
from verification.run.backends import GlooBackend, Unavailable
from verification.runner import RunPlan, explore
from verification.search.search import Search
from verification.training.training_coverage import TRAINING_GROUPS
from verification.training.training_run import TRAINING_PRELOAD


def run_peers(options: argparse.Namespace, plan: RunPlan, console: Console) -> int:
    """0 all held, 1 a counter-example was found, 2 a peer could not be run.

    Raises Unavailable for a name that stands for no peer, before anything is run or printed.
    """
    if plan.backend != "gloo":
        raise Unavailable(f"argument --peer: peers run on gloo, got --backend {plan.backend}")
    outcomes = [PeerOutcome(name, "training_case") for name in chosen(options.peer, KNOWN_STEP_PEERS)]
    say(console, f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    started = time.perf_counter()
    for outcome in outcomes:
        attempt(outcome, lambda outcome: _run(outcome, options, plan, console), console)
    seconds = time.perf_counter() - started
    summary(outcomes, seconds, console, options.verbose, "training")
    record = processor_run(f"python -m verification training {typed_words(sys.argv[2:])}")
    record |= {"peers": [outcome.to_dict() for outcome in outcomes], "seconds": round(seconds, 3), "seed": plan.seed}
    write_json(options.json, record)
    return exit_status(outcomes)


def _run(outcome: PeerOutcome, options: argparse.Namespace, plan: RunPlan, console: Console) -> None:
    """World sizes in turn, up to the first with a counter-example.

    Raises Refused, Unavailable or ToolError where the peer cannot be run.
    """
    name = outcome.name
    if name in KNOWN_STEP_PEERS:  # what it claims is known whether its package is there or not
        outcome.version, outcome.supported = load_step_peer(name).version, load_step_peer(name).supported
    probe(name, ready=ready_step_peer)
    peer = load_step_peer(name)
    outcome.version, outcome.supported = peer.version, peer.supported
    say(console, f"{name} {peer.version or ''}: {peer.supported}")
    report = Report(console, verbose=options.verbose)
    report.coverage = Coverage(groups=TRAINING_GROUPS)
    backend = GlooBackend(TIMEOUT, partial(prepare_step_peer, name), (*TRAINING_PRELOAD, *peer.preload))
    try:
        with report:
            for world in _worlds(peer, options, plan):
                _search(name, backend, report, plan, world)
                if report.failures:
                    break
    finally:
        backend.close()
    outcome.examples, outcome.failures = report.examples, report.failures
    outcome.verdict = FAILED if outcome.failures else HELD


def _worlds(peer: StepPeer, options: argparse.Namespace, plan: RunPlan) -> list[int]:
    """Those of the plan that the adapter is for; all that it is for where it has none of them, unless these were asked
    for. Raises Refused."""
    found = [world for world in sorted(plan.worlds) if world in peer.worlds]
    if not found and options.world is not None:
        raise Refused(f"{peer.name} is for {', '.join(map(str, peer.worlds))} ranks, none of which --world names")
    return found or sorted(peer.worlds)


def _search(name: str, backend: GlooBackend, report: Report, plan: RunPlan, world: int) -> None:
    backend.start(world)
    examples = plan.examples_for(world)
    report.start_world(world, examples)
    search = Search(step_experiment(name), backend, report, world, plan.profile.budget, plan.profile.remembers)
    found = explore(plan, report, search, examples)
    if not found and not search.examples:
        raise Refused(f"{name} claims no training step that was drawn on {world} ranks")
    report.end_world(name)
