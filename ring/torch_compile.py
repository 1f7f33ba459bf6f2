"""The call within `torch.compile`: two operators, forward and backward, of tensors, numbers and strings.

A compiled graph holds no Python objects. So a layout is passed by its number in this process (`Layout.number`), which
may change without recompilation, a group by its name, and a pattern as text. The documents and slices of a pattern,
which change at every step, are passed by its number (`Pattern.number`). The operators do the same as an eager call:
consensus, then execution. The forward also returns the number of its call on the group, with which the backward looks
the call up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.fake_impl import allocate_size
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.node import has_side_effect

from reference.pattern import Pattern, numbered_pattern
from ring.adjacent import adjacent, joined
from ring.comm.group import is_mesh
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from ring.consensus import agree, agree_backward, hosts_of, setting_of
from ring.execute import backward, execution_of, forward, kept_forms, select_transport
from ring.layout import Layout, numbered_layout
from ring.plan.exchange import HEADS_KEPT
from ring.plan.exchanges import DIRECT_KEPT
from ring.precision import accumulator_dtype
from ring.settings import OPERATOR_SCHEMA, Settings
from ring.validation import NO_TRANSFORMS, Call, wants_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NO_GROUP = ""


def traced(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, layout: Layout, *, key_layout: Layout | None = None,
    group: dist.ProcessGroup | DeviceMesh | Transport | None, sinks: Tensor | None = None, packed: int | None = None,
    **settings: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`ring_attention` in a graph. packed: number of the pattern whose documents to use; None: those of `pattern`.
    settings: those of `Settings`.

    Raises ValueError while traced if the group has no name, NotImplementedError within vmap. Other errors are raised
    when the graph runs.
    """
    differentiated = wants_gradients(q, k, v, sinks)
    out, lse, *_ = torch.ops.ring.attention_forward(
        q, k, v, sinks, layout=layout.number, key_layout=(layout if key_layout is None else key_layout).number,
        pattern=pattern.text, sliced=pattern.number if pattern.has_slices else 0,
        packed=(0 if pattern.documents is None else pattern.number) if packed is None else packed,
        group=group_name(group),
        differentiated=differentiated, sinks_differentiated=wants_gradients(sinks),
        keeps=differentiated and settings.get("exchange") in (DIRECT_KEPT.name, HEADS_KEPT),
        **Settings(**settings).for_operator(),
    )  # fmt: skip
    return (out, lse) if settings.get("return_lse", False) else out


# --- objects by text, number and name ---------------------------------------------------------------------------------


def group_name(group: dist.ProcessGroup | DeviceMesh | Transport | None) -> str:
    """Return the name by which a graph looks a process group up; NO_GROUP for none.

    Raises ValueError for a group without a name.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or isinstance(group, SoloTransport):
        return NO_GROUP
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if is_mesh(group) and group.ndim == 1:
        return group.get_group().group_name
    raise ValueError(
        "group must be a process group, a mesh of one dimension or None within torch.compile, which looks it up by name"
    )


@lru_cache(maxsize=64)
def _pattern(text: str, sliced: int, packed: int) -> Pattern:
    """Decode a pattern: that of the number `sliced`, if not 0, with the documents of that of `packed`, if not 0. Cached
    for the backward.
    """
    pattern = numbered_pattern(sliced) if sliced else Pattern.from_dict(json.loads(text))
    return replace(pattern, documents=numbered_pattern(packed).documents) if packed else pattern


def named_transport(group: str) -> Transport:
    """Look up the transport of a group by its name."""
    if group == NO_GROUP:
        return SoloTransport()
    return ProcessGroupTransport(_resolve_process_group(group))  # type: ignore[arg-type]


# --- the operators ----------------------------------------------------------------------------------------------------

_CALL = (
    "SymInt layout, SymInt key_layout, str pattern, SymInt sliced, SymInt packed, str group, bool differentiated, "
    f"bool sinks_differentiated, bool keeps, {OPERATOR_SCHEMA}"
)


def _call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: dict[str, Any]) -> Call:
    """Return the call of an operator's arguments."""
    layouts = numbered_layout(arguments["layout"]), numbered_layout(arguments["key_layout"])
    pattern = _pattern(arguments["pattern"], arguments["sliced"], arguments["packed"])
    return Call(
        q, k, v, pattern, *layouts, sinks, Settings.of_operator(arguments), arguments["differentiated"],
        arguments["sinks_differentiated"],
    )  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **arguments: Any) -> tuple[Tensor, ...]:
    """q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hk, Dv), sinks (H,) -> out (B, N, H, Dv), lse (B, H, N), the number of
    the call, (1,) int64, and what is kept for the backward, (bytes,) uint8.
    """
    transport = named_transport(arguments["group"])
    with torch.cuda.device_of(q), transport.calls.lock(), torch.autocast(q.device.type, enabled=False):
        numbered = transport.calls.begin(arguments["name_"], transport.world_size)
        call = _call(q, k, v, sinks, arguments)
        setting = agree(call, numbered, transport)
        execution = execution_of(call, setting, numbered, select_transport(q, transport))
        out, lse, kept = forward(execution, q, k, v, sinks)
        number = torch.tensor([numbered.number], device="cpu")
        return out.contiguous(), lse, number, joined(kept, q)


