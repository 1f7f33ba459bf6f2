"""accelerate's Accelerator as the data ranks see it: the ranks of a context group read and report the same batches.

The Trainer asks its accelerator for everything that concerns data: which part of the dataset a process reads, how many
labels all processes have, what all processes predicted. So numbers and results are those of the data ranks, each
counted once. Gradients are averaged over all processes, as accelerate's DDP and FSDP2 do, or summed by `SameWeights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from ring.integrations.trainers.call import ShardedCall
from ring.nn.same_weights.wrapper import SameWeights

OF_DATA_RANKS: WeakSet[Any] = WeakSet()  # loaders that deal batches to data ranks


class DataAccelerator(Accelerator):  # type: ignore[misc]
    """An accelerator whose processes are the data ranks of a mesh.

    Args:
        mesh: of all ranks, ("data", "context").
        same_bits: True: models get `SameWeights` in place of DDP.
        options: of accelerate's `Accelerator`.
    """

    def __init__(self, mesh: DeviceMesh, same_bits: bool, **options: Any) -> None:
        super().__init__(**options)
        self._mesh, self._same_bits = mesh, same_bits
        self._same: SameWeights | None = None

    @property
    def num_processes(self) -> int:
        """Number of data ranks."""
        return self._mesh["data"].size()

    @property
    def process_index(self) -> int:
        """Number of this data rank."""
        return self._mesh.get_local_rank("data")

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **options: Any) -> DataLoader[Any]:
        """Return a loader of the batches of this data rank.

        Args:
            data_loader: of all batches.
            args, options: of accelerate.

        Raises:
            ValueError: process 0 alone would read a dataset without a length, and hand out its parts.
        """
        check_loader("data_loader", data_loader)
        check_dataset("dataset", data_loader.dataset, self.dispatch_batches)
        prepared = super().prepare_data_loader(data_loader, *args, **options)
        OF_DATA_RANKS.add(prepared)
        return prepared

    def same_weights(self, model: nn.Module) -> SameWeights | None:
        """Return the model in its `SameWeights`; None without `same_bits`.

        Args:
            model: not wrapped.
        """
        if self._same_bits and (self._same is None or self._same.module is not model):
            self._same = SameWeights(model, self._mesh)
        return self._same

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return the model, wrapped for training.

        Args:
            model: not wrapped.
            device_placement, evaluation_mode: of accelerate.
        """
        prepared = super().prepare_model(model, device_placement, evaluation_mode or self._same_bits)
        return prepared if evaluation_mode else self.same_weights(prepared) or prepared

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Return a context for the backward of a micro-batch before the last one.

        Args:
            model: wrapped.
        """
        with model.no_sync() if isinstance(model, SameWeights) else super().no_sync(model):
            yield

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Return the model itself.

        Args:
            model: wrapped, or in a `ShardedCall`.
            args, options: of accelerate.
        """
        model = model.model if isinstance(model, ShardedCall) else model
        return super().unwrap_model(model.module if isinstance(model, SameWeights) else model, *args, **options)

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all data ranks, joined along their first dimension.

        Args:
            tensor: a tensor, or nested lists, tuples and dicts of tensors, the same on the ranks of a context group.
        """
        return tensor if self.num_processes == 1 else recursively_apply(self._joined, tensor, error_on_other_type=True)

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """Return the objects of all data ranks.

        Args:
            objects: the same on the ranks of a context group.
        """
        parts: list[Any] = [None] * self.num_processes
        dist.all_gather_object(parts, objects, self._mesh.get_group("data"))
        return [x for part in parts for x in part]

    def _joined(self, x: Tensor) -> Tensor:
        x = torch.atleast_1d(x).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_processes)]
        dist.all_gather(parts, x, self._mesh.get_group("data"))
        return torch.cat(parts)


def check_dataset(name: str, dataset: object, dispatch: bool | None) -> None:
    """Raise for a dataset that process 0 alone would read.

    Args:
        name: of the argument, in the message.
        dataset: of a loader.
        dispatch: accelerate's dispatch_batches.
    """
    if isinstance(dataset, IterableDataset) and dispatch is not False:
        raise ValueError(
            f"{name} must have a length, or be read by every rank, since batches that rank 0 hands out differ within a "
            f"context group: write accelerator_config={{'dispatch_batches': False}}, got an IterableDataset"
        )


def check_loader(name: str, loader: Any) -> None:
    """Raise for a loader that another accelerator prepared.

    Args:
        name: of the loader's source, in the message.
        loader: of batches; None: none.

    Raises:
        ValueError: the loader deals batches to all ranks, others within a context group.
    """
    if getattr(loader, "_is_accelerate_prepared", False) and loader not in OF_DATA_RANKS:
        raise ValueError(
            f"{name} must give a loader of whole batches that no other Accelerator prepared, which would deal them to "
            f"all ranks: write trainer.accelerator.prepare(loader), got a {type(loader).__name__} of another one"
        )
