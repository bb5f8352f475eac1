"""Training with TensorFlow's parameter server (ParameterServerStrategy), which is asynchronous.

Each rank hosts a worker in a server of TensorFlow. Rank 0 also hosts the parameter server and runs the training loop:
it gives each batch to the next free worker (ClusterCoordinator). The worker reads the weights from the parameter
server, computes a gradient, and the parameter server applies it at once, whatever others have changed meanwhile. So an
update is one batch of one worker, and the learning rate is that of one worker.
"""

import math
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tensorflow as tf

from task_images.cifar10_resnet20.data import SIDE
from task_images.cifar10_resnet20_tensorflow import Settings
from task_images.cifar10_resnet20_tensorflow.data import Batch
from task_images.cifar10_resnet20_tensorflow.rendezvous import meet
from task_images.cifar10_resnet20_tensorflow.training import Network, TensorFlowTrainer, normalize
from task_images.cifar10_resnet20_tensorflow.world import World, configure, lost_ranks
from task_images.contract import EXIT_RETRYABLE, Contract
from task_images.errors import PeerLostError
from task_images.loop import Update, Values
from task_images.ranks import GROUP_SECONDS, RENDEZVOUS_SECONDS, free_port

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

    def _load_state(self, state: Mapping[str, Any]) -> None:
        copy(self.network, self._shared)

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
