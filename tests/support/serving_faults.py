"""A server written as engines are, with slots, lengths and metadata of each call; and with one fault of theirs each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verification.serving import Call, Server, ServingCase

FAULTS = __name__
PLACES = 512  # of a slot's memory on a rank


class Engine:
    """Memory, and the calls whose lengths a graph captured. fault: what is wrong, by name; "" for nothing."""

    def __init__(self, fault: str, k: Tensor, v: Tensor, slots: int) -> None:
        self.fault, self.captured = fault, dict[tuple[int, ...], Call]()
        self.k, self.v = (x.new_zeros(slots, PLACES, *x.shape[1:]) for x in (k, v))

    def owns(self, call: Call, position: int) -> bool:
        if call.replicated and self.fault != "replicated_slots":
            return True
        at = position - (self.fault == "negative_modulo")
        return at // call.block % call.world == call.rank

    def owned(self, call: Call, length: int) -> int:
        """Number of the first positions of a request that the rank keeps."""
        return sum(self.owns(call, position) for position in range(length))

    def write(self, call: Call, slot: int, k: Tensor, v: Tensor) -> None:
        for row, position in enumerate(range(call.before[slot], call.lengths[slot])):
            if self.owns(call, position):
                place = self.owned(call, position)
                self.k[slot, place], self.v[slot, place] = k[row], v[row]

    def places(self, call: Call, slot: int) -> list[int]:
        """Number of places that each new token sees."""
        new, prefix, told = call.new[slot], call.before[slot], call
        if self.fault == "stale_lengths":
            told = self.captured.setdefault(call.new, call)
            prefix = told.before[slot]
        if self.fault == "padded_prefix":
            prefix = max(0, call.lengths[slot] - -(-new // call.world) * call.world)
        if self.fault == "shard_positions":  # a causal kernel that aligns the ends of queries and of the shard
            held = self.owned(call, call.lengths[slot])
            return [max(0, held - new + row + 1) for row in range(new)]
        return [self.owned(told, prefix + row + 1) for row in range(new)]

    def attend(self, call: Call, slot: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (T, H, Dv) and lse (T, H) of a slot's new tokens over the places of this rank."""
        places = self.places(call, slot)
        wide, most = torch.promote_types(q.dtype, torch.float32), max(places, default=0)
        k, v = (x[slot, :most].to(wide).repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (self.k, self.v))
        limits = torch.tensor(places, dtype=torch.int64, device=q.device)[:, None]
        hidden = torch.arange(most, device=q.device) >= limits
        scores = torch.einsum("thd,nhd->thn", q.to(wide), k) * call.scale
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        out = torch.einsum("thn,nhd->thd", (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp(), v)
        if self.fault == "lse_of_garbage":
            lse = lse.masked_fill(limits == 0, 0.4375)  # as any number left in memory
        if self.fault == "zero_times_nan":
            out = out.masked_fill(limits[..., None] == 0, torch.nan)
        return out, lse


def step(fault: str, cache: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, group: Any) -> Any:
    engine = Engine(fault, k, v, len(call.new)) if cache is None else cache
    if fault == "contiguous_queries":
        q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
    parts = []
    for slot, (queries, *new) in enumerate(zip(*(x.split(call.new) for x in (q, k, v)), strict=True)):
        engine.write(call, slot, *new)
        parts.append(engine.attend(call, slot, queries))
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    merged, total = out, lse
    if group is not None and not call.replicated:
        gathered = [torch.empty_like(lse) for _ in range(call.world)]
        dist.all_gather(gathered, lse.contiguous(), group)
        total = torch.stack(gathered).logsumexp(0)
        merged = out * (lse - total).exp()[..., None]
        dist.all_reduce(merged, group=group)
    results = {"out": merged.to(q.dtype), "lse": total, "partial_out": out.to(q.dtype), "partial_lse": lse}
    if fault == "base_2":
        results["partial_lse"] = lse / torch.tensor(2.0, dtype=lse.dtype).log()
    return engine, results


def any_case(case: ServingCase) -> ServingCase:
    return case


def server(fault: str = "") -> Server:
    returns = ("out", "lse", "partial_out", "partial_lse")
    return Server(fault or "engine", "everything", any_case, partial(step, fault), returns=returns)


engine = server()
replicated_slots = server("replicated_slots")  # vllm-project/vllm#57260
stale_lengths = server("stale_lengths")  # vllm-project/vllm#36070
padded_prefix = server("padded_prefix")  # sgl-project/sglang#23415
shard_positions = server("shard_positions")  # sgl-project/sglang#32098
contiguous_queries = server("contiguous_queries")  # sgl-project/sglang#27276
lse_of_garbage = server("lse_of_garbage")  # vllm-project/vllm#34355
negative_modulo = server("negative_modulo")  # NVIDIA/TensorRT-LLM#17795
zero_times_nan = server("zero_times_nan")  # ROCm/ATOM#1832
base_2 = server("base_2")


# --- malformed --------------------------------------------------------------------------------------------------------


def changed(change: Any, fault: str = "", returns: tuple[str, ...] = engine.returns) -> Server:
    """A server whose results are changed."""

    def changed_step(cache: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, group: Any) -> Any:
        cache, results = step(fault, cache, q, k, v, call, group)
        return change(cache, results, q)

    return replace(engine, name="changed", step=changed_step, returns=returns)


def only_merged(fault: str) -> Server:
    return changed(lambda cache, results, q: (cache, {"out": results["out"]}), fault, ("out",))


no_partials = changed(lambda cache, results, q: (cache, {"out": results["out"]}))
alone = changed(lambda cache, results, q: results["out"])
heads_first = changed(lambda cache, results, q: (cache, results | {"out": results["out"].transpose(0, 1)}))
of_integers = changed(lambda cache, results, q: (cache, results | {"lse": results["lse"].long()}))
widened = changed(lambda cache, results, q: (cache, results | {"out": results["out"].double()}))
spoils = changed(lambda cache, results, q: (q.zero_(), cache, results)[1:])
only_merged_garbage, only_merged_nan = only_merged("lse_of_garbage"), only_merged("zero_times_nan")
halves = changed(lambda cache, results, q: (cache, results | {"out": results["out"] / 2}))
of_nothing = replace(engine, name="nothing", claims=lambda case: None)
