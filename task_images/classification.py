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
from task_images.loop import Plan, SampleBatches, Unit, Values, check_finite
from task_images.methods.base import Bsp, MakeOptimizer, Method, prepare_method
from task_images.parameters import CheckpointedSettings, ClassifierSettings, CudaSettings
from task_images.report import GoalWatch, Reporter, make_accuracy_goal
from task_images.schedules import Schedule
from task_images.train import (
    Loss,
    Mean,
    Metric,
    PassLoss,
    Precision,
    TopK,
    Trainer,
    collect,
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
    make_sample_trainer(
        world,
        report,
        data,
        model,
        loss,
        lambda model: torch.optim.SGD(
            groups(model, settings.weight_decay) if groups else model.parameters(),
            lr=0.0,  # set by the schedule before every update
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            fused=True,
        ),
        schedule,
        Plan(
            settings.epochs,
            settings.budget_seconds,
            checkpoint=long is not None and long.checkpoint,
            resume=long.resume if long else "",
            protocol=settings.protocol,
        ),
        method=chosen,
        metrics=[] if measure else [TopK(k) for k in (1, 5) if k <= classes],
        training_metrics=[] if measure else [TopK(1)],
        goal=None
        if measure
        else make_accuracy_goal(settings.goal_full, settings.goal_light, settings.goal_on, world.contract.goal),
        validation_loss=nn.functional.cross_entropy,
        precision=precision,
        compiled=long is not None and long.compile != "no",
        graphs=speed.Graphs() if long is not None and long.compile == "graphs" else None,
        arithmetic=settings,
        unit=Unit("images"),
        name=name,
        details={**facts, **(details or {})},
        closing=closing,
        identity={**(identity or {}), **same},
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


class SampleWork:
    """A pass on a batch. `loss` is (outputs, targets) -> mean over the batch.

    compiled   whether the model has compiled parts: they are used only for batches of the usual size, because
               recompiling for a few others costs more than it saves
    metrics    of the training samples, as augmented, by the model that trained on them
    scores     maps the model's outputs to inputs of the metrics; None: the outputs
    """

    def __init__(
        self,
        data: Data,
        loss: Loss,
        compiled: bool = False,
        metrics: Sequence[Metric] = (),
        scores: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._data, self._loss, self._compiled = data, loss, compiled
        self._metrics, self._scores = metrics, scores or _keep_outputs
        self._usual = 0

    def prepare(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device; the first batch's size is the usual one."""
        self._usual = self._usual or part.size
        return self._data.prepare(part, training=True)

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        """The model's outputs; batches of another size do not use compiled parts."""
        with run_eagerly(self._compiled and len(data[1]) != self._usual):
            outputs: Tensor = model(data[0])
        return outputs

    def loss(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> PassLoss:
        """The mean loss over the batch, with the number of samples."""
        value = self._loss(outputs, data[1])
        return PassLoss(value, value.detach(), len(data[1]))

    def observe(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> None:
        """Add a pass to the metrics, asynchronously."""
        outputs = outputs.detach()
        for metric in self._metrics:
            metric.update(self._scores(outputs), data[1])

    def read_sums(self) -> list[list[float]]:
        """This rank's sums of the metrics since they were last collected, for a checkpoint."""
        sums = [metric.take() for metric in self._metrics]
        self.load_sums(sums)
        return sums

    def load_sums(self, sums: list[list[float]]) -> None:
        """Restore the sums of `read_sums`."""
        for metric, own in zip(self._metrics, sums, strict=True):
            metric.take()
            metric.add(*own)

    def collect_metrics(self, world: World) -> Values:
        """The metrics since the last call, over all ranks. Collective."""
        return collect(world, self._metrics) if self._metrics else {}


@dataclass(frozen=True)
class SampleValidator:
    """Computes loss and metrics over the whole validation set, each rank on its shard, which may be empty.

    model      unwrapped: a wrapper's forward pass may be collective, and a rank may have no batch
    scores     maps the model's outputs to inputs of the metrics (e.g. logits to probabilities)
    """

    world: World
    model: nn.Module
    data: Data
    loss: Loss
    metrics: Sequence[Metric]
    precision: Precision
    scores: Callable[[Tensor], Tensor]
    compiled: bool = False

    def __call__(self, epoch: int) -> Values:
        mean = Mean("loss")
        with torch.inference_mode(), run_eagerly(self.compiled):
            for batch in self.data.validation():
                inputs, targets = self.data.prepare(batch, training=False)
                with self.precision.autocast():
                    outputs = self.model(inputs)
                    loss = self.loss(outputs, targets)
                mean.add_mean(loss, batch.size)
                scores = self.scores(outputs)
                for metric in self.metrics:
                    metric.update(scores, targets)
        return check_finite(collect(self.world, [mean, *self.metrics]), epoch)


def make_sample_trainer(
    world: World,
    report: Reporter,
    data: Data,
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    schedule: Schedule,
    plan: Plan,
    *,
    method: Method,
    metrics: Sequence[Metric] = (),
    training_metrics: Sequence[Metric] = (),
    goal: GoalWatch | None = None,
    validation_loss: Loss | None = None,
    scores: Callable[[Tensor], Tensor] | None = None,
    precision: Precision | None = None,
    compiled: bool = False,
    graphs: "speed.Graphs | None" = None,
    arithmetic: CudaSettings | None = None,
    unit: Unit | None = None,
    name: str = "",
    details: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    closing: Callable[[], Mapping[str, Any]] = dict,
) -> Trainer[Batch]:
    """The trainer of a task that maps a batch of inputs to outputs and a loss.

    loss     (outputs, targets) -> mean over the batch; validation_loss: None: the same
    metrics  of the validation set, including the goal's. Empty: no validation
    training_metrics   of the training samples
    scores   see SampleValidator; the others see Trainer and Loop
    """
    precision = precision or Precision("fp32", world.device)
    validator = SampleValidator(
        world, model, data, validation_loss or loss, metrics, precision, scores or _keep_outputs, compiled
    )
    return Trainer(
        world,
        report,
        SampleBatches(data),
        schedule,
        plan,
        name=name,
        validate=validator if metrics else None,
        goal=goal,
        details=dict(details or {}),
        closing=closing,
        identity=dict(identity or {}),
        work=SampleWork(data, loss, compiled, training_metrics, scores),
        model=model,
        make_optimizer=make_optimizer,
        method=method,
        precision=precision,
        arithmetic=arithmetic or CudaSettings(),
        graphs=graphs,
        unit=unit or Unit(),
    )


def _keep_outputs(outputs: Tensor) -> Tensor:
    return outputs


def run_eagerly(needed: bool) -> AbstractContextManager[object]:
    """A context that bypasses compiled code if `needed`."""
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()
