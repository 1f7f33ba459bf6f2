"""Comparison of a model with one process before its first step: a tiny sequence, sharded and whole.

A model may mix tokens outside the attention that is sharded: an attention of its own, a convolution, a state along the
sequence, a mean over tokens, a pooled output, positions that it counts itself. No list of architectures can tell. So
the ranks run a few tokens through the sharded model, each rank runs all of them alone with the model's own attention,
and the outputs are compared: in unequal zigzag shards, then in contiguous ones with packed documents, against each
document by itself. If an output differs, the first module in the order of the forward is named whose output differs
although its inputs agree.

Everything is computed in fp64, operation by operation, without a copy of the model. Rounding stays near 1e-13, and half
of the digits of fp64 must agree. Parameters of zeros (gates, adapters, biases) count as small random numbers, since
they would hide a branch. Weights, buffers, modes and random states stay as they are.

The text has tokens of padding, and is run once more with padding on the left: a model that differs then is taken, but
its calls with padding are refused. So it is with token types, if the model makes masks of them. The example is longer
where the configuration has blocks, rates of compression or a number of selected keys (`lengths`), up to a limit beyond
which such a model is refused.

Not detected: mixing that begins beyond the example at a length that the configuration does not name, outputs that only
arguments of a call request, and any difference of training mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ring.comm.group import device_for, is_mesh, transport_over
from ring.comm.transport import Transport, all_gather_json
from ring.integrations.transformers.double import instead_of_zeros
from ring.integrations.transformers.first_difference import Part, differing_module
from ring.integrations.transformers.lengths import LONGEST, reach
from ring.integrations.transformers.token_types import types_argument
from ring.integrations.transformers.undisturbed import record, settings
from ring.layout import Layout
from ring.nn.context import ContextParallel
from ring.nn.module_calls import ModuleCall
from ring.validation import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ring.integrations.transformers.call import PreparedCall

OFF = "or give compare=False, which prepares the model unchecked"


@dataclass(frozen=True, eq=False)
class Passage:
    """One pass over the example: the handle of its shards, this rank's inputs, and the same in one process."""

    context: ContextParallel
    inputs: dict[str, Any]
    parts: list[Part]


