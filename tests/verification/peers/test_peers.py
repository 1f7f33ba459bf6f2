"""Examples of peers: each fault is reported as what it is, and sound ones hold."""

from __future__ import annotations

import io
import random
import signal
from dataclasses import replace

import pytest
import torch

from reference import Pattern
from tests.support.peer_examples import EXAMPLES
from tests.support.plain_case import PLAIN
from verification.case import Case, Keys
from verification.console import Console
from verification.failures import Malformed, VerificationFailure
from verification.peers.known_peers import load
from verification.peers.peer_experiment import experiment, experiments, nearest_claimed
from verification.peers.peer_rank import RUNS
from verification.peers.side_effects import SETTINGS, left_as_they_were, must_leave_nothing
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.search.search import Search

pytestmark = pytest.mark.ranks

SCORED = replace(PLAIN, sinks="some", softcap=2.0, value_dim=3)
KEPT = ("tensors? more", "1 tensor", "autograd node", "1 thread", "1 open file", "1 child", "bytes more", "1 storage")
PACKED = replace(PLAIN, tokens=7, pattern=Pattern.dense(True, (3, 0, 4)))


@pytest.mark.parametrize(
    "name, case, check, said",
    [
        ("raises", PLAIN, "every rank answers", "never in this life"),
        ("returns_none", PLAIN, "every rank answers", "attend returned None as out; it must be a tensor of shape"),
        ("no_lse", PLAIN, "every rank answers", "attend returned no lse, and the claim has lse 'differentiated'"),
        ("unconnected", PLAIN, "every rank answers", "no gradient reaches v: the result of attend does not depend on"),
        ("drops_sinks", SCORED, "every rank answers", "no gradient reaches sinks: the result of attend"),
        (
            "transposed", PLAIN, "every rank answers",
            r"out of shape \(2, 2, 5, 4\); it must be \(2, 5, 2, 4\).* return out.transpose.1, 2., or set heads_first=",
        ),
        ("wide", PLAIN, "types, shapes, finite", "out of rank 0 is float32, not bfloat16"),
        ("spoils", PLAIN, "inputs intact, repeatable", "inputs: changed"),
        ("forgets", PLAIN, "inputs intact, repeatable", "a second run"),
        ("detached", PLAIN, "gradients", "dv is"),
        ("of_last_call", replace(PLAIN, again="between"), "inputs intact, repeatable", "a second run"),
        ("of_last_call", replace(PLAIN, again="pipelined"), "inputs intact, repeatable", "a second run"),
        ("only_in_training", replace(PLAIN, again="no_grad"), "output and lse", "out is"),
        ("only_in_training", replace(PLAIN, again="kv"), "output and lse", "out is"),
        ("has_side_effects", replace(PLAIN, seed=1), "every rank answers", "attend of mine changed .*: autocast on"),
        *(
            ("has_side_effects", replace(PLAIN, seed=16 * seed), "every rank answers", f"mine leaves .*{said}")
            for seed, said in enumerate(KEPT, 1)
        ),
        ("has_side_effects", replace(PLAIN, seed=12), "every rank answers", "the backward of mine .*torch's random"),
        ("in_integers", PLAIN, "every rank answers", "returned out in int32 with layout strided on cpu; it must be"),
        ("unpacked", PACKED, "output and lse", "out is"),
        ("wrong_lse", PLAIN, "output and lse", "lse is"),
    ],
)  # fmt: skip
def test_each_fault_is_reported_as_what_it_is(
    backend: GlooBackend, name: str, case: Case, check: str, said: str
) -> None:
    found, nearest = experiment(f"{EXAMPLES}:{name}"), nearest_claimed(load(f"{EXAMPLES}:{name}"), case)
    with pytest.raises(VerificationFailure, match=said) as caught:
        found.check(backend, nearest)
    assert found.property_of(nearest, caught.value) == check
    assert ("Traceback" in str(caught.value)) == (name == "raises")
    if check not in ("output and lse", "gradients"):  # numbers explain no others
        found.add_cause(caught.value, backend, nearest, nearest)
        assert hasattr(caught.value, "__notes__") == (name == "of_last_call")  # whose second run alone is as the first


