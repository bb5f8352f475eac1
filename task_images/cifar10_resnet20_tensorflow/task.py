"""ResNet-20 v2 on CIFAR-10 with SGD in TensorFlow 2 to a validation accuracy: the image classification 1a in another
framework, without torch.

The mathematics of the official image classification: one global batch per step, shared by the ranks; gradients weighted
by samples and summed over all ranks before the update; every rank validates on its shard and all agree on the sums.
With a parameter server, ranks update its weights independently instead, each with batches of its own.

What is here needs no TensorFlow: settings, images, and how ranks meet. The rest is in `training`.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from task_images import Lazy, cifar10_resnet20
from task_images.cifar10_resnet20 import CifarSettings, make_schedule
from task_images.cifar10_resnet20 import data as cifar
from task_images.cifar10_resnet20.data import SIDE, Cifar
from task_images.cifar10_resnet20.data import prepare_data as prepare_data
from task_images.contract import Contract, EnvironmentUnfitError, PeerLostError, TaskUsageError, install_hint
from task_images.data import Bytes, Labels, Partition, ahead, numpy_generator, shard
from task_images.loop import Plan, SampleBatches, Unit
from task_images.network import Line
from task_images.parameters import (
    AccuracySettings,
    SgdSettings,
    TrainingSettings,
    parameter,
    read_parameters,
)
from task_images.ranks import name_place
from task_images.report import GoalWatch, Reporter

training: Any = Lazy("task_images.cifar10_resnet20_tensorflow.training")  # imports this module

COLLECTIVE, PARAMETER_SERVER = "collective", "parameter-server"


@dataclass(frozen=True)
class Settings(CifarSettings, SgdSettings, AccuracySettings, TrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    batch_size: int = parameter(128, "images per rank and step", min=1, max=65536)
    epochs: int = parameter(164, "maximum number of epochs", min=1, max=100000)
    loaders: int = parameter(2, "threads that load and augment ahead", min=0, max=64)
    tf32: bool = parameter(False, "GPU: allow TF32 for fp32 products")
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
    measured_on=["CPU"],
    legacy_name="Tensorflow Cifar-10 ResNet-20 Open-MPI",
    # TensorFlow's own collectives: a ring over gRPC, or NCCL; or its parameter server, over gRPC, as the original had.
    backends=["grpc", "nccl"],
    method=None,
    notes=[
        (
            "With strategy=parameter-server, ranks update the weights on rank 0 asynchronously: an "
            "update is one batch of one rank at"
        ),
        (
            "the learning rate of one worker. Rank 0 cuts the images and validates. The time of an "
            "update counts as other. CPUs only."
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
        "throughput": {
            "data": "synthetic",
            "training_images": 12800,
            "validation_images": 1000,
            "blocks": 10,
        },
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
    is_served = settings.strategy == PARAMETER_SERVER
    parts = 1 if is_served else contract.world_size  # of the batch of an update, one per rank
    _check(settings, parts, contract.device)
    if find_spec("tensorflow") is None:
        raise EnvironmentUnfitError("TensorFlow is not installed here", f"Install it: {install_hint('tensorflow')}")
    world = training.open_cluster(contract) if is_served else training.open_world(contract, tf32=settings.tf32)
    synthetic = settings.data == "synthetic"
    report = Reporter(world, "images like CIFAR-10, generated" if synthetic else "CIFAR-10", synthetic)
    report.environment()
    if isinstance(world, training.Cluster) and not world.is_first:
        world.serve()
        return
    report.phase("loading")
    images = cifar.load_images(settings, contract)
    report.data_identity(images.identity)
    data = Images(images, settings.batch_size, world.rank, parts, contract.seed, settings.loaders)
    network = training.Network(settings, contract.seed)
    same = {"seed": contract.seed, "global_batch": settings.batch_size * parts}
    make_trainer = partial(training.ServerTrainer, settings=settings) if is_served else training.TensorFlowTrainer
    make_trainer(
        world,
        report,
        SampleBatches(data),
        make_schedule(settings, parts),
        Plan(
            settings.epochs,
            settings.budget_seconds,
            protocol=settings.protocol,
        ),
        name="cifar10_resnet20_tensorflow",
        validate=training.Validator(world, network, data),
        goal=GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, contract.goal),
        details={
            "parameters": network.model.count,
            "global_batch": same["global_batch"],
            "images": [len(images.training[1]), len(images.validation[1])],
            "options": {name: getattr(settings, name) for name in ("loaders", "strategy", "tf32")},
        },
        identity={"depth": settings.depth, **same},
        unit=Unit("images"),
        network=network,
    ).run()
    world.close()


def _check(settings: Settings, parts: int, device: str) -> None:
    make_schedule(settings, parts)
    if settings.strategy == PARAMETER_SERVER and device != "cpu":
        raise TaskUsageError(
            "the strategy parameter-server is for CPUs", "Leave out --gpu, or --set strategy=collective."
        )
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")
    if (settings.depth - 2) % 6:
        raise TaskUsageError(f"the depth {settings.depth} is not of the form 6n+2", "--set depth=20, 32, 44, 56 or 110")


# --- images -------------------------------------------------------------------------------------------------------
# Which images a step sees, and how each of them is cropped and mirrored, are functions of seed, epoch and image alone.

PADDING = 4
VALIDATION_BATCH = 500


class Batch(NamedTuple):
    """Images [n, 32, 32, 3] of bytes, labels [n], and how many samples all ranks have in this step."""

    images: Bytes
    labels: Labels
    total: int

    @property
    def size(self) -> int:
        """How many images this rank has in the step."""
        return len(self.labels)


class Images:
    """Batches for rank `rank` of `size`; all ranks get equally many training batches, none of them empty."""

    def __init__(self, images: Cifar, batch_size: int, rank: int, size: int, seed: int, loaders: int) -> None:
        self._images = images
        self._rank, self._size = rank, size
        self._seed = seed
        self._loaders = loaders
        self._partition = Partition(len(images.training[1]), batch_size, size, seed)
        self.steps = self._partition.steps

    def training(self, epoch: int) -> Iterator[Batch]:
        """Half of the images mirrored, each cut from where it stands in a black border of four pixels."""
        images, labels = self._images.training
        stream = numpy_generator(self._seed, "augmentation", epoch)
        offsets = stream.integers(0, 2 * PADDING + 1, (2, len(labels), 1))
        mirrored = stream.random((len(labels), 1)) < 0.5

        def load(rows: npt.NDArray[np.int64], total: int) -> Batch:
            return Batch(cut(images[rows], offsets[:, rows], mirrored[rows]), labels[rows], total)

        shares = self._partition.shares(epoch, self._rank)
        return ahead(self._loaders, (partial(load, share.indices, share.total) for share in shares))

    def validation(self) -> Iterator[Batch]:
        """This rank's shard; it may be empty."""
        images, labels = self._images.validation
        own = shard(len(labels), self._size, self._rank)

        def load(start: int) -> Batch:
            rows = slice(start, min(start + VALIDATION_BATCH, own.stop))
            return Batch(images[rows].transpose(0, 2, 3, 1), labels[rows], len(labels))

        return ahead(self._loaders, (partial(load, start) for start in range(own.start, own.stop, VALIDATION_BATCH)))


