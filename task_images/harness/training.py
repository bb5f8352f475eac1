"""Synchronous data-parallel training to a goal, for tasks that map a batch of inputs to outputs and a loss.

Read it from top to bottom: `Trainer.run` is an epoch after another, `_train` an update after another. Tasks whose loop
differs (sequences, accumulation) write their own with the same tracker, strategy, loss guard, goal and reporter.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from task_images.comm.base import MakeOptimizer, Placement, Strategy
from task_images.harness.data import Data
from task_images.harness.distributed import World
from task_images.harness.errors import DivergedError
from task_images.harness.goals import GoalWatch
from task_images.harness.metrics import Mean, Metric, TrainingLoss, collect
from task_images.harness.precision import Precision
from task_images.harness.replicas import average_buffers
from task_images.harness.report import Reporter
from task_images.harness.resumption import Progress, Resumption
from task_images.harness.schedules import Schedule
from task_images.harness.tracker import Snapshot, Tracker

Loss = Callable[[Tensor, Tensor], Tensor]

# Steps between two looks at the global training loss; the original posted as often.
LOSS_EVERY = 25


def _unchanged(outputs: Tensor) -> Tensor:
    return outputs


@dataclass
class Trainer:
    """All that a training needs.

    model       on world.device; the strategy broadcasts it from rank 0 before the first step
    loss        (outputs, targets) -> mean over the batch, a scalar; validation_loss: where validation has another
    make_optimizer  from the model; its groups' rates are set before every update
    metrics     of the validation set; among them the goal's, by name. None at all: no validation
    scores      from the model's outputs what the metrics want (probabilities from logits, say)
    goal        None: train all epochs
    precision   None: fp32
    budget      seconds after which training ends, validation included in them; it does not end at the goal then,
                for what counts is how far it comes (accuracy after time); 0: train to the goal
    compiled    whether the model has compiled parts: they serve training batches of the usual size only
    """

    world: World
    model: nn.Module
    loss: Loss
    make_optimizer: MakeOptimizer
    schedule: Schedule
    strategy: Strategy
    data: Data
    metrics: Sequence[Metric]
    goal: GoalWatch | None
    report: Reporter
    epochs: int
    validation_loss: Loss | None = None
    scores: Callable[[Tensor], Tensor] = _unchanged
    precision: Precision | None = None
    resumption: Resumption | None = None
    budget: float = 0.0
    compiled: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Train until the goal or the last epoch, and report the result. Raises DivergedError on NaN."""
        self.tracker = Tracker(self.world.synchronize if self.world.device.type == "cuda" else None)
        self._precision = self.precision or Precision("fp32", self.world.device)
        if self.world.contract.calibrate:
            self._calibrate()
        self.model = self.strategy.attach(Placement(self.world), self.model, self.make_optimizer, tracker=self.tracker)
        self._earlier = self._resume()
        self.world.barrier()
        self.tracker.restart()
        curve: list[dict[str, float]] = []
        spent: float | None = None
        for epoch in range(self._earlier.epoch + 1, self.epochs + 1):
            self.tracker.epoch = epoch
            begin = self.tracker.snapshot()
            training_loss = self._train(epoch)
            rate = self._rate(begin)
            with self.strategy.consensus():
                self.strategy.check_replicas()
                with self.tracker.section("validation"):
                    values = self._validate(epoch)
            self.schedule.after_epoch(values.get("loss", training_loss))
            self._report_epoch(epoch, training_loss, rate, values)
            curve.append(
                {
                    "epoch": epoch,
                    "seconds": self.tracker.snapshot().wall,
                    "train_loss": training_loss,
                    "samples_per_second": rate,
                    **values,
                }
            )
            with self.strategy.consensus():
                self._keep(epoch)
            if self.goal and self.goal.observe(values[self.goal.metric], epoch, self.tracker) and not self.budget:
                break
            if self._is_over():
                spent = self.budget
                break
        self.report.phase("finished")
        found = {"curve": curve, "throughput": self._throughput(curve), "communication": self.strategy.stats()}
        self.report.result(self.tracker, self.goal, {**self.details, **found}, spent)
        self.strategy.close()

    def _calibrate(self) -> None:
        """Leave what a prediction needs, from steps on one batch. Model and random numbers are as before afterwards."""
        from task_images.harness.calibration import calibrate

        batch = next(iter(self.data.training(1)))
        self.model.to(self.world.device)
        inputs, targets = self.data.prepare(batch, training=False)

        def compute_loss() -> Tensor:
            with self._precision.autocast():
                return self.loss(self.model(inputs), targets)

        calibrate(self.world, self.model, self.make_optimizer, compute_loss, batch.size)

    def _train(self, epoch: int) -> float:
        """One epoch; returns the mean training loss over all ranks' samples."""
        tracker, section = self.tracker, self.tracker.section
        self.model.train()
        self.report.phase("training", epoch=epoch, epochs=self.epochs)
        recent, whole, usual = TrainingLoss(), Mean("loss"), 0
        for step, batch in enumerate(tracker.waiting(self.data.training(epoch)), 1):
            usual = usual or batch.size
            with tracker.step(samples=batch.total):
                self.strategy.begin(batch.size, batch.total)
                with section("preprocessing"):
                    inputs, targets = self.data.prepare(batch, training=True)
                with self.strategy.last_pass():
                    with section("forward"), self._precision.autocast(), self._code(usual=batch.size == usual):
                        outputs = self.model(inputs)
                    with section("loss"), self._precision.autocast():
                        loss = self.loss(outputs, targets)
                    with section("backward"):
                        (loss * self._precision.factor).backward()  # type: ignore[no-untyped-call]
                rate = self.schedule.rate(self._earlier.updates + tracker.updates)
                self.strategy.step(rate, scale=self._precision.scale)
                with section("metrics"):
                    recent.add(loss, batch.size)
                    whole.add_mean(loss, batch.size)
                    if step % LOSS_EVERY == 0 or step == self.data.steps:
                        value = recent.collect(self.world, epoch, step)
                        self.report.metric("train_loss", value, epoch=epoch, step=tracker.updates + 1)
            self.report.step(step, self.data.steps, epoch=epoch, epochs=self.epochs)
            if step % LOSS_EVERY == 0 and self._is_over():
                break
        return collect(self.world, [whole])["loss"]

    def _validate(self, epoch: int) -> dict[str, float]:
        """Loss and metrics over the whole validation set, each rank on its shard. Raises DivergedError on NaN."""
        if not self.metrics:
            return {}
        self.report.phase("validation", epoch=epoch, epochs=self.epochs)
        average_buffers(self.world, self.model)
        self.model.eval()
        mean = Mean("loss")
        with torch.inference_mode(), self._code(usual=False):
            for batch in self.data.validation():
                inputs, targets = self.data.prepare(batch, training=False)
                with self._precision.autocast():
                    outputs = self.model(inputs)
                    loss = (self.validation_loss or self.loss)(outputs, targets)
                mean.add_mean(loss, batch.size)
                scores = self.scores(outputs)
                for metric in self.metrics:
                    metric.update(scores, targets)
        values = collect(self.world, [mean, *self.metrics])
        if not math.isfinite(values["loss"]):
            # The last update may have spoilt a model whose training loss was still finite.
            raise DivergedError(
                f"the validation loss is {values['loss']} in epoch {epoch}: the training has diverged",
                "A lower learning rate may help.",
            )
        return values

    def _code(self, usual: bool) -> AbstractContextManager[object]:
        """Compiled code in the `usual` case; in others, which are few, compiling anew would cost more than it saves."""
        return contextlib.nullcontext() if usual or not self.compiled else torch.compiler.set_stance("force_eager")

    def _is_over(self) -> bool:
        """Whether the time budget is spent, by rank 0's clock. Every rank must ask."""
        return bool(self.budget) and self.world.agree(self.tracker.snapshot().wall) >= self.budget

    def _resume(self) -> Progress:
        if self.resumption is None:
            return Progress()
        progress = self.resumption.restore(self.world, self.strategy, self.schedule)
        if progress.epoch:
            self.details["resumed"] = {"epoch": progress.epoch, "updates": progress.updates}
            self.report.say(f"going on after epoch {progress.epoch}")
        return progress

    def _keep(self, epoch: int) -> None:
        if self.resumption is not None:
            progress = Progress(epoch, self._earlier.updates + self.tracker.updates)
            self.resumption.store(self.world, self.strategy, self.schedule, progress)

    def _rate(self, begin: Snapshot) -> float:
        """Samples per second of all ranks since `begin`, by this rank's clock: steps and waiting for data."""
        now = self.tracker.snapshot()
        waited = now.seconds["data_wait"] - begin.seconds["data_wait"]
        return (now.samples - begin.samples) / (now.training - begin.training + waited)

    def _throughput(self, curve: list[dict[str, float]]) -> dict[str, float]:
        """Over all epochs but the first, in which much is done for the first time, unless there is no other."""
        rates = [point["samples_per_second"] for point in curve[1:] or curve]
        if not rates:
            return {}
        whole = self.tracker.snapshot()
        waited = whole.seconds["data_wait"]
        return {
            "samples_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "data_wait_share": waited / (waited + whole.training),
        }

    def _report_epoch(self, epoch: int, training_loss: float, rate: float, values: dict[str, float]) -> None:
        seconds = self.tracker.snapshot().wall
        for name, value in values.items():
            self.report.metric(f"val_global_{name}", value, epoch=epoch, seconds=seconds)
        self.report.metric("samples_per_second", rate, epoch=epoch, seconds=seconds)
        names = {"loss": "validation loss"}
        shown = "".join(f"  {names.get(name, name)} {value:.4g}" for name, value in values.items())
        self.report.say(
            f"epoch {epoch}/{self.epochs}  loss {training_loss:.4f}{shown}  {rate:.0f} samples/s  {seconds:.1f} s"
        )
