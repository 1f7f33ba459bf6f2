"""A forward is one operator to those who watch operators: what selective checkpointing makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ring import Layout, Transport, ring_attention
from ring.comm.transport import RecordingTransport
from ring.operator import _prepared
from tests.support import operator_tasks
from tests.support.attention_cases import PATTERNS, call, inputs
from tests.support.operator_tasks import SAVED, WAYS, Trace
from verification.run.processes.pool import Pool
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

LAYOUT = Layout.contiguous(17, 1)
Run = Callable[[str], list[Trace]]


class Names(TorchDispatchMode):
    """Counts operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("lse", (False, True))
def test_a_forward_is_one_operator(lse: bool) -> None:
    q, k, v, *_ = inputs()
    with Names() as seen:
        ring_attention(q, k, v, PATTERNS["longnet"], LAYOUT, return_lse=lse)
    assert seen.count["ring.attention.default"] == 1
    assert not [name for name in seen.count if "bmm" in name or ("attention" in name and "ring" not in name)]


def test_nothing_is_kept_when_it_has_run() -> None:
    q, k, v, *_ = inputs()
    out, lse = call(q.requires_grad_(), k, v, PATTERNS["longnet"], LAYOUT)
    assert not _prepared
    torch.autograd.grad(out.sum() + lse.sum(), q)


def test_the_operator_is_no_way_to_call() -> None:
    q, k, v, *_ = inputs()
    with pytest.raises(ValueError, match="prepared must be the number of a forward that ring_attention has begun"):
        torch.ops.ring.attention(q, k, v, 10**9)


# --- checkpointing ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, preload=("torch", "torch._dynamo", operator_tasks.__name__)) as ranks:
        yield ranks


@pytest.fixture(params=("gloo", "sim"))
def run(request: pytest.FixtureRequest) -> Run:
    """Two ranks differentiate a model of three layers whose activations are kept in one of WAYS."""
    if request.param == "sim":
        return lambda way: Simulation(2, 0).run(lambda transport: operator_tasks.train(transport, way))
    pool: Pool = request.getfixturevalue("pool")
    return lambda way: pool.run(operator_tasks.train, None, way)


FORWARDS = {"kept": 3, "selective": 3, "computed again": 6, "reentrant": 6}


@pytest.mark.parametrize("way", WAYS)
def test_each_forward_runs_as_often_as_it_must_and_no_bit_changes(run: Run, way: str) -> None:
    """Selective checkpointing runs none twice, the others all. Calls are numbered alike on both ranks."""
    kept, found = run("kept"), run(way)
    for one, other in zip(kept, found, strict=True):
        assert other.forwards == FORWARDS[way]
        assert all(x.equal(y) for x, y in zip(one.gradients, other.gradients, strict=True))
    assert found[0].number == found[1].number


def test_selective_checkpointing_sends_no_forward_twice() -> None:
    """Whatever messages an exchange needs, they are those of three forwards and three backwards."""

    def step(transport: Transport, way: str) -> list[tuple[int, int, str]]:
        recording = RecordingTransport(transport)
        operator_tasks.train(recording, way)
        return recording.sent

    kept, selective, again = (
        Simulation(2, 0).run(partial(step, way=way)) for way in ("kept", "selective", "computed again")
    )
    assert kept == selective and all(len(x) > len(y) for x, y in zip(again, kept, strict=True))


def test_a_policy_that_saves_all_else_computes_it_again() -> None:
    """The operator is what the policy names, and nothing besides."""
    count: list[str] = []

    def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        if operator is SAVED and not context.is_recompute:
            count.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE if operator is SAVED else CheckpointPolicy.PREFER_SAVE

    q, k, v, dout, _ = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(*x: Tensor) -> Tensor:
        out = ring_attention(x[0], x[1], x[2], PATTERNS["longnet"], LAYOUT)
        assert isinstance(out, Tensor)
        return out

    contexts = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(attend, *leaves, use_reentrant=False, context_fn=contexts)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out, leaves, dout)
    for x, y in zip(found, torch.autograd.grad(attend(*leaves), leaves, dout), strict=True):
        assert x.equal(y)
    assert count == ["ring.attention.default"]
