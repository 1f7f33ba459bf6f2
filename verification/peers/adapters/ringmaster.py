"""axolotl-ai-cloud/ringmaster (`axolotl-ringmaster`): its rings, Ulysses, and both combined.

The attention functions that the package registers with transformers are called, with its runtime set as by `setup`.
Blocks are its "math" blocks, which it has for gloo; Ulysses wraps transformers' `sdpa`.

    p2p, allgather   rotation of keys and values, or one gather; contiguous
    zigzag           head-tail order, packed: its dense call needs CUDA
    distflash        contiguous, with work routed to idle ranks (DistFlashAttention); causal only
    varlen           gathered keys and values with the mask of the documents, also for windows
    ulysses, usp     all-to-all over heads, alone or times a ring, p2p or allgather by the Case's exchange

Its sliding window of n is a Case's window of n - 1, and bounds only the keys before a query: the claim has windows with
causal masks. The dense backward of distflash on CPUs does not repeat key/value heads and raises for grouped ones; its
CUDA kernel takes them: the claim has equal heads. On CPUs torch's `scaled_dot_product_attention` is nan for a causal
mask with a scale of zero or less, so `ulysses` claims positive ones.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters.ring_flash_attn_varlen import lengths
from verification.peers.adapters.yunchang import all_to_all_ranks
from verification.peers.peer import Peer, Result

MODULES = ("ringmaster", "ringmaster.strategies.ring", "ringmaster.strategies.ulysses", "ringmaster.strategies.usp")
NARROW, WIDE = ("float32", "bfloat16", "float16"), ("float32", "bfloat16", "float16", "float64")


def prepare() -> None:
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("transformers.integrations.sdpa_attention")
    # The package looks for a flash kernel, which imports much of transformers, and warns that there is none.
    logging.getLogger("ringmaster").setLevel(logging.ERROR)
    importlib.import_module("ringmaster.ring.distflash")._flash_ops()


@dataclass(frozen=True)
class Way:
    """One way of the package. kind: ring, ulysses or usp. rotation, balance: its `RotateMethod` and `LoadBalance`.
    packed: takes documents. windows: takes windows with causal masks. grouped: takes grouped heads."""

    supported: str
    kind: str = "ring"
    rotation: str = "allgather"
    balance: str = "none"
    causal: bool | None = None
    packed: bool = False
    windows: bool = False
    grouped: bool = True
    dtypes: tuple[str, ...] = NARROW

    def claimed(self, case: Case) -> Case:
        """Return the nearest Case that this way supports."""
        exchange = "gather" if case.exchange == "gather" else "ring"
        case = claims.two_ranks_or_more(claims.without_own_settings(case))
        if self.kind != "ring":
            case = claims.all_ranks(case)
        causal = case.pattern.causal if self.causal is None else self.causal
        to_dense = claims.packed if self.packed else claims.dense
        case = to_dense(case, causal, windows=self.windows and causal)
        case = dataclasses.replace(case, batch=1 if self.packed else case.batch)
        zigzag = self.balance == "head_tail"
        case = claims.even_shards(case, "zigzag" if zigzag else "contiguous", 2 if zigzag else 1)
        case = claims.without_lse(claims.in_dtypes(case, *self.dtypes))
        if self.kind == "ulysses":
            case = claims.positive_scale(claims.divisible_heads(case, case.world))
        elif self.kind == "usp":
            case = dataclasses.replace(claims.divisible_heads(case, 2), exchange=exchange)
        return case if self.grouped else claims.equal_heads(case)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        master, runtime = importlib.import_module("ringmaster"), importlib.import_module("ringmaster.runtime")
        groups: dict[str, Any] = {"ring_group": group, "cp_group": group}
        if self.kind == "ulysses":
            groups = {"ulysses_group": group, "cp_group": group}
        elif self.kind == "usp":
            groups = hybrid_groups(all_to_all_ranks(case), case.world) | {"cp_group": group}
        config = master.RingmasterConfig(size=len(case.ranks), load_balance=master.LoadBalance(self.balance))
        varlen = lengths(case) if self.packed else None
        runtime.set_runtime(runtime.CPRuntime(config=config, varlen=varlen, **groups))
        window = claims.window(case)
        options: dict[str, Any] = {} if window is None else {"sliding_window": window + 1}
        module = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads)
        out: Tensor = self.function(case)(
            module, *(x.transpose(1, 2) for x in (q, k, v)), None, scaling=case.scale, is_causal=case.pattern.causal,
            **options,
        )[0]  # fmt: skip
        return out

    def function(self, case: Case) -> Callable[..., tuple[Tensor, None]]:
        """Return the attention function that the package registers for this way."""
        strategies, rotation = "ringmaster.strategies", self.rotation
        make: Callable[..., Callable[..., tuple[Tensor, None]]]
        if self.kind == "ulysses":
            make = importlib.import_module(f"{strategies}.ulysses").make_ulysses_attention
            return make("sdpa")
        if self.kind == "usp":
            rotation = "allgather" if case.exchange == "gather" else "alltoall"
        make = getattr(importlib.import_module(f"{strategies}.{self.kind}"), f"make_{self.kind}_attention")
        return make("math", "math", importlib.import_module("ringmaster").RotateMethod(rotation))


@lru_cache(maxsize=64)
def hybrid_groups(ulysses: int, world: int) -> dict[str, Any]:
    """Return the groups of the package's mesh: ring by Ulysses. Collective. They are created once, never destroyed."""
    mesh = init_device_mesh("cpu", (world // ulysses, ulysses), mesh_dim_names=("cp_ring", "cp_ulysses"))
    assert dist.get_rank() == mesh["cp_ring"].get_local_rank() * ulysses + mesh["cp_ulysses"].get_local_rank()
    return {"ring_group": mesh["cp_ring"].get_group(), "ulysses_group": mesh["cp_ulysses"].get_group()}


def variant(name: str, way: Way) -> Peer:
    dtypes = ", ".join(dict(float32="fp32", bfloat16="bf16", float16="fp16", float64="fp64")[x] for x in way.dtypes)
    masks = {True: "causal", None: "causal or not"}[way.causal]
    within = ", within documents of one sequence" if way.packed else ""
    windows = ", with windows if causal" if way.windows else ""
    heads = "GQA" if way.grouped else "equal heads"
    scale = "positive" if way.kind == "ulysses" else "any"
    supported = f"{masks}{windows}{within}, {way.supported} in shards of one length, {dtypes}, {heads}, {scale} scale"
    return Peer(
        f"ringmaster/{name}", supported, way.claimed, way.attend, package="axolotl-ringmaster", arithmetic="half",
        prepare=prepare, worlds=(4,) if way.kind == "usp" else (2, 3, 4),
    )  # fmt: skip


CONTIGUOUS = "contiguous order, subgroups of two ranks or more,"
WAYS = {
    "p2p": Way(CONTIGUOUS, rotation="alltoall"),
    "allgather": Way(CONTIGUOUS),
    "distflash": Way(CONTIGUOUS, balance="distflash", causal=True, grouped=False),
    "ring-varlen": Way(CONTIGUOUS, packed=True, windows=True, dtypes=WIDE),
    "zigzag-varlen": Way(
        "zigzag order, subgroups of two ranks or more,", balance="head_tail", causal=True, packed=True
    ),
    "distflash-varlen": Way(CONTIGUOUS, balance="distflash", causal=True, packed=True),
    "ulysses": Way("contiguous order, all ranks,", "ulysses", dtypes=WIDE),
    "ulysses-varlen": Way("contiguous order, all ranks,", "ulysses", packed=True, windows=True, dtypes=WIDE),
    "usp": Way("contiguous order, all ranks,", "usp"),
    "usp-varlen": Way("contiguous order, all ranks,", "usp", packed=True, windows=True, dtypes=WIDE),
}
(p2p, allgather, distflash, ring_varlen, zigzag_varlen, distflash_varlen, ulysses, ulysses_varlen, usp, usp_varlen) = (
    variant(*item) for item in WAYS.items()
)
