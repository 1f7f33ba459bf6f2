"""What `ring.nn` promises beside a step's calls: where it breaks a promise, a call beside the steps tells.

On one rank in this process. What several ranks must agree on is in `test_other_calls`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from reference.pattern import Pattern
from ring.attention import over_documents
from ring.comm.process_group import ProcessGroupTransport
from ring.nn import ContextParallel, SelfAttention, batch, gradients, loss, ring_attention, self_attention
from ring.nn import context as contexts
from ring.nn.frameworks import checkpoint, ddp, fsdp, mesh, parallel_style, recompute
from tests.support.training_cases import small_model, small_step
from verification.failures import WrongResult
from verification.run.layouts import layout_of
from verification.training.rank import loss_calls, meshes, module_calls
from verification.training.rank.all_calls import ALL_CALLS
from verification.training.rank.meshes import mesh_of
from verification.training.rank.other_calls import CallPlace, Unlike
from verification.training.rank.rank_step import train_on_rank
from verification.training.step_expectation import expect_training
from verification.training.step_properties import check_step
from verification.training.training_case import TrainingCase

rotary: Any = importlib.import_module("ring.nn.rotary")  # the package has the function by this name
SEEDS = 30  # examples in which a defect must show


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    made = (meshes._mesh, meshes._reversed_mesh, meshes._small_mesh)
    for kept in made:
        kept.cache_clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for kept in made:
        kept.cache_clear()


def _make(name: str, seed: int) -> None:
    case = small_step(1, seed=seed, tokens=2 + seed % 7)
    ranks = mesh_of(case)
    ALL_CALLS[name].make(CallPlace(case, ranks, ContextParallel(layout_of(case), ranks["context"])))


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a check."""


def _with_documents(self: ContextParallel, documents: tuple[int, ...] | None) -> ContextParallel:
    """Settings are lost."""
    return ContextParallel(self.layout, self.group, documents=documents)


