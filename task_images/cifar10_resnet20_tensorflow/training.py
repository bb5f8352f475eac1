"""Model, ranks and training in TensorFlow.

Ranks are one worker each of a MultiWorkerMirroredStrategy, which is used for what it does best, collectives over gRPC
or NCCL; model and loop are written out, so that the tracker sees forward, backward, communication and update apart.
With TensorFlow's parameter server (ParameterServerStrategy), training is asynchronous instead, see `Cluster`.
"""

import math
import os
import platform
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from task_images.cifar10_resnet20.data import DEVIATION, MEAN, SIDE
from task_images.cifar10_resnet20_tensorflow.task import (
    Batch,
    Images,
    Settings,
    meet,
    rendezvous,
)
from task_images.clock import Tracker
from task_images.contract import EXIT_RETRYABLE, Contract, EnvironmentUnfitError, PeerLostError
from task_images.data import numpy_generator
from task_images.loop import Loop, Update, Values, check_finite
from task_images.ranks import (
    GROUP_SECONDS,
    RENDEZVOUS_SECONDS,
    compare_checksums,
    cpu_threads,
    free_port,
    make_strategy,
    resident_peak,
)

# Before TensorFlow is loaded: its own notices are no errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import tensorflow as tf


class World:
    """This rank among all ranks; see ranks.Ranks. With one rank every collective is a no-op."""

    def __init__(self, contract: Contract, device: str, threads: int, strategy: Any) -> None:
        self.contract = contract
        self.rank = contract.rank
        self.size = contract.world_size
        self.backend = contract.backend
        self.threads = threads
        self.device = device  # as TensorFlow names it: CPU:0 or GPU:0
        self._strategy = strategy
        self._reduce = tf.function(self._reduce_tensor, reduce_retracing=True) if strategy else None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until the device has done what it was given. Nothing to do on a CPU."""
        if self.device.startswith("GPU"):
            tf.test.experimental.sync_devices()

    def await_loading(self) -> None:
        """TensorFlow has no other way to wait than a collective."""
        self.barrier()

    def barrier(self) -> None:
        self.sum([0.0])

    def peak_memory(self) -> int:
        """Highest number of bytes over ranks: allocated on the GPU, else resident in the process. One collective."""
        if self.device.startswith("GPU"):
            own = float(tf.config.experimental.get_memory_info(self.device)["peak"])
        else:
            own = float(resident_peak())
        return int(max(row[0] for row in self.gather([own])))

    def all_reduce(self, tensor: Any) -> Any:
        """The sum of all ranks' tensors, the same bits on every rank."""
        if self._reduce is None:
            return tensor
        with lost_ranks():
            return self._reduce(tensor)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element, the sum over ranks, in float64. One collective."""
        return [float(value) for value in self.all_reduce(tf.constant(list(values), tf.float64)).numpy()]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values`, by rank, on every rank."""
        rows = np.zeros((self.size, len(values)))
        rows[self.rank] = values
        flat = self.sum(rows.reshape(-1).tolist())
        return np.reshape(flat, rows.shape).tolist()

    def agree(self, value: float) -> float:
        """Rank 0's `value`."""
        return self.gather([value])[0][0]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Give every rank rank 0's values: a sum in which all other ranks add 0."""
        self._replace(variables, 1.0 if self.is_first else 0.0)

    def average(self, variables: Sequence[Any]) -> None:
        """Replace every variable by its mean over ranks."""
        self._replace(variables, 1 / self.size)

    def framework_facts(self) -> dict[str, Any]:
        """TensorFlow's version, libraries and device, for the environment event."""
        return {
            "framework": "tensorflow",
            "framework_version": tf.__version__,
            "device": self.device.lower(),
            "device_name": _device_name() if self.device.startswith("GPU") else platform.machine(),
            "libraries": _libraries(),
        }

    def backend_facts(self) -> dict[str, object]:
        """How collectives are done, for the environment event."""
        return {"collectives": "NCCL" if self.backend == "nccl" else "ring over gRPC"} if self._strategy else {}

    def close(self) -> None:
        """Leave together, only after success."""
        self.sum([0.0])

    def _replace(self, variables: Sequence[Any], factor: float) -> None:
        if self.size == 1:
            return
        flat = self.all_reduce(pack(variables) * factor)
        for variable, part in zip(variables, unpack(flat, variables), strict=True):
            variable.assign(part)

    def _reduce_tensor(self, tensor: Any) -> Any:
        def add(own: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(own))

        return self._strategy.run(add, args=(tensor,))