def cut(images: Bytes, offsets: npt.NDArray[np.int64], mirrored: npt.NDArray[np.bool_]) -> Bytes:
    """Crops [n, 32, 32, 3] of images [n, 3, 32, 32] at offsets [2, n, 1] in their padded forms."""
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    place = np.arange(SIDE)
    down = offsets[0] + place
    across = offsets[1] + np.where(mirrored, SIDE - 1 - place, place)
    number = np.arange(len(images))
    return padded[number[:, None, None], :, down[:, :, None], across[:, None, :]]


# --- where each rank's server listens -------------------------------------------------------------------------------
# TensorFlow wants to know it beforehand. Over a connection to MASTER_ADDR:MASTER_PORT a rank sends rank 0 the line
# "RANK HOST:PORT", and gets the places of all ranks.

PATIENCE = 5.0  # seconds for an attempt to connect


def rendezvous(contract: Contract, port: int, seconds: float) -> list[str]:
    """ "host:port" of every rank, by rank; `port` is that of this rank. Raises PeerLostError after `seconds`."""
    addresses, links = meet(contract, port, seconds)
    for link in links.values():
        link.close()
    return addresses


def meet(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    """The same, and the open connections by rank: rank 0's to all others, another rank's to rank 0."""
    return (_join if contract.rank else _gather)(contract, port, seconds)


def _gather(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    deadline = time.monotonic() + seconds
    addresses = {0: name_place(contract, contract.node_rank, contract.master_addr, port)}
    lines: dict[int, Line] = {}
    with ExitStack() as stack, _listening(contract) as server:
        while missing := [rank for rank in range(contract.world_size) if rank not in addresses]:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = Line(server.accept()[0])
            except TimeoutError:
                raise PeerLostError(
                    f"rank {', '.join(map(str, missing))} did not connect within {seconds:g} s",
                    "See the log of that rank for the cause.",
                ) from None
            with suppress(OSError, ValueError):
                rank, _, address = line.read().partition(" ")
                if int(rank) in missing:
                    addresses[int(rank)], lines[int(rank)] = address, line
                    stack.callback(line.close)
                    continue
            line.close()  # a port scan, or a rank of another run
        everyone = [addresses[rank] for rank in range(contract.world_size)]
        for line in lines.values():
            line.write(" ".join(everyone))
        stack.pop_all()
        return everyone, {rank: line.socket for rank, line in lines.items()}


def _listening(contract: Contract) -> socket.socket:
    try:
        return socket.create_server(("", contract.master_port), backlog=contract.world_size)
    except OSError as error:
        raise EnvironmentUnfitError(
            f"port {contract.master_port} for the other ranks cannot be opened: {error.strerror}"
        ) from None


def _join(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    place, deadline = (contract.master_addr, contract.master_port), time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError, ValueError), ExitStack() as stack:
            line = Line(socket.create_connection(place, timeout=min(left, PATIENCE)))
            stack.callback(line.close)
            address = name_place(contract, contract.node_rank, line.socket.getsockname()[0], port)
            line.write(f"{contract.rank} {address}")
            line.socket.settimeout(left)
            addresses = line.read().split()
            if len(addresses) == contract.world_size:
                stack.pop_all()
                return addresses, {0: line.socket}
        time.sleep(0.1)  # rank 0 is not there yet
    raise PeerLostError(
        f"rank 0 did not answer at {contract.master_addr}:{contract.master_port} within {seconds:g} s",
        "See the log of rank 0 for the cause.",
    )
