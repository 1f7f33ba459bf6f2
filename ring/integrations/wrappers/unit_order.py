"""Order in which the units of FSDP run: the same on every rank, or the same error on every rank.

Each unit's parameters are gathered by all ranks when it runs. If a rank leaves a unit out, the others' gathering is
paired with whichever comes next there: with equal sizes the layers silently compute with each other's parameters.

In a model's first forward the ranks compare every unit before it is gathered. Afterwards each rank follows the order
that was found, and they compare once, at the end of a forward: a rank that skips a unit takes part in gathering it. A
rank that runs a unit out of this order gathers all that are left, then compares, so that nobody waits for it. If all
ranks do so, the new order replaces the old one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ring.comm.call_order import within_backward
from ring.comm.transport import MissingRanks, all_gather_json
from ring.nn.batch_group import BatchRanks

END = -1  # of a forward


class UnitOrder:
    """The units of a model, numbered by their places in it.

    Args:
        model: whose units, and itself, are sharded.
        ranks: over which it is sharded.
    """

    def __init__(self, model: FSDPModule, ranks: BatchRanks) -> None:
        self.model, self.ranks = model, ranks
        self.names: list[str] = []
        self.units: list[Any] = []
        self.known: list[int] | None = None  # the order of an earlier forward
        self.ahead: list[int] | None = None  # the part of it that did not run yet; None: every unit is compared
        self.ran: list[int] = []
        self.inside = False  # the model's own forward
        assert isinstance(model, nn.Module)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and module is not model:
                self._watch(name.replace("_checkpoint_wrapped_module.", ""), module)
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)

    def _watch(self, name: str, unit: Any) -> None:
        number = len(self.units)
        self.names.append(name)
        self.units.append(unit)
        unit.register_forward_pre_hook(lambda module, inputs: self._enter(number), prepend=True)

    @torch.compiler.disable
    def _begin(self, module: nn.Module, inputs: object) -> None:
        if not within_backward():
            self.ran, self.ahead, self.inside = [], self.known, True

    @torch.compiler.disable
    def _enter(self, number: int) -> None:
        if within_backward():  # a recomputed forward is that of the first time
            return
        if not self.inside:
            self.ran, self.ahead = [], None
        self.ran.append(number)
        if self.ahead is not None and number in self.ahead:
            at = self.ahead.index(number)
            self._take_part(self.ahead[:at])
            self.ahead = self.ahead[at + 1 :]
            return
        self._take_part(self.ahead or [])
        self.ahead = None
        self._compare()

    @torch.compiler.disable
    def _end(self, module: nn.Module, inputs: object, output: object) -> None:
        if within_backward():
            return
        self._take_part(self.ahead or [])
        found = list(self.ran)
        self.ran.append(END)
        self._compare()
        self.inside = False
        left_out = [name for number, name in enumerate(self.names) if number not in found]
        if left_out and not hasattr(self.model, "reset_iter_state"):
            raise NotImplementedError(
                f"layers must all run in each forward under torch {torch.__version__}, whose FSDP fails in the "
                f"backward otherwise, got none of {', '.join(left_out)}: use torch 2.13, or leave their class out of "
                "layers"
            )
        if self.ahead is None:
            self.known = found

    def _take_part(self, numbers: list[int]) -> None:
        """Gather units that this rank skips, as the ranks do that run them."""
        for number in numbers:
            self.units[number].unshard()
            self.units[number].reshard()

    def _compare(self) -> None:
        """Raise ValueError, on every rank, if ranks ran other units, or in another order. Collective."""
        digest = hashlib.blake2b(json.dumps(self.ran).encode(), digest_size=16).digest()
        with self.ranks.lock():
            try:
                if self.ranks.all_equal(digest):
                    return
            except MissingRanks as missing:
                raise RuntimeError(missing.message("the forward of a model that fsdp.shard wraps")) from missing
            everyone = all_gather_json(self.ran, self.ranks)
        self.inside = False
        if hasattr(self.model, "reset_iter_state"):  # torch 2.11 lacks it: there the model is of no use afterwards
            self.model.reset_iter_state()
        raise ValueError(self._difference(everyone))

    def _difference(self, everyone: list[list[int]]) -> str:
        """Describe the first difference between the orders of all ranks."""
        at = next(i for i in range(max(map(len, everyone))) if len({tuple(ran[: i + 1]) for ran in everyone}) > 1)
        ranks_at: dict[str, list[str]] = {}
        for rank, ran in enumerate(everyone):
            ranks_at.setdefault(self._called(ran, at), []).append(str(rank))
        found = "; ".join(f"{name} on ranks {', '.join(ranks)}" for name, ranks in ranks_at.items())
        after = f"after {self.names[everyone[0][at - 1]]}" if at else "first"
        return (
            f"layers must run on every rank, equally often and in one order, since all ranks gather their parameters: "
            f"{after} comes {found}. Call the layer on every rank, with an input of no tokens where there are none, or "
            f"leave its class out of layers: its parameters then belong to the layer around it, which all ranks run"
        )

    def _called(self, ran: list[int], at: int) -> str:
        return self.names[ran[at]] if at < len(ran) and ran[at] != END else "the end of the forward"
