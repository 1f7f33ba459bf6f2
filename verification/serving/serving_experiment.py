"""A server as an Experiment: ServingCases mapped by its claim, with the checks of any server."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis.strategies import SearchStrategy

from verification.check.properties import run_checks
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.search.claim import apply_claim
from verification.search.experiment import Experiment
from verification.serving.causes import find_cause
from verification.serving.expected import ServingExpectation, expect
from verification.serving.server import Server, load_server, ready_server
from verification.serving.serving_case import ServingCase
from verification.serving.serving_checks import SERVING_CHECKS, SERVING_PROPERTIES, Observations
from verification.serving.serving_rank import serve
from verification.serving.strategies import serving_cases


def serving_experiment(name: str, device: str = "cpu", only: tuple[str, ...] = ()) -> Experiment:
    """Return the Experiment with the server of that name. only: titles of properties; (): all. Raises Refused."""
    server = load_server(name)
    claim = partial(claimed_serving, server, device=device)
    wanted = {check for p in SERVING_PROPERTIES if not only or p.title in only for check in p.checks}
    checks = {name: check for name, check in SERVING_CHECKS.items() if name in wanted}

    def run(backend: Backend, case: ServingCase) -> tuple[ServingExpectation, Observations]:
        backend.submit(serve, case, name)
        expectation = expect(server, case)  # computed while the ranks work
        return expectation, backend.collect()

    def check_case(backend: Backend, case: ServingCase) -> dict[str, float]:
        return run_checks(SERVING_PROPERTIES, checks, case, *run(backend, case))

    def draw(world: int) -> SearchStrategy[ServingCase | None]:
        return serving_cases(world).map(claim).filter(lambda case: case is not None)

    def validate(case: ServingCase) -> None:
        if claim(case) != case:
            raise ValueError(f"{case} is no case of {server.name}: {server.supported}")

    def explain(failure: WrongResult, backend: Backend, minimal: ServingCase, first: ServingCase) -> str | None:
        return find_cause(server, run, claim, backend, minimal)

    return Experiment(
        f"server {server.name}", draw, check_case, moved=lambda case, device: replace(case, device=device),
        kind="server", names={"server": name}, validate=validate, explain=explain, timeout=server.timeout,
        prepare_rank=partial(ready_server, name), calls=f"step of {name}", on_fewer=True,
    )  # fmt: skip


def claimed_serving(server: Server, case: ServingCase, device: str = "cpu") -> ServingCase | None:
    """Return the nearest case on that device that the server claims, or None. Raises ToolError, as `apply_claim`."""
    if case.world not in server.worlds:
        return None
    return apply_claim(server.name, server.claims, replace(case, device=device))
