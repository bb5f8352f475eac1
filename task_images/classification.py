"""Tasks whose passes map a batch of inputs to outputs and a loss; for image classifications, from model to result.

with training_session(contract, data="CIFAR-10") as (world, report):
    images = ...                                    # load
    seed_all(contract.seed)
    train_classifier(world, report, settings, model, data, schedule)
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from task_images import Lazy
from task_images.contract import TaskUsageError
from task_images.data import Batch, Data
from task_images.methods.base import Bsp, Method, prepare_method
from task_images.metrics import Mean, Metric, TopK, collect
from task_images.parameters import CheckpointedSettings, ClassifierSettings
from task_images.report import Reporter, make_accuracy_goal
from task_images.schedules import Schedule
from task_images.train import (
    Loss,
    PassLoss,
    Plan,
    Precision,
    SampleBatches,
    Trainer,
    Unit,
    Values,
    check_finite,
    count_parameters,
    make_precision,
)
from task_images.world import World

if TYPE_CHECKING:
    from task_images import speed
else:
    speed = Lazy("task_images.speed")


def check_settings(settings: ClassifierSettings) -> None:
    """Raises TaskUsageError for conflicting settings, before anything is opened or loaded."""
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")


def train_classifier(
    world: World,
    report: Reporter,
    settings: ClassifierSettings,
    model: nn.Module,
    data: Data,
    schedule: Schedule,
    *,
    classes: int = 10,
    loss: Loss = nn.functional.cross_entropy,
    measure: bool = False,
    groups: Callable[[nn.Module, float], Iterable[Any]] | None = None,
    method: Method | None = None,
    name: str = "",
    identity: Mapping[str, Any] | None = None,
    details: Mapping[str, Any] | None = None,
    closing: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Train `model` (initialized on the CPU) with synchronous SGD until the Prec@1 goal, and report the result.

    classes    number of classes; below five there is no Prec@5
    loss       training loss; validation uses cross-entropy
    measure    measure throughput only, without validation and goal
    groups     (model, weight decay) -> parameter groups of the optimizer; None: a single group
    method     gradient exchange; None: one flat buffer after the backward pass
    name       the task's name in checkpoints; identity: settings that must match to resume from one
    """
    model = model.to(world.device)
    long = settings if isinstance(settings, CheckpointedSettings) else None
    same = {"seed": world.contract.seed, "global_batch": settings.batch_size * world.size}
    facts: dict[str, Any] = {"parameters": count_parameters(model.parameters()), "global_batch": same["global_batch"]}
    precision = make_precision(long.precision if long else "fp32", world.device)
    chosen = prepare_method(world, lambda: method or Bsp())
    if long:
        _check_graphs(long, chosen)
        long = replace(long, compile=speed.choose_compile(long.compile, world.contract))
        speed.apply_speed(long, model)
        facts["options"] = {name: getattr(long, name) for name in ("channels_last", "compile", "loaders")}
    samples = Samples(
        world,
        data,
        model,
        loss,
        metrics=[] if measure else [TopK(k) for k in (1, 5) if k <= classes],
        training_metrics=[] if measure else [TopK(1)],
        validation_loss=nn.functional.cross_entropy,
        precision=precision,
        compiled=long is not None and long.compile != "no",
    )
    goal = make_accuracy_goal(settings.goal_full, settings.goal_light, settings.goal_on, world.contract.goal)
    Trainer(
        world,
        report,
        SampleBatches(data),
        schedule,
        Plan(
            settings.epochs,
            settings.budget_seconds,
            checkpoint=long is not None and long.checkpoint,
            resume=long.resume if long else "",
            protocol=settings.protocol,
        ),
        name=name,
        validate=None if measure else samples.validate,
        goal=None if measure else goal,
        details={**facts, **(details or {})},
        closing=closing,
        identity={**(identity or {}), **same},
        unit=Unit("images"),
        work=samples,
        model=model,
        make_optimizer=lambda model: torch.optim.SGD(
            groups(model, settings.weight_decay) if groups else model.parameters(),
            lr=0.0,  # set by the schedule before every update
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            fused=True,
        ),
        method=chosen,
        precision=precision,
        arithmetic=settings,
        graphs=speed.Graphs() if long is not None and long.compile == "graphs" else None,
    ).run()


