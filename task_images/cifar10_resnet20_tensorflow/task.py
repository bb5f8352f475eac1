"""ResNet-20 v2 on CIFAR-10 with SGD in TensorFlow 2 to a validation accuracy: the image classification 1a in another
framework.

Model, gradients, updates and their messages are TensorFlow's. torch reads and crops the images, as for
cifar10_resnet20, and keeps the ranks together outside the clock. Each rank's gradients are weighted by its samples and
summed over all ranks before the update (`TensorFlowTrainer`); or, with a parameter server, ranks update its weights
independently (`ServerTrainer`).
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from task_images.metrics import Values, check_finite
from task_images.parameters import AccuracySettings, SgdSettings, TrainingSettings, parameter, read_parameters
from task_images.report import GoalWatch, Reporter
from task_images.tensorflow_ranks import TensorFlowRanks, find_addresses
from task_images.train import Loop, Plan, SampleBatches, Unit, Update
from task_images.world import World, check_same, open_world

tf: Any = Lazy("tensorflow")

COLLECTIVE, PARAMETER_SERVER = "collective", "parameter-server"
A_YEAR = 365 * 86400.0


@dataclass(frozen=True)
class Settings(CifarSettings, SgdSettings, AccuracySettings, TrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    batch_size: int = parameter(128, "images per rank and step", min=1, max=65536)
    epochs: int = parameter(164, "maximum number of epochs", min=1, max=100000)
    loaders: int = parameter(2, "threads that load and augment ahead", min=0, max=64)
    strategy: str = parameter(
        COLLECTIVE,
        "collective: all ranks sum their gradients; parameter-server: asynchronous, ranks update weights on rank 0",
        choices=(COLLECTIVE, PARAMETER_SERVER),
    )
    weight_decay: float = parameter(0.0001, "weight decay", min=0, max=1)
    decay_norms: bool = parameter(True, "also apply weight decay to scales and offsets of the norms")


TASK = replace(
    cifar10_resnet20.TASK,
    settings=Settings,
    title="ResNet-20 v2 on CIFAR-10 with TensorFlow 2",
    devices=["cpu"],
    measured_on=["CPU"],
    legacy_name="Tensorflow Cifar-10 ResNet-20 Open-MPI",
    # TensorFlow's own collectives, a ring over gRPC; or its parameter server, over gRPC, as the original had.
    backends=["grpc"],
    packages=["tensorflow-cpu>=2.20,<2.22"],
    method=None,
    notes=[
        (
            "With strategy=parameter-server, ranks update the weights on rank 0 asynchronously: an "
            "update is one batch of one rank at"
        ),
        (
            "the learning rate of one worker. Rank 0 cuts the images and validates. The time of an "
            "update counts as other."
        ),
    ],
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
    _check(settings)
    is_served, synthetic = settings.strategy == PARAMETER_SERVER, settings.data == "synthetic"
    everyone = world = open_world(contract)
    if is_served and world.is_first:
        world = ServedWorld(contract, everyone.device, everyone.threads, grouped=False)
    report = Reporter(world, "images like CIFAR-10, generated" if synthetic else "CIFAR-10", synthetic)
    report.environment()
    cluster = Cluster(everyone) if is_served else None
    if cluster is None or everyone.is_first:
        _train(settings, world, report, cluster or TensorFlowRanks(world))
    with _lost_rank_0():
        everyone.await_all("trained", A_YEAR)
    everyone.close()


class ServedWorld(World):
    """Rank 0 with a parameter server: only it runs the loop, so its collectives have nobody else."""

    finish_calls: Callable[[], None] | None = None

    def synchronize(self) -> None:
        """Wait for the workers."""
        if self.finish_calls is not None:
            self.finish_calls()


def _train(settings: Settings, world: World, report: Reporter, ranks: "TensorFlowRanks | Cluster") -> None:
    contract, parts = world.contract, 1 if isinstance(ranks, Cluster) else world.size  # of the batch of an update
    report.phase("loading")
    images = load_images(settings, contract)
    report.data_identity(images.identity)
    data = ImageData(
        world if parts > 1 else World(Contract({}), world.device, world.threads, grouped=False),
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
    same = {"seed": contract.seed, "global_batch": settings.batch_size * parts}
    trainer = ServerTrainer if isinstance(ranks, Cluster) else TensorFlowTrainer
    trainer(
        world,
        report,
        SampleBatches(data),
        make_schedule(settings, parts),
        Plan(settings.epochs, settings.budget_seconds, protocol=settings.protocol),
        name="cifar10_resnet20_tensorflow",
        validate=Validator(world, network, data),
        goal=GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, contract.goal),
        details={
            "parameters": sum(int(tf.size(item)) for item in network.parameters),
            "global_batch": same["global_batch"],
            "images": [len(images.training[1]), len(images.validation[1])],
            "options": {name: getattr(settings, name) for name in ("loaders", "strategy")},
        },
        identity={"depth": settings.depth, **same},
        unit=Unit("images"),
        network=network,
        ranks=ranks,
    ).run()


def _check(settings: Settings) -> None:
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")
    if (settings.depth - 2) % 6:
        raise TaskUsageError(f"the depth {settings.depth} is not of the form 6n+2", "--set depth=20, 32, 44, 56 or 110")


@contextmanager
def _lost_rank_0() -> Iterator[None]:
    """Other ranks of a parameter server wait for rank 0 at its store, which ends with it."""
    try:
        yield
    except RuntimeError:
        raise PeerLostError("lost rank 0", "See the log of rank 0 for the cause.") from None


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

    @property
    def variables(self) -> list[Any]:
        """Parameters, running statistics and momentum, in a fixed order."""
        return [*self.parameters, *self.averages, *self.velocities]

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
            with tf.device(variable.device):  # the parameter server; a variable is changed under its lock
                applied.append(
                    tf.raw_ops.ResourceApplyMomentum(
                        var=variable.handle,
                        accum=velocity.handle,
                        lr=rate,
                        grad=part + settings.weight_decay * variable if index < decayed else part,
                        momentum=settings.momentum,
                        use_locking=True,
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
        values = {"loss": loss / number, "Prec@1": 100 * first / number, "Prec@5": 100 * fifth / number}
        return check_finite(values, epoch)


@dataclass
class TensorFlowTrainer(Loop[Batch]):
    """One rank's training in TensorFlow."""

    network: Network = field(kw_only=True)
    ranks: Any = field(kw_only=True)
    _reduction = "after the backward pass"

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
        self.losses.add(float(loss), update.weight)
        return True

    def _check_replicas(self) -> Values:
        """Raises DivergedError if parameters differ; running statistics are averaged."""
        check_same(self.world, (one.numpy().tobytes() for one in self.network.parameters))
        for variable in self.network.averages:
            variable.assign(self.world.all_reduce(torch.from_numpy(variable.numpy() / self.world.size)).numpy())
        return {}

    def _communication(self) -> Mapping[str, Any]:
        return self._sent

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        return {
            "communication": {**self._communication(), "updates": self.position.total},
            "precision": "fp32",
            "options": {**self.details["options"], "precision": "fp32", "reduction": self._reduction},
        }


