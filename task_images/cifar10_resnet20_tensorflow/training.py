"""What TensorFlow gives the training loop (loop): one update, one validation, a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from task_images.cifar10_resnet20.data import DEVIATION, MEAN, SIDE
from task_images.cifar10_resnet20_tensorflow import Settings
from task_images.cifar10_resnet20_tensorflow.checkpoint import load_arrays, save_arrays
from task_images.cifar10_resnet20_tensorflow.data import Batch, Images
from task_images.cifar10_resnet20_tensorflow.model import ResNet
from task_images.cifar10_resnet20_tensorflow.world import World, pack, unpack
from task_images.clock import Tracker
from task_images.loop import Loop, Update, Values, check_finite
from task_images.ranks import compare_checksums


class Network:
    """Model and momentum, with the functions that TensorFlow compiles: each is traced once, for any size of batch."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self.model = ResNet(settings.depth, seed)
        self.velocities = [tf.Variable(tf.zeros_like(item), trainable=False) for item in self.model.parameters]
        pixels = tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8)
        inputs = tf.TensorSpec([None, SIDE, SIDE, 3], tf.float32)
        self.prepare = tf.function(normalize, input_signature=[pixels])
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
        return check_finite(values, epoch)


@dataclass
class TensorFlowTrainer(Loop[Batch]):
    """One rank's training in TensorFlow."""

    network: Network = field(kw_only=True)

    def _make_tracker(self) -> Tracker:
        return Tracker(self.world.synchronize if self.world.device.startswith("GPU") else None)

    def _attach(self) -> None:
        self._sent = {"messages": 0, "bytes": 0}
        self.world.broadcast(self.network.model.parameters)

    def _update(self, update: Update[Batch], rate: float) -> bool:
        section, network, world = self.tracker.section, self.network, self.world
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
            self.losses.add(loss, update.weight)
        return True

    def _read_losses(self, losses: list[Any]) -> list[float]:
        return [float(loss) for loss in tf.stack(losses).numpy()]

    def _check_replicas(self) -> Values:
        compare_checksums(self.world, (one.numpy().tobytes() for one in self.network.model.parameters))
        self.world.average(self.network.model.averages)
        return {}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        options = {**self.details["options"], "precision": "fp32", "reduction": "after the backward pass"}
        return {
            "communication": {**self._sent, "updates": self.position.total},
            "precision": "fp32",
            "options": options,
        }

    def _checkpoint_path(self) -> Path:
        return super()._checkpoint_path().with_suffix(".npz")

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        save_arrays(self.world, path, self.name, state, [item.numpy() for item in self.network.variables])

    def _read(self, path: Path) -> Mapping[str, Any]:
        state, arrays = load_arrays(path, self.name, self.identity)
        for variable, value in zip(self.network.variables, arrays, strict=True):
            variable.assign(value)
        return state


def normalize(pixels: Any) -> Any:
    """Images [n, height, width, 3] of bytes as the network wants them: CIFAR-10 has mean 0 and deviation 1."""
    return (tf.cast(pixels, tf.float32) / 255 - tf.constant(MEAN)) / tf.constant(DEVIATION)