def _check_graphs(settings: CheckpointedSettings, method: Method) -> None:
    """Raises TaskUsageError for methods that hook single layers or change weights, which do not work in a graph
    replay."""
    if settings.compile == "graphs" and (method.gates or not method.identical or not method.replays):
        raise TaskUsageError(
            "compile=graphs replays the whole model, but this method uses its layers or moves its parameters",
            "--set compile=blocks, or a method that exchanges gradients before the update, such as bsp",
        )


# --- passes on a batch of inputs and targets -----------------------------------------------------------------------


@dataclass
class Samples:
    """A task whose passes map a batch of inputs to outputs and a loss: what a pass computes (`train.Work`), and the
    validation of the whole validation set, each rank on its shard, which may be empty.

    model              unwrapped: a wrapper's forward pass may be collective, and a rank may have no batch to validate
    loss_of            (outputs, targets) -> mean over the batch; validation_loss: None: the same
    metrics            of the validation set, including the goal's
    training_metrics   of the training samples, as augmented, by the model that trained on them
    scores             maps the model's outputs to inputs of the metrics (e.g. logits to probabilities)
    compiled           whether the model has compiled parts: they are used only for training batches of the usual size,
                       because recompiling for a few others costs more than it saves
    """

    world: World
    data: Data
    model: nn.Module
    loss_of: Loss
    metrics: Sequence[Metric] = ()
    training_metrics: Sequence[Metric] = ()
    validation_loss: Loss | None = None
    scores: Callable[[Tensor], Tensor] | None = None
    precision: Precision | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        self._usual = 0

    def prepare(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device; the first batch's size is the usual one."""
        self._usual = self._usual or part.size
        return self.data.prepare(part, training=True)

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        """The model's outputs."""
        with run_eagerly(self.compiled and len(data[1]) != self._usual):
            outputs: Tensor = model(data[0])
        return outputs

    def loss(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> PassLoss:
        """The mean loss over the batch, with the number of samples."""
        value = self.loss_of(outputs, data[1])
        return PassLoss(value, value.detach(), len(data[1]))

    def observe(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> None:
        """Add a pass to the metrics, asynchronously."""
        self._count(self.training_metrics, outputs.detach(), data[1])

    def _count(self, metrics: Sequence[Metric], outputs: Tensor, targets: Tensor) -> None:
        scores = outputs if self.scores is None else self.scores(outputs)
        for metric in metrics:
            metric.update(scores, targets)

    def read_sums(self) -> list[list[float]]:
        """This rank's sums of the metrics since they were last collected, for a checkpoint."""
        sums = [metric.take() for metric in self.training_metrics]
        self.load_sums(sums)
        return sums

    def load_sums(self, sums: list[list[float]]) -> None:
        """Restore the sums of `read_sums`."""
        for metric, own in zip(self.training_metrics, sums, strict=True):
            metric.take()
            metric.add(*own)

    def collect_metrics(self, world: World) -> Values:
        """The metrics since the last call, over all ranks. Collective."""
        return collect(world, self.training_metrics) if self.training_metrics else {}

    def validate(self, epoch: int) -> Values:
        """Loss and metrics over the whole validation set. Collective."""
        mean, loss_of = Mean("loss"), self.validation_loss or self.loss_of
        autocast = contextlib.nullcontext if self.precision is None else self.precision.autocast
        with torch.inference_mode(), run_eagerly(self.compiled):
            for batch in self.data.validation():
                inputs, targets = self.data.prepare(batch, training=False)
                with autocast():
                    outputs = self.model(inputs)
                    loss = loss_of(outputs, targets)
                mean.add_mean(loss, batch.size)
                self._count(self.metrics, outputs, targets)
        return check_finite(collect(self.world, [mean, *self.metrics]), epoch)


def run_eagerly(needed: bool) -> AbstractContextManager[object]:
    """A context that bypasses compiled code if `needed`."""
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()
