"""A right server holds; one with a fault of a public engine is found, with the cause; malformed results are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.drawing import draw_many
from tests.support.serving_faults import FAULTS
from verification.failures import Refused, VerificationFailure
from verification.run.backends import GlooBackend
from verification.serving import ServingCase
from verification.serving.server import load_server
from verification.serving.serving_experiment import serving_experiment
from verification.serving.strategies import serving_cases

pytestmark = pytest.mark.ranks

SMALL = ServingCase(world=2, block=2, calls=((1, 5), (4, 1)), heads=2)
FOUND = {  # the end of each fault's cause
    "replicated_slots": "the owners and slots of sharded ones (vllm-project/vllm#57260)",
    "stale_lengths": "a call read the lengths of an earlier call (vllm-project/vllm#36070)",
    "padded_prefix": "new tokens that are padded, no less than 0 (sgl-project/sglang#23415)",
    "shard_positions": "compared queries with places in the rank's shard (sgl-project/sglang#32098)",
    "contiguous_queries": "strided queries were taken for contiguous (sgl-project/sglang#27276)",
    "lse_of_garbage": "its lse is not -inf (vllm-project/vllm#34355)",
    "negative_modulo": "a negative modulo (NVIDIA/TensorRT-LLM#17795)",
    "zero_times_nan": "a rank without a key has weight 0, and output NaN (ROCm/ATOM#1832)",
    "only_merged_nan": "a rank without a key has weight 0, and output NaN (ROCm/ATOM#1832)",
    "base_2": "partial_lse were in base 2",
    "merged_in_base_2": "partial_lse were in base 2",
}


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[GlooBackend]:
    """Return a backend of as many ranks as the parameter says."""
    backend = GlooBackend()
    backend.start(request.param)
    yield backend
    backend.close()


def first_cause(backend: GlooBackend, name: str) -> str | None:
    """Return the cause of the first drawn case that fails, "" if none is found; None if all hold."""
    experiment = serving_experiment(f"{FAULTS}:{name}")
    for case in draw_many(serving_cases(backend.prepared().world_size), 20):
        try:
            assert set(experiment.check(backend, case)) >= {"merged results"}
        except VerificationFailure as failure:
            experiment.add_cause(failure, backend, case, case)
            return "".join(getattr(failure, "__notes__", ()))
    return None


@pytest.mark.parametrize("backend", [1, 2, 3], indirect=True)
def test_a_right_server_holds(backend: GlooBackend) -> None:
    assert first_cause(backend, "right") is None


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("backend", [2, pytest.param(3, marks=pytest.mark.slow)], indirect=True)
def test_each_fault_is_found_with_its_cause(backend: GlooBackend, name: str) -> None:
    cause = first_cause(backend, name)
    assert cause is not None and cause.startswith("cause: ") and cause.endswith(FOUND[name]) and "; or" not in cause


@pytest.mark.parametrize("backend", [2], indirect=True)
def test_no_cause_is_named_for_an_unknown_mistake(backend: GlooBackend) -> None:
    assert first_cause(backend, "halves") == ""


@pytest.mark.parametrize("backend", [2], indirect=True)
@pytest.mark.parametrize(
    "name, said",
    [
        ("no_partials", "step returned the results out; `returns` promises out, lse, partial_out, partial_lse"),
        ("heads_first", r"out of shape \(2, 6, 4\); it must be a tensor of shape \(6, 2, 4\), .tokens, heads, head"),
        ("of_integers", "step returned lse in int64 with layout strided on cpu; it must be dense float32 on cpu"),
        ("spoils", "step of my server changed its inputs in call 0"),
        ("zero_times_nan", "partial_out is nan .*, expected 0.0 within 0: the query sees no key of the rank"),
        ("lse_of_garbage", "partial_lse is 0.4375 .*, expected -inf within 0: the query sees no key of the rank"),
    ],
)
def test_malformed_results_are_named(backend: GlooBackend, name: str, said: str) -> None:
    with pytest.raises(VerificationFailure, match=said):
        serving_experiment(f"{FAULTS}:{name}").check(backend, SMALL)


def test_refuses_what_is_no_server() -> None:
    with pytest.raises(Refused, match=r"it must be a verification\.serving\.Server; .* has right, "):
        load_server(f"{FAULTS}:CODE")
    with pytest.raises(Refused, match=r"'mine' is no server; it must be package\.module:server"):
        load_server("mine")


def test_refuses_a_wrong_declaration() -> None:
    for changes, said in (
        ({"returns": ("lse",)}, 'returns is .*; it must be a tuple of "out", and of lse, partial_out, partial_lse'),
        ({"returns": ("out", "partial_lse")}, "it must have both partial_out and partial_lse, or neither"),
        ({"step": lambda q, k, v: None}, r"it must be called as step\(cache, q, k, v, call, group\)"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(load_server(f"{FAULTS}:right"), **changes)
