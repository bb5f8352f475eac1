"""What TensorFlow gives the training loop (harness.loop): one update, one validation, a checkpoint."""

import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from task_images.cifar10_resnet20.data import DEVIATION, MEAN, SIDE
from task_images.cifar10_resnet20_tensorflow.data import Batch, Images
from task_images.cifar10_resnet20_tensorflow.model import ResNet
from task_images.cifar10_resnet20_tensorflow.settings import Settings
from task_images.cifar10_resnet20_tensorflow.world import World, pack, unpack
from task_images.harness.errors import DivergedError, EnvironmentUnfitError, TaskUsageError
from task_images.harness.loop import Loop, Values
from task_images.harness.tracker import Tracker
from task_images.harness.updates import Update

FORM = 1


@dataclass(frozen=True)
class ImageUpdates:
    """Every batch is an update of one pass."""

    images: Images

    def count(self, epoch: int) -> int:
        return self.images.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        for number, batch in enumerate(self.images.training(epoch)):
            if number >= begin:
                yield Update([batch], 1, len(batch.labels), batch.total, batch.total)


class Network:
    """Model and momentum, with the functions that TensorFlow compiles: each is traced once, for any size of batch."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self.model = ResNet(settings.depth, seed)
        self.velocities = [tf.Variable(tf.zeros_like(item), trainable=False) for item in self.model.parameters]
        pixels = tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8)
        inputs = tf.TensorSpec([None, SIDE, SIDE, 3], tf.float32)
        self.prepare = tf.function(_normalize, input_signature=[pixels])
        self.forward = tf.function(lambda x: self.model(x, training=True), input_signature=[inputs])
        self.evaluate = tf.function(lambda x: self.model(x, training=False), input_signature=[inputs])
        self.update = tf.function(self._apply)

    @property
    def variables(self) -> list[Any]:
        """All that a checkpoint holds, in a fixed order."""
        return [*self.model.parameters, *self.model.averages, *self.velocities]

    def _apply(self, gradient: Any, rate: Any) -> None:
        """SGD with momentum as torch has it: v = m v + g; w -= rate (g + m v) with Nesterov, rate v without."""
        settings, model = self._settings, self.model
        decayed = len(model.parameters) if settings.decay_norms else len(model.weights)
        for index, part in enumerate(unpack(gradient, model.parameters)):
            parameter, velocity = model.parameters[index], self.velocities[index]
            if index < decayed:
                part += settings.weight_decay * parameter
            velocity.assign(settings.momentum * velocity + part)
            parameter.assign_sub(rate * (part + settings.momentum * velocity if settings.nesterov else velocity))


@dataclass(frozen=True)
class Validator:
    """Loss and metrics over the whole validation set, each rank on its shard."""

    world: World
    network: Network
    images: Images

    def __call__(self, epoch: int) -> Values:
        sums = [0.0, 0.0, 0.0, 0.0]
        for batch in self.images.validation():
            outputs = self.network.evaluate(self.network.prepare(tf.constant(batch.images)))
            labels = tf.constant(batch.labels)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            hits = [tf.math.in_top_k(labels, outputs, k) for k in (1, 5)]
            found = [losses, *(tf.cast(hit, tf.float32) for hit in hits)]
            own = [*(float(tf.reduce_sum(tf.cast(item, tf.float64))) for item in found), float(len(batch.labels))]
            sums = [total + value for total, value in zip(sums, own, strict=True)]
        loss, first, fifth, number = self.world.sum(sums)
        values = {"loss": loss / number, "Prec@1": 100 * first / number, "Prec@5": 100 * fifth / number}
        _check_finite(values["loss"], f"the validation loss is {values['loss']} in epoch {epoch}")
        return values


@dataclass
class TensorFlowTrainer(Loop[Batch]):
    """One rank's training in TensorFlow."""

    network: Network | None = None

    @property
    def _network(self) -> Network:
        assert self.network is not None
        return self.network

    def _make_tracker(self) -> Tracker:
        return Tracker(self.world.synchronize if self.world.device.startswith("GPU") else None)

    def _attach(self) -> None:
        self._sent = {"messages": 0, "bytes": 0}
        self._recent, self._whole = _Mean(), _Mean()
        self.world.broadcast(self._network.model.parameters)

    def _update(self, update: Update[Batch], rate: float) -> bool:
        section, network, world = self.tracker.section, self._network, self.world
        parameters = network.model.parameters
        [batch] = update.passes
        with section("preprocessing"):
            images, labels = network.prepare(tf.constant(batch.images)), tf.constant(batch.labels)
        with tf.GradientTape() as tape:
            with section("forward"):
                outputs = network.forward(images)
            with section("loss"):
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        with section("backward"):
            # A rank's gradient counts as much as it has samples.
            gradient = pack(tape.gradient(loss, parameters)) * (update.weight / update.total)
        if world.size > 1:
            with section("communication"):
                gradient = world.all_reduce(gradient)
            self._sent["messages"] += 1
            self._sent["bytes"] += 4 * int(gradient.shape[0])
        with section("optimizer"):
            network.update(gradient, tf.constant(rate, tf.float32))
        with section("metrics"):
            self._recent.add(loss, update.weight)
            self._whole.add(loss, update.weight)
        return True

    def _recent_loss(self, epoch: int, step: int) -> float:
        loss = self._recent.take(self.world)
        return _check_finite(loss, f"the training loss is {loss} in epoch {epoch}, by step {step}")

    def _whole_loss(self) -> float:
        return self._whole.take(self.world)

    def _consensus(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _check_replicas(self) -> Values:
        checksum = 0
        for parameter in self._network.model.parameters:
            checksum = zlib.crc32(parameter.numpy().tobytes(), checksum)
        sums = [row[0] for row in self.world.gather([float(checksum)])]
        odd = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
        if odd:
            raise DivergedError(f"the model of rank {', '.join(odd)} differs from that of rank 0")
        self.world.average(self._network.model.averages)
        return {}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        options = {**self.details["options"], "precision": "fp32", "reduction": "after the backward pass"}
        return {
            "communication": {**self._sent, "updates": self.position.total},
            "precision": "fp32",
            "options": options,
        }

    # --- checkpoints: arrays in numpy's form, numbers beside them -----------------------------------------------------

    def _checkpoint_path(self) -> Path:
        return super()._checkpoint_path().with_suffix(".npz")

    def _state(self) -> Mapping[str, Any]:
        return {}

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        if not self.world.is_first:
            return
        arrays = {f"variable-{number}": item.numpy() for number, item in enumerate(self._network.variables)}
        new = path.with_name(f".{path.name}")
        with new.open("wb") as file:
            np.savez(file, facts=np.array(json.dumps({"form": FORM, "task": self.name, **state})), **arrays)
        new.replace(path)

    def _read(self, path: Path) -> Mapping[str, Any]:
        try:
            with np.load(path, allow_pickle=False) as stored:
                facts: Mapping[str, Any] = json.loads(str(stored["facts"]))
                self._stored = [stored[f"variable-{number}"] for number in range(len(self._network.variables))]
        except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
            why = " ".join(str(error).split())[:200]
            raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Take another one.") from None
        for name, value in {"form": FORM, "task": self.name, **self.identity}.items():
            if facts.get(name) != value:
                raise TaskUsageError(
                    f"{path} was made with {name} = {facts.get(name)!r}, this run has {value!r}",
                    "Resume with the parameters of the run that made it.",
                )
        return facts

    def _load_state(self, state: Mapping[str, Any]) -> None:
        for variable, value in zip(self._network.variables, self._stored, strict=True):
            variable.assign(value)


class _Mean:
    """Mean over samples, and over ranks when it is taken. Losses stay on the device until then."""

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._weight = 0.0

    def add(self, mean: Any, weight: float) -> None:
        self._total += tf.cast(mean, tf.float64) * weight
        self._weight += weight

    def take(self, world: World) -> float:
        """The mean since the last call; one collective."""
        total, weight = world.sum([float(self._total), self._weight])
        self._total, self._weight = 0.0, 0.0
        return total / weight if weight else math.nan


def _check_finite(loss: float, words: str) -> float:
    if not math.isfinite(loss):
        raise DivergedError(f"{words}: the training has diverged", "A lower learning rate may help.")
    return loss


def _normalize(pixels: Any) -> Any:
    return (tf.cast(pixels, tf.float32) / 255 - tf.constant(MEAN)) / tf.constant(DEVIATION)
