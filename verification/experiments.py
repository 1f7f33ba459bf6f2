"""The experiments of the main job: plain examples, and the laws between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from verification.case import Case
from verification.check import properties
from verification.check.attention_on_ranks import OURS, AttentionOnRanks, Implementation
from verification.check.checks import CHECKS
from verification.check.laws import Law
from verification.check.supported import check_supported
from verification.run.backends import Backend
from verification.run.rank import observe
from verification.search.experiment import Experiment
from verification.strategies.cases import cases_and_chunks


def check_case(backend: Backend, case: Case, names: Sequence[str] = tuple(CHECKS)) -> dict[str, float]:
    """Check the properties of one Case that these checks make up. Computes the expectation while the ranks work."""
    backend.submit(observe, case)
    expectation = properties.prepare(case)
    return properties.check(case, expectation, backend.collect(), names)


def check_errors(backend: Backend, case: Case) -> dict[str, float]:
    """Check the properties of the ranks, without oracle agreement: its ratio is no error of the ranks."""
    backend.submit(observe, case)
    expectation = properties.prepare_ranks(case)
    return properties.check(case, expectation, backend.collect(), properties.OF_THE_RANKS)


EXAMPLES = Experiment("examples", cases_and_chunks, check_case, validate=check_supported)

# A separate experiment, since its Cases are much alike: if half of the EXAMPLES were drawn around one Case, rare Cases
# would be missed.
LARGER_ERRORS = replace(EXAMPLES, name="examples with larger errors", check=check_errors, targets_error=True)


def law_experiment(law: Law, attention: Implementation = OURS) -> Experiment:
    """Return the experiment of a law. Its subjects are pairs (Case, how), and each failure breaks the law itself."""
    return Experiment(
        law.name,
        law.draw,
        check=lambda backend, subject: {law.name: law.check(AttentionOnRanks(backend, attention), *subject)},
        kind="law",
        names={"law": law.name},
        property_of=lambda subject, failure: law.name,
        fewest_ranks=law.fewest_ranks,
        validate=lambda subject: law.validate(*subject),
    )


def on_gpus(experiment: Experiment) -> Experiment:
    """Return the experiment with its Cases on GPUs."""
    change = partial(experiment.placed, device="cuda")
    return replace(experiment, draw=lambda world: experiment.draw(world).map(change))
