"""The training loop of all tasks. Start reading at `Loop.run`: epochs, validation, goal, budget, reports.
`Trainer`, below it, computes updates with torch and a communication method.

A task supplies a work: its data as updates of one or more passes, whose gradients are averaged exactly (`Batches`), and
the model and what a pass computes (`Work`); and a validator.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from task_images import Lazy
from task_images.clock import ClockLook, Measurement, Throughput, Tracker
from task_images.contract import TaskError, TaskUsageError
from task_images.data import Batch, Data, seed_device
from task_images.methods.base import LossScale, MakeOptimizer, Method
from task_images.metrics import (
    Mean,
    Metric,
    TrainingLoss,
    Values,
    check_finite,
    collect,
    make_divergence_error,
)
from task_images.parameters import CUDNN, CudaSettings, ThroughputProtocol
from task_images.report import GoalWatch, Reporter
from task_images.schedules import Schedule
from task_images.world import World, average_buffers, sample_gpu

if TYPE_CHECKING:
    from task_images import checkpoint, peak, speed
else:
    checkpoint, peak = Lazy("task_images.checkpoint"), Lazy("task_images.peak")
    speed = Lazy("task_images.speed")

P = TypeVar("P")


@dataclass(frozen=True)
class Update(Generic[P]):
    """The work of one update on one rank.

    passes        this rank's passes in order; an iterator may load each on demand
    count         number of passes; may be 0 in the last update of an epoch
    weight        weight of this rank's gradients (see Method.begin): the number of samples if the loss is a mean, 1
                  if it is a sum
    total         the sum of all ranks' weights, or the number of terms of all ranks if losses are sums
    samples       samples of all ranks, for throughput and the result
    first         number of this rank's first pass among those of all ranks. If given, dropout's generator is seeded for
                  every pass, so that masks do not depend on the rank that computes it
    rate_factor   factor on the schedule's learning rate (shorter sequences learn more slowly)
    """

    passes: Iterable[P]
    count: int
    weight: float
    total: float
    samples: int
    first: int | None = None
    rate_factor: float = 1.0


class Batches(Protocol[P]):
    """The updates of one rank. All ranks get the same number."""

    def count(self, epoch: int) -> int:
        """Number of updates in `epoch` (from 1)."""
        ...

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[P]]:
        """The updates of `epoch` except the first `begin`. Waiting for the next one counts as data_wait."""
        ...


@dataclass
class SampleBatches:
    """The batches of `data` as updates of one pass each."""

    data: Data

    def count(self, epoch: int) -> int:
        """Number of updates in an epoch."""
        return self.data.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        """The updates of an epoch, starting with number `begin`."""
        for batch in self.data.training(epoch, begin):
            yield Update([batch], 1, batch.size, batch.total, batch.total)


NO_PROTOCOL = ThroughputProtocol(blocks=0)

# Prefix of metrics of the training samples. Metrics of the validation set have no prefix in a goal.
TRAINING = "train_"


class Stateful(Protocol):
    """State of a task that is saved in checkpoints."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state to save."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state."""


Validator = Callable[[int], Values]


@dataclass
class Position:
    """The position in training: epoch (from 1), updates in it and in total, and how many of them fp16 skipped."""

    epoch: int = 1
    in_epoch: int = 0
    total: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Plan:
    """How long to train, and what to do on the way; shared by all tasks, whose parameters have the same names.

    epochs            maximum number of epochs
    budget_seconds    of training on rank 0's wall clock; the goal does not end it, because the result is the accuracy
                      reached by then. 0: train to the goal
    validate_every    updates between validations within an epoch; 0: only at its end, where there is always one
    report_every      updates between two reports of the training loss; by default as in the original
    checkpoint_every, checkpoint_dir, resume   see parameters.CheckpointSettings
    protocol          blocks of updates to time instead, without validation and goal (clock)
    """

    epochs: int
    budget_seconds: float = 0.0
    validate_every: int = 0
    report_every: int = 25
    checkpoint_every: int = 0
    checkpoint_dir: str = ""
    resume: str = ""
    protocol: ThroughputProtocol = NO_PROTOCOL

    @classmethod
    def of(cls, settings: object, **others: Any) -> Plan:
        """What the parameters of a task say; `others`: what they do not."""
        known = {one.name: getattr(settings, one.name) for one in fields(cls) if hasattr(settings, one.name)}
        return cls(**{**known, **others})

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints are written, or there is one to resume from."""
        return bool(self.checkpoint_every or self.resume)