# --- the parameter server -----------------------------------------------------------------------------------------
# Each rank hosts a worker in a server of TensorFlow. Rank 0 also hosts the parameter server and runs the training loop:
# it gives each batch to the next free worker (ClusterCoordinator). The worker reads the weights from the parameter
# server, computes a gradient, and the parameter server applies it at once, whatever others have changed meanwhile. So
# an update is one batch of one worker, and the learning rate is that of one worker.

GIVEN = 4  # batches per worker that are given out before the first of them is done


class Cluster:
    """The workers of all ranks, and on rank 0 what gives them work. Collective."""

    def __init__(self, world: World) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its own notices are no errors
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        threads = world.size + 1  # with fewer its servers may hang, says TensorFlow's own test base
        tf.config.threading.set_intra_op_parallelism_threads(world.threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self._config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, intra_op_parallelism_threads=world.threads, inter_op_parallelism_threads=threads
        )
        self._worker, port = self._serve("worker", world.rank)
        workers = find_addresses(world, port)
        if not world.is_first:
            return
        self._server, port = self._serve("ps", 0)
        [chief] = find_addresses(World(Contract({}), world.device, 1, grouped=False))
        jobs = {"chief": [chief], "ps": [f"{workers[0].rpartition(':')[0]}:{port}"], "worker": workers}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(jobs), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        with _lost_ranks():
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def _serve(self, job: str, index: int) -> tuple[Any, int]:
        """A server of TensorFlow in this process, which ends with it, and its port."""
        server = tf.distribute.Server(
            {job: {index: "localhost:0"}}, job_name=job, task_index=index, protocol="grpc", config=self._config
        )
        return server, int(server.target.rpartition(":")[2])


