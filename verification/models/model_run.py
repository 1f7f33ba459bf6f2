"""Runs a user's Setup on drawn ModelCases: `python -m verification model`, and `check_model` for tests."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from hypothesis.strategies import SearchStrategy

from verification import runner
from verification.case import TILE
from verification.check.properties import broken_by
from verification.console import Console
from verification.experiments import on_gpus
from verification.failures import RankFailure, Refused, WrongResult
from verification.models.first_module import describe_first_difference
from verification.models.loading import import_from_here, import_name, load, told, with_users_frames
from verification.models.model_case import ModelCase
from verification.models.model_checks import MODEL_GROUPS, check_model_step
from verification.models.observation import ModelObservation
from verification.models.probing import Facts, probe
from verification.models.same_bits import SAME_WEIGHTS, check_same_bits, describe_cause
from verification.models.setup import Misuse
from verification.models.step_case import Split, StepCase
from verification.models.strategies import chunked_cases, has_labels, if_valid, model_cases, other_splits
from verification.report.coverage import Coverage
from verification.report.report import Report
from verification.run.backends import PRELOAD, Backend, PoolBackend, Task, open_backend
from verification.runner import Profile, RunPlan
from verification.search.claim import apply_claim
from verification.search.experiment import Experiment, ToolError
from verification.search.search import Search

AnyStepCase = TypeVar("AnyStepCase", bound=StepCase)
MODEL_WORLDS = (1, 2, 3, 4)
MAX_CHUNKED = 4096  # tokens of a sequence
STEP_BACKENDS = ("gloo", "nccl")
# Ranks preload these modules: their import takes longer than an example.
STEP_PRELOAD = (
    *PRELOAD, "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch._dynamo.backends.debugging", "torch._inductor.lowering",  # imported by the first compilation
)  # fmt: skip
PROFILE = Profile("for each world size", 30, budget=30.0)
TIMEOUT = 20.0  # seconds for an example


class AloneBackend(PoolBackend):
    """One process, which computes the expected results while the ranks train, by definitions in place of `ring`. It
    imports the user's module after these."""

    name = "alone"

    def submit(self, task: Task, *arguments: Any) -> None:
        if self._pool is None:
            self.open_pool(1)
        self._under_way = self.prepared().submit(task, *arguments), arguments[0]

    def collect(self) -> Any:
        return self.answers(self.timeout)[1][0]