@dataclass(frozen=True)
class Unit:
    """The unit of throughput, and the number of units per sample."""

    name: str = "samples"
    per_sample: float = 1.0


@dataclass
class Loop(Generic[P]):
    """One rank's training. What differs between frameworks is below: `_attach`, `_update` and `_check_replicas`; and
    `_set_mode`, `consensus` and `_facts`, which may stay as they are.

    validate      epoch -> loss and metrics over the whole validation set, equal on all ranks, including the goal's
                  metric. None: no validation
    goal          on a metric of the validation set, or, with the prefix TRAINING, of the training samples. None: train
                  all epochs
    details       further entries of the result; `closing` adds to them at the end
    states        the task's state for checkpoints, by name
    identity      settings that must match between a checkpoint and the run that resumes from it
    after_update, after_validation   called at these points
    """

    is_saved: ClassVar[bool] = False  # whether checkpoints can have its model

    world: World
    report: Reporter
    work: Batches[P]
    schedule: Schedule
    plan: Plan
    name: str = ""
    validate: Validator | None = None
    goal: GoalWatch | None = None
    details: dict[str, Any] = field(default_factory=dict)
    closing: Callable[[], Mapping[str, Any]] = dict
    states: Mapping[str, Stateful] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    after_update: Callable[[], None] | None = None
    after_validation: Callable[[int, Values], None] | None = None
    unit: Unit = field(default_factory=Unit)

    def run(self) -> None:
        """Train until the goal, the last epoch or the end of the budget, and report the result.

        Raises DivergedError if a loss or a gradient is not finite, or if the ranks' models differ.
        """
        self.world.await_loading()
        self.tracker, self.position = Tracker(self.world.device), Position()
        self.curve: list[Values] = []
        self.losses = TrainingLoss()
        self.is_done, self._spent = False, False
        self._attach()
        is_kept = self.plan.is_saved or self.world.contract.checkpoint_dir
        self._checkpoints = checkpoint.Checkpoints(self) if is_kept else None
        earlier = None if self._checkpoints is None else self._checkpoints.resume()
        self.world.barrier()
        self.tracker.restart(earlier if self._checkpoints is None else self._checkpoints.begin(earlier))
        self._begin, self._budget_look = self.tracker.snapshot(), ClockLook()
        measured = self._measure() if self.plan.protocol.is_on else None
        while measured is None and self.position.epoch <= self.plan.epochs and not self.is_done:
            self._train(self.position.epoch)
        end = self.tracker.snapshot()
        self.report.phase("finished")
        with self.consensus():
            closing = self.closing()
        facts: dict[str, object] = {
            "curve": self.curve,
            "throughput": self._throughput(),
            "updates_skipped": self.position.skipped,
            "peak_memory_bytes": self.world.peak_memory(),
        }
        if measured is not None:
            facts |= {"throughput_protocol": asdict(measured), "train_loss": self._measured_loss}
        if self._spent:
            # The figure is from the last validation, which began when training had ended.
            facts["measured_at_seconds"] = self.curve[-1]["seconds"]
        details = {**self.details, **facts, **self._facts(self._updates_per_second(measured)), **closing}
        goal = None if measured else self.goal
        if self._checkpoints is not None:
            self._checkpoints.wait()
        self.report.result(self.tracker, goal, details, self.plan.budget_seconds if self._spent else None, end)

    def _train(self, epoch: int) -> None:
        """Train one epoch, or the rest of it."""
        tracker, position, plan = self.tracker, self.position, self.plan
        tracker.epoch = epoch
        steps = self.work.count(epoch)
        self._begin_training(epoch)
        for update in tracker.steps(self.work.updates(epoch, position.in_epoch)):
            step = self._step(update, steps)
            self.report.step(step, steps, epoch=epoch, epochs=plan.epochs)
            is_over = self._is_over()
            if step == steps or is_over or self._is_validation_due(step, steps):
                self._validate_and_report(epoch, is_last=step == steps)
                if not self.is_done and step < steps:
                    self._begin_training(epoch)
            if self._checkpoints is not None:
                self._checkpoints.after_update()
            if self.is_done:
                return
        if position.epoch == epoch:
            raise TaskError(f"epoch {epoch} ended after {position.in_epoch} updates, but its count is {steps}")

    def _step(self, update: Update[P], steps: int | None = None) -> int:
        """Make one update; returns its number in this epoch, from 1. Losses are reported if the epoch's `steps` are
        given."""
        tracker, position = self.tracker, self.position
        rate = self.schedule.rate(position.total - position.skipped) * update.rate_factor
        applied = self._update(update, rate)
        if self.after_update is not None:
            tracker.enter("optimizer")
            self.after_update()
        position.in_epoch, position.total = position.in_epoch + 1, position.total + 1
        position.skipped += not applied
        step = position.in_epoch
        if steps is not None and (step % self.plan.report_every == 0 or step == steps):
            tracker.enter("metrics")
            loss = self.losses.collect_recent(self.world, tracker.epoch)
            tracker.enter("other")
            if loss is not None:
                self.report.metric("train_loss", loss, epoch=tracker.epoch, step=position.total)
            self.report.metric("learning_rate", rate, epoch=tracker.epoch, step=position.total)
        tracker.end_step(update.samples)
        return step

    def _measure(self) -> Measurement:
        """Time blocks of updates by the protocol: a warm-up, then as many epochs as the blocks need."""
        tracker, position, protocol = self.tracker, self.position, self.plan.protocol

        def restart() -> None:
            tracker.restart()
            tracker.epoch, self._begin = position.epoch, tracker.snapshot()

        meter = Throughput(self.world, protocol, unit=self.unit.name, on_start=restart)
        self._set_mode(training=True)
        self.report.phase("training")  # the number of epochs is unknown, so steps are counted in total
        while not meter.is_over:
            tracker.epoch = position.epoch
            for update in tracker.steps(self.work.updates(position.epoch, position.in_epoch)):
                self._step(update)
                self.report.step(position.total, protocol.total)
                if meter.after_update(update.samples * self.unit.per_sample):
                    break
            else:
                if not position.in_epoch:
                    raise TaskError(f"epoch {position.epoch} has no updates")
                position.epoch, position.in_epoch = position.epoch + 1, 0
        measured = meter.measurement()
        self._measured_loss = self.losses.collect_whole(self.world)
        if not math.isfinite(self._measured_loss):
            raise make_divergence_error(f"the training loss is {self._measured_loss}")
        self.report.say(str(measured))
        self.report.metric(f"{self.unit.name}_per_second", measured.summary.mean, unit=f"{self.unit.name}/s")
        return measured

    def _begin_training(self, epoch: int) -> None:
        self._set_mode(training=True)
        self.report.phase("training", epoch=epoch, epochs=self.plan.epochs)

    def _is_validation_due(self, step: int, steps: int) -> bool:
        """Every `validate_every` updates, but not shortly before the end of the epoch, where there is one anyway."""
        every = self.plan.validate_every
        return bool(every) and step % every == 0 and steps - step >= every / 2

    def _validate_and_report(self, epoch: int, is_last: bool) -> None:
        """Validate, record the figures, and decide whether training ends here."""
        tracker, position = self.tracker, self.position
        training_loss = self.losses.collect_whole(self.world)
        collect_metrics = getattr(self.work, "collect_metrics", dict)
        trained = {TRAINING + name: value for name, value in collect_metrics().items()}
        rate = self._samples_per_second()
        values: Values = {}
        with self.consensus():
            extra = self._check_replicas()
            if self.validate is not None:
                self.report.phase("validation", epoch=epoch, epochs=self.plan.epochs)
                tracker.enter("validation")
                self._set_mode(training=False)
                values = check_finite(self.validate(epoch), epoch)
                tracker.enter("other")
        seconds = self._wall()
        self._report_values(epoch, training_loss, rate, trained, values, seconds)
        point = {"epoch": epoch, "update": position.total, "seconds": seconds, "train_loss": training_loss}
        self.curve.append({**point, "samples_per_second": rate, **trained, **values, **extra})
        if self.after_validation is not None:
            self.after_validation(epoch, values)
        if is_last:
            self.schedule.after_epoch(values.get("loss", training_loss))
            position.epoch, position.in_epoch = epoch + 1, 0
        reached = self.goal is not None and self.goal.observe({**values, **trained}[self.goal.metric], epoch, tracker)
        budget = self.plan.budget_seconds
        self._spent = bool(budget) and self.world.agree(seconds) >= budget
        self.is_done = self._spent or (reached and not budget)
        self._begin = tracker.snapshot()

    def _is_over(self) -> bool:
        """Whether the time budget is used up, by rank 0's clock."""
        budget = self.plan.budget_seconds
        return bool(budget) and self._budget_look.is_past(
            self.position.total, lambda: budget - float(self.world.agree(self._wall()))
        )

    # --- reporting --------------------------------------------------------------------------------------------------

    def _wall(self) -> float:
        return self.tracker.snapshot().wall

    def _samples_per_second(self) -> float:
        """Throughput of all ranks since the last validation, by this rank's clock: steps and waiting for data."""
        now, begin = self.tracker.snapshot(), self._begin
        waited = now.seconds["data_wait"] - begin.seconds["data_wait"]
        seconds = now.training - begin.training + waited
        return (now.samples - begin.samples) / seconds if seconds > 0 else 0.0

    def _throughput(self) -> Values:
        """Throughput over all intervals except the first, which includes one-time work, unless there is no other."""
        rates = [point["samples_per_second"] for point in self.curve[1:] or self.curve]
        if not rates:
            return {}
        whole = self.tracker.snapshot()
        waited = whole.seconds["data_wait"]
        spent = waited + whole.training
        return {
            "samples_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "data_wait_share": waited / spent if spent else 0.0,
        }

    def _updates_per_second(self, measured: Measurement | None) -> float | None:
        """From the protocol's blocks, else from the whole training without validation; None if nothing was trained."""
        if measured is not None:
            return measured.summary.mean / measured.per_update
        rate, now = self._throughput().get("samples_per_second"), self.tracker.snapshot()
        return rate * now.updates / now.samples if rate and now.samples else None

    def _report_values(
        self, epoch: int, loss: float, rate: float, trained: Values, values: Values, seconds: float
    ) -> None:
        for name, value in {**trained, **{f"val_global_{name}": value for name, value in values.items()}}.items():
            self.report.metric(name, value, epoch=epoch, step=self.position.total, seconds=seconds)
        self.report.metric("samples_per_second", rate, epoch=epoch, step=self.position.total, seconds=seconds)
        names = {"loss": "validation loss"}
        shown = "".join(f"  {names.get(name, name)} {value:.4g}" for name, value in values.items())
        self.report.say(
            f"epoch {epoch}/{self.plan.epochs} update {self.position.total}  loss {loss:.4f}{shown}"
            f"  {rate:.0f} samples/s  {seconds:.1f} s"
        )

    # --- to be implemented for a framework --------------------------------------------------------------------------

    def _attach(self) -> None:
        """Give all ranks the same model. Collective."""
        raise NotImplementedError

    def _update(self, update: Update[P], rate: float) -> bool:
        """Make one update at learning rate `rate`, and add its losses to `losses`; False if it was skipped because of
        an fp16 overflow."""
        raise NotImplementedError

    def _set_mode(self, training: bool) -> None:
        """Switch the model between training and evaluation."""

    def consensus(self) -> AbstractContextManager[object]:
        """A context in which all ranks have the same model."""
        return nullcontext()

    def _check_replicas(self) -> Values:
        """Raises DivergedError if models that must be equal differ; returns figures for the curve. Collective."""
        raise NotImplementedError

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        """Entries of the result about computation and communication, with their speed if anything was trained."""
        return {}


