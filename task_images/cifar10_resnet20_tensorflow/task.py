"""ResNet-20 v2 on CIFAR-10 with SGD in TensorFlow 2 to a validation accuracy: the image classification 1a in another
framework.

Model, gradients, updates and their messages are TensorFlow's. torch reads and crops the images, as for
cifar10_resnet20, and keeps the ranks together outside the clock. Each rank's gradients are weighted by its samples and
summed over all ranks before the update.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from task_images import Lazy, cifar10_resnet20
from task_images.cifar10_resnet20 import CifarSettings, make_schedule
from task_images.cifar10_resnet20.data import DEVIATION, MEAN, SIDE, load_images
from task_images.cifar10_resnet20.data import prepare_data as prepare_data
from task_images.contract import Contract, PeerLostError, TaskUsageError
from task_images.data import Batch, numpy_generator
from task_images.images import ImageData
from task_images.metrics import Values
from task_images.parameters import AccuracySettings, SgdSettings, TrainingSettings, parameter, read_parameters
from task_images.report import GoalWatch, training_session
from task_images.resnet import check_depth
from task_images.tensorflow_ranks import TensorFlowRanks
from task_images.train import Loop, Plan, SampleBatches, Unit, Update
from task_images.world import World, check_same

tf: Any = Lazy("tensorflow")


@dataclass(frozen=True)
class Settings(CifarSettings, SgdSettings, AccuracySettings, TrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    batch_size: int = parameter(128, "images per rank and step", min=1, max=65536)
    epochs: int = parameter(164, "maximum number of epochs", min=1, max=100000)
    loaders: int = parameter(2, "threads that load and augment ahead", min=0, max=64)
    weight_decay: float = parameter(0.0001, "weight decay", min=0, max=1)
    decay_norms: bool = parameter(True, "also apply weight decay to scales and offsets of the norms")


TASK = replace(
    cifar10_resnet20.TASK,
    settings=Settings,
    title="ResNet-20 v2 on CIFAR-10 with TensorFlow 2",
    devices=["cpu"],
    measured_on=["CPU"],
    legacy_name="Tensorflow Cifar-10 ResNet-20 Open-MPI",
    backends=["grpc"],  # TensorFlow's own collectives, a ring
    packages=["tensorflow-cpu>=2.20,<2.22"],
    method=None,
    notes=[],
    free=["loaders"],
    presets={
        # The original's code: 0.1, cut by ten after 32,000 and 48,000 steps of one worker: 82 and 123 epochs. Its
        # batch of 128 x workers per worker, and its epochs of as many data sets, are bugs that are not repeated.
        "legacy": {
            "schedule": "multistep",
            "learning_rate": 0.1,
            "scale_rate": False,
            "warmup_epochs": 0,
            "milestones": [82, 123],
            "weight_decay": 0.0002,
            "decay_norms": False,
        },
        "throughput": {"data": "synthetic", "training_images": 12800, "validation_images": 1000, "blocks": 10},
        "tiny": {
            "data": "synthetic",
            "training_images": 600,
            "validation_images": 200,
            "depth": 8,
            "batch_size": 32,
            "epochs": 20,
            "learning_rate": 0.05,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)


def main(contract: Contract) -> None:
    """Check the settings, connect the ranks, load the images and train to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")
    check_depth(settings.depth)
    synthetic = settings.data == "synthetic"
    name = "images like CIFAR-10, generated" if synthetic else "CIFAR-10"
    with training_session(contract, name, synthetic) as (world, report):
        ranks, images = TensorFlowRanks(world), load_images(settings, contract)
        report.data_identity(images.identity)
        data = ImageData(
            world,
            images.training,
            images.validation,
            settings.batch_size,
            contract.seed,
            mean=MEAN,
            deviation=DEVIATION,
            padding=4,
            mirror=True,
            loaders=settings.loaders,
        )
        network = Network(settings, contract.seed)
        global_batch = settings.batch_size * world.size
        TensorFlowTrainer(
            world,
            report,
            SampleBatches(data),
            make_schedule(settings, world.size),
            Plan.of(settings),
            name="cifar10_resnet20_tensorflow",
            validate=Validator(world, network, data),
            goal=GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, contract.goal),
            details={
                "parameters": sum(int(tf.size(item)) for item in network.parameters),
                "global_batch": global_batch,
                "images": [len(images.training[1]), len(images.validation[1])],
                "options": {"loaders": settings.loaders},
            },
            identity={"depth": settings.depth, "seed": contract.seed, "global_batch": global_batch},
            unit=Unit("images"),
            network=network,
            ranks=ranks,
        ).run()


