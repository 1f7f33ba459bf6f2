"""The call within `torch.compile`: two operators, forward and backward, of tensors, numbers and strings.

A compiled graph holds no Python objects. So a layout is passed by its number in this process (`Layout.number`), which
may change without recompilation, a group by its name, and a pattern as text. The documents of a pattern, which change
at every step, are passed by its number (`Pattern.number`). The operators do the same as an eager call: consensus, then
execution. The forward also returns the number of its call on the group, with which the backward looks the call up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.node import has_side_effect

from reference.pattern import Pattern, numbered_pattern
from ring.comm.group import is_mesh
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from ring.consensus import agree, agree_backward, hosts_of, setting_of
from ring.execute import backward, execution_of, forward, select_transport
from ring.layout import Layout, numbered_layout
from ring.precision import accumulator_dtype
from ring.validation import Call, wants_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NO_GROUP = ""


def traced(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, layout: Layout, *,
    group: dist.ProcessGroup | DeviceMesh | Transport | None, kernel: str, return_lse: bool, packed: int | None = None,
    key_layout: Layout | None = None, sinks: Tensor | None = None, **settings: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`ring_attention` in a graph. packed: number of the pattern whose documents to use; None: those of `pattern`.
    settings: the other arguments.

    Raises ValueError while traced if the group has no name. Other errors are raised when the graph runs.
    """
    out, lse, _ = torch.ops.ring.attention_forward(
        q, k, v, sinks, layout=layout.number, key_layout=(layout if key_layout is None else key_layout).number,
        pattern=pattern.text, group=group_name(group), return_lse=return_lse, kernel_name=kernel,
        packed=pattern.number if packed is None else packed,
        differentiated=wants_gradients(q, k, v, sinks), sinks_differentiated=wants_gradients(sinks), **settings,
    )  # fmt: skip
    return (out, lse) if return_lse else out


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
def _pattern(text: str, number: int) -> Pattern:
    """Decode a pattern, with the documents of the pattern of this number, if not 0. Cached for the backward."""
    pattern = Pattern.from_dict(json.loads(text))
    return replace(pattern, documents=numbered_pattern(number).documents) if number else pattern


def named_transport(group: str) -> Transport:
    """Look up the transport of a group by its name."""
    if group == NO_GROUP:
        return SoloTransport()
    return ProcessGroupTransport(_resolve_process_group(group))  # type: ignore[arg-type]


# --- the operators ----------------------------------------------------------------------------------------------------
# Do not name an argument `kernel`: Inductor passes arguments by name, beside a `kernel` of its own.


@torch.library.custom_op("ring::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, layout: int, key_layout: int, pattern: str, group: str,
    exchange: str, bucket: int | None, kernel_name: str, scale: float | None, return_lse: bool, check: bool,
    name: str | None, differentiated: bool, packed: int = 0, softcap: float | None = None,
    sinks_differentiated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hk, Dv), sinks (H,) -> out (B, N, H, Dv), lse (B, H, N), and the number
    of the call, (1,) int64.

    packed: the number of the pattern whose documents to use; 0: none. differentiated: True if the graph is.
    """
    transport = named_transport(group)
    with torch.cuda.device_of(q), transport.calls.lock(), torch.autocast(q.device.type, enabled=False):
        numbered = transport.calls.begin(name, transport.world_size)
        call = Call(
            q, k, v, _pattern(pattern, packed), numbered_layout(layout), numbered_layout(key_layout), exchange,
            bucket, kernel_name, scale, softcap, sinks, return_lse, differentiated, sinks_differentiated,
        )  # fmt: skip
        setting = agree(call, numbered, transport, check)
        execution = execution_of(call, setting, numbered, select_transport(q, transport), check)
        out, lse = forward(execution, q, k, v, sinks)
        return out.contiguous(), lse, torch.tensor([numbered.number], device="cpu")


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, tokens, heads, v.shape[3])), lse, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("ring::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    number: Tensor, *, layout: int, key_layout: int, pattern: str, group: str, exchange: str,
    bucket: int | None, kernel_name: str, scale: float | None, return_lse: bool, check: bool, name: str | None,
    packed: int = 0, softcap: float | None = None, sinks_differentiated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv, dsinks, like q, k, v, sinks; an empty dsinks if they have no gradient. number: of the call, as
    returned by the forward.
    """
    transport = named_transport(group)
    with torch.cuda.device_of(q), transport.calls.lock(), torch.autocast(q.device.type, enabled=False):
        numbered = transport.calls.get(int(number), name)
        call = Call(
            q, k, v, _pattern(pattern, packed), numbered_layout(layout), numbered_layout(key_layout), exchange,
            bucket, kernel_name, scale, softcap, sinks, return_lse, differentiated=True,
            sinks_differentiated=sinks_differentiated,
        )  # fmt: skip
        agree_backward(numbered, transport, check)
        setting = setting_of(call, transport, hosts_of(call, numbered, transport))
        execution = execution_of(call, setting, numbered, select_transport(q, transport), check)
        grads = backward(execution, q, k, v, out, lse, dout, dlse, sinks if sinks_differentiated else None)
        dq, dk, dv, *dsinks = (grad.contiguous() for grad in grads)
    return dq, dk, dv, dsinks[0] if dsinks else q.new_empty(0)


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Tensor,
    sinks_differentiated: bool = False, **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsinks = q.new_empty(0) if sinks is None or not sinks_differentiated else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    ctx.settings = {name: value for name, value in keyword_only_inputs.items() if name != "differentiated"}
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    out = ctx.saved_tensors[4]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.ring.attention_backward(dout, dlse, *ctx.saved_tensors, **ctx.settings)
    return dq, dk, dv, dsinks if ctx.settings["sinks_differentiated"] else None


attention_forward.register_autograd(_differentiate, setup_context=_setup_context)

# Do not let a graph eliminate these as dead code: other ranks wait for them.
for operator in (torch.ops.ring.attention_forward.default, torch.ops.ring.attention_backward.default):
    has_side_effect(operator)