def run(backend: GlooBackend, name: str, case: Case = PLAIN) -> dict[str, float]:
    spec = f"{EXAMPLES}:{name}"
    return experiment(spec).check(backend, nearest_claimed(load(spec), case))


@pytest.mark.parametrize(
    "name, case",
    [
        ("sound", replace(PLAIN, dtype="float64")),
        ("with_scores", replace(SCORED, again="pipelined")),
        ("with_scores", replace(SCORED, keys=Keys(9))),
        ("with_scores", replace(SCORED, again="kv", softcap=None)),
        ("packed", PACKED),
        ("heads_first", PLAIN),
        ("keeps_settings", replace(PLAIN, exchange="ring+all-to-all")),
        *(("sound", replace(PLAIN, again=again)) for again in RUNS),
    ],
)
def test_a_sound_one_holds(backend: GlooBackend, name: str, case: Case) -> None:
    ratios = run(backend, name, case)
    assert len(ratios) == 6 and 0 < ratios["gradients"] < 1 and 0 < ratios["output and lse"] < 1


@pytest.mark.parametrize(
    "name, changed",
    [
        *((name, not read()) for name, (read, _) in SETTINGS.items() if type(read()) is bool),
        ("environment variables", {"MASTER_PORT": "1"}), ("the working directory", "/"), ("the number of threads", 61),
        ("torch.backends.cuda.matmul.fp32_precision", "tf32"), ("the precision of fp32 products", "medium"),
        ("deterministic algorithms", 1), ("filters of warnings", []), ("the handler of SIGTERM", signal.SIG_IGN),
        ("the default dtype", torch.float64), ("Python's random numbers", random.Random(0).getstate()),
    ],
)  # fmt: skip
def test_a_changed_setting_is_named_and_restored(name: str, changed: object) -> None:
    torch.use_deterministic_algorithms(name == "deterministic algorithms")  # then `changed` is to warn only
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    for _ in range(2):  # a setting that was not restored would not change again
        with pytest.raises(Malformed, match=name), left_as_they_were("attend"):
            SETTINGS[name][1](changed)
        assert {name: read() for name, (read, _) in SETTINGS.items()} == before
    torch.use_deterministic_algorithms(False)


def test_a_cache_that_is_filled_once_is_no_leak() -> None:
    cache: dict[str, torch.Tensor] = {}
    must_leave_nothing("attend", lambda: cache or cache.update(kept=torch.ones(1)))


@pytest.mark.parametrize("name, least", [("tokens", 1025), ("dims", 65), ("batches", 3)])
def test_a_fault_of_large_sizes_shrinks_to_its_threshold(backend: GlooBackend, name: str, least: int) -> None:
    _, (large, count), *_ = experiments(f"{EXAMPLES}:off_beyond_{name}", 1, 100)
    report = Report(Console(io.StringIO()))
    (found,) = Search(large, backend, report, 1, budget=60.0, others=0.0).explore(count, 0)
    case = found.subject
    sizes = {"tokens": case.tokens, "dims": case.head_dim, "batches": case.batch, "heads": case.heads}
    assert sizes == {"tokens": 1, "dims": 1, "batches": 1, "heads": 1} | {name: least}


@pytest.mark.parametrize("name", ("forward_only", "in_numpy"))
def test_forward_alone_has_no_gradients_to_check(backend: GlooBackend, name: str) -> None:
    ratios = run(backend, name, replace(PLAIN, lse="differentiated"))
    assert "gradients" not in ratios and 0 < ratios["output and lse"] < 1
    with pytest.raises(VerificationFailure, match="NumPy arrays have no gradients; the claim must return"):
        experiment(f"{EXAMPLES}:in_numpy").check(backend, PLAIN)
