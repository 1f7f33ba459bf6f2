"""One rank's part in an example of serving: the calls in order, with the cache that each returns to the next."""

from __future__ import annotations

import torch

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Transport
from verification.failures import Malformed
from verification.peers.side_effects import left_as_they_were
from verification.run.observation import Floats, to_numpy
from verification.serving.server import ready_server
from verification.serving.serving_case import ServingCase

Results = list[dict[str, Floats]]  # of one rank, by call and name


def serve(transport: Transport, case: ServingCase, name: str) -> Results:
    """Task: make the calls of the server of that name. Raises Malformed for what a step may not do or return."""
    server, collected, cache = ready_server(name), Results(), None
    group = transport.group if isinstance(transport, ProcessGroupTransport) else None
    device = torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")
    for call, tensors in zip(case.calls_of(transport.rank), case.tensors(), strict=True):
        inputs = [x.to(device) for x in tensors]
        copies = [x.clone() for x in inputs]
        with torch.no_grad(), left_as_they_were(f"step of {server.name}"):
            returned = server.step(cache, *inputs, call, group)
        if not all(map(torch.equal, inputs, copies)):
            raise Malformed(f"step of {server.name} changed its inputs in call {call.number}")
        cache, results = server.results_of(returned, case, len(inputs[0]))
        collected.append({result: to_numpy(x).copy() for result, x in results.items()})
    return collected
