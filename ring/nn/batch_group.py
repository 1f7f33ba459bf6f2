"""The ranks that share a global batch, data x context: they agree on errors, sum losses and average gradients.

A mesh of several dimensions has process groups along each dimension, but none of all its ranks. So collectives run
along one dimension after another. A mesh of all ranks of the world uses the default group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ring.comm.call_order import Calls, NumberedCall
from ring.comm.group import is_mesh
from ring.comm.process_group import ProcessGroupTransport, backends_of
from ring.comm.transport import MissingRanks
from ring.consensus import agreed_result
from ring.nn.waiting_ranks import groups_of_this_thread, raise_where_ranks_wait

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by torch's version


@dataclass(frozen=True)
class _MeshAxis:
    """The ranks along one dimension of the mesh, through this rank.

    members: their ranks in the group, which torch sorts, in the order of the mesh. stride: distance between their
    numbers among all ranks of the mesh.
    """

    transport: ProcessGroupTransport
    members: tuple[int, ...]
    stride: int

    @property
    def index(self) -> int:
        """Index of this rank among the members."""
        return self.members.index(self.transport.rank)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.transport.group


class _SharedCallNumber(Calls):
    """The calls of batch ranks, which are not numbered: groups along one dimension may have had unequal numbers of
    calls. If another rank is found in a call on the group of an axis, all ranks advance beyond that call.
    """

    def __init__(self, axis_calls: Sequence[Calls]) -> None:
        super().__init__()
        self._axis_calls = axis_calls

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the locks of all axes."""
        with ExitStack() as locks:
            for calls in self._axis_calls:
                locks.enter_context(calls.lock())
            yield

    def enter(self, where: str) -> None:
        for calls in self._axis_calls:
            calls.enter(where)

    def check_thread(self, call: NumberedCall | str) -> None:
        for calls in self._axis_calls:
            calls.check_thread(call)

    @property
    def number(self) -> int:
        return max((calls.number for calls in self._axis_calls), default=0)

    def advance_to(self, number: int) -> None:
        for calls in self._axis_calls:
            calls.advance_to(number)


class BatchRanks:
    """The ranks of a process group, of a mesh, or of the default group; this process alone if there is no group.

    `rank` is the number in the group or, in a mesh of a part of the world, in the mesh read row by row; `world_ranks`
    are the numbers of all in the world.

    Raises ValueError for anything else, also on all ranks of the group in which others wait for this one; and on a
    process alone that is not among its ranks.

    Ranks that give different groups, each of them valid, cannot be refused at once: a thread of a rank that waits on
    one group may yet call on the other. After the timeout the error names the ranks that wait for one another.
    """

    def __init__(self, over: dist.ProcessGroup | DeviceMesh | None) -> None:
        self._axes = _mesh_axes(over)
        self.rank = sum(axis.index * axis.stride for axis in self._axes)
        self.world_size = prod(len(axis.members) for axis in self._axes)
        self.world_ranks = _world_ranks(over)
        self.calls: Calls = _SharedCallNumber([axis.transport.calls for axis in self._axes])

    @property
    def is_one_group(self) -> bool:
        """True if one process group, or this process alone, has all ranks, in the same order."""
        axes = [axis for axis in self._axes if len(axis.members) > 1]
        return not axes or (len(axes) == 1 and [*axes[0].members] == [*range(axes[0].transport.world_size)])

    def lock(self) -> AbstractContextManager[object]:
        """Lock for all collectives of one result: another thread waits until it is released."""
        return self.calls.lock()

    def agree(self, doing: str, compute: Callable[[], tuple[dict[str, object], T]]) -> T:
        """Return what this rank computes. Raise one error on all ranks if any rank has one, or if signatures differ.

        Every rank calls it. compute: returns a signature, the values that must be equal on all ranks, and the result.
        """
        return agreed_result(doing, compute, self)

    def gather(self, x: Tensor) -> Tensor:
        """x (...), of one shape and type on all ranks -> (ranks, ...) in rank order, with the same bits on all."""
        shape = x.shape
        for axis in (axis for axis in self._axes if len(axis.members) > 1):
            local = x.to(_device_for(axis.group, x.device)).flatten()
            gathered = local.new_empty(len(axis.members) * len(local))
            _all_gather(gathered, local, group=axis.group)
            rows = gathered.view(len(axis.members), len(local))
            in_order = [*axis.members] == [*range(len(axis.members))]
            x = (rows if in_order else rows[list(axis.members)]).to(x.device)
        return x.reshape(-1, *shape)

    def add(self, x: Tensor) -> None:
        """Sum x, contiguous and of one shape and type, over the ranks, in place: the same bits on all."""
        for axis in self._axes:
            dist.all_reduce(x, group=axis.group)
        for axis in self._axes[:-1]:  # sums of the same numbers along two axes may differ in their last bit
            dist.broadcast(x, group=axis.group, group_src=0)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that has all ranks (`is_one_group`); None for a rank alone."""
        return next((axis.group for axis in self._axes if len(axis.members) > 1), None)

    def start_all_to_all(
        self, x: Tensor, held: Sequence[bool], group: dist.ProcessGroup | None
    ) -> Callable[[], Tensor]:
        """Return a function that waits for what other ranks have for this one and returns it, (ranks that have
        something, ...), in rank order.

        Args:
            x: (ranks, ...), contiguous: an entry for each rank; of no use on a rank that has nothing.
            held: True for each rank that has something.
            group: of these ranks, in the same order (`is_one_group`); None for a rank alone.
        """
        if group is None:
            return lambda: x
        local, size = x.to(_device_for(group, x.device)), x[0].numel()
        sizes = [size * has for has in held]
        found = local.new_empty(sum(sizes))
        sent = local.flatten() if held[self.rank] else local.new_empty(0)
        own = [size * held[self.rank]] * self.world_size
        work = dist.all_to_all_single(found, sent, sizes, own, group=group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return found.to(x.device).view(-1, *x.shape[1:])

        return arrived

    def all_equal(self, payload: bytes) -> bool:
        equal = True
        for axis in self._axes:
            # Ranks that found a difference pass it on along the next dimension.
            message = payload if equal else bytes(255 - byte for byte in payload)
            try:
                equal = axis.transport.all_equal(message) and equal
            except MissingRanks as absent:
                waited = absent.waited + _elsewhere(axis, absent.ranks)
                raise MissingRanks(self._numbers(axis, absent.ranks), waited) from absent
        return equal

    def _numbers(self, axis: _MeshAxis, ranks: tuple[int, ...] | None) -> list[int] | None:
        """Numbers of ranks of this rank's axis among all ranks."""
        if ranks is None:
            return None
        first = self.rank - axis.index * axis.stride
        return sorted(first + axis.members.index(rank) * axis.stride for rank in ranks)

    def all_gather(self, payload: bytes) -> list[bytes]:
        pieces = [payload]
        for axis in self._axes:
            gathered = axis.transport.all_gather(b"".join(pieces))
            size, parts = len(payload), [gathered[member] for member in axis.members]
            pieces = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
        return pieces