attention_forward = torch.library.custom_op(
    "ring::attention_forward", _forward, mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, *, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **arguments: Any) -> tuple[Tensor, ...]:
    batch, tokens, heads, _ = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
    kept = _known_when_run() if arguments["keeps"] else 0
    number = torch.empty(1, dtype=torch.int64, device="cpu")
    return q.new_empty((batch, tokens, heads, v.shape[3])), lse, number, q.new_empty(kept, dtype=torch.uint8)


def _known_when_run() -> int | torch.SymInt:
    """Return a size that is known only when the graph runs. Not by `new_dynamic_size`, which breaks the graph unless
    the whole function is one.
    """
    shapes = torch.library.get_ctx()._shape_env
    return torch.library.get_ctx().new_dynamic_size() if shapes is None else allocate_size(shapes)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    *number_and_kept: Tensor, **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv, dsinks, like q, k, v, sinks; an empty dsinks if they have no gradient. number_and_kept: as
    returned by the forward.
    """
    number, kept = number_and_kept
    transport = named_transport(arguments["group"])
    with torch.cuda.device_of(q), transport.calls.lock(), torch.autocast(q.device.type, enabled=False):
        numbered = transport.calls.get(int(number), arguments["name_"])
        call = _call(q, k, v, sinks, arguments)
        agree_backward(numbered, transport, call.settings.check)
        setting = setting_of(call, transport, hosts_of(call, numbered, transport))
        execution = execution_of(call, setting, numbered, select_transport(q, transport))
        differentiated = sinks if call.sinks_differentiated else None
        received = adjacent(kept.contiguous(), kept_forms(execution, q, k, v))
        grads = backward(execution, q, k, v, out, lse, dout, dlse, differentiated, kept=received)
        dq, dk, dv, *dsinks = (grad.contiguous() for grad in grads)
    return dq, dk, dv, dsinks[0] if dsinks else q.new_empty(0)


attention_backward = torch.library.custom_op(
    "ring::attention_backward", _backward, mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
    f"Tensor number, Tensor kept, *, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Tensor,
    sinks_differentiated: bool = False, **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsinks = q.new_empty(0) if sinks is None or not sinks_differentiated else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    ctx.arguments = keyword_only_inputs | {"differentiated": True}
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    out = ctx.saved_tensors[4]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.ring.attention_backward(dout, dlse, *ctx.saved_tensors, **ctx.arguments)
    return dq, dk, dv, dsinks if ctx.arguments["sinks_differentiated"] else None


attention_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _refuse_vmap(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(NO_TRANSFORMS)


attention_forward.register_vmap(_refuse_vmap)
attention_backward.register_vmap(_refuse_vmap)

# Do not let a graph eliminate these as dead code: other ranks wait for them.
for operator in (torch.ops.ring.attention_forward.default, torch.ops.ring.attention_backward.default):
    has_side_effect(operator)
