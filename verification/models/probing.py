"""Probes a user's Setup in a new process, since an import or `build` may hang or abort."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch
from torch import nn

from ring import Layout
from ring.nn import ContextParallel
from verification.failures import RankFailure, Refused
from verification.models.batches import VOCABULARY, global_batch
from verification.models.definitions import replace_ring
from verification.models.loading import UserError, built, calling, load, told
from verification.models.model_case import ModelCase
from verification.models.observation import TRACED
from verification.models.precision import computing_in
from verification.models.results import Array, size
from verification.models.setup import Misuse, Run, Setup, scalar
from verification.models.whole_batch import Rows
from verification.run.backends import PRELOAD, Unavailable
from verification.run.observation import to_numpy
from verification.run.processes.pool import Pool, PoolError

TIMEOUT = 120.0  # seconds to import the module and to build the model


@dataclass(frozen=True)
class Facts:
    """Properties of a user's model. fp64: it computes in fp64. layers: it has layers to shard and to recompute.
    documents: its forward takes the handle, which has the documents."""

    fp64: bool
    layers: bool
    documents: bool

    def nearest(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase that the model supports."""
        if not self.fp64:
            case = replace(case, dtype="float32")
        if not self.documents:
            case = replace(case, packed=None)
        if not self.layers:
            wrapper = case.wrapper if case.wrapper in ("none", "ddp") else "none"
            case = replace(case, checkpointing="none", wrapper=wrapper)
        return case


def probe(name: str, timeout: float = TIMEOUT) -> Facts:
    """Build the model in a new process, for one process and for one rank, and call it. Raises Refused if that fails,
    Unavailable if no process starts."""
    try:
        with Pool(1, timeout=timeout, preload=PRELOAD) as pool:
            (facts,) = pool.run(read_facts, name)
    except PoolError as error:
        raise Unavailable(f"no process to import {name} in could be started: {error}") from error
    except RankFailure as failure:
        raise Refused(f"importing and building {name}: {told(failure)}") from failure
    if isinstance(facts, str):
        raise Refused(facts)
    return facts


CONTEXT = (
    "In one process context is None: there a model of ring.nn's modules makes its own, "
    "ContextParallel(Layout.contiguous(tokens.shape[1], 1))"
)
SMALLEST = ModelCase(
    world=1, data=1, arrangement="contiguous", tokens=4, batch=2, order="contiguous", cuts=None, packed=None,
    padding=False, labels="all", exchange="direct", dtype="float64", wrapper="none", accumulation=1,
    checkpointing="none", clipping=None, optimiser="sgd", steps=1, seed=0,
)  # fmt: skip


def read_facts(name: str) -> Facts | str:
    """Task: return the model's Facts, or the reason why it cannot be run."""
    replace_ring()
    try:
        setup = load(name)
        try:
            _check_runs(setup, SMALLEST)
            fp64 = True
        except UserError:
            _check_runs(setup, replace(SMALLEST, dtype="float32"))
            fp64 = False
        context = ContextParallel(Layout.contiguous(SMALLEST.tokens, 1))
        model = built(setup, SMALLEST, context)
        if not any(x.requires_grad for x in model.parameters()):
            raise Misuse("build(context) returned a model without parameters to train; it must have some")
    except (Refused, Misuse, UserError) as error:
        return f"{name}: {error}" if not str(error).startswith(name) else str(error)
    own = any(getattr(type(setup), name) is not getattr(Setup, name) for name in ("logits", "loss", "step", "train"))
    accepted = inspect.signature(model.forward).parameters
    documents = own or "context" in accepted or "position_ids" in accepted
    return Facts(fp64, bool(setup.layers(model)), documents)


def _check_runs(setup: Setup, smallest: ModelCase) -> None:
    """Call the model as the one process does. Raises UserError and Misuse, also for a model that draws numbers."""
    case = replace(smallest, batch=32)  # so that even a small dropout shows
    model, *first = _call(setup, case, 1)
    other, *second = _call(setup, case, 2)
    if not all(map(torch.equal, model.parameters(), other.parameters())):
        raise Misuse(
            "build(None) draws other initial parameters each time; torch must draw them, by the seed that is set"
        )
    if not any(size(a - b) > TRACED[case.dtype] * size(a) for a, b in zip(first, second, strict=True)):
        return
    dropouts = (
        f" (module {name} is a {type(module).__name__} with p={module.p})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p
    )
    raise Misuse(f"the model draws random numbers{next(dropouts, '')}; set dropout to 0, or call eval() in build")


def _call(setup: Setup, case: ModelCase, seed: int) -> tuple[nn.Module, Array, Array]:
    """Return the model, its loss and its logits in one process. seed: of random numbers after `build`."""
    part, run = Rows.of(case).alone(case, 0), Run(case, labelled=global_batch(case, 0).labelled)
    with computing_in(case.dtype):
        model = built(setup, case, None)
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if sizes and sizes[0] < VOCABULARY:
            raise Misuse(f"the model's first Embedding has {sizes[0]} entries; it must have at least {VOCABULARY}")
        torch.manual_seed(seed)
        try:
            with calling("loss, in one process,"):
                loss = scalar("loss, in one process,", setup.loss(model, part, run))
        except UserError as error:
            if "context must be a ContextParallel" in str(error):
                raise Misuse(f"{error}. {CONTEXT}") from error
            raise
    logits = run.logits[0][0] if run.logits else loss
    return model, to_numpy(loss.detach()), to_numpy(logits)
