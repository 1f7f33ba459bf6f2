"""`ring-validate`: check links, drawn Cases, laws and long problems on the ranks that torchrun started."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verification import runner
from verification.case import Case
from verification.cli import arguments as cli
from verification.console import Console
from verification.failures import RankCrash, RankHang, Refused, VerificationFailure
from verification.peers import peer_experiment
from verification.peers.peer_rank import prepare as ready_peer
from verification.peers.peer_rank import run_named
from verification.peers.probe import probe
from verification.problems import links, long_problems
from verification.problems.long_problems import LongProblem
from verification.record_kinds import Record
from verification.replay import replay as replays
from verification.replay.registry import parse
from verification.report.counter_example import CounterExample, save_record
from verification.report.provenance import surroundings
from verification.report.report import Report
from verification.run.backends import Preparation, Unavailable
from verification.run.torchrun.agents import Address, Agent, NotUnderTorchrun, RankZeroLost, connect
from verification.run.torchrun.backend import ShrinkBackend, TorchrunBackend
from verification.run.torchrun.rank_zero import AgentLost, Agents
from verification.search.experiment import ToolError
from verification.search.search import Search
from verification.wording import counted, printable

MODULE = "verification.cli.validate"
HOW = f"torchrun --nproc-per-node=2 -m {MODULE}"
EXAMPLES = {"nccl": 300, "gloo": 200}
LONG = {"nccl": 65_536, "gloo": 2048}
TIMEOUT = 20.0  # seconds
LARGE_TIMEOUT = 300.0  # seconds for a message of 256 MiB or a long problem, unless --timeout is more
BUDGET = 60.0  # seconds
DESCRIPTION = """\
Checks ring_attention on the ranks that torchrun started. First come the links
between them, then drawn Cases and laws, as in `python -m verification run`,
and last long problems. A failure is shrunk in a simulation, saved, and printed
with the command that replays it. With --backend gloo no GPU is needed."""
EPILOGUE = """\
exit status: 0 all held; 1 a counter-example, or a process died; 2 it could not
run, or was interrupted. After an interrupt the results so far are reported, and
the JSON has "interrupted": true and "held": false. torchrun itself turns any
status but 0 into 1."""


class TorchrunReport(Report):
    """A report whose counter-examples are replayed under torchrun, or in the simulation if they fail only there.
    attention: the peer under test, if any."""

    attention: str | None = None

    def failed(self, failure: CounterExample) -> None:
        if failure.backend != "sim":
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={failure.world}"]
            again = ["--backend", failure.backend, "--replay", str(failure.file.resolve())]
            name = failure.record.get("peer") or self.attention
            again += ["--attention", name] if name else []
            failure = replace(failure, command=(*start, "-m", "verification.cli.validate", *again))
        super().failed(failure)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=HOW, description=DESCRIPTION, epilog=EPILOGUE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="transport of ranks (default: nccl)")
    cli.add_examples(
        top,
        f"Cases to draw (default: {EXAMPLES['nccl']}, gloo {EXAMPLES['gloo']}); laws and the search for larger "
        "errors add up to as many again",
    )
    cli.add_seed(top)
    seconds = cli.number(float, lambda x: 0 < x < 86_400, "a number of seconds > 0 and less than a day")
    top.add_argument(
        "--timeout", type=seconds, default=TIMEOUT, metavar="S",
        help="timeout per example, in seconds (default: %(default)g)",
    )  # fmt: skip
    least, kinds = long_problems.MIN_TOKENS, tuple(long_problems.KINDS)
    top.add_argument(
        "--long",
        type=cli.number(int, lambda x: x == 0 or x >= least, f"0 or an integer >= {least}"),
        metavar="N",
        help=f"tokens of the long problems (default: {LONG['nccl']}, gloo {LONG['gloo']}); 0 skips them",
    )
    top.add_argument(
        "--long-kinds", nargs="+", metavar="KIND", choices=kinds, default=kinds,
        help=f"of {', '.join(map(repr, kinds))} (default: all)",
    )  # fmt: skip
    top.add_argument(
        "--long-case",
        metavar="LINE",
        help='in place of these a long problem of your own, such as "tokens=32768 heads=32 kv_heads=8 head_dim=128 '
        'dtype=bfloat16 causal=true order=zigzag"; rows are sampled',
    )
    top.add_argument(
        "--budget", type=seconds, default=BUDGET, metavar="S",
        help="seconds for shrinking a failure, and for finding others after the first (default: %(default)g)",
    )  # fmt: skip
    top.add_argument(
        "--attention",
        metavar="NAME",
        help="check this peer, or your own package.module:adapter, in place of ring_attention: the same links, drawn "
        "Cases and laws that its claim supports, and long dense problems",
    )
    top.add_argument("--replay", type=Path, metavar="CASE.json", help="run only this saved counter-example")
    cli.add_outputs(top, "the rates of all links, each long problem, the full coverage, each counter-example")
    return top


def main(arguments: Sequence[str] | None = None, prepare: Preparation | None = None) -> int:
    """Run this process and return its exit status. prepare: called first in every rank, also simulated ones."""
    options = parser().parse_args(arguments)
    try:
        address = Address.of(os.environ)
    except (NotUnderTorchrun, ValueError) as error:
        return _refuse(f"this runs under torchrun, which starts the ranks ({error}):\n    {HOW}")
    if address.rank:
        try:
            store = address.store()
            return Agent(address, connect(address, store), options.timeout).serve()
        except RankZeroLost as lost:
            print(f"{MODULE}: the process that torchrun started for rank 0 {lost}", file=sys.stderr, flush=True)
            return 1
        except (OSError, RuntimeError) as error:
            return _refuse(f"rank {address.rank} could not reach rank 0: {error}")
    try:
        agents = Agents(address, options.timeout)
    except (Unavailable, OSError, RuntimeError) as error:
        return _refuse(str(error))
    status = 2
    try:
        status = _serve(options, agents, prepare)
    finally:
        sys.stdout.flush()
        agents.farewell(status)
    return status


def _serve(options: argparse.Namespace, agents: Agents, prepare: Preparation | None) -> int:
    """Run all checks from rank 0, which reports every error; the other processes just exit."""
    signal.signal(signal.SIGTERM, agents.on_sigterm)
    signal.signal(signal.SIGINT, agents.on_sigint)
    extras = {"backend": options.backend, "world": agents.address.world_size}
    report = TorchrunReport(Console(), extras, options.verbose)
    report.attention = options.attention
    if options.attention is not None:
        assert prepare is None, "a defect of this project's attention would not reach another's"
        prepare = partial(ready_peer, options.attention)
    backend = TorchrunBackend(agents, options.backend, options.timeout, prepare)
    shrink_backend = ShrinkBackend(agents, prepare)
    try:
        if options.attention is not None:
            probe(options.attention, ready=peer_experiment.rehearse)
        cli.check_outputs(options)
        if options.replay is not None:
            _replay(options, report, backend)
        else:
            _run(options, report, backend, shrink_backend)
    except (AgentLost, KeyboardInterrupt) as ended:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would lose the report, which takes no time
        if isinstance(ended, AgentLost) and ended.ranks:
            _record_loss(ended, report, backend, options.failures)
        else:  # by the user, or by torchrun, which was told to end
            report.interrupt()
        report.summary()
    except (Unavailable, Refused, OSError) as error:
        return _refuse(str(error))
    except (Exception, ToolError):
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        return _refuse("the test harness itself failed, see above")
    finally:
        shrink_backend.close()
    if options.json is not None:
        world = agents.address.world_size
        command = f"torchrun --nproc-per-node={world} -m {MODULE} {shlex.join(sys.argv[1:])}"
        report.extras |= surroundings("cuda" if options.backend == "nccl" else "cpu", world, command.rstrip())
        try:
            cli.write_json(options.json, report.to_dict())
        except OSError as error:
            return _refuse(f"argument --json: {error}")
    if report.interrupted:
        return _refuse("interrupted")
    return 1 if report.failures else 0


def _refuse(why: str) -> int:
    print(f"{MODULE}: error: {printable(why)}", file=sys.stderr, flush=True)
    return 2


def _record_loss(lost: AgentLost, report: Report, backend: TorchrunBackend, folder: Path) -> None:
    """Save the example that was running, unshrunk: too few ranks are left to shrink it on."""
    last = backend.last
    last = Record("case", last.to_dict()).to_dict() if isinstance(last, Case) else last
    record = last if isinstance(last, dict) else {}
    failure = (RankHang if lost.silent else RankCrash)(
        f"{lost}; the example that was running, if any, is saved as it was drawn, not shrunk"
    )
    world = backend.agents.address.world_size
    report.failed(save_record(failure, "every process stays", world, record, folder, backend.name))


def _run(options: argparse.Namespace, report: Report, backend: TorchrunBackend, shrink_backend: ShrinkBackend) -> None:
    world = backend.agents.address.world_size
    seed = cli.seed_of(options)
    try:
        own = None if options.long_case is None else LongProblem.own(world, options.long_case)
    except ValueError as error:
        raise Unavailable(f"argument --long-case: {error}") from error
    report.extras["seed"] = seed
    report.say(f"{counted(world, 'rank')}, joined by {backend.name}; seed {seed}; repeat this run with --seed {seed}")
    backend.start(world)
    if run_links(report, backend, options.failures):
        profile = replace(runner.PROFILES["quick"], budget=options.budget)
        examples = options.examples or EXAMPLES[backend.name]
        plan = runner.RunPlan((world,), profile, examples, seed, backend.name, options.failures, real_size=0)
        if options.attention is None:
            runner.run_world(plan, report, backend, shrink_backend, world)
        else:
            run_attention(options.attention, plan, report, backend)
        length = LONG[backend.name] if options.long is None else options.long
        if runner.hangs(report.failures):
            report.say(f"ranks hang, so {long_problems.TITLE} are skipped")
        elif own is not None:
            run_long(report, backend, own, options.failures, options.attention)
        elif length:
            for kind in options.long_kinds:
                run_long(report, backend, LongProblem(world, length, kind), options.failures, options.attention)
    else:
        report.say("the links fail, so everything else is skipped")
    report.summary()


def run_attention(name: str, plan: runner.RunPlan, report: Report, backend: TorchrunBackend) -> None:
    """Draw Cases that the peer of that name claims, then Cases of the laws. Failures are shrunk on the ranks
    themselves, since a peer is not simulated."""
    world = backend.agents.address.world_size
    drawn = peer_experiment.experiments(name, world, plan.examples_for(world), device=backend.device)
    report.start_world(world, sum(examples for _, examples in drawn), name)
    for experiment, examples in drawn:
        search = Search(experiment, backend, report, world, plan.profile.budget)
        if runner.explore(plan, report, search, examples):
            break
    report.end_world(name)


def run_links(report: Report, backend: TorchrunBackend, folder: Path) -> bool:
    """Check the links between ranks and return True if they hold."""
    world = backend.agents.address.world_size
    if world == 1:
        report.say(f"{links.TITLE}: none, since there is one rank")
        return True
    report.start_world(world, 1, links.TITLE)
    started = time.perf_counter()

    def run(function: Any, *arguments: Any) -> list[Any]:
        large = any(isinstance(x, int) and x > 2**20 for x in arguments)
        return backend.run(function, *arguments, timeout=max(LARGE_TIMEOUT if large else 0, backend.timeout))

    backend.last = Record("links", links.Links(world).to_dict()).to_dict()
    try:
        rates = links.check_links(run, links.SIZES[backend.name])
    except VerificationFailure as failure:
        report.end_world(links.TITLE)
        report.failed(save_record(failure, links.TITLE, world, backend.last, folder, backend.name))
        return False
    report.held("uint8", {links.TITLE: 0.0}, time.perf_counter() - started)
    report.end_world(links.TITLE)
    report.extras["links"] = [asdict(rate) for rate in rates]
    report.notable.append(links.fastest(rates))
    for line in links.table(rates):
        report.detail(line)
    return True


def run_long(
    report: Report, backend: TorchrunBackend, problem: LongProblem, folder: Path, attention: str | None = None
) -> None:
    """Check a long problem. attention: name of a peer, whose claim may change the Case, but not its mask."""
    case = problem.case(backend.device)
    arguments: tuple[Any, ...] = ()
    if attention is not None:
        claimed = peer_experiment.implementation(attention, backend.device).claims(case)
        if claimed is None or any(
            getattr(claimed, name) != getattr(case, name) for name in ("tokens", "pattern", "dtype")
        ):
            report.say(f"{problem.kind}, {problem.tokens} tokens: {attention} does not claim it")
            return
        case = claimed
        arguments = partial(run_named, attention), partial(peer_experiment.arithmetic_named, attention)
    timeout, started = backend.timeout, time.perf_counter()
    record = Record("long", problem.to_dict()).to_dict()
    report.start_world(problem.world, 1, problem.kind)
    backend.timeout, about = max(LARGE_TIMEOUT, timeout), f"{problem.kind}, {problem.tokens} tokens"
    try:
        backend.submit(long_problems.judge, case, *arguments)
        backend.last = record
        judgements: list[long_problems.Judgement] = backend.collect()
        ratios = long_problems.verdict(problem, judgements)
    except VerificationFailure as failure:
        report.end_world(about)
        report.failed(save_record(failure, long_problems.TITLE, problem.world, record, folder, backend.name))
        return
    finally:
        backend.timeout = timeout
    report.held(case.dtype, {long_problems.TITLE: float(np.max(list(ratios.values())))}, time.perf_counter() - started)
    rows = judgements[0].rows
    about += ", all rows" if rows == case.tokens else f", {rows} sampled rows and their share of dk and dv"
    report.end_world(about)
    seconds, peak = max(x.seconds for x in judgements), max(x.bytes for x in judgements)
    cost = f"forward + backward {seconds:.3f} s, at most {peak / 2**20:.0f} MiB per rank"
    report.notable.append(f"{about}: {cost}")
    report.detail("  worst error / bound " + ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items()))
    report.extras.setdefault("long", []).append(
        problem.to_dict() | {"rows": rows, "worst_ratio": ratios, "seconds": seconds, "bytes": peak}
    )


def _replay(options: argparse.Namespace, report: Report, backend: TorchrunBackend) -> None:
    file: Path = options.replay
    world = backend.agents.address.world_size
    with replays.naming(file, "--replay"):
        problem = parse(replays.read_record(file), options.attention).case
        if isinstance(problem, links.Links) and problem.world != world:
            raise ValueError(f"it was found on {counted(problem.world, 'rank')}; torchrun must start as many")
    if not isinstance(problem, (links.Links, LongProblem)):
        replays.replay(file, report, backend, "--replay", options.attention)
        return
    backend.start(problem.world)
    if isinstance(problem, LongProblem):
        run_long(report, backend, problem, options.failures, options.attention)
    else:
        run_links(report, backend, options.failures)
    report.summary(replayed=True)


if __name__ == "__main__":
    sys.exit(main())