# --- ResNet version 2 for small images (He et al. 2016), as the original's TensorFlow task has it --------------------
# No norm after the stem, norm and ReLU before every convolution and at the end, and a 1x1 convolution of the activated
# input, without a norm, in the first block of every stage. ResNet-20 has 272 538 parameters. The same as version 2 of
# resnet.resnet; images are [n, height, width, channels].

WIDTHS, CLASSES = (16, 32, 64), 10
EPSILON = 1e-5
MOMENTUM = 0.1  # of the running statistics: what a batch adds


class Network:
    """Model and momentum. Equal seeds give equal parameters.

    weights    of convolutions and of the classifier; `norms`: scales and offsets; `averages`: means and variances
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings, self._stream = settings, numpy_generator(seed, "model")
        self.weights: list[Any] = []
        self.norms: list[Any] = []
        self.averages: list[Any] = []
        self._stem = self._convolution(3, 3, WIDTHS[0])
        self._blocks, inputs = [], WIDTHS[0]
        for stage, outputs in enumerate(WIDTHS):
            for index in range((settings.depth - 2) // 6):
                projection = self._convolution(1, inputs, outputs) if index == 0 else None
                first = self._norm(inputs), self._convolution(3, inputs, outputs)
                second = self._norm(outputs), self._convolution(3, outputs, outputs)
                self._blocks.append((2 if stage and index == 0 else 1, projection, first, second))
                inputs = outputs
        self._last = self._norm(inputs)
        bound = 1 / math.sqrt(inputs)
        self._kernel = self._weight(self._stream.uniform(-bound, bound, (inputs, CLASSES)))
        self._bias = self._weight(self._stream.uniform(-bound, bound, CLASSES))
        self.velocities = [tf.Variable(tf.zeros_like(item), trainable=False) for item in self.parameters]

    @property
    def parameters(self) -> list[Any]:
        """All trainable variables."""
        return [*self.weights, *self.norms]

    def __call__(self, pixels: Any, training: bool) -> Any:
        """Logits [n, 10] of images [n, height, width, 3] of bytes. In training the running statistics move."""
        x = (tf.cast(pixels, tf.float32) / 255 - tf.constant(MEAN)) / tf.constant(DEVIATION)
        x = _convolve(x, self._stem, 1)
        for stride, projection, (norm, kernel), (second_norm, second_kernel) in self._blocks:
            activated = tf.nn.relu(_normalize(x, norm, training))
            shortcut = x if projection is None else _convolve(activated, projection, stride)
            y = _convolve(activated, kernel, stride)
            x = _convolve(tf.nn.relu(_normalize(y, second_norm, training)), second_kernel, 1) + shortcut
        x = tf.reduce_mean(tf.nn.relu(_normalize(x, self._last, training)), [1, 2])
        return tf.linalg.matmul(x, self._kernel) + self._bias

    def apply(self, gradients: Sequence[Any], rate: Any) -> list[Any]:
        """SGD as torch has it: v = m v + g; w -= rate (g + m v) with Nesterov, rate v without."""
        settings, applied = self._settings, []
        decayed = len(self.parameters) if settings.decay_norms else len(self.weights)
        for index, (variable, velocity, part) in enumerate(
            zip(self.parameters, self.velocities, gradients, strict=True)
        ):
            applied.append(
                tf.raw_ops.ResourceApplyMomentum(
                    var=variable.handle,
                    accum=velocity.handle,
                    lr=rate,
                    grad=part + settings.weight_decay * variable if index < decayed else part,
                    momentum=settings.momentum,
                    use_nesterov=settings.nesterov,
                )
            )
        return applied

    def _convolution(self, side: int, inputs: int, outputs: int) -> Any:
        """Kaiming normal, fan out."""
        deviation = math.sqrt(2 / (side * side * outputs))
        return self._weight(deviation * self._stream.standard_normal((side, side, inputs, outputs)))

    def _weight(self, values: Any) -> Any:
        self.weights.append(tf.Variable(values.astype(np.float32)))
        return self.weights[-1]

    def _norm(self, width: int) -> tuple[Any, ...]:
        """Scale, offset, mean and variance."""
        self.norms += [tf.Variable(tf.ones(width)), tf.Variable(tf.zeros(width))]
        self.averages += [tf.Variable(tf.zeros(width), trainable=False), tf.Variable(tf.ones(width), trainable=False)]
        return (*self.norms[-2:], *self.averages[-2:])


def _convolve(x: Any, kernel: Any, stride: int) -> Any:
    """Padded by one pixel on every side for a 3x3 kernel, as torch does; "SAME" would pad a stride of 2 to one side."""
    pad = int(kernel.shape[0]) // 2
    return tf.nn.conv2d(x, kernel, stride, [[0, 0], [pad, pad], [pad, pad], [0, 0]])


def _normalize(x: Any, norm: tuple[Any, ...], training: bool) -> Any:
    """Normalization over the batch."""
    scale, offset, mean, variance = norm
    batch_norm = tf.compat.v1.nn.fused_batch_norm
    if not training:
        return batch_norm(x, scale, offset, mean=mean, variance=variance, epsilon=EPSILON, is_training=False)[0]
    y, own_mean, own_variance = batch_norm(x, scale, offset, epsilon=EPSILON, is_training=True)
    mean.assign_add(MOMENTUM * (own_mean - mean))
    variance.assign_add(MOMENTUM * (own_variance - variance))
    return y


# --- training -----------------------------------------------------------------------------------------------------


def _tensors(batch: Batch) -> tuple[Any, Any]:
    """Images [n, height, width, 3] of bytes and labels."""
    return tf.constant(batch.inputs.permute(0, 2, 3, 1).numpy()), tf.constant(batch.targets.numpy())


def _pack(tensors: Sequence[Any]) -> Any:
    """One flat tensor of all."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpack(flat: Any, like: Sequence[Any]) -> list[Any]:
    """The reverse of `_pack`."""
    parts = tf.split(flat, [int(np.prod(tensor.shape)) for tensor in like])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """What TensorFlow raises when another rank is gone, as a PeerLostError."""
    errors = tf.errors
    try:
        yield
    except (errors.UnavailableError, errors.DeadlineExceededError, errors.CancelledError, errors.AbortedError,
            errors.InternalError) as error:  # fmt: skip
        raise PeerLostError(
            f"lost another rank: {' '.join(str(error).split())[:300]}",
            "See the log of the rank that failed first for the cause.",
        ) from None


