"""What ranks do of which some do not come, or come late: importable functions, for a pool of three."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ring import Layout, Pattern, ring_attention
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Message
from ring.comm.waiting import GRACE, SLOW
from ring.compute import kernels

TIMEOUT = 3.0  # seconds, of a group: longer than SLOW, so that ranks leave their marks


def _group(seconds: float = TIMEOUT) -> dist.ProcessGroup:
    dist.barrier()  # its timeout holds for the making of it, too
    made = dist.new_group([0, 1, 2], timeout=timedelta(seconds=seconds))
    assert isinstance(made, dist.ProcessGroup)
    return made


def _forward(
    group: dist.ProcessGroup | None, name: str | None = None, exchange: str = "ring"
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (torch.ones(1, 2, 1, 4, requires_grad=True) for _ in range(3))
    layout = Layout.contiguous(6, 3)
    out = ring_attention(q, k, v, Pattern.dense(), layout, group=group, name=name, exchange=exchange)
    assert isinstance(out, torch.Tensor)
    return out, q


def _said(act: Any) -> str:
    try:
        act()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def one_rank_is_late() -> tuple[str, list[str]]:
    """What is said, and the marks that are in the store afterwards."""
    group = _group(60.0)
    _forward(group)
    if dist.get_rank() == 1:
        time.sleep(SLOW + 0.7)
    said = _said(lambda: _forward(group))
    dist.barrier()
    store = group.get_group_store()
    keys = [f"ring/waits/{number}/{rank}" for number in range(6) for rank in range(3)]
    return said, [key for key in keys if store.check([key])]


def some_never_come(direction: str, absent: tuple[int, ...]) -> tuple[str, float]:
    """What is said, and after how many seconds."""
    group, rank = _group(), dist.get_rank()
    _forward(group)
    name, began = "layer 3", time.monotonic()
    if direction == "backward":
        out, q = _forward(group, name)
        began = time.monotonic()
        said = "stayed away" if rank in absent else _said(lambda: torch.autograd.grad(out.sum(), q))
    else:
        said = "stayed away" if rank in absent else _said(lambda: _forward(group, name))
    seconds = time.monotonic() - began
    dist.barrier()
    return said, seconds


def one_comes_too_late() -> str:
    group = _group()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT + 2 * GRACE)
    said = _said(lambda: _forward(group))
    dist.barrier()
    return said


def one_ends_in_the_middle(exchange: str) -> list[str]:
    """What is said in the call in which rank 1 runs out of memory, or is interrupted, and in the next one."""
    group = _group()
    _forward(group)
    real = kernels.forward

    def failing(*arguments: Any) -> Any:
        raise MemoryError("no room\nfor anything")

    if dist.get_rank() == 1:
        kernels.forward = failing  # type: ignore[assignment]
    found = []
    for name in ("layer 3", "layer 4"):
        try:
            _forward(group, name, exchange)
            found.append("fine")
        except (MemoryError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        kernels.forward = real
    dist.barrier()
    return found


def one_ends_after_a_message(rank: int, folder: str) -> None:
    """A process of its own, of two. It writes what the first one hears of messages from and to the second one, whose
    connection is broken from the second message on."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    transport = ProcessGroupTransport()
    message = Message(1 - rank, torch.ones(2), "a message")
    if rank == 1:
        transport.post([message], []).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    transport.post([], [message]).wait()
    posts: list[Any] = [*3 * [([], [message])], ([message], [])]
    Path(folder, "said").write_text("\n".join(_said(lambda post=post: transport.post(*post).wait()) for post in posts))


def one_dies(rank: int, killed: int, folder: str, agreed: bool) -> None:
    """A process of its own. It writes what is said where a rank is killed before its second call, or when it has agreed
    to it.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    _forward(None)
    if rank == killed and agreed:
        kernels.forward = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    elif rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _forward(None)
    except RuntimeError as error:
        Path(folder, f"said {rank}").write_text(str(error))
