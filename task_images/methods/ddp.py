"""torch's DistributedDataParallel, which sends gradients in buckets during the backward pass; with it, ZeRO-1."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from task_images.methods import Lazy, dist
from task_images.methods.base import LossScale, MakeOptimizer, Method, size_option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import GradBucket, optim  # type: ignore[attr-defined]
    from torch.futures import Future
    from torch.nn import parallel
    from torch.nn.parallel import DistributedDataParallel

else:
    parallel, optim = Lazy("torch.nn.parallel"), Lazy("torch.distributed.optim")

MIB = 2**20
# No broadcast of buffers in the forward pass: like all methods, this one averages them before validation. The option
# has another name in torch 2.14 and older.
SYNC_BUFFERS, SYNC_BUFFERS_BEFORE = "forward_sync_buffers", "broadcast_buffers"


class Ddp(Method):
    """The weighted mean, so unequal batches are exact.

    The collectives start and end within the backward pass, which is measured as one with them. `stats` has torch's own
    figures, means over sampled steps: backward_seconds, communication_seconds, overlapped_seconds.
    """

    name = "ddp"
    summary = "torch's DistributedDataParallel"
    source = "Li et al. 2020, arXiv:2006.15704"
    options = {"bucket": size_option("25MiB", "bytes of gradients in a message")}  # noqa: RUF012
    exact = True
    wraps = True
    mixed: ClassVar[tuple[str, ...]] = ("backward",)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel."""
        device = self.world.device
        known = inspect.signature(parallel.DistributedDataParallel).parameters
        options: dict[str, Any] = {SYNC_BUFFERS if SYNC_BUFFERS in known else SYNC_BUFFERS_BEFORE: False}
        self._wrapped: DistributedDataParallel = parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.values["bucket"] / MIB,
            gradient_as_bucket_view=True,
            **options,
        )
        # torch compares annotations with its classes, and these are text: a lambda has none.
        self._wrapped.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))
        return self._wrapped

    def start(self) -> None:
        """Gradients are views of torch's buckets."""
        self.keeps_gradients = True
        self._sent = [0, 0]

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update; only its last pass exchanges gradients."""
        super().begin(weight, total, passes, scale)
        if self.world.size > 1:
            self._wrapped.require_backward_grad_sync = self.is_last_pass

    def begin_last_pass(self) -> None:
        """From now on the buckets are sent."""
        if self.world.size > 1:
            self._wrapped.require_backward_grad_sync = True

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer().mul_(self.share)
        self._sent = [self._sent[0] + 1, self._sent[1] + flat.numel() * flat.element_size()]
        done: Future[list[Tensor]] = dist.all_reduce(flat, async_op=True).get_future()
        return done.then(_first)

    def stats(self) -> dict[str, float]:
        """Messages, bytes, and torch's own figures in seconds: backward, communication, and its overlap."""
        figures = {"updates": float(self._updates), "messages": 0.0, "bytes": 0.0}
        if self.world.size == 1:
            return figures
        logged = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        figures |= {"messages": float(self._sent[0]), "bytes": float(self._sent[1])}
        for name, entry in (
            ("backward_seconds", "avg_backward_compute_time"),
            ("communication_seconds", "avg_backward_comm_time"),
            ("overlapped_seconds", "avg_backward_compute_comm_overlap_time"),
        ):
            figures[name] = float(logged.get(entry, 0)) / 1e9
        return figures


class Zero1(Ddp):
    """ZeRO-1: each rank updates a part of the parameters and broadcasts it."""

    name = "zero1"
    summary = "shards the optimizer state across ranks (torch's ZeroRedundancyOptimizer)"
    source = "Rajbhandari et al. 2020, arXiv:1910.02054"
    formula = "2 (P-1)/P M + (P-1)/P M on average over all ranks"
    replays = False
    mixed = ("backward", "optimizer")

    def make_optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """The task's optimizer with its settings, sharded."""
        self._make = make
        whole = make(self.model)
        if self.world.size == 1:
            return whole
        known = inspect.signature(type(whole)).parameters
        defaults = {name: value for name, value in whole.defaults.items() if name in known}
        groups = [
            {name: value for name, value in group.items() if name == "params" or name in known}
            for group in whole.param_groups
        ]
        made: torch.optim.Optimizer = optim.ZeroRedundancyOptimizer(groups, type(whole), **defaults)
        return made

    def whole_optimizer(self) -> torch.optim.Optimizer:
        """The task's own, with the state of all shards on rank 0."""
        whole = self._make(self.model)
        if self.world.size > 1:
            self.optimizer.consolidate_state_dict(0)  # type: ignore[attr-defined]
        if self.world.is_first:
            whole.load_state_dict(self.optimizer.state_dict())
        return whole

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Each rank keeps its shard."""
        self.optimizer.load_state_dict(optimizer.state_dict())


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