class ModelExperiment:
    """Checks of the Setup of that name. only: titles of the properties to check; all if empty. same_bits: tokens of a
    chunk, with which Cases with other ranks are drawn; None: without. Raises Refused for one that cannot be loaded."""

    def __init__(
        self, name: str, facts: Facts | None = None, only: Sequence[str] = (), same_bits: int | None = None
    ) -> None:
        load(name)
        self.name, self.facts, self.only, self.same_bits = name, facts, only, same_bits
        self.alone = AloneBackend(TIMEOUT, partial(begin_alone, name), STEP_PRELOAD)

    def close(self) -> None:
        """End the process beside those of the backend."""
        self.alone.close()

    def draw(self, world: int) -> SearchStrategy[ModelCase | None]:
        if self.same_bits is None:
            return model_cases(world).map(self._nearest).filter(has_labels)
        cases = chunked_cases(world, self.same_bits).map(self._nearest).filter(has_labels)
        return cases.flatmap(other_splits).map(self._on_supported_ranks).filter(bool)  # type: ignore[arg-type]

    def _on_supported_ranks(self, case: ModelCase) -> ModelCase | None:
        """Return the Case with the nearest other ranks that the Setup supports; None if they are the Case's own."""
        nearest = None if case.other_ranks is None else self._nearest(case.elsewhere)
        if nearest is None or nearest == replace(case, other_ranks=None):
            return None
        split = Split(**{field.name: getattr(nearest, field.name) for field in fields(Split)})
        case = if_valid(case, other_ranks=split)
        return case if case.other_ranks == split and case.elsewhere == nearest else None

    def _nearest(self, case: ModelCase) -> ModelCase | None:
        if self.facts is not None:
            case = self.facts.nearest(case)
        setup = load(self.name)
        case = replace(
            case, held=case.held if setup.evaluates else 0, resumed_after=case.resumed_after if setup.resumes else 0
        )
        nearest = apply_claim(self.name, setup.claims, case)
        if nearest is not None and nearest.resumed_after:
            before = nearest.before()
            if apply_claim(self.name, setup.claims, before) != before:
                return replace(nearest, resumed_after=0)
        return nearest

    def validate(self, case: ModelCase) -> None:
        """Raises ValueError for a ModelCase that cannot be drawn."""
        own = replace(case, other_ranks=None)
        supported = self._nearest(own) == own and has_labels(case)
        if self.same_bits is not None:
            supported &= case.same_bits in (self.same_bits, None) and case.other_ranks is not None
            supported = supported and self._on_supported_ranks(case) == case
        if not supported:
            raise ValueError(f"the Setup {self.name} does not support {case}")

    def check(self, backend: Backend, case: ModelCase) -> dict[str, float]:
        expectation, observations = self._results(backend, case)
        ratios = check_model_step(case, expectation, observations, self.only)
        if SAME_WEIGHTS.concerns(case) and (not self.only or SAME_WEIGHTS.title in self.only):
            ratios |= self._check_same_bits(backend, case, observations)
        return ratios

    def _check_same_bits(
        self, backend: Backend, case: ModelCase, observations: Sequence[ModelObservation]
    ) -> dict[str, float]:
        from verification.models.steps import train_on_rank

        try:
            others = backend.beside(case.elsewhere.world)
            others.submit(train_on_rank, case.elsewhere, self.name, False, "", case)
            elsewhere = others.collect()
        except RankFailure as failure:
            raise self._explained(failure) from None
        try:
            return check_same_bits(case, observations, elsewhere, case.accumulation == case.elsewhere.accumulation)
        except WrongResult as failure:
            failure.add_note(describe_cause(case, observations, elsewhere, str(failure.quantity)))
            raise

    def cause(self, backend: Backend, case: ModelCase) -> str | None:
        """Return a sentence on the first module that differs in a failing example; None if a process fails."""
        wide = replace(case, dtype="float64") if self.facts is not None and self.facts.fp64 else case
        wide = replace(wide, held=0, resumed_after=0)
        with suppress(RankFailure, ToolError):
            if case.resumed_after and self._holds(backend, wide):
                return "without the checkpoint the run is that of one process: the cause is in its saving or loading"
            return describe_first_difference(wide, *self._results(backend, wide, True))
        return None

    def _holds(self, backend: Backend, case: ModelCase) -> bool:
        try:
            self.check(backend, case)
        except WrongResult:
            return False
        return True

    def _results(self, backend: Backend, case: ModelCase, traced: bool = False) -> Any:
        """Return the expectation and the ranks' observations. Raises ToolError for faults of the Setup that are no
        counter-examples: those in one process, and results that are malformed on ranks."""
        from verification.models.steps import expect  # lazy: importing FSDP slows every command

        self.alone.submit(expect, case, self.name, traced)
        failure, observations = self._on_ranks(backend, case, traced)
        try:
            expectation = self.alone.collect()
        except RankFailure as alone:
            raise ToolError(f"{self.name}, in one process: {told(alone)}; the example is {case.to_dict()}") from None
        if failure is None:
            return expectation, observations
        raise self._explained(failure)

    def _explained(self, failure: RankFailure) -> RankFailure:
        """Return a failure of ranks with the user's frames alone. Raises ToolError for malformed results."""
        misuse = [state.detail for state in failure.states if f"{Misuse.__qualname__}: " in state.detail]
        if misuse:
            raise ToolError(f"{self.name}: {misuse[0].partition(f'{Misuse.__qualname__}: ')[2]}")
        return with_users_frames(failure)

    def _on_ranks(
        self, backend: Backend, case: ModelCase, traced: bool
    ) -> tuple[RankFailure | None, Sequence[ModelObservation]]:
        """Train on the ranks, from a checkpoint of other ranks if the Case has one. Return a failure, not raised."""
        from verification.models.steps import train_on_rank

        with TemporaryDirectory(prefix="ring-checkpoint-") as folder:
            try:
                if case.resumed_after:
                    self._save(backend, case, folder)
                backend.submit(train_on_rank, case, self.name, traced, folder)
                return None, backend.collect()
            except RankFailure as failure:
                return failure, ()

    def _save(self, backend: Backend, case: ModelCase, folder: str) -> None:
        from verification.models.steps import save_on_rank

        others = backend.beside(case.before().world)
        others.submit(save_on_rank, case.before(), self.name, case, folder)
        others.collect()

    def experiment(self) -> Experiment:
        return Experiment(
            f"model {self.name}", self.draw, self.check,
            moved=on_device, kind="model", names={"model": self.name}, timeout=TIMEOUT, preload=list_preload(self.name),
            on_fewer=True, fewest_ranks=1 if self.same_bits is None else 2, validate=self.validate,
            explain=self._explain,
        )  # fmt: skip

    def _explain(self, failure: WrongResult, backend: Backend, case: ModelCase, first: ModelCase) -> str | None:
        return None if broken_by(failure) == SAME_WEIGHTS.title else self.cause(backend, case)


