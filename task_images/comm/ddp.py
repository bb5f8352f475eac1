"""torch's DistributedDataParallel as a strategy: gradients travel in buckets while the backward pass goes on."""

from torch import Tensor, nn
from torch.distributed import GradBucket, all_reduce  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from task_images.harness.data import Batch
from task_images.harness.distributed import World


class DdpAllReduce:
    """Every rank's gradients become their weighted mean over all ranks, exact for unequal batches.

    DDP needs its own module around the model (`wrap`), and each batch before its forward pass (`before_pass`), since
    the collectives start within the backward pass. What of them does not overlap is booked there, too; `stats` has
    torch's own figures, means over sampled steps: backward_seconds, communication_seconds, overlapped_seconds.

    bucket_mb    gradients are sent when so many MiB are together
    """

    def __init__(self, bucket_mb: float = 25.0) -> None:
        self._bucket_mb = bucket_mb
        self._share = 1.0
        self._total = 1.0
        self._stats = {"updates": 0.0, "messages": 0.0, "bytes": 0.0}
        self._wrapped: DistributedDataParallel | None = None

    def wrap(self, world: World, model: nn.Module) -> nn.Module:
        """The module to train: `model` itself on a single rank."""
        if world.size == 1:
            return model
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
        )
        self._wrapped.register_comm_hook(None, self._reduce)
        return self._wrapped

    def before_pass(self, batch: Batch) -> None:
        self._total = batch.total
        self._share = batch.size / batch.total

    def attach(self, world: World, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def before_update(self, weight: float, total: float | None = None) -> None:
        self._stats["updates"] += 1
        factor = (total or self._total) / (self._total if self._wrapped else weight)
        if factor != 1:  # the scale of an fp16 loss
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(factor)

    def after_update(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        figures = dict(self._stats)
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

    def _reduce(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        self._stats["messages"] += 1
        self._stats["bytes"] += gradients.numel() * gradients.element_size()
        gradients.mul_(self._share)
        work = all_reduce(gradients, async_op=True)
        future: Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])
