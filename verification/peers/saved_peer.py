"""Saved counter-examples of peers: {"peer": name, "case": ...}, with a law also {"law": title, "how": ...}."""

from __future__ import annotations

from functools import partial
from typing import Any

from reference import validators
from verification.peers.known_peers import FORM, load
from verification.peers.peer_experiment import LAWS_OF_ANY, attend_of, experiment, law_of
from verification.peers.peer_rank import prepare
from verification.replay.records import read_case
from verification.replay.registry import Saved, SavedExample, experiment_with
from verification.run.backends import Backend, Unavailable


class SavedPeerExample(SavedExample):
    """A counter-example that runs the Case as saved, without applying the peer's claim."""

    def prepare(self, backend: Backend) -> None:
        if backend.name == "sim":
            raise Unavailable(f"argument --backend: a peer needs torch.distributed, on gloo; got {backend.name}")
        self.prepare_ranks(backend)

    def prepare_ranks(self, backend: Backend) -> None:
        name = self.record["peer"]
        backend.timeout, backend.prepare = max(backend.timeout, load(name).timeout), partial(prepare, name)
        backend.calls = attend_of(name)


def read_peer_example(record: dict[str, Any]) -> Saved:
    """Read a saved record. Raises ValueError if it is malformed or its peer cannot be loaded."""
    if "law" not in record:
        validators.exactly("a counter-example of a peer", record, ["peer", "case"])
        case = read_case(record["case"])
        return SavedPeerExample(experiment_with(record, "peer", FORM, experiment), case, record)
    validators.exactly("a counter-example of a law with a peer", record, ["peer", "law", "case", "how"])
    laws = {law.name: law for law in LAWS_OF_ANY}
    validators.choice("law", record["law"], tuple(laws))
    law, case = laws[record["law"]], read_case(record["case"])
    law.validate(case, record["how"])
    experiment_of = partial(law_of, law=law)
    return SavedPeerExample(experiment_with(record, "peer", FORM, experiment_of), (case, record["how"]), record)