def _world_ranks(over: dist.ProcessGroup | DeviceMesh | None) -> frozenset[int]:
    """Ranks in the world, of the checked `over`."""
    if over is None or isinstance(over, dist.ProcessGroup):
        return frozenset(dist.get_process_group_ranks(over) if dist.is_initialized() else (0,))
    return frozenset(over.mesh.flatten().tolist())


def _elsewhere(axis: _MeshAxis, missing: Sequence[int] | None) -> str:
    """Tell which of the missing ranks wait for this one on another group. missing: none if that is not known."""
    with suppress(RuntimeError):  # the rank that served the store has ended
        for other in groups_of_this_thread():
            ours, theirs = (dist.get_process_group_ranks(group) for group in (axis.group, other.group))
            sought = {ours[rank] for rank in missing or range(len(ours))}
            if waiting := sorted(sought & {theirs[rank] for rank in other.waiting()}):
                return (
                    f"; world ranks {waiting} wait for this one among {theirs}, which waits for them among {ours}: "
                    "calls must come in the same order, and with the same over, on every rank"
                )
    return ""


def _mesh_axes(over: Any) -> tuple[_MeshAxis, ...]:
    """The axes of the ranks, the last dimension first, so that gathered tensors are in rank order."""
    if over is dist.GroupMember.NON_GROUP_MEMBER or (is_mesh(over) and over.get_coordinate() is None):
        raise ValueError(f"over must contain the calling process; world rank {dist.get_rank()} is not in {over!r}")
    try:
        return _axes(over)
    except Exception as error:  # of any type, as of a destroyed group: the other ranks must raise it too
        raise_where_ranks_wait("over", error)


def _axes(over: dist.ProcessGroup | DeviceMesh | None) -> tuple[_MeshAxis, ...]:
    if over is None:
        return (_whole_group(None),) if dist.is_initialized() else ()
    if isinstance(over, dist.ProcessGroup):
        return (_whole_group(over),)
    if not is_mesh(over):
        raise ValueError(f"over must be a process group, a DeviceMesh or None, got {over!r}")
    if over.ndim > 1 and over.size() == dist.get_world_size():
        return (_whole_group(None),)
    axes, stride = [], 1
    for dim in reversed(range(over.ndim)):
        axes.append(_mesh_axis(over, dim, stride))
        stride *= over.size(dim)
    return tuple(axes)


def _whole_group(group: dist.ProcessGroup | None) -> _MeshAxis:
    transport = ProcessGroupTransport(group)
    return _MeshAxis(transport, tuple(range(transport.world_size)), 1)


def _mesh_axis(mesh: DeviceMesh, dim: int, stride: int) -> _MeshAxis:
    group, coordinate = mesh.get_group(dim), mesh.get_coordinate()
    assert coordinate is not None
    world_ranks = mesh.mesh.movedim(dim, -1)[tuple(at for i, at in enumerate(coordinate) if i != dim)].tolist()
    return _MeshAxis(
        ProcessGroupTransport(group), tuple(dist.get_group_rank(group, rank) for rank in world_ranks), stride
    )


def _device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device if the group can send its tensors, else the GPU."""
    if device.type in backends_of(group):
        return device
    return torch.device("cuda", torch.cuda.current_device())
