"""Saved counter-examples of peers, {"peer": name, "case": ...}: importing this module makes them readable."""

from __future__ import annotations

from functools import partial
from typing import Any

from reference import fields
from verification.peers.known_peers import KNOWN
from verification.peers.peer import Refused
from verification.peers.peer_experiment import experiment
from verification.peers.peer_rank import prepare
from verification.replay.records import read_case
from verification.replay.registry import Saved, SavedExample, register
from verification.run.backends import Backend, Unavailable


class SavedPeerExample(SavedExample):
    """The Case is run as it was saved, without asking the peer's claim."""

    def prepare(self, backend: Backend) -> None:
        if backend.name != "gloo":
            raise Unavailable(f"argument --backend: a peer needs torch.distributed, on gloo; got {backend.name}")
        backend.prepare = partial(prepare, self.record["peer"])


def read_peer_example(record: dict[str, Any]) -> Saved:
    """Raises ValueError for a malformed record, and for a peer that cannot be loaded."""
    fields.exactly("a counter-example of a peer", record, ["peer", "case"])
    case, name = read_case(record["case"]), record["peer"]
    if not isinstance(name, str):
        raise ValueError(f"peer is {name!r}; it must be package.module:adapter, or one of {', '.join(KNOWN)}")
    try:
        return SavedPeerExample(experiment(name), case, record)
    except Refused as error:
        raise ValueError(str(error)) from error


register("peer", read_peer_example)