def _angles_of_any_type(context: ContextParallel, x: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    make: Callable[[], tuple[Tensor, Tensor]] = lambda: rotary._angles(  # noqa: E731
        context.positions_on(x.device), x.shape[3], theta, rotary.accumulator_dtype(x.dtype)
    )
    return context.once(("rotary", x.shape[3], theta, x.device), make)


def _cut_in_place(labels: Tensor, documents: Any) -> Tensor:
    if documents is not None:
        labels[:, -1] = batch.IGNORED
    return labels


def _gradients_replaced(bucket: Any, ranks: Any) -> None:
    for x in bucket:
        x.grad = torch.zeros_like(x) if x.grad is None else x.grad.clone()


def _zeroed(parameters: Any, over: Any) -> None:
    for x in gradients._listed(parameters):
        assert x.grad is not None
        x.grad.zero_()


def _own_documents_hold(packed: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **settings: Any) -> Tensor:
    return over_documents(None if pattern.documents else packed, q, k, v, pattern, **settings)


def _replicated(self: Any, out: Tensor, ranks: Any) -> DTensor:
    return DTensor.from_local(out, ranks, [Replicate()])


def _angles_in_fp32(positions: Tensor, head_dim: int, theta: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions[..., None, None] * theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos().to(kind), angles.sin().to(kind)


def _theta_lost(self: SelfAttention, state: dict[str, Any]) -> None:
    self.__dict__.update(state | {"rotary_theta": None})


def _root_without_policy(module: Any, mp_policy: Any, **options: Any) -> Any:
    own = {} if len(module) == 2 else {"mp_policy": mp_policy}
    return FULLY_SHARD(module, **own, **options)


def _root_without_options(module: Any, mesh: Any, mp_policy: Any, **options: Any) -> Any:
    own = {} if hasattr(module, "layers") else options
    return FULLY_SHARD(module, mesh=mesh, mp_policy=mp_policy, **own)


def _names_without_model(folder: Any, parameters: Any) -> None:
    entries = checkpoint.dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {name.replace("model.", "") for name in entries if name.startswith("model.")}
    if saved != set(parameters):
        raise ValueError(f"model must have the parameters of the checkpoint, {saved}")


FULLY_SHARD = fsdp.fully_shard
WRAP = ddp.DistributedDataParallel
PLANTED: list[tuple[str, Any, str, Any]] = [
    ("handles as they were made", ContextParallel, "with_documents", _with_documents),
    ("layers that differ on one handle", self_attention, "angles_of", _angles_of_any_type),
    ("cross entropy by the formula", loss, "accumulator_dtype", lambda dtype: dtype),
    ("labels of the next tokens", loss_calls, "next_tokens", lambda tokens, ignored=-100: tokens.roll(-1, 1)),
    ("batches of any type", batch, "_within_documents", _cut_in_place),
    ("shards that lie anyhow, gathered", loss_calls, "gather", lambda context, x, dim: x.detach()),
    ("gradients of any type, averaged", gradients, "_average", _gradients_replaced),
    ("gradients averaged over any ranks", loss_calls, "average_gradients", _zeroed),
    ("gradients on several meshes, clipped", gradients, "_square_of_sharded", lambda x: torch.zeros(())),
    ("attention over a handle's documents", contexts, "over_documents", _own_documents_hold),
    ("a module in a plan, with DTensors", parallel_style.RingParallel, "_whole", _replicated),
    ("rotary positions by the formula", rotary, "_angles", _angles_in_fp32),
    ("copies of modules", SelfAttention, "__setstate__", _theta_lost),
    (
        "patterns of LongNet's configurations", module_calls, "longnet_pattern",
        lambda x, y, heads, causal: Pattern.longnet([*eval(str(x))], [*eval(str(y))], heads, causal),
    ),
    ("a run that is saved and taken up", checkpoint, "set_state_dict", _nothing),
    ("a run that is saved and taken up", checkpoint, "_check_gradients", _nothing),
    ("wrappers over any mesh", ddp, "DistributedDataParallel", lambda x, process_group, **_: WRAP(x)),
    ("units of a policy", fsdp, "fully_shard", _root_without_policy),
    ("layers that are computed again", recompute, "apply_activation_checkpointing", _nothing),
    ("losses that are computed again", loss, "_WRONG", (Exception,)),
    ("options of units", fsdp, "fully_shard", _root_without_options),
    ("names like a checkpoint's own", checkpoint, "_check_names", _names_without_model),
    ("names like a checkpoint's own", fsdp, "reversed", list),  # layers before the layers within them
    ("arguments of losses", loss, "_check_options", _nothing),
    ("labels beyond the vocabulary", loss, "_per_token", lambda logits, labels, ignored: logits.sum(1)),
    ("gradients that cannot be averaged or clipped", gradients, "_check_grad", _nothing),
    ("batches that cannot be sharded or gathered", batch, "_check_shifted", _nothing),
    ("arguments of modules", ring_attention, "_check_heads", _nothing),
    ("positions that are not the layout's", self_attention, "_check_positions", _nothing),
    ("modules that cannot be made", self_attention, "check_turn", _nothing),
    ("meshes, options, layers and plans that do not fit", mesh, "_check", _nothing),
    ("DTensors that are placed otherwise", parallel_style.RingParallel, "_local", lambda self, name, x: x.to_local()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "what", "broken"), PLANTED, ids=[f"{p[0]}: {p[2]}" for p in PLANTED])
def test_a_broken_promise_is_told(
    name: str, where: Any, what: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        _make(name, seed)
    monkeypatch.setattr(where, what, broken, raising=False)
    with pytest.raises((Unlike, RuntimeError)):
        for seed in range(SEEDS):
            _make(name, seed)


def _step(case: TrainingCase) -> None:
    seen = train_on_rank(ProcessGroupTransport(None), case)
    check_step(case, expect_training(case), [seen])


PACKED = Pattern.dense(documents=(3, 5))


@pytest.mark.parametrize("optimiser", ("sgd", "adamw"))
def test_numbers_of_the_optimizer_that_a_checkpoint_does_not_bring_show(
    optimiser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small_step(1, steps=2, resumed="zigzag", optimiser=optimiser)
    _step(case)
    monkeypatch.setattr(checkpoint, "set_state_dict", _nothing)
    with pytest.raises(WrongResult, match="parameters: "):
        _step(case)


def test_documents_of_the_modules_that_hold_in_place_of_the_batchs_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_step(1, pattern=PACKED, own_documents=(1, 7), model=small_model(positions="rotary"))
    _step(case)
    monkeypatch.setattr(contexts, "over_documents", _own_documents_hold)
    _step(replace(case, own_documents=None))
    with pytest.raises(WrongResult, match="logits: "):
        _step(case)