# --- in torch ---------------------------------------------------------------------------------------------------------


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of elements in `parameters`, including those on the meta device."""
    return sum(parameter.numel() for parameter in parameters)


ParameterGroup = dict[str, object]  # "params" and options of an optimizer


def split_decay(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Parameter groups: weights of convolutions and linear layers with decay; normalization parameters and biases
    without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": weight_decay},
        {"params": [item for item in parameters if item.dim() <= 1], "weight_decay": 0.0},
    ]


Loss = Callable[[Tensor, Tensor], Tensor]

NOT_FINITE = "the norm of the gradients is not finite"


class PassLoss(NamedTuple):
    """The loss of one pass: `value` is differentiated; `mean` over `weight` samples (or tokens) is reported."""

    value: Tensor
    mean: Tensor
    weight: float

    def backward(self, factor: float) -> None:
        """Add `factor` times the loss's gradients to those of the parameters."""
        torch.autograd.backward(self.value if factor == 1 else self.value * factor)


class Work(Batches[P], Protocol[P]):
    """The data, the model, and what a pass computes. The tracker counts each method in its own category.

    `model` is unwrapped, on world.device; the method broadcasts it from rank 0 before the first step.

    A work with metrics of its passes has `collect_metrics() -> {name: value}`, over all ranks since the last call.
    `observe(outputs, data)`, if present, is called after each backward pass. `read_sums` and `load_sums` save them in
    checkpoints.
    """

    @property
    def model(self) -> nn.Module: ...

    def prepare(self, part: P) -> Any:
        """The pass's data for the model, on its device."""
        ...

    def forward(self, model: nn.Module, data: Any) -> Any:
        """The model's outputs."""
        ...

    def loss(self, outputs: Any, data: Any) -> PassLoss:
        """The loss of the outputs."""
        ...