def open_world(contract: Contract, seconds: float = RENDEZVOUS_SECONDS, *, tf32: bool = False) -> World:
    """Meet the other ranks and set up device and threads.

    Raises EnvironmentUnfitError if backend or device are missing, PeerLostError naming the ranks that did
    not connect within `seconds`.
    """
    device, threads = configure(contract, tf32=tf32)
    return World(contract, device, threads, _strategy(contract, seconds) if contract.world_size > 1 else None)


def configure(contract: Contract, *, tf32: bool = False, inter_op: int = 2) -> tuple[str, int]:
    """Set up device and threads of this process, `inter_op` of them for operations that run side by side.

    Returns the device and the number of threads of an operation. Raises EnvironmentUnfitError.
    """
    threads = cpu_threads(contract)
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    return _device(contract), threads


@contextmanager
def lost_ranks() -> Iterator[None]:
    """What TensorFlow raises when another rank is gone, as a PeerLostError."""
    try:
        yield
    except (
        tf.errors.UnavailableError,
        tf.errors.DeadlineExceededError,
        tf.errors.CancelledError,
        tf.errors.AbortedError,
        tf.errors.InternalError,
    ) as error:
        raise PeerLostError(
            f"lost another rank: {' '.join(str(error).split())[:300]}",
            "See the log of the rank that failed first for the cause.",
        ) from None


