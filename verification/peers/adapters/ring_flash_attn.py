"""zhuzilin/ring-flash-attention (`ring-flash-attn`): ring, zigzag and striped ring attention over flash_attn.

The package's own code sends messages, masks blocks and merges partial results; `flash_attn_shim` stands in for
flash_attn. The claim is 16 bits, as for flash_attn: the package's sums of gradients start as `x.to(float32)` of a
buffer that it overwrites, which is a copy only if x is not float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ring.extras import how_to_install
from verification.case import Case
from verification.failures import Refused
from verification.peers import claims
from verification.peers.adapters import flash_attn_shim
from verification.peers.adapters.over_flash_attn import Ring, peer, window_size
from verification.peers.peer import Peer, Result

PACKAGE = "ring_flash_attn"
SUPPORTED = "bf16 and fp16, GQA, subgroups of two ranks or more, any scale; lse is returned"


def import_modules(modules: Iterable[str]) -> None:
    """Import without the package's own __init__, which imports transformers, an undeclared requirement."""
    flash_attn_shim.install()
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            raise Refused(f"the package ring-flash-attn is not installed{how_to_install(PACKAGE)}")
        package = types.ModuleType(PACKAGE)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[PACKAGE] = package
    for module in modules:
        importlib.import_module(f"{PACKAGE}.{module}")


def prepare() -> None:
    import_modules(VARIANTS)


def call(module: str, qkv: Iterable[Tensor], case: Case, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse by the function of that module."""
    function = getattr(importlib.import_module(f"{PACKAGE}.{module}"), f"{module}_func")
    options = {"causal": case.pattern.causal, "window_size": window_size(case), "softmax_scale": case.scale}
    out, lse, _ = function(*qkv, **options, return_attn_probs=True, **arguments)
    return out, lse


def variant(module: str, ring: Ring) -> Peer:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        return call(module, (q, k, v), case, group=group)

    name = f"ring-flash-attn/{module.partition('_')[0]}"
    return peer(name, ring, SUPPORTED, claims.two_ranks_or_more, claims.lse_returned, attend, prepare)


VARIANTS = {
    "ring_flash_attn": Ring(),
    "zigzag_ring_flash_attn": Ring("zigzag", 2, causal=True),
    "stripe_flash_attn": Ring("striped", causal=True),
}
ring, zigzag, stripe = (variant(*item) for item in VARIANTS.items())