@dataclass
class ServerTrainer(TensorFlowTrainer):
    """Rank 0's training of a model on the parameter server; `network` is a copy, used for validation."""

    _reduction = "none: updates are asynchronous"

    def __post_init__(self) -> None:
        """As many updates per worker in the throughput protocol as a run with collectives has, and reports of the loss
        so far apart that some updates have finished."""
        size, protocol = self.world.size, self.plan.protocol
        self.plan = replace(
            self.plan,
            loss_every=max(self.plan.loss_every, 2 * GIVEN * size),
            protocol=replace(protocol, warmup=protocol.warmup * size, updates=protocol.updates * size),
        )

    def _attach(self) -> None:
        with self.ranks.strategy.scope():
            self._shared = Network(self.network._settings, self.world.contract.seed)
            self._version = tf.Variable(0, dtype=tf.int64, trainable=False)
        images, labels = tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8), tf.TensorSpec([None], tf.int64)
        self._work = tf.function(self._compute, input_signature=[images, labels, tf.TensorSpec([], tf.float32)])
        self._given: deque[tuple[Any, float]] = deque()  # calls under way, and their samples
        self._late: list[float] = []  # staleness of each update
        self._validated = 0  # how many of them were before the last validation
        assert isinstance(self.world, ServedWorld)
        self.world.finish_calls = self._finish

    def _compute(self, pixels: Any, labels: Any, rate: Any) -> Any:
        """On a worker: one update. Returns its loss and how many updates of others its weights had missed."""
        begun = self._version.read_value()
        with tf.GradientTape() as tape:
            outputs = self._shared(pixels, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        with tf.control_dependencies(self._shared.apply(tape.gradient(loss, self._shared.parameters), rate)):
            ended = self._version.assign_add(1, read_value=True)
        return tf.stack([loss, tf.cast(ended - begun - 1, tf.float32)])

    def _update(self, update: Update[Batch], rate: float) -> bool:
        [batch] = update.passes
        self._finish(GIVEN * self.world.size - 1)
        with _lost_ranks():
            call = self.ranks.coordinator.schedule(self._work, (*_tensors(batch), tf.constant(rate, tf.float32)))
        self._given.append((call, update.weight))
        if self.position.in_epoch + 1 == self.batches.count(self.position.epoch):
            self._finish()
        return True

    def _finish(self, left: int = 0) -> None:
        """Wait for the oldest calls until so many are left."""
        while len(self._given) > left:
            call, weight = self._given.popleft()
            with _lost_ranks():
                loss, late = map(float, call.fetch())
            self.losses.add(loss, weight)
            self._late.append(late)

    def _validate_and_report(self, epoch: int, is_last: bool) -> None:
        self._finish()
        super()._validate_and_report(epoch, is_last)

    def _check_replicas(self) -> Values:
        """There is one model: take it for the validation."""
        for variable, other in zip(self.network.variables, self._shared.variables, strict=True):
            variable.assign(other.numpy())
        late, self._validated = self._late[self._validated :], len(self._late)
        return {"staleness": _mean(late)}

    def _communication(self) -> Mapping[str, Any]:
        return {"staleness": {"mean": _mean(self._late), "max": max(self._late, default=0.0)}}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
