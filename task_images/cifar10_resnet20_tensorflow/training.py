"""The training loop in TensorFlow, from top to bottom: `Training.run` is an epoch after another, `_train` its steps."""

import math
import zlib
from typing import Any

import tensorflow as tf

from task_images.cifar10_resnet20.data import DEVIATION, MEAN, SIDE
from task_images.cifar10_resnet20_tensorflow.data import Images
from task_images.cifar10_resnet20_tensorflow.model import ResNet
from task_images.cifar10_resnet20_tensorflow.settings import Settings
from task_images.cifar10_resnet20_tensorflow.world import World, pack, unpack
from task_images.harness.errors import DivergedError
from task_images.harness.goals import GoalWatch
from task_images.harness.report import Reporter
from task_images.harness.schedules import Schedule
from task_images.harness.tracker import Tracker

LOSS_EVERY = 25  # steps between two looks at the global training loss, and at the time budget


class Training:
    """One run on this rank."""

    def __init__(self, world: World, settings: Settings, data: Images, report: Reporter, schedule: Schedule) -> None:
        self._world = world
        self._settings = settings
        self._data = data
        self._report = report
        self._schedule = schedule
        self._model = ResNet(settings.depth, world.contract.seed)
        self._velocities = [tf.Variable(tf.zeros_like(item), trainable=False) for item in self._model.parameters]
        self._tracker = Tracker(world.synchronize)
        self._goal = GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, world.contract.goal)
        # Each traced once, for any size of batch.
        pixels = tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8)
        inputs = tf.TensorSpec([None, SIDE, SIDE, 3], tf.float32)
        self._prepare = tf.function(_normalise, input_signature=[pixels])
        self._forward = tf.function(lambda x: self._model(x, training=True), input_signature=[inputs])
        self._evaluate = tf.function(lambda x: self._model(x, training=False), input_signature=[inputs])
        self._update = tf.function(self._apply_update)

    def run(self, details: dict[str, Any]) -> None:
        """Train until the goal, the last epoch or the end of the budget, and report the result."""
        world, tracker, settings = self._world, self._tracker, self._settings
        world.broadcast(self._model.parameters)
        world.sum([0.0])
        tracker.restart()
        curve: list[dict[str, float]] = []
        spent: float | None = None
        for epoch in range(1, settings.epochs + 1):
            tracker.epoch = epoch
            loss = self._train(epoch)
            self._check_identical()
            with tracker.section("validation"):
                values = self._validate(epoch)
            self._schedule.after_epoch(values["loss"])
            self._report_epoch(epoch, loss, values)
            curve.append({"epoch": epoch, "seconds": tracker.snapshot().wall, "train_loss": loss, **values})
            if self._goal.observe(values["Prec@1"], epoch, tracker) and not settings.budget_seconds:
                break
            if self._is_over():
                spent = settings.budget_seconds
                break
        self._report.phase("finished")
        sent = {"messages": world.messages, "bytes": world.bytes}
        parameters = sum(int(tf.size(item)) for item in self._model.parameters)
        self._report.result(
            tracker, self._goal, {"parameters": parameters, **details, "curve": curve, "communication": sent}, spent
        )

    def _train(self, epoch: int) -> float:
        """One epoch; returns the mean training loss over all ranks' samples."""
        tracker, section, world = self._tracker, self._tracker.section, self._world
        self._report.phase("training", epoch=epoch, epochs=self._settings.epochs)
        recent, whole = _Mean(), _Mean()
        parameters = self._model.parameters
        for step, batch in enumerate(tracker.waiting(self._data.training(epoch)), 1):
            with tracker.step(samples=batch.total):
                with section("preprocessing"):
                    images, labels = self._prepare(tf.constant(batch.images)), tf.constant(batch.labels)
                with tf.GradientTape() as tape:
                    with section("forward"):
                        outputs = self._forward(images)
                    with section("loss"):
                        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
                with section("backward"):
                    # A rank's gradient counts as much as it has samples.
                    gradient = pack(tape.gradient(loss, parameters)) * (len(batch.labels) / batch.total)
                if world.size > 1:
                    with section("communication"):
                        gradient = world.all_reduce(gradient)
                        world.messages += 1
                        world.bytes += 4 * int(gradient.shape[0])
                with section("optimizer"):
                    self._update(gradient, tf.constant(self._schedule.rate(tracker.updates), tf.float32))
                with section("metrics"):
                    value = float(loss)
                    recent.add(value, len(batch.labels))
                    whole.add(value, len(batch.labels))
                    if step % LOSS_EVERY == 0 or step == self._data.steps:
                        mean = self._finite(recent.take(world), epoch, step)
                        self._report.metric("train_loss", mean, epoch=epoch, step=tracker.updates + 1)
            self._report.step(step, self._data.steps, epoch=epoch, epochs=self._settings.epochs)
            if step % LOSS_EVERY == 0 and self._is_over():
                break
        return whole.take(world)

    def _apply_update(self, gradient: Any, rate: Any) -> None:
        """SGD with momentum as torch has it: v = m v + g; w -= rate (g + m v) with Nesterov, rate v without."""
        settings, model = self._settings, self._model
        decayed = len(model.parameters) if settings.decay_norms else len(model.weights)
        for index, part in enumerate(unpack(gradient, model.parameters)):
            parameter, velocity = model.parameters[index], self._velocities[index]
            if index < decayed:
                part += settings.weight_decay * parameter
            velocity.assign(settings.momentum * velocity + part)
            parameter.assign_sub(rate * (part + settings.momentum * velocity if settings.nesterov else velocity))

    def _validate(self, epoch: int) -> dict[str, float]:
        """Loss and metrics over the whole validation set, each rank on its shard."""
        self._report.phase("validation", epoch=epoch, epochs=self._settings.epochs)
        self._world.average(self._model.averages)
        sums = [0.0, 0.0, 0.0, 0.0]
        for batch in self._data.validation():
            outputs, labels = self._evaluate(self._prepare(tf.constant(batch.images))), tf.constant(batch.labels)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            hits = [tf.math.in_top_k(labels, outputs, k) for k in (1, 5)]
            found = [losses, *(tf.cast(hit, tf.float32) for hit in hits)]
            own = [*(float(tf.reduce_sum(tf.cast(item, tf.float64))) for item in found), float(len(batch.labels))]
            sums = [total + value for total, value in zip(sums, own, strict=True)]
        loss, first, fifth, number = self._world.sum(sums)
        return {"loss": loss / number, "Prec@1": 100 * first / number, "Prec@5": 100 * fifth / number}

    def _check_identical(self) -> None:
        """Raises DivergedError, on every rank, naming the ranks whose parameters differ from rank 0's."""
        checksum = 0
        for parameter in self._model.parameters:
            checksum = zlib.crc32(parameter.numpy().tobytes(), checksum)
        sums = [row[0] for row in self._world.gather([float(checksum)])]
        odd = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
        if odd:
            raise DivergedError(f"the model of rank {', '.join(odd)} differs from that of rank 0")

    def _finite(self, loss: float, epoch: int, step: int) -> float:
        if not math.isfinite(loss):
            raise DivergedError(
                f"the training loss is {loss} in epoch {epoch}, by step {step}: the training has diverged",
                "A lower learning rate may help.",
            )
        return loss

    def _is_over(self) -> bool:
        """Whether the time budget is spent, by rank 0's clock. Every rank must ask."""
        budget = self._settings.budget_seconds
        return bool(budget) and self._world.agree(self._tracker.snapshot().wall) >= budget

    def _report_epoch(self, epoch: int, loss: float, values: dict[str, float]) -> None:
        seconds = self._tracker.snapshot().wall
        for name, value in values.items():
            self._report.metric(f"val_global_{name}", value, epoch=epoch, seconds=seconds)
        self._report.say(
            f"epoch {epoch}/{self._settings.epochs}  loss {loss:.4f}  validation loss {values['loss']:.4f}"
            f"  Prec@1 {values['Prec@1']:.4g}  {seconds:.1f} s"
        )


class _Mean:
    """Mean over samples, and over ranks when it is taken."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0]

    def add(self, mean: float, weight: int) -> None:
        self._sums = [self._sums[0] + mean * weight, self._sums[1] + weight]

    def take(self, world: World) -> float:
        """The mean since the last call; one collective."""
        total, weight = world.sum(self._sums)
        self._sums = [0.0, 0.0]
        return total / weight if weight else math.nan


def _normalise(pixels: Any) -> Any:
    return (tf.cast(pixels, tf.float32) / 255 - tf.constant(MEAN)) / tf.constant(DEVIATION)
