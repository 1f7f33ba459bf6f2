"""Defects, planted in every rank before its first task: what a backend's `prepare` is in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from verification.run import rank as execute
from verification.run.recording_transport import RecordingTransport


def plant(spoil: Callable[..., Any]) -> None:
    """Replace the ring_attention that ranks call by `spoil(the real one, arguments, options)`."""
    real = execute.ring_attention
    execute.ring_attention = lambda *args, **kwargs: spoil(real, args, kwargs)


def plant_on_results(change: Callable[[Tensor, Any, Any], Tensor]) -> None:
    """The output becomes change(out, arguments, options)."""

    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if isinstance(result, tuple):
            return change(result[0], args, kwargs), result[1]
        return change(result, args, kwargs)

    plant(spoil)


def plant_wrong_result() -> None:
    plant_on_results(lambda out, args, kwargs: out * (1.01 if args[4].n >= 6 and args[3].causal else 1.0))


class ReceiveFirst(RecordingTransport):
    """A transport that sends nothing before what it is to receive is there: a ring of such ranks waits for ever."""

    def post(self, sends: Any, receives: Any) -> Any:
        self.inner.post([], receives).wait()
        return self.inner.post(sends, [])


def plant_receive_first() -> None:
    from ring.comm.exchange import Exchange

    real = Exchange.__init__

    def init(self: Any, plan: Any, transport: Any, *args: Any, **rest: Any) -> None:
        chosen: Any = ReceiveFirst(transport) if transport.world_size > 2 else transport
        real(self, plan, chosen, *args, **rest)

    Exchange.__init__ = init  # type: ignore[method-assign]
