"""One rank's part in an example of serving: the calls in order, with the cache that each returns to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Transport
from verification.peers.side_effects import left_as_they_were
from verification.run.observation import Floats, to_numpy
from verification.serving.server import ready_server
from verification.serving.serving_case import ServingCase


@dataclass(frozen=True, eq=False)
class ServingObservation:
    """Results of one rank, by call and name, and names of their types. spoilt: calls that changed their inputs."""

    results: list[dict[str, Floats]] = field(default_factory=list)
    dtypes: list[dict[str, str]] = field(default_factory=list)
    spoilt: list[int] = field(default_factory=list)


def serve(transport: Transport, case: ServingCase, name: str) -> ServingObservation:
    """Task: make the calls of the server of that name. Raises Malformed for a malformed result."""
    server, observation, cache = ready_server(name), ServingObservation(), None
    group = transport.group if isinstance(transport, ProcessGroupTransport) else None
    device = torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")
    for call, tensors in zip(case.calls_of(transport.rank), case.tensors(), strict=True):
        inputs = [x.to(device) for x in tensors]
        copies = [x.clone() for x in inputs]
        with torch.no_grad(), left_as_they_were(f"step of {server.name}"):
            returned = server.step(cache, *inputs, call, group)
        cache, results = server.results_of(returned, case, len(inputs[0]))
        observation.results.append({result: to_numpy(x).copy() for result, x in results.items()})
        observation.dtypes.append({result: str(x.dtype).removeprefix("torch.") for result, x in results.items()})
        if not all(map(torch.equal, inputs, copies)):
            observation.spoilt.append(call.number)
    return observation