def on_device(case: AnyStepCase, device: str) -> AnyStepCase:
    return replace(case, device=device)


def begin_alone(name: str) -> None:
    """Prepare the one process. Import the user's module here, not in an example, whose time is limited."""
    # Import both here: after a test has planted a mistake, they are those of the edited project.
    from verification.models.definitions import replace_ring
    from verification.models.loading import load

    replace_ring()
    load(name)


def list_preload(name: str) -> tuple[str, ...]:
    """Modules that ranks preload: the user's own, whose import may take longer than an example."""
    import_from_here()
    return (*STEP_PRELOAD, "verification.models.steps", name.partition(":")[0])


def run_model(name: str, plan: RunPlan, report: Report, same_bits: int | None = None) -> Report:
    """Probe the Setup, and run all world sizes; failures go to the report. same_bits: tokens of a chunk, with which
    steps run on other ranks, too. Raises Refused for a Setup that cannot be run, and for arguments that do not fit
    `same_bits`; ToolError for a Setup whose functions fail in one process or return something else than they must."""
    if same_bits is not None:
        _check_chunk(same_bits, plan)
    elif SAME_WEIGHTS.title in plan.only:
        raise Refused(f"only is {SAME_WEIGHTS.title!r}, which does not apply without --same-bits")
    facts = probe(name)
    run = ModelExperiment(name, facts, plan.only, same_bits)
    backend = open_backend(plan.backend)
    experiment = on_gpus(run.experiment()) if backend.name == "nccl" else run.experiment()
    experiment.prepare(backend)
    report.coverage = Coverage(groups=MODEL_GROUPS)
    if not facts.fp64:
        report.say("the model does not compute in fp64, so all examples are in fp32")

    def examine(world: int) -> bool:
        search = Search(experiment, backend, report, world, plan.profile.budget, plan.profile.remembers)
        failures = runner.explore(plan, report, search, plan.examples_for(world))
        if not failures and not search.examples:
            raise Refused(f"{name} supports none of the ModelCases drawn on {world} ranks")
        report.end_world(name)
        return bool(failures)

    with closing(run):
        runner.run_worlds(plan, report, backend, examine, first_failure=True)
    report.summary()
    return report


def tile_of(backend: str) -> int:
    """Return the tokens of which a chunk is a multiple. backend: "gloo" or "nccl"."""
    return TILE["cuda" if backend == "nccl" else "cpu"]


def _check_chunk(chunk: int, plan: RunPlan) -> None:
    """Raise Refused for a length of chunks, or ranks, of which no ModelCases with other ranks can be drawn."""
    tile = tile_of(plan.backend)
    if min(plan.worlds) < 2:
        listed = ",".join(map(str, plan.worlds))
        raise Refused(f"--same-bits compares N ranks with 1 to N: each of --world must be at least 2, got {listed}")
    longest = MAX_CHUNKED // max(6, *plan.worlds) // tile * tile
    if chunk % tile or not 0 < chunk <= longest:
        raise Refused(f"--same-bits must be a multiple of {tile} tokens, up to {longest}, got {chunk}")


def check_model(
    setup: object,
    *,
    examples: int = PROFILE.examples,
    worlds: Sequence[int] | None = None,
    seed: int = 0,
    only: Sequence[str] = (),
    failures: Path = Path(".verification/failures"),
    same_bits: int | None = None,
) -> None:
    """Check a user's model and training step against one process, on drawn ModelCases; for tests.

    Args:
        setup: a function `build(context)`, a Setup, or "module:attribute": an attribute of an importable module.
        examples: number of examples for each world size.
        worlds: numbers of ranks, each 1 .. 64. The first with a counter-example is the last that is run. None: 1, 2,
            or with `same_bits` 2, 3.
        seed: of the draws.
        only: titles of properties to check; empty: all.
        failures: folder for counter-examples.
        same_bits: tokens of a chunk, with which each step must have the same bits on other ranks; None: it need not.

    Raises:
        AssertionError: a counter-example was found. The message is the report.
        Refused: the Setup cannot be imported, built or called, or supports none of the ModelCases drawn on a
            world size.
        ToolError: a function of the Setup fails in one process, or returns something else than it must.
        Unavailable: processes cannot be started.
    """
    printed = io.StringIO()
    worlds = worlds or ((1, 2) if same_bits is None else (2, 3))
    plan = RunPlan(tuple(worlds), PROFILE, examples, seed, "gloo", failures, only=tuple(only))
    if run_model(import_name(setup), plan, Report(Console(printed)), same_bits).failures:
        raise AssertionError(printed.getvalue())