def pack(tensors: Sequence[Any]) -> Any:
    """One flat tensor of all."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unpack(flat: Any, like: Sequence[Any]) -> list[Any]:
    """The reverse of `pack`."""
    sizes = [int(np.prod(tensor.shape)) for tensor in like]
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(tf.split(flat, sizes), like, strict=True)]


def _device(contract: Contract) -> str:
    devices = tf.config.list_physical_devices("GPU")
    if contract.device == "cpu":
        if contract.backend == "nccl":
            raise EnvironmentUnfitError(
                "the backend nccl needs a GPU and the run's device is cpu", "Choose --backend grpc, or --gpu."
            )
        tf.config.set_visible_devices([], "GPU")
        return "CPU:0"
    if not devices:
        raise EnvironmentUnfitError(
            "the run needs a GPU, but TensorFlow finds none here",
            "Run without --gpu, or install TensorFlow with its CUDA libraries: pip install 'tensorflow[and-cuda]'.",
        )
    own = devices[contract.local_rank % len(devices)]
    tf.config.set_visible_devices([own], "GPU")
    tf.config.experimental.set_memory_growth(own, True)
    return "GPU:0"


def _libraries() -> dict[str, str]:
    """Versions of what this build of TensorFlow uses on GPUs; empty if it is for CPUs only."""
    build = tf.sysconfig.get_build_info()
    return {name: str(build[f"{name}_version"]) for name in ("cuda", "cudnn") if build.get(f"{name}_version")}


def _device_name() -> str:
    (device,) = tf.config.get_visible_devices("GPU")
    return str(tf.config.experimental.get_device_details(device).get("device_name", device.name))


def _strategy(contract: Contract, seconds: float) -> Any:
    if contract.backend not in ("grpc", "nccl"):
        raise EnvironmentUnfitError(
            f'TensorFlow has no communication backend "{contract.backend}"', "Choose --backend grpc."
        )
    addresses = rendezvous(contract, free_port(), seconds)
    with lost_ranks():
        return make_strategy(tf, addresses, contract.rank, is_nccl=contract.backend == "nccl")


# --- ResNet version 2 for small images (He et al. 2016), as the original's TensorFlow task has it --------------------
# No norm after the stem, norm and ReLU before every convolution and at the end, and a 1x1 convolution of the activated
# input, without a norm, in the first block of every stage. ResNet-20 has 272 538 parameters. The same as version 2 of
# models.resnet; images are [n, height, width, channels].

WIDTHS = (16, 32, 64)
EPSILON = 1e-5
MOMENTUM = 0.1  # of the running statistics: what a batch adds


class ResNet(tf.Module):  # type: ignore[misc]
    """A ResNet of `depth` 6n+2. Raises ValueError for another depth. Equal seeds give equal parameters.

    weights   parameters of convolutions and of the classifier; norms: those of the norms
    averages  running means and variances
    """

    def __init__(self, depth: int, seed: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a ResNet for small images has depth 6n+2, not {depth}")
        self._stream = numpy_generator(seed, "model")
        self.weights: list[Any] = []
        self.norms: list[Any] = []
        self.averages: list[Any] = []
        self._stem = self._convolution(3, channels, WIDTHS[0])
        self._blocks = []
        inputs = WIDTHS[0]
        for stage, outputs in enumerate(WIDTHS):
            for index in range((depth - 2) // 6):
                self._blocks.append(_Block(self, inputs, outputs, 2 if stage and not index else 1, first=not index))
                inputs = outputs
        self._last = _Norm(self, inputs)
        bound = 1 / math.sqrt(inputs)
        self._kernel = self._weight(self._stream.uniform(-bound, bound, (inputs, classes)))
        self._bias = self._weight(self._stream.uniform(-bound, bound, classes))

    @property
    def parameters(self) -> list[Any]:
        """All trainable variables."""
        return [*self.weights, *self.norms]

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(int(tf.size(item)) for item in self.parameters)

    def __call__(self, images: Any, training: bool) -> Any:
        """Logits [n, classes] of images [n, height, width, channels]. In training the running statistics move."""
        x = _convolve(images, self._stem, 1)
        for block in self._blocks:
            x = block(x, training)
        x = tf.reduce_mean(tf.nn.relu(self._last(x, training)), [1, 2])
        return tf.linalg.matmul(x, self._kernel) + self._bias

    def _convolution(self, side: int, inputs: int, outputs: int) -> Any:
        """Kaiming normal, fan out."""
        deviation = math.sqrt(2 / (side * side * outputs))
        return self._weight(deviation * self._stream.standard_normal((side, side, inputs, outputs)))

    def _weight(self, values: Any) -> Any:
        self.weights.append(tf.Variable(values.astype(np.float32)))
        return self.weights[-1]


class _Block(tf.Module):  # type: ignore[misc]
    def __init__(self, model: ResNet, inputs: int, outputs: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self._stride = stride
        self._norm1 = _Norm(model, inputs)
        self._convolution1 = model._convolution(3, inputs, outputs)
        self._norm2 = _Norm(model, outputs)
        self._convolution2 = model._convolution(3, outputs, outputs)
        self._projection = model._convolution(1, inputs, outputs) if first else None

    def __call__(self, x: Any, training: bool) -> Any:
        activated = tf.nn.relu(self._norm1(x, training))
        shortcut = x if self._projection is None else _convolve(activated, self._projection, self._stride)
        y = _convolve(activated, self._convolution1, self._stride)
        return _convolve(tf.nn.relu(self._norm2(y, training)), self._convolution2, 1) + shortcut


class _Norm(tf.Module):  # type: ignore[misc]
    """Normalization over the batch."""

    def __init__(self, model: ResNet, width: int) -> None:
        super().__init__()
        self._scale, self._offset = tf.Variable(tf.ones(width)), tf.Variable(tf.zeros(width))
        model.norms += [self._scale, self._offset]
        self._mean = tf.Variable(tf.zeros(width), trainable=False)
        self._variance = tf.Variable(tf.ones(width), trainable=False)
        model.averages += [self._mean, self._variance]

    def __call__(self, x: Any, training: bool) -> Any:
        batch_norm = tf.compat.v1.nn.fused_batch_norm
        if not training:
            kept = {"mean": self._mean, "variance": self._variance}
            return batch_norm(x, self._scale, self._offset, **kept, epsilon=EPSILON, is_training=False)[0]
        y, mean, variance = batch_norm(x, self._scale, self._offset, epsilon=EPSILON, is_training=True)
        self._mean.assign_add(MOMENTUM * (mean - self._mean))
        self._variance.assign_add(MOMENTUM * (variance - self._variance))
        return y


def _convolve(x: Any, kernel: Any, stride: int) -> Any:
    """Padded by one pixel on every side for a 3x3 kernel, as torch does; "SAME" would pad a stride of 2 to one side."""
    pad = int(kernel.shape[0]) // 2
    return tf.nn.conv2d(x, kernel, stride, [[0, 0], [pad, pad], [pad, pad], [0, 0]])


# --- training -----------------------------------------------------------------------------------------------------


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
        """Parameters, running statistics and momentum, in a fixed order."""
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
        enter, network, world = self.tracker.enter, self.network, self.world
        parameters = network.model.parameters
        [batch] = update.passes
        enter("preprocessing")
        images, labels = network.prepare(tf.constant(batch.images)), tf.constant(batch.labels)
        with tf.GradientTape() as tape:
            enter("forward")
            outputs = network.forward(images)
            enter("loss")
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        enter("backward")
        # A rank's gradient counts as much as it has samples.
        gradient = pack(tape.gradient(loss, parameters)) * (update.weight / update.total)
        if world.size > 1:
            enter("communication")
            gradient = world.all_reduce(gradient)
            self._sent["messages"] += 1
            self._sent["bytes"] += 4 * int(gradient.shape[0])
        enter("optimizer")
        network.update(gradient, tf.constant(rate, tf.float32))
        enter("metrics")
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


def normalize(pixels: Any) -> Any:
    """Images [n, height, width, 3] of bytes as the network wants them: CIFAR-10 has mean 0 and deviation 1."""
    return (tf.cast(pixels, tf.float32) / 255 - tf.constant(MEAN)) / tf.constant(DEVIATION)


# --- the parameter server -----------------------------------------------------------------------------------------
# Each rank hosts a worker in a server of TensorFlow. Rank 0 also hosts the parameter server and runs the training loop:
# it gives each batch to the next free worker (ClusterCoordinator). The worker reads the weights from the parameter
# server, computes a gradient, and the parameter server applies it at once, whatever others have changed meanwhile. So
# an update is one batch of one worker, and the learning rate is that of one worker.

GIVEN = 4  # batches per worker that are given out before the first of them is done


# Seconds without an answer, between two probes, and their number, after which a connection ends: a machine is off.
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}


Finish = Callable[[Any, int], None]


class Cluster(World):
    """This rank among the workers. Only rank 0 runs the loop, so its collectives have nobody else.

    `links` are connections between rank 0 and each other rank, which carry one byte at the end of training. One that
    ends before means that its rank is gone: TensorFlow would wait for it for an hour.
    """

    def __init__(self, contract: Contract, device: str, threads: int, port: int, seconds: float, config: Any) -> None:
        super().__init__(contract, device, threads, None)
        addresses, self._links = meet(contract, port, seconds)
        for link in self._links.values():
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in PROBES.items():
                if hasattr(socket, name):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if not self.is_first:
            return
        self._given: deque[tuple[Any, Finish]] = deque()
        self._is_over = False
        self._waiting_since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()
        self._server = _start("ps", 0, config)
        host = addresses[0].rpartition(":")[0]
        jobs = {"chief": [f"{host}:{free_port()}"], "ps": [f"{host}:{_port(self._server)}"], "worker": addresses}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(jobs), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        with lost_ranks():
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._waiting_since = math.inf

    def serve(self) -> None:
        """Another rank than 0: work until rank 0 says that training has ended. Raises PeerLostError if it is gone."""
        try:
            word = self._links[0].recv(1)
        except OSError:
            word = b""
        if not word:
            raise PeerLostError("lost rank 0", "See the log of rank 0 for the cause.")

    def give(self, function: Any, arguments: Sequence[Any], finish: Finish) -> None:
        """Give a call of `function` to the next free worker; waits for an earlier one if there are too many. Its values
        and the worker's rank are passed to `finish`, in the order of the calls."""
        while len(self._given) >= GIVEN * self.size:
            self._finish_first()
        with lost_ranks():
            self._given.append((self._coordinator.schedule(function, arguments), finish))

    def synchronize(self) -> None:
        """Wait for all calls."""
        while self._given:
            self._finish_first()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Rank 0's `values`."""
        return [list(values)]

    def close(self) -> None:
        """Let the other ranks end."""
        self._is_over = True
        for link in self._links.values():
            with suppress(OSError):  # its exit code says why it is gone
                link.sendall(b"\n")

    def _finish_first(self) -> None:
        remote, finish = self._given.popleft()
        self._waiting_since = time.monotonic()
        with lost_ranks():
            values = remote.fetch()
        self._waiting_since = math.inf
        # Nothing public says which worker it was.
        finish(values, tf.DeviceSpec.from_string(remote._values.device).task or 0)

    def _watch(self) -> None:
        """End this process if another rank is gone or nothing comes: TensorFlow's waiting cannot be interrupted."""
        patience = self.contract.collective_seconds or GROUP_SECONDS
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while not self._is_over:
                ended = selector.select(0.5)
                if ended and not self._is_over:
                    _exit(f"lost rank {ended[0][0].data}", "See the log of that rank for the cause.")
                if time.monotonic() - self._waiting_since > patience:
                    _exit(f"the workers have not answered for {patience:g} s", "A rank may be stopped.")