@dataclass
class Samples(SampleBatches):
    """A work whose passes map a batch of inputs to outputs and a loss, with the validation of the whole validation set,
    each rank on its shard, which may be empty.

    loss_of            (outputs, targets) -> mean over the batch; validation_loss: None: the same
    metrics            of the validation set, including the goal's
    training_metrics   of the training samples, as augmented, by the model that trained on them
    scores             maps the model's outputs to inputs of the metrics (e.g. logits to probabilities)
    compiled           whether the model has compiled parts: they are used only for training batches of the usual size,
                       because recompiling for a few others costs more than it saves
    """

    world: World
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
        return [metric.read() for metric in self.training_metrics]

    def load_sums(self, sums: list[list[float]]) -> None:
        """Restore the sums of `read_sums`."""
        for metric, own in zip(self.training_metrics, sums, strict=True):
            metric.take()
            metric.add(*own)

    def collect_metrics(self) -> Values:
        """The metrics since the last call, over all ranks. Collective."""
        return collect(self.world, self.training_metrics) if self.training_metrics else {}

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
        return collect(self.world, [mean, *self.metrics])


def run_eagerly(needed: bool) -> AbstractContextManager[object]:
    """A context that bypasses compiled code if `needed`."""
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()


@dataclass
class Trainer(Loop[P], Generic[P]):
    """A training in torch.

    make_optimizer  from the model; its groups' rates are set before every update
    method          owns the optimizer and the update
    precision       None: fp32
    clip            largest norm of the gradients; None: no clipping
    arithmetic      settings of GPUs
    compile         what of the model is compiled (speed.compile_modules)
    flops           FLOPs of one update of all ranks, and how they were derived; None: a pass is counted for throughput
    """

    is_saved = True

    work: Work[P]
    make_optimizer: MakeOptimizer = field(kw_only=True)
    method: Method = field(kw_only=True)
    precision: Precision | None = field(default=None, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)
    arithmetic: CudaSettings = field(default_factory=CudaSettings, kw_only=True)
    compile: str = field(default="no", kw_only=True)
    flops: tuple[float, str] | None = field(default=None, kw_only=True)

    @property
    def model(self) -> nn.Module:
        """The unwrapped model."""
        return self.work.model

    def run(self) -> None:
        with sample_gpu(self.world) as self._gpu:
            super().run()
        self.method.close()

    def _attach(self) -> None:
        set_arithmetic(self.arithmetic)
        self.number_format = self.precision or Precision("fp32", self.world.device)
        if self.flops is None and self.plan.protocol.is_on:
            self.flops = self._count_flops()
        self._observe = None if self.plan.protocol.is_on else getattr(self.work, "observe", None)
        self._trained = self.method.attach(self.world, self.model, self.make_optimizer, self.tracker)
        if self.compile == "graphs":
            self.method.keeps_gradients = True
            speed.allocate_gradients(self.model.parameters())

    def _update(self, update: Update[P], rate: float) -> bool:
        enter = self.tracker.enter
        losses: list[PassLoss] = []
        self.method.begin(update.weight, update.total, update.count, self.number_format.scale)
        # Passes in a list need no waiting.
        passes = update.passes if isinstance(update.passes, list) else self.tracker.waiting(update.passes)
        for number, part in enumerate(passes):
            enter("preprocessing")
            data = self.work.prepare(part)
            if update.first is not None:
                path = ("dropout", self.position.total, update.first + number)
                seed_device(self.world.device, self.world.contract.seed, *path)
            if self.compile == "graphs":
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            if number and number == update.count - 1:
                self.method.begin_last_pass()
            with self.number_format.autocast():
                enter("forward")
                outputs = self.work.forward(self._trained, data)
                enter("loss")
                loss = self.work.loss(outputs, data)
            enter("backward")
            loss.backward(self.number_format.factor)
            if self._observe is not None:
                enter("metrics")
                self._observe(outputs, data)
            losses.append(loss)
        updated = self.method.step(rate, self.clip)
        if not updated and self.number_format.scale is None:
            raise make_divergence_error(NOT_FINITE)
        if updated:
            for loss in losses:
                self.losses.add(loss.mean, loss.weight, self.position.in_epoch + 1)
        return updated

    def _count_flops(self) -> tuple[float, str] | None:
        """Count one pass of the first update; None if torch knows none of its operations."""
        update = next(self.work.updates(1))
        data = self.work.prepare(next(iter(update.passes)))

        def compute_loss() -> Tensor:
            with self.number_format.autocast():
                return self.work.loss(self.work.forward(self.model, data), data).value

        with peak.keep_state(self.model, self.world.device):
            self.model.train()
            flops = peak.count_flops(compute_loss) * update.count * self.world.size
        return (flops, peak.COUNTED) if flops else None

    def _set_mode(self, training: bool) -> None:
        self._trained.train(training)

    def consensus(self) -> AbstractContextManager[object]:
        if not self.method.is_finite():
            raise make_divergence_error(NOT_FINITE)
        return self.method.consensus()

    def _check_replicas(self) -> Values:
        """Compare replicas off the clock: a checksum of all weights is not part of training."""
        average_buffers(self.world, self.model)
        self.world.barrier()  # waiting for slower ranks counts
        with self.tracker.paused():
            distance = self.method.check_replicas()
        return {} if distance is None else {"replica_distance": distance}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        options: dict[str, object] = {
            **self.details.get("options", {}),
            "compile": self.compile,
            "precision": self.number_format.used,
            **asdict(self.arithmetic),
            "fused_optimizer": bool(self.method.optimizer.defaults.get("fused")),
            "reduction": type(self.method).__name__,
        }
        if self.compile == "graphs":
            options["cuda_graphs"] = speed.are_graphs_replayed(self.world.device)
        facts: dict[str, object] = {
            "precision": self.number_format.used,
            "options": options,
            "loss_scale": self.number_format.factor,
            "communication": self.method.stats(),
        }
        if self.compile != "no":
            facts["compile_seconds"] = speed.compile_seconds()
        if self.method.checked:
            facts["self_check"] = dict(self.method.checked)
        if self._gpu is not None and (sampled := self._gpu.facts()):
            facts["gpu"] = sampled
        if self.flops is not None:
            flops, formula = self.flops
            highest = peak.find_peak(self.world.device, self.number_format.used)
            facts |= peak.Utilization(flops, formula, highest, updates_per_second, self.world.size).to_dict()
        return facts


