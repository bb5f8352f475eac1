"""torch's DistributedDataParallel as a strategy: gradients are sent in buckets during the backward pass."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, all_reduce  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from task_images.comm.base import Strategy, Traits
from task_images.harness.errors import TaskUsageError
from task_images.harness.precision import LossScale

# No broadcast of buffers in the forward pass: like all strategies, this one averages them before validation. The option
# has another name in torch 2.14 and older.
_OPTION = "forward_sync_buffers"
_NO_BROADCAST: Mapping[str, Any] = {
    _OPTION if _OPTION in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


class DdpAllReduce(Strategy):
    """Average the gradients of all ranks, weighted by batch size, so unequal batches are exact.

    The collectives start and end within the backward pass, which is measured as one with them. `stats` has
    torch's own figures, means over sampled steps: backward_seconds, communication_seconds, overlapped_seconds.

    bucket_mb    bucket size in MiB at which gradients are sent
    static       the graph never changes; wire: data type of the messages if it differs from the gradients'
    """

    traits = Traits(mixed=("backward",))

    def __init__(self, bucket_mb: float = 25.0, static: bool = False, wire: torch.dtype | None = None) -> None:
        self._bucket_mb = bucket_mb
        self._static = static
        self._wire = wire
        self._wrapped: DistributedDataParallel | None = None

    def _prepare(self, model: nn.Module) -> nn.Module:
        device = self.world.device
        if self.world.size == 1:
            return model
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self._static,
            **_NO_BROADCAST,
        )
        self._wrapped.register_comm_hook(None, self._reduce_bucket)
        return self._wrapped

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update of `passes` passes; only the last one exchanges gradients."""
        super().begin(weight, total, passes, scale)
        if self._wrapped is not None:
            if self._static and passes > 1:  # torch counts a static graph's hooks in the first backward pass
                raise TaskUsageError(
                    f"an update has {passes} passes, and DistributedDataParallel with a static graph supports only one",
                    "--method ddp, or a batch that fits into one pass.",
                )
            self._wrapped.require_backward_grad_sync = passes == 1

    def last_pass(self) -> AbstractContextManager[object]:
        """A context for the last pass, in which the buckets are sent."""
        return self._send_gradients()

    @contextlib.contextmanager
    def _send_gradients(self) -> Iterator[None]:
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = True
        yield

    def _reduce(self) -> None:
        if self._wrapped is None:
            self._scale_alone()

    def stats(self) -> dict[str, float]:
        """The common figures, and torch's own in seconds: backward, communication, and its overlap."""
        figures = super().stats()
        if self._wrapped is None:
            return figures
        logged = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        for name, entry in (
            ("backward_seconds", "avg_backward_compute_time"),
            ("communication_seconds", "avg_backward_comm_time"),
            ("overlapped_seconds", "avg_backward_compute_comm_overlap_time"),
        ):
            figures[name] = float(logged.get(entry, 0)) / 1e9
        return figures

    def bucket_bytes(self) -> list[int]:
        """Bytes of torch's buckets, as it built them after the first backward pass."""
        logged = {} if self._wrapped is None else self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
        return [int(size) for size in sizes.split(",") if size.strip().isdecimal()]

    def _reduce_bucket(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        gradients.mul_(self._weight / self._total)
        sent = gradients if self._wire is None else gradients.to(self._wire)
        self._count(sent)
        work = all_reduce(sent, async_op=True)
        future: Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: gradients.copy_(done.value()[0]) if self._wire else done.value()[0])