class Validator:
    """Loss and metrics over the whole validation set, each rank on its shard."""

    def __init__(self, world: World, network: Network, data: ImageData) -> None:
        self._world, self._data = world, data
        pixels = tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8)
        self._evaluate = tf.function(lambda x: network(x, training=False), input_signature=[pixels])

    def __call__(self, epoch: int) -> Values:
        sums = [0.0, 0.0, 0.0, 0.0]
        for batch in self._data.validation():
            pixels, labels = _tensors(batch)
            outputs = self._evaluate(pixels)
            found = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)]
            found += [tf.math.in_top_k(labels, outputs, k) for k in (1, 5)]
            own = [*(float(tf.reduce_sum(tf.cast(item, tf.float64))) for item in found), float(len(labels))]
            sums = [total + value for total, value in zip(sums, own, strict=True)]
        loss, first, fifth, number = self._world.sum(sums)
        return {"loss": loss / number, "Prec@1": 100 * first / number, "Prec@5": 100 * fifth / number}


@dataclass
class TensorFlowTrainer(Loop[Batch]):
    """One rank's training in TensorFlow."""

    network: Network = field(kw_only=True)
    ranks: TensorFlowRanks = field(kw_only=True)

    def _attach(self) -> None:
        self._sent = {"messages": 0, "bytes": 0}
        self._sum = self.ranks.collective("all_reduce")
        self._forward = tf.function(lambda x: self.network(x, training=True), reduce_retracing=True)
        self._apply = tf.function(
            lambda flat, rate: self.network.apply(_unpack(flat, self.network.parameters), rate) and None
        )

    def _update(self, update: Update[Batch], rate: float) -> bool:
        enter, parameters = self.tracker.enter, self.network.parameters
        [batch] = update.passes
        enter("preprocessing")
        pixels, labels = _tensors(batch)
        with tf.GradientTape() as tape:
            enter("forward")
            outputs = self._forward(pixels)
            enter("loss")
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        enter("backward")
        # A rank's gradient counts as much as it has samples.
        gradient = _pack(tape.gradient(loss, parameters)) * (update.weight / update.total)
        if self.world.size > 1:
            enter("communication")
            with _lost_ranks():
                gradient = self._sum(gradient)
            self._sent["messages"] += 1
            self._sent["bytes"] += 4 * int(gradient.shape[0])
        enter("optimizer")
        self._apply(gradient, tf.constant(rate, tf.float32))
        enter("metrics")
        self.losses.add(float(loss), update.weight, self.position.in_epoch + 1)
        return True

    def _check_replicas(self) -> Values:
        """Raises DivergedError if parameters differ; running statistics are averaged."""
        check_same(self.world, (one.numpy().tobytes() for one in self.network.parameters))
        for variable in self.network.averages:
            variable.assign(self.world.all_reduce(torch.from_numpy(variable.numpy() / self.world.size)).numpy())
        return {}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        return {
            "communication": {**self._sent, "updates": self.position.total},
            "precision": "fp32",
            "options": {**self.details["options"], "precision": "fp32", "reduction": "after the backward pass"},
        }