# --- number formats: fp32, or mixed precision with fp32 parameters (bf16; fp16 with a dynamic loss scale) -------------

FORMATS = ("fp32", "bf16", "fp16")
# Overflows are detected and skipped, so start high, where small gradients do not vanish.
FIRST_LOSS_SCALE = 65536.0


def set_arithmetic(settings: CudaSettings) -> None:
    """Use true fp32 on NVIDIA GPUs unless TF32 is requested; torch's default is TF32 in convolutions and RNNs.

    `cudnn`: "default" uses the algorithm that cuDNN proposes, "deterministic" a bitwise reproducible one, "benchmark"
    the fastest one tried.
    """
    if settings.cudnn not in CUDNN:
        raise TaskUsageError(f'the parameter "cudnn" is {settings.cudnn!r}, not {" or ".join(CUDNN)}')
    kind = "tf32" if settings.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = kind
    torch.backends.cudnn.conv.fp32_precision = kind  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = kind  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = settings.cudnn == "deterministic"
    torch.backends.cudnn.benchmark = settings.cudnn == "benchmark"


def refuse_bf16_lstm(precision: str, device: torch.device) -> None:
    """Raises TaskUsageError for bf16 LSTMs on NVIDIA GPUs: torch.autocast runs them in fp16, in which small gradients
    vanish without a loss scale (ATen/native/cudnn/AutocastRNN.cpp)."""
    if precision == "bf16" and device.type == "cuda":
        raise TaskUsageError(
            "on GPUs, torch computes LSTMs in fp16 if bf16 is requested, without loss scaling",
            "--set precision=fp32, with --set tf32=true for speed; or fp16, if the task has it",
        )


class Precision:
    """A number format: its autocast context and its loss scale (only for fp16, else None).

    `used` may differ from the request: fp16 is supported only on GPUs, and replaced by fp32 on CPUs. `casts` is False
    for models that cast themselves (FSDP).
    """

    def __init__(self, asked: str, device: torch.device, scale: LossScale | None = None, *, casts: bool = True) -> None:
        if asked not in FORMATS:
            raise ValueError(f"the precision {asked!r} is not one of {', '.join(FORMATS)}")
        self.used = "fp32" if asked == "fp16" and device.type == "cpu" else asked
        self.scale = (scale or LossScale(FIRST_LOSS_SCALE)) if self.used == "fp16" else None
        self._device = device
        self._casts = casts

    @property
    def factor(self) -> float:
        """The factor on losses before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context for forward pass and loss."""
        if self.used == "fp32" or not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16 if self.used == "bf16" else torch.float16)