class Comparison:
    """The run in one process, and the comparison of the sharded model with it.

    Args:
        model: before it is switched to ring attention.
        group: the context group, as of `ContextParallel`.
        example: whole inputs by name, as `prepare` takes them.

    Raises:
        ValueError, NotImplementedError: the model cannot be compared, on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | DeviceMesh | Transport | None,
        example: Mapping[str, Any] | None,
    ) -> None:
        if group is None and not dist.is_initialized():
            raise ValueError(
                "group must be that of the context, mesh['context'], since the model is compared with one process: "
                f"torch.distributed is not initialised; call prepare after init_process_group, {OFF}"
            )
        self._world = dist.get_world_size() if group is None else _size(group)
        self._model, self._group = model, group
        self._handle = _Probe(Layout.contiguous(self._world, self._world), group)
        self._instead: dict[int, Tensor] = {}
        self._padded: Passage | str = ""
        self._typed: list[Passage] | str = []
        self._passages: list[Passage] = self._handle.agree("prepare", lambda: self._run_whole(example))

    def _run_whole(self, example: Mapping[str, Any] | None) -> tuple[dict[str, object], list[Passage]]:
        """Run the example in one process. Also returns the values that must be equal on all ranks."""
        _refuse_parameters(self._model)
        self._reach, self._lengths = reach(self._model)
        inputs = _drawn(self._model, self._world, self._reach) if example is None else dict(example)
        n = _length(inputs, self._world)
        self._instead = instead_of_zeros(self._model)
        short = max(1, n // 3)
        documents = tuple(length for length in (short, 1, n - short - 1) if length > 0)
        layouts = (Layout.zigzag(n, self._world), None), (Layout.contiguous(n, self._world), documents)
        contexts = [_Probe(layout, self._group, documents=packed) for layout, packed in layouts]
        passages = [self._passage(inputs, n, context) for context in contexts]
        for call in (part.calls[-1] for passage in passages for part in passage.parts):
            for name, x in call.outputs.items():
                if x.is_floating_point() and bool(x.isnan().any()):
                    raise ValueError(f"model must compute numbers, got NaN in its output {name} of {n} tokens {_HINT}")
        self._typed = self._with_types(inputs, n, contexts)
        self._padded = self._pad(inputs, n)
        padded = self._padded if isinstance(self._padded, str) else None
        same = {"the example": sorted(inputs), "tokens of the example": n, "the configuration's lengths": self._lengths}
        typed = self._typed if isinstance(self._typed, str) else None
        same |= {"token types of the example": typed}
        return same | {"padding of the example": padded, _PARAMETERS: _sums(self._model)}, passages

    def _with_types(self, inputs: dict[str, Any], n: int, contexts: list[_Probe]) -> list[Passage] | str:
        """Run the example with token types, if the model makes masks of them. Return why it cannot be run."""
        name = types_argument(self._model) if isinstance(self._model, PreTrainedModel) else None
        if name is None or name in inputs:
            return []
        x = next(x for x in inputs.values() if _is_along(x, n))
        types = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        types[:, 1 : n // 2] = types[:, n // 2 + 1 : n - 2] = 1
        try:
            return [self._passage(inputs | {name: types}, n, context) for context in contexts]
        except NotImplementedError as error:
            return str(error)

    def _pad(self, inputs: dict[str, Any], n: int) -> Passage | str:
        """Run the example with padding on the left, in place of a mask of its own. Return why it cannot be run."""
        x = next(x for x in inputs.values() if _is_along(x, n))
        mask = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
        mask[:, : n // 4] = 0
        context = _Probe(Layout.zigzag(n, self._world), self._group)
        try:
            padded = self._passage(inputs | {"attention_mask": mask}, n, context)
        except NotImplementedError as error:
            return str(error)
        (part,) = padded.parts
        seen = part.there >= n // 4
        return replace(padded, parts=[replace(part, here=part.here[seen], there=part.there[seen])])

    def _passage(self, inputs: dict[str, Any], n: int, context: ContextParallel) -> Passage:
        return Passage(context, self._sharded(inputs, n, context), self._parts(inputs, n, context))

    def _parts(self, inputs: dict[str, Any], n: int, context: ContextParallel) -> list[Part]:
        """Run each document by itself, or the whole sequence."""
        positions, parts, begin = context.layout.positions(context.rank), [], 0
        for length in context.documents or (n,):
            here = ((positions >= begin) & (positions < begin + length)).nonzero()[:, 0]
            rows = slice(begin, begin + length)
            arguments = {k: x[:, rows] if _is_along(x, n) else x for k, x in inputs.items()}
            try:
                with settings(self._model, _attn_implementation_internal="eager"):
                    calls = record(self._model, self._instead, arguments)
            except Exception as error:
                raise NotImplementedError(
                    f"model must run {length} tokens in one process to be compared, got {_told(error)} {_HINT}"
                ) from error
            parts.append(Part(length, context.tokens, here, positions[here] - begin, calls))
            begin += length
        return parts

    def _sharded(self, inputs: dict[str, Any], n: int, context: ContextParallel) -> dict[str, Any]:
        shards = {k: context.shard(x) if _is_along(x, n) else x for k, x in inputs.items()}
        device = next(x.device for x in inputs.values() if _is_along(x, n))
        return shards | {"position_ids": context.positions_on(device)[None], "context": context}

    def check(self, call: PreparedCall) -> None:
        """Run the example through the model, which is now switched to ring attention, and compare.

        Args:
            call: the model's hook, which learns whether the model can have padding.

        Raises:
            ValueError, NotImplementedError: an output differs from that of one process, or the model cannot run its
                shards. Every rank raises the same error.
        """
        for passage in self._passages:
            self._compare(passage)
        tokens = self._passages[0].context.layout.n
        if tokens <= self._reach:
            raise NotImplementedError(
                f"example must have more than {self._reach} tokens, since the configuration has "
                f"{self._lengths}, beyond which layers may mix tokens in another way, got {tokens} {_HINT}"
            )
        call.types_refused = self._check_types()
        call.compared, call.refused = True, None  # for the example with padding
        call.refused = self._check_padding(call)

    def _check_types(self) -> str | None:
        """Return why the model cannot have token types, None if it can."""
        if isinstance(self._typed, str):
            return self._typed
        try:
            for passage in self._typed:
                self._compare(passage)
        except (ValueError, NotImplementedError) as error:  # on every rank
            return str(error)
        return None

    def _check_padding(self, call: PreparedCall) -> str | None:
        """Return why the model cannot have padding, None if it can, and let the call count positions as the model."""
        if not isinstance(self._padded, Passage):
            return self._padded
        refusal = ""
        for call.counts_mask in (False, True):
            try:
                self._compare(self._padded)
            except (ValueError, NotImplementedError) as error:  # on every rank
                refusal = refusal or str(error)
            else:
                return None
        return refusal

    def _compare(self, passage: Passage) -> None:
        calls: list[ModuleCall] = []
        error: Exception | None = None
        try:
            calls = record(self._model, self._instead, passage.inputs)
        except _OnEveryRankError as told:
            raise told.error from None
        except Exception as wrong:  # on this rank alone, perhaps: the others must learn of it
            error = NotImplementedError(
                "model must take position_ids= and context= in its call, hand its keywords to the attention, and not "
                f"read the mask, which is None, got {_told(wrong)}: give a model that does so, {OFF}"
            )
        self._handle.agree("prepare", partial(_raised, error))
        finding = differing_module(calls, passage.parts)
        findings = all_gather_json(finding, self._handle.transport)
        ranks = [rank for rank, other in enumerate(findings) if other is not None]
        if ranks:
            first = min((findings[rank] for rank in ranks), key=lambda other: other[0])
            _refuse(first[1], [rank for rank in ranks if findings[rank] == first], passage.context, self._model)


_PARAMETERS = "the parameters, loaded from one place or drawn after torch.manual_seed,"
_HINT = f"(give example=, a dict of whole inputs that it can run, as {{'input_ids': (1, n) tokens, ...}}, {OFF})"


def _size(group: dist.ProcessGroup | DeviceMesh | Transport) -> int:
    if is_mesh(group) and group.ndim == 1:
        return group.size()
    return group.size() if isinstance(group, dist.ProcessGroup) else transport_over(group, 1).world_size


def _raised(error: Exception | None) -> tuple[dict[str, object], None]:
    if error is not None:
        raise error
    return {}, None


def _told(error: Exception) -> str:
    module = "".join(getattr(error, "__notes__", ())[:1])  # of `ModuleCalls`
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{module}"


class _OnEveryRankError(Exception):
    """An error that all ranks raise in the same call."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Probe(ContextParallel):
    """A handle that tells the errors that every rank raises from those of a rank alone."""

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            with _disable_current_modes():  # the ring has types of its own for its buffers
                own = args[0].device
                device = device_for(self.transport, own)  # a model may be compared before it is moved to the GPU
                args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
                return super().attention(*args, **kwargs).to(own)
        except Exception as error:
            raise _OnEveryRankError(error) from error

    def raise_everywhere(self, error: Exception, name: str | None = None) -> NoReturn:
        try:
            super().raise_everywhere(error, name)
        except Exception as joint:
            raise _OnEveryRankError(joint) from joint


