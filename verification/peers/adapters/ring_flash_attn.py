"""zhuzilin/ring-flash-attention (`ring-flash-attn`): ring, zigzag and striped ring attention over flash_attn.

Its logic - who sends what, which blocks are masked, how partial results are merged - over a stand-in for flash_attn.
Types are those that flash_attn takes, 16 bits: sums of gradients begin as `x.to(float32)` of a buffer that is written
again, which is a copy only because x is not float32 already.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters import flash_attn_shim
from verification.peers.peer import Peer, Refused, Result

PACKAGE = "ring_flash_attn"
WORDS = "bf16 and fp16, GQA, subgroups of two ranks or more, any scale; lse is returned"


def prepare() -> None:
    """The package's own __init__ imports transformers, which its metadata do not name: it is passed over."""
    flash_attn_shim.install()
    if PACKAGE not in sys.modules:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.submodule_search_locations is None:
            raise Refused("the package ring-flash-attn is not installed")
        bare = types.ModuleType(PACKAGE)
        bare.__path__ = list(found.submodule_search_locations)
        sys.modules[PACKAGE] = bare
    for module, _, _, _ in VARIANTS:
        importlib.import_module(f"{PACKAGE}.{module}")


def claimed(case: Case, order: str, chunks: int, causal: bool | None) -> Case:
    case = claims.even(claims.dense(claims.together(claims.settled(case)), causal), order, chunks)
    return claims.lse_returned(claims.in_dtypes(case, "float16", "bfloat16"))


def variant(module: str, order: str, chunks: int, causal: bool | None) -> Peer:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        function = getattr(importlib.import_module(f"{PACKAGE}.{module}"), f"{module}_func")
        out, lse, _ = function(
            q, k, v, causal=case.pattern.causal, softmax_scale=case.scale, return_attn_probs=True, group=group
        )
        return out, lse

    masks = "dense causal" if causal else "dense, causal or not"
    return Peer(
        name=f"ring-flash-attn/{module.partition('_')[0]}",
        package="ring-flash-attn",
        supported=f"{masks}, {order} order in shards of one length, {WORDS}",
        claims=lambda case: claimed(case, order, chunks, causal),
        attend=attend,
        arithmetic="half",
        merge="interpolated",
        prepare=prepare,
    )


# module, order of the tokens, chunks of a shard, causal: always (True) or as asked (None)
VARIANTS: tuple[tuple[str, str, int, bool | None], ...] = (
    ("ring_flash_attn", "contiguous", 1, None),
    ("zigzag_ring_flash_attn", "zigzag", 2, True),
    ("stripe_flash_attn", "striped", 1, True),
)
ring, zigzag, stripe = (variant(*row) for row in VARIANTS)
