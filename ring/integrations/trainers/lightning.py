"""Lightning's Trainer over data x context: strategies for DDP and FSDP2.

    class Model(LightningModule):
        def configure_model(self):                             # with ShardedStrategy; DDP wraps by itself
            fsdp.shard(self.net, self.device_mesh, DecoderLayer)

        def training_step(self, whole, index):
            context = ContextParallel(Layout.zigzag(whole.shape[1], ...), self.device_mesh["context"])
            batch = shard_batch(context, whole, next_tokens(whole))
            labelled = count_labels(batch.labels, self.device_mesh)
            loss = cross_entropy(self.net(batch.tokens, batch.context), batch.labels, self.device_mesh)
            self.log("loss", loss, batch_size=labelled)        # the mean of an epoch weighs by labels, too
            return self.trainer.strategy.weighted(loss, labelled)

    Trainer(strategy=ReplicatedStrategy(context_size=4), accumulate_grad_batches=2, gradient_clip_val=1.0, ...)

Lightning divides the loss of each micro-batch by `accumulate_grad_batches`, which gives a mean of means. `weighted`
undoes it: after the last micro-batch of a step gradients are those of the mean over all its labelled tokens.

Lightning's samplers give each data rank other sequences, and all ranks of a context group the same ones. Those of
evaluation repeat sequences if their number is no multiple of the data ranks, so that some count twice.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ring.extras import optional_imports

with optional_imports(__name__):
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from lightning.pytorch.strategies.parallel import ParallelStrategy

from ring.integrations.wrappers import ddp


class _Weights:
    """Weights of a step's micro-batches: labels of each, relative to those of the first."""

    def __init__(self) -> None:
        self.first = self.total = self.given = 0

    def next(self, labelled: int) -> float:
        """Return the weight of a micro-batch."""
        if not self.total:
            self.first = max(labelled, 1)
        self.total += labelled
        self.given += 1
        return labelled / self.first

    def end(self, divided_by: int) -> float:
        """Return the factor of the gradients of a step, of which each share was divided."""
        factor = divided_by * self.first / max(self.total, 1)
        self.first = self.total = 0
        return factor


class _OverDataAndContext(ParallelStrategy):  # type: ignore[misc]
    """The mesh, samplers and accumulation of both strategies."""

    context_size: int
    _mesh: DeviceMesh
    _weights: _Weights
    _last: bool  # micro-batch of a step

    def _begin(self, context_size: int) -> None:
        if not isinstance(context_size, int) or isinstance(context_size, bool) or context_size < 1:
            raise ValueError(f"context_size must be a positive integer, got {context_size!r}")
        self.context_size, self._weights, self._last = context_size, _Weights(), True

    def _make_mesh(self) -> DeviceMesh:
        """Make the mesh, and hand it to the module as `device_mesh`."""
        if self.world_size % self.context_size:
            raise ValueError(f"context_size must divide the {self.world_size} ranks, got {self.context_size}")
        sizes = (self.world_size // self.context_size, self.context_size)
        self._mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("data", "context"))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's samplers: data ranks have different sequences."""
        return {"num_replicas": self._mesh["data"].size(), "rank": self._mesh.get_local_rank("data")}

    def weighted(self, mean: Tensor, labelled: int) -> Tensor:
        """Return what `training_step` returns: the micro-batch's mean loss, weighted by its labels.

        Args:
            mean: over the labelled tokens of this micro-batch on all ranks (`cross_entropy`, `token_mean`).
            labelled: their number (`count_labels`).

        Returns:
            A scalar; in a step of one micro-batch the mean itself.

        Raises:
            ValueError: the module optimizes manually: then `cross_entropy` takes the labels of the whole step.
        """
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise ValueError("weighted is for automatic optimization: give cross_entropy the labels of the whole step")
        return mean * self._weights.next(labelled)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Look whether the loss was weighted.

        Args:
            closure_loss: to be differentiated.

        Raises:
            ValueError: `weighted` was not called once since the last backward.
        """
        super().pre_backward(closure_loss)
        assert self.lightning_module is not None
        given, self._weights.given = self._weights.given, 0
        if self.lightning_module.automatic_optimization and given != 1:
            raise ValueError(
                f"training_step must return strategy.weighted(mean, labelled), called once, since micro-batches have "
                f"unequal numbers of labels; it was called {given} times"
            )

    def post_backward(self, closure_loss: Tensor) -> None:
        """Give gradients their scale after the last backward of a step, before they are clipped.

        Args:
            closure_loss: which was differentiated.
        """
        super().post_backward(closure_loss)
        module = self.lightning_module
        assert module is not None
        if self._last and module.automatic_optimization:
            factor = self._weights.end(module.trainer.accumulate_grad_batches)
            for x in module.parameters() if factor != 1.0 else ():
                if x.grad is not None:
                    x.grad.mul_(factor)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate: the backward within is not the last of a step.

        Returns:
            A context.
        """
        self._last = False
        self._set_sync(False)
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._last = True
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        """Tell FSDP."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(sync, recurse=False)


class ReplicatedStrategy(_OverDataAndContext, DDPStrategy):  # type: ignore[misc]
    """DDP over data x context.

    Args:
        context_size: number of ranks that share sequences; a divisor of all ranks.
        options: of Lightning's `DDPStrategy`.

    Raises:
        ValueError: context_size is no positive integer.
    """

    def __init__(self, context_size: int, **options: Any) -> None:
        super().__init__(**options)
        self._begin(context_size)

    def setup_environment(self) -> None:
        """Join the ranks, and make their mesh."""
        super().setup_environment()
        self._make_mesh()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return ddp.wrap(model, self._mesh, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class ShardedStrategy(_OverDataAndContext, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 over data x context: the module's `configure_model` calls `fsdp.shard` with `self.device_mesh`.

    Args:
        context_size: number of ranks that share sequences; a divisor of all ranks.
        options: of Lightning's `ModelParallelStrategy`, without its sizes.

    Raises:
        ValueError: context_size is no positive integer.
    """

    def __init__(self, context_size: int, **options: Any) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, **options)
        self._begin(context_size)

    def setup_environment(self) -> None:
        """Join the ranks, and make their mesh."""
        self._setup_distributed()
        self._device_mesh = self._make_mesh()