def _refuse_parameters(model: nn.Module) -> None:
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta or is_dtensor(x):
            got = "on the meta device" if x.is_meta else "sharded already, as a DTensor"
            raise ValueError(
                f"model must have its weights, whole, to be compared with one process, got {name} {got}: call prepare "
                f"after they are loaded and before the model is wrapped, {OFF}"
            )


def _sums(model: nn.Module) -> list[str]:
    """Sum of the bits of each parameter."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums: list[Tensor] = []
    for _, x in model.named_parameters():
        plain = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        sums.append(
            plain.view(integers[plain.element_size()]).sum(dtype=torch.int64).to(sums[0].device if sums else x.device)
        )
    values = torch.stack(sums).tolist() if sums else []
    return [f"{name} {value:x}" for (name, _), value in zip(model.named_parameters(), values, strict=True)]


def _drawn(model: Any, world: int, longest: int) -> dict[str, Any]:
    """Draw the tokens of an example: an odd number, unlikely as another size; of those that the configuration names
    padding and masked ones alone, which models may count. longest: tokens beyond which layers mix."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise NotImplementedError(f"model must take input_ids, got one that takes {model.main_input_name} {_HINT}")
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise NotImplementedError(
            f"model must be an encoder or a decoder, got {type(model).__name__}, which has both: its cross attention "
            f"reads another sequence, which ring attention does not shard; {OFF}"
        )
    named = {x for c in (config, model.config) for x in c.to_dict().values() if type(x) is int}
    tokens = [x for x in range(min(config.vocab_size, 1000)) if x not in named] or [0]
    draw = torch.Generator().manual_seed(0)
    n = (min(longest, LONGEST) + 6 * world + 11) | 1
    ids = torch.tensor(tokens)[torch.randint(len(tokens), (1, n), generator=draw)]
    special = [getattr(config, name, None) for name in ("pad_token_id", "mask_token_id")]
    special = [x for x in special if type(x) is int and 0 <= x < config.vocab_size]
    ids[0, 2 : 2 + len(special)] = torch.tensor(special, dtype=torch.int64)
    return {"input_ids": ids.to(model.device)}


def _length(inputs: Mapping[str, Any], world: int) -> int:
    """Number of tokens of an example."""
    for name in ("input_ids", "inputs_embeds"):
        x = inputs.get(name)
        if isinstance(x, Tensor) and x.dim() >= 2:
            if x.shape[1] < 2 * world:
                raise ValueError(f"example must have at least {2 * world} tokens, two a rank, got {x.shape[1]}")
            if "position_ids" in inputs or "context" in inputs:
                break
            return x.shape[1]
    raise ValueError(
        "example must have input_ids (batch, tokens) or inputs_embeds (batch, tokens, width), whole, and neither "
        f"position_ids nor context, which are those of the shards, got {sorted(inputs)}"
    )


def _is_along(x: object, n: int) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == n


def _refuse(sentence: str, ranks: list[int], context: ContextParallel, model: nn.Module) -> NoReturn:
    packed = "" if context.documents is None else f", packed from documents of {context.documents} tokens"
    which = "all ranks" if len(ranks) == context.world_size > 1 else f"rank {', '.join(map(str, ranks))}"
    raise NotImplementedError(
        f"model must be the same sharded as in one process, got a {type(model).__name__}: of {context.layout.n} tokens"
        f"{packed}, on {which}, {sentence}, {OFF}"
    )
