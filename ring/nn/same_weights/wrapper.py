"""A model whose training step has the same bits on any number of ranks, data x context: in place of DDP.

    model = SameWeights(model, mesh)                      # after prepare, before the optimizer
    context = ContextParallel(Layout.whole_chunks(n, ranks, 4096), mesh["context"], same_bits=4096)
    batch = shard_batch(context, tokens, next_tokens(tokens))
    cross_entropy(model(batch.tokens, batch.context), batch.labels, model).backward()
    clip_grad_norm(model.parameters(), 1.0, model)
    optimizer.step()

`ring/nn/SAME_WEIGHTS.md` says what is promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ring.comm.process_group import ProcessGroupTransport
from ring.nn import loss_ranks
from ring.nn.batch_group import BatchRanks
from ring.nn.context import ContextParallel
from ring.nn.replicas import check_plain, check_replicas
from ring.nn.same_weights.chunk_rows import chunks_of_ranks
from ring.nn.same_weights.chunked_calls import ChunkedCalls, Forward
from ring.nn.same_weights.comparison import compare_alone, no_random_numbers
from ring.nn.same_weights.errors_of_one_rank import run_together
from ring.nn.same_weights.gradient_sums import GradientSums
from ring.nn.same_weights.share_messages import Held
from ring.nn.same_weights.token_sums import TokenSums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SameWeights(nn.Module):
    """A model whose gradients have the same bits on any number of ranks, data x context. Its parameters then have, too.

    A forward gets a `ContextParallel` with `same_bits`, and tensors of this rank's tokens, (B, N, ...). After the
    backward every rank has the gradient of the sum of all ranks' losses: give the losses this model in place of a mesh.
    The sequences of a step are numbered micro-batch by micro-batch, data rank by data rank, entry by entry.

    Args:
        module: the model, not wrapped, with the same parameters on every rank. Its modules with parameters are called
            chunk by chunk until `restore`.
        over: ranks of the batch, data x context: a process group, a `DeviceMesh` of one dimension or of the whole
            world, or None: the default group, if any.
        compare: compare chunks alone with all chunks of a rank, before the first forward that records gradients: a
            model whose tokens depend on others than by attention is refused. False: nothing then notices it.

    Raises:
        ValueError, NotImplementedError: on every rank, for parameters that are no plain tensors or differ between
            ranks, and for modules that have parameters beside modules.
    """

    def __init__(
        self, module: nn.Module, over: dist.ProcessGroup | DeviceMesh | None = None, *, compare: bool = True
    ) -> None:
        super().__init__()
        self.module, self.ranks = module, BatchRanks(over)
        self._parameter_names = [name for name, x in module.named_parameters() if x.requires_grad]
        tensors = [x for x in module.parameters() if x.requires_grad]

        def checked() -> tuple[dict[str, object], ChunkedCalls]:
            wrappers = SameWeights, DistributedDataParallel
            compiled = any(hasattr(x, "_orig_mod") or x._compiled_call_impl is not None for x in module.modules())
            wrapped = compiled or any(isinstance(x, wrappers) for x in module.modules())
            if wrapped or not tensors:
                got = f"{type(module).__name__}{', compiled' if compiled else ''}"
                raise ValueError(f"module must be a plain model with parameters to train, got {got}")
            if not self.ranks.is_one_group:
                raise NotImplementedError(
                    "over must be a process group, a mesh of one dimension or one of the whole world, got a part of "
                    f"the world in several, of {self.ranks.world_size} ranks: write mesh['data', 'context']._flatten()"
                )
            if any(x.device.type == "cpu" for x in tensors) and torch.get_num_threads() > 1:
                raise ValueError(
                    f"torch.get_num_threads() must be 1 on CPUs, got {torch.get_num_threads()}: threads share elements "
                    "by their number. Write torch.set_num_threads(1), or OMP_NUM_THREADS=1 in the environment"
                )
            for number, x in enumerate(tensors):
                check_plain(number, x)
            signature: dict[str, object] = {
                "parameters": [[str(x.dtype), list(x.shape), x.device.type] for x in tensors],
            }
            return signature, ChunkedCalls(module, {id(x): i for i, x in enumerate(tensors)}, self._insert)

        with self.ranks.lock():
            self._calls = self.ranks.agree("SameWeights", checked)
            check_replicas([x.detach() for x in module.parameters()], self.ranks)
            self._parameters_list, self._sums = tensors, GradientSums(tensors, self.ranks)
        self.token_sums = TokenSums(self.ranks, self._meet)
        self._compare, self._promises, self._synchronized = compare, compare, True
        self._backward: int | None = None  # torch's number of the backward whose end is awaited

    def restore(self) -> nn.Module:
        """Return the model as it was given."""
        self._calls.restore()
        return self.module

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the group of the ranks cannot be."""
        raise NotImplementedError(
            "SameWeights cannot be copied or pickled: write copy.deepcopy(model.module), or save model.state_dict()"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backwards leave no gradients yet, but keep them for the step's last micro-batch, as
        DDP's `no_sync`.
        """
        before, self._synchronized = self._synchronized, False
        try:
            yield
        finally:
            self._synchronized = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, and begin the step anew: without the micro-batches of `no_sync` so far, and without
        what a forward or backward left that an error ended.

        Args:
            set_to_none: as of `nn.Module`.
        """
        super().zero_grad(set_to_none)
        self._sums.forget()
        self._sums = GradientSums(self._parameters_list, self.ranks, self._sums.early)
        if self._calls.running is not None:  # its backward may yet come
            self._calls.running.given_up = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns for this rank's tokens.

        Args:
            args: of the model, with a `ContextParallel` that has `same_bits` among them.
            kwargs: alike.

        Raises:
            ValueError, NotImplementedError: no such handle; a rank without tokens; a call before the backward of the
                last output; parameters that have gradients.
            Exception: of any type, which the model raised on some rank. Every rank raises the same error.
        """
        forward = self._begin(args, kwargs)
        if self._calls.running is not None:
            self._close(self._calls.running)
        if self._compare and torch.is_grad_enabled():
            compare_alone(self.module, self._calls, self._parameters_list, forward, args, kwargs, self.ranks)
            self._compare = False
        self.token_sums.begin(forward)
        self._sums.begin(torch.is_grad_enabled())
        run, doing = partial(self._call, args, kwargs), "the forward of SameWeights"
        with self._calls.within(forward):
            output = run_together(doing, run, self.module, forward.context, self.ranks)
        differentiable = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        for x in differentiable:
            x.register_hook(lambda _: self._begin_backward(forward))
        if not differentiable:
            self._close(forward)
        return output

    def _call(self, args: Any, kwargs: Any) -> Any:
        checked = self._promises and torch.is_grad_enabled()
        with no_random_numbers(self._parameters_list) if checked else nullcontext():
            return self.module(*args, **kwargs)

    def _close(self, forward: Forward) -> None:
        forward.done, self._calls.running, self._backward = True, None, None

    def _begin(self, args: Any, kwargs: Any) -> Forward:
        values = tree_leaves((args, kwargs))
        handles = [x for x in values if isinstance(x, ContextParallel)]
        if len(handles) != 1 or handles[0].same_bits is None:
            raise ValueError(
                "model must be called with one ContextParallel(..., same_bits=C), got "
                f"{[f'same_bits={x.same_bits}' for x in handles] or 'none'}"
            )
        (context,) = handles
        # Then all ranks of the handle are in this forward, where an error of one finds them.
        context.agree("the call of SameWeights", lambda: self._check(context, values))
        chunks = chunks_of_ranks(context)[context.rank]
        batch = max(x.shape[0] for x in values if isinstance(x, Tensor) and x.shape[1:2] == (context.tokens,))
        return Forward(context, chunks, batch)

    def _check(self, context: ContextParallel, values: list[Any]) -> tuple[dict[str, object], None]:
        if context.world_size > 1 and not isinstance(context.transport, ProcessGroupTransport):
            raise NotImplementedError(
                f"context must be of a process group or mesh, got a {type(context.transport).__name__}"
            )
        if not all(context.layout.counts):
            raise NotImplementedError(
                f"layout must give every rank a chunk, got {list(context.layout.counts)} tokens: take shorter chunks"
            )
        chunks_of_ranks(context)  # refuses a layout that cuts chunks
        shapes = [tuple(x.shape) for x in values if isinstance(x, Tensor)]
        if all(shape[1:2] != (context.tokens,) for shape in shapes):
            raise ValueError(f"model must be called with tensors of tokens, (B, {context.tokens}, ...), got {shapes}")
        now = {id(x) for x in self.module.parameters() if x.requires_grad}
        if now != {id(x) for x in self._parameters_list}:
            raise ValueError(
                "parameters that require gradients must be those that SameWeights was made with, got others: wrap the "
                "model again"
            )
        hooks = [
            name for name, x in self.module.named_parameters() if x._backward_hooks or x._post_accumulate_grad_hooks
        ]
        if hooks:
            raise NotImplementedError(
                f"parameters must have no hooks, which get no gradient of a chunk, got some of {', '.join(hooks[:3])}"
            )
        if self._calls.running is not None and not self._calls.running.given_up:
            raise ValueError(
                "model must be called again after the backward of its output, or of one under no_grad(). If an error "
                "ended the last step, write model.zero_grad(), with the model of SameWeights, and begin the step anew"
            )
        if torch.is_grad_enabled():
            self._check_no_gradients("be None before the first forward of a step: zero_grad(set_to_none=True)")
        return {}, None

    def _check_no_gradients(self, wanted: str) -> None:
        some = [
            x
            for x, parameter in zip(self._parameter_names, self._parameters_list, strict=True)
            if parameter.grad is not None
        ]
        if some:
            raise ValueError(f"gradients of {', '.join(some[:3])} must {wanted}")

    # --- gradients ---

    def _meet(self, own: Held) -> Sequence[Held]:
        """Return what each rank holds. Collective."""
        return self._sums.meet(own).held

    def _begin_backward(self, forward: Forward) -> None:
        """Await the end of the backward that reaches an output. Recomputation has backwards of its own within it."""
        running = torch._C._current_graph_task_id()
        if forward.done or self._backward not in (None, running):
            raise ValueError("loss must have one backward for each forward of the model, got another one")
        if self._backward is None:
            self._backward = running
            Variable._execution_engine.queue_callback(lambda: self._end(forward))

    def _insert(self, forward: Forward, index: int, entry: int, chunk: int, gradient: Tensor) -> None:
        """Take the gradient of a parameter in a chunk. Called within a backward."""
        if self._backward is None:
            raise ValueError("loss must be a function of what the model returns, got one of other tensors in it")
        self._sums.insert(index, entry, chunk, forward.chunks.count, gradient)

    def _end(self, forward: Forward) -> None:
        """Sum over ranks, at the end of a backward."""
        backward = self._backward
        assert backward is not None
        # A rank whose backward an error ended is met here, in its next forward.
        forward.context.agree("the backward of SameWeights", lambda: ({}, None))

        def checked() -> tuple[dict[str, object], None]:
            if others := [sorted(x) for x in loss_ranks.noted(backward) if x]:
                raise ValueError(
                    "losses must be over the model with SameWeights, as cross_entropy(logits, labels, model), got one "
                    f"over ranks {others[0]}"
                )
            self._check_no_gradients(
                "come from calls of their modules alone, but they came from elsewhere: the model uses them itself"
            )
            return {"synchronized": self._synchronized}, None

        with self.ranks.lock():
            self.ranks.agree("the backward of SameWeights", checked)
            self._sums.exchange(self.token_sums.held)
            if self._synchronized:
                for index, gradient in self._sums.results().items():
                    self._parameters_list[index].grad = gradient
        self._close(forward)


def ranks_over(over: dist.ProcessGroup | DeviceMesh | SameWeights | None) -> BatchRanks:
    """Return the ranks of a batch."""
    return over.ranks if isinstance(over, SameWeights) else BatchRanks(over)