def open_cluster(contract: Contract, seconds: float = RENDEZVOUS_SECONDS) -> Cluster:
    """Meet the other ranks, and start what TensorFlow needs; raises as `open_world`."""
    side_by_side = contract.world_size + 1  # with fewer threads its servers may hang, says TensorFlow's own test base
    device, threads = configure(contract, inter_op=side_by_side)
    config = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0}, intra_op_parallelism_threads=threads, inter_op_parallelism_threads=side_by_side
    )
    worker = _start("worker", contract.rank, config)
    return Cluster(contract, device, threads, _port(worker), seconds, config)


@dataclass
class ServerTrainer(TensorFlowTrainer):
    """Rank 0's training of a model on the parameter server; `network` is a copy, made and used for each validation."""

    settings: Settings = field(kw_only=True)

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
        with self.world.strategy.scope():
            self._shared = Network(self.settings, self.world.contract.seed)
            self._version = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._work = tf.function(
            self._compute,
            input_signature=[
                tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([], tf.float32),
            ],
        )
        self._by_rank = [0] * self.world.size
        self._sent_bytes = 0
        self._late: list[float] = []  # staleness of each update
        self._validated = 0  # how many of them were before the last validation

    def _compute(self, pixels: Any, labels: Any, rate: Any) -> Any:
        """On a worker: one update. Returns its loss and how many updates of others its weights had missed."""
        settings, model = self.settings, self._shared.model
        decayed = len(model.parameters) if settings.decay_norms else len(model.weights)
        begun = self._version.read_value()
        with tf.GradientTape() as tape:
            outputs = model(normalize(pixels), training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        applied = []
        for index, part in enumerate(tape.gradient(loss, model.parameters)):
            parameter = model.parameters[index]
            with tf.device(parameter.device):  # the parameter server; a variable is changed under its lock
                if index < decayed:
                    part += settings.weight_decay * parameter
                applied.append(
                    tf.raw_ops.ResourceApplyMomentum(
                        var=parameter.handle,
                        accum=self._shared.velocities[index].handle,
                        lr=rate,
                        grad=part,
                        momentum=settings.momentum,
                        use_locking=True,
                        use_nesterov=settings.nesterov,
                    )
                )
        with tf.control_dependencies(applied):
            ended = self._version.assign_add(1, read_value=True)
        return tf.stack([loss, tf.cast(ended - begun - 1, tf.float32)])

    def _update(self, update: Update[Batch], rate: float) -> bool:
        [batch] = update.passes
        arguments = (tf.constant(batch.images), tf.constant(batch.labels), tf.constant(rate, tf.float32))
        size = batch.images.nbytes + batch.labels.nbytes
        self.world.give(self._work, arguments, partial(self._count, update.weight, size))
        if self.position.in_epoch + 1 == self.batches.count(self.position.epoch):
            self.world.synchronize()
        return True

    def _count(self, weight: float, size: int, values: Any, rank: int) -> None:
        """An update of `rank`, on a batch of `size` bytes, is done."""
        loss, late = map(float, values)
        self.losses.add(loss, weight)
        self._by_rank[rank] += 1
        self._sent_bytes += size if rank else 0
        self._late.append(late)

    def _validate_and_report(self, epoch: int, is_last: bool) -> None:
        self.world.synchronize()
        super()._validate_and_report(epoch, is_last)

    def _check_replicas(self) -> Values:
        """There is one model: take it for the validation."""
        copy(self._shared, self.network)
        late, self._validated = self._late[self._validated :], len(self._late)
        return {"staleness": _mean(late)}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        """Bytes between rank 0 and the others, by the sizes of tensors: weights, running statistics and batches there,
        gradients and statistics back. What rank 0's own worker exchanges stays in its process."""
        elsewhere, model = sum(self._by_rank[1:]), self.network.model
        size = 4 * sum(int(tf.size(item)) for item in [*model.parameters, *model.averages])
        return {
            "communication": {
                "messages": elsewhere,
                "sent_bytes": elsewhere * size + self._sent_bytes,
                "received_bytes": elsewhere * size,
                "updates": self.position.total,
                "updates_by_rank": self._by_rank,
                "staleness": {"mean": _mean(self._late), "max": max(self._late, default=0.0)},
            },
            "precision": "fp32",
            "options": {**self.details["options"], "precision": "fp32", "reduction": "none: updates are asynchronous"},
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def copy(source: Network, target: Network) -> None:
    """Give `target` the values of `source`, with momentum."""
    for variable, other in zip(target.variables, source.variables, strict=True):
        variable.assign(other.numpy())


def _start(job: str, index: int, config: Any) -> Any:
    """A server of TensorFlow in this process, at a port of the system's choice. It ends with the process."""
    return tf.distribute.Server(
        {job: {index: "localhost:0"}}, job_name=job, task_index=index, protocol="grpc", config=config
    )


def _port(server: Any) -> int:
    return int(server.target.rpartition(":")[2])


def _exit(message: str, hint: str) -> None:
    sys.stderr.write(f"rank 0: {message}\nrank 0: {hint}\n")
    sys.stderr.flush()
    os._exit(EXIT_RETRYABLE)
