"""The ranks that share a global batch: data x context. They agree on errors, sum losses and average gradients.

A mesh of several dimensions has a process group for each line of ranks along a dimension, and not for all ranks
together. So what all ranks are to know goes along one dimension after another. A mesh of all ranks there are goes by
the default group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ring.comm.call_order import Calls, NumberedCall
from ring.comm.group import is_mesh
from ring.comm.process_group import ProcessGroupTransport, backends_of
from ring.comm.transport import MissingRanks
from ring.consensus import compare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class _MeshAxis:
    """This rank and those that differ from it along one dimension of the mesh.

    members: their ranks in the group, which torch sorts, in the order of the mesh. stride: between their numbers among
    all ranks of the mesh.
    """

    transport: ProcessGroupTransport
    members: tuple[int, ...]
    stride: int

    @property
    def index(self) -> int:
        """Of this rank among the members."""
        return self.members.index(self.transport.rank)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.transport.group


class _SharedCallNumber(Calls):
    """What batch ranks do is not numbered, since lines along one dimension may have seen different numbers of calls.
    But where another rank was found in a call on the group of a line, all ranks have to go on after that call.
    """

    def __init__(self, lines: Sequence[Calls]) -> None:
        super().__init__()
        self._lines = lines

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Of all lines."""
        with ExitStack() as turns:
            for calls in self._lines:
                turns.enter_context(calls.lock())
            yield

    def check_thread(self, call: NumberedCall | str) -> None:
        for calls in self._lines:
            calls.check_thread(call)

    @property
    def number(self) -> int:
        return max((calls.number for calls in self._lines), default=0)

    def advance_to(self, number: int) -> None:
        for calls in self._lines:
            calls.advance_to(number)


class BatchRanks:
    """The ranks of a process group, of a mesh, or of the default group; this process alone where there is none.

    A rank goes by its number in the group, or in a mesh of fewer ranks than there are, read row by row.

    Raises ValueError for anything else, and on a process that is not among them.
    """

    def __init__(self, over: dist.ProcessGroup | DeviceMesh | None) -> None:
        self._lines = _lines(over)
        self.rank = sum(line.index * line.stride for line in self._lines)
        self.world_size = prod(len(line.members) for line in self._lines)
        self.calls: Calls = _SharedCallNumber([line.transport.calls for line in self._lines])

    def lock(self) -> AbstractContextManager[object]:
        """Around all that the ranks do together for one result: another thread waits until it is there."""
        return self.calls.lock()

    def agree(self, doing: str, signature: dict[str, object], error: Exception | None) -> None:
        """Raise one error on all ranks if there is any, or if their signatures differ. Every rank calls it."""
        if error is None and self.world_size > 1:
            try:
                self.calls.check_thread(doing)
            except ValueError as found:
                error = found
        compare(doing, signature, error, self)

    def gather(self, x: Tensor) -> Tensor:
        """x (...), of one shape and type on all ranks -> (ranks, ...) in their order: the same bits on all."""
        shape = x.shape
        for line in self._lines:
            mine = x.to(_device_for(line.group, x.device)).contiguous()
            everyone = [torch.empty_like(mine) for _ in line.members]
            dist.all_gather(everyone, mine, group=line.group)
            x = torch.stack([everyone[member] for member in line.members]).to(x.device)
        return x.reshape(-1, *shape)

    def add(self, x: Tensor) -> None:
        """Make x, contiguous and of one shape and type on all ranks, the sum over the ranks: the same bits on all."""
        for line in self._lines:
            dist.all_reduce(x, group=line.group)
        for line in self._lines[:-1]:  # sums of the same numbers along two lines may differ in their last bit
            dist.broadcast(x, group=line.group, group_src=0)

    def all_equal(self, payload: bytes) -> bool:
        equal = True
        for line in self._lines:
            # Ranks that have found a difference have to show it to those along the next dimension.
            shown = payload if equal else bytes(255 - byte for byte in payload)
            try:
                equal = line.transport.all_equal(shown) and equal
            except MissingRanks as absent:
                raise MissingRanks(self._numbers(line, absent.ranks), absent.waited) from absent
        return equal

    def _numbers(self, line: _MeshAxis, ranks: tuple[int, ...] | None) -> list[int] | None:
        """Of ranks of a line, which differ from this one along its dimension only."""
        if ranks is None:
            return None
        first = self.rank - line.index * line.stride
        return sorted(first + line.members.index(rank) * line.stride for rank in ranks)

    def all_gather(self, payload: bytes) -> list[bytes]:
        pieces = [payload]
        for line in self._lines:
            joined = line.transport.all_gather(b"".join(pieces))
            size, wholes = len(payload), [joined[member] for member in line.members]
            pieces = [whole[start : start + size] for whole in wholes for start in range(0, len(whole), size)]
        return pieces


def _lines(over: dist.ProcessGroup | DeviceMesh | None) -> tuple[_MeshAxis, ...]:
    """The last dimension first, so that what is gathered comes in the order of the ranks."""
    if over is None:
        return (_whole_group(None),) if dist.is_initialized() else ()
    if isinstance(over, dist.ProcessGroup):
        return (_whole_group(over),)
    if not is_mesh(over):
        raise ValueError(f"over must be a process group, a DeviceMesh or None, got {over!r}")
    if over.get_coordinate() is None:
        raise ValueError(f"over must contain the calling process; world rank {dist.get_rank()} is not in {over!r}")
    if over.ndim > 1 and over.size() == dist.get_world_size():
        return (_whole_group(None),)
    lines, stride = [], 1
    for dim in reversed(range(over.ndim)):
        lines.append(_line(over, dim, stride))
        stride *= over.size(dim)
    return tuple(lines)


def _whole_group(group: dist.ProcessGroup | None) -> _MeshAxis:
    transport = ProcessGroupTransport(group)
    return _MeshAxis(transport, tuple(range(transport.world_size)), 1)


def _line(mesh: DeviceMesh, dim: int, stride: int) -> _MeshAxis:
    group, here = mesh.get_group(dim), mesh.get_coordinate()
    assert here is not None
    world_ranks = mesh.mesh.movedim(dim, -1)[tuple(at for i, at in enumerate(here) if i != dim)].tolist()
    return _MeshAxis(
        ProcessGroupTransport(group), tuple(dist.get_group_rank(group, rank) for rank in world_ranks), stride
    )


def _device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device itself if the group can move its tensors, else that of the GPU."""
    if device.type in backends_of(group):
        return device
    return torch.device("cuda", torch.cuda.current_device())
