"""The table of replayers, by kind of record (`verification.record_kinds`), and the reader of records.

A record may have been edited, or come from elsewhere: every field is validated. It imports no module that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reference import validators
from verification.check.laws import LAWS
from verification.check.laws.law import Law
from verification.experiments import EXAMPLES, law_experiment
from verification.failures import Refused
from verification.faults.fault_experiment import FAULTS, validate_fault
from verification.models.model_case import ModelCase
from verification.models.model_run import ModelExperiment
from verification.peers.peer_experiment import LAWS_OF_ANY, peer_law
from verification.peers.peer_experiment import experiment as peer_experiment
from verification.peers.training.step_peer_experiment import step_experiment
from verification.problems.links import Links
from verification.problems.real_size import RealSizeProblem
from verification.record_kinds import KINDS, OPTIONS, Record
from verification.replay.limits import read_case, read_long, read_own_case
from verification.replay.saved import Replayer, Saved, run_real_size
from verification.serving.serving_case import ServingCase
from verification.serving.serving_experiment import serving_experiment
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING

OWN_ADAPTERS = "verification.peers.adapters."  # these modules may be named by a file


def _law(name: Any, laws: Sequence[Law]) -> Law:
    return {law.name: law for law in laws}[validators.choice("law", name, [law.name for law in laws])]


# A peer or a model runs the case as saved, without applying a claim.
REPLAYERS = {
    "case": Replayer(read_own_case, lambda: EXAMPLES),
    "law": Replayer(
        read_own_case, lambda law: law_experiment(_law(law, LAWS)),
        lambda case, how, law: _law(law, LAWS).validate(case, how),
    ),
    "peer": Replayer(read_case, peer_experiment),
    "peer law": Replayer(
        read_case, lambda peer, law: peer_law(peer, _law(law, LAWS_OF_ANY)),
        lambda case, how, peer, law: _law(law, LAWS_OF_ANY).validate(case, how),
    ),
    "step peer": Replayer(TrainingCase.from_dict, step_experiment),
    "training": Replayer(TrainingCase.from_dict, lambda: TRAINING),
    "model": Replayer(ModelCase.from_dict, lambda model: ModelExperiment(model).experiment()),
    "server": Replayer(ServingCase.from_dict, serving_experiment),
    "fault": Replayer(read_case, lambda: FAULTS, validate_fault),
    "real size": Replayer(RealSizeProblem.from_dict, run=run_real_size),
    "links": Replayer(Links.from_dict, run=None),
    "long": Replayer(read_long, run=None),
}  # fmt: skip


def parse(data: object, attention: str | None = None) -> Saved:
    """Return the counter-example of a JSON record.

    Args:
        data: as saved.
        attention: name of a peer, or of a Setup of a model, that runs it in place of the one that the record names.

    Raises:
        ValueError: no counter-example; or one of a user's own module, which only `attention` may name, since data
            imports nothing.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a counter-example must be a JSON object, got {type(data).__name__}")
    record = Record.from_dict(data)
    if attention is None:
        _refuse_modules(record.names)
    else:
        record = _with_attention(record, attention)
    replayer, names = REPLAYERS[record.kind], record.names
    for field, name in names.items():
        validators.text(field, name)
    case = replayer.read(record.case)
    try:
        experiment = replayer.experiment(*names.values()) if replayer.experiment else None
    except Refused as error:
        raise ValueError(str(error)) from error
    replayer.validate(case, record.how, *names.values())
    example = Saved(record, case, experiment, replayer.run)
    return example if record.before == () else _after(example, record.before, attention)


def _after(example: Saved, before: Any, attention: str | None) -> Saved:
    """Return the counter-example with the examples before it, None where these are not known. Raises ValueError."""
    if not (before is None or isinstance(before, list)) or example.experiment is None:
        raise ValueError("before must be null, or a list of examples, in the record of an example")
    examples = tuple(parse(earlier, attention) for earlier in before or ())
    if any(x.experiment is None or x.before != () or x.world != example.world for x in examples):
        raise ValueError(f"an entry of before must be an example on {example.world} ranks, without a before")
    return replace(example, before=None if before is None else examples)


def _refuse_modules(names: Mapping[str, Any]) -> None:
    """Raise ValueError for a user's own module."""
    for field, option in OPTIONS.items():
        name = names.get(field)
        if isinstance(name, str) and ":" in name and not name.startswith(OWN_ADAPTERS):
            raise ValueError(
                f"{field} is {name!r}, and a replay imports no module that a file names; if it is yours, "
                f"write {option} {name}"
            )


def _with_attention(record: Record, attention: str) -> Record:
    """Return the record with that attention. Raises ValueError for one of a kind that no other attention can run."""
    kind = KINDS[record.kind].attention
    if kind is None:
        raise ValueError(f"it is {KINDS[record.kind].title}, which --attention cannot run")
    names = {field: attention if field in OPTIONS else record.names[field] for field in KINDS[kind].names}
    return replace(record, kind=kind, names=names)
