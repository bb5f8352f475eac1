"""ResNet on CIFAR-10 with synchronous SGD to a validation accuracy: the official image classification."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from task_images.cifar10_resnet20 import data as cifar
from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.ddp import DdpAllReduce
from task_images.contract import Contract
from task_images.harness.accumulation import count_parameters
from task_images.harness.datasets import data_folder
from task_images.harness.distributed import World, open_world
from task_images.harness.errors import TaskUsageError
from task_images.harness.goals import GoalWatch
from task_images.harness.images import ImageData, synthetic_images
from task_images.harness.metrics import TopK
from task_images.harness.models.resnet import resnet
from task_images.harness.parameters import read_parameters
from task_images.harness.report import Reporter
from task_images.harness.resumption import Resumption
from task_images.harness.schedules import MultiStep, PerEpoch, Plateau, Schedule, log2_warmup
from task_images.harness.seeds import seed_all
from task_images.harness.speed import SpeedOptions
from task_images.harness.training import Trainer


@dataclass(frozen=True)
class Settings:
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    data: str = "cifar10"
    training_images: int = 50_000
    validation_images: int = 10_000
    depth: int = 20
    version: int = 1
    batch_size: int = 128
    epochs: int = 164
    schedule: str = "plateau"
    rate: float = 0.02
    scale_rate: bool = True
    warmup_epochs: int = -1
    plateau_factor: float = 0.5
    plateau_patience: int = 1
    plateau_threshold: float = 0.01
    milestones: list[int] = field(default_factory=lambda: [82, 109])
    step_factor: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    goal_full: float = 80.0
    goal_light: float = 70.0
    budget_seconds: float = 0.0
    checkpoint: bool = False
    resume: str = ""
    channels_last: bool = True
    compile: str = "no"
    precision: str = "fp32"
    loaders: int = 2


def main(contract: Contract) -> None:
    train(contract, read_parameters(Settings, contract.parameters))


def train(contract: Contract, settings: Settings, ddp: DdpAllReduce | None = None) -> None:
    """One run. With `ddp` torch's own wrapper reduces the gradients, otherwise one flat buffer after the backward."""
    _check(settings, contract.world_size)
    world = open_world(contract)
    synthetic = settings.data == "synthetic"
    report = Reporter(world, data="images like CIFAR-10, generated" if synthetic else "CIFAR-10", synthetic=synthetic)
    report.environment()
    report.phase("loading")
    images = load_images(world, settings, report)

    seed_all(contract.seed)
    model = resnet(settings.depth, settings.version).to(world.device)
    speed = SpeedOptions(settings.channels_last, settings.compile, settings.precision, settings.loaders)
    speed.apply(model)
    precision = speed.make_precision(world.device)
    Trainer(
        world=world,
        model=ddp.wrap(world, model) if ddp else model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(
            model.parameters(),
            lr=settings.rate,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            fused=True,
        ),
        schedule=make_schedule(settings, world.size),
        strategy=ddp or GradientAllReduce(),
        data=ImageData(
            world,
            images.training,
            images.validation,
            settings.batch_size,
            contract.seed,
            mean=cifar.MEAN,
            deviation=cifar.DEVIATION,
            padding=4,
            mirror=True,
            loaders=settings.loaders,
            channels_last=settings.channels_last,
        ),
        metrics=[TopK(1), TopK(5)],
        goal=GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, contract.goal),
        report=report,
        epochs=settings.epochs,
        precision=precision,
        resumption=make_resumption(contract, settings, world),
        budget=settings.budget_seconds,
        before_pass=ddp.before_pass if ddp else None,
        details={
            "parameters": count_parameters(model.parameters()),
            "global_batch": settings.batch_size * world.size,
            "images": [len(images.training[1]), len(images.validation[1])],
            "official_data": not synthetic and images.is_official,
            "options": speed.facts(precision),
        },
    ).run()
    world.close()


def _check(settings: Settings, workers: int) -> None:
    make_schedule(settings, workers)
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")
    if (settings.depth - 2) % 6:
        raise TaskUsageError(f"the depth {settings.depth} is not of the form 6n+2", "--set depth=20, 32, 44, 56 or 110")


def load_images(world: World, settings: Settings, report: Reporter) -> cifar.Cifar:
    if settings.data == "synthetic":
        seed = world.contract.seed
        sizes = {"training": settings.training_images, "validation": settings.validation_images}
        return cifar.Cifar(
            *(synthetic_images(size, cifar.CLASSES, cifar.SIDE, seed, part) for part, size in sizes.items())
        )
    images = cifar.load(data_folder(world.contract), print)
    if not images.is_official:
        report.say(f"{len(images.training[1])} and {len(images.validation[1])} images: not the official data set")
    return images


def make_schedule(settings: Settings, workers: int) -> Schedule:
    """The rate of one worker, linearly warmed up to that of `workers`; then halved on plateaus, or cut at milestones.

    Epoch by epoch. Warm-up: warmup_epochs, or floor(log2 workers) where that is -1. Raises TaskUsageError.
    """
    target = settings.rate * (workers if settings.scale_rate else 1)
    warmup = log2_warmup(workers) if settings.warmup_epochs < 0 else settings.warmup_epochs
    if settings.schedule == "plateau":
        return Plateau(
            start=settings.rate,
            target=target,
            warmup=warmup,
            factor=settings.plateau_factor,
            patience=settings.plateau_patience,
            threshold=settings.plateau_threshold,
            floor=settings.rate,
        )
    try:
        return PerEpoch(MultiStep(target, tuple(settings.milestones), settings.step_factor, warmup, settings.rate))
    except (ValueError, TypeError) as error:
        raise TaskUsageError(f"milestones {settings.milestones} and {warmup} epochs of warm-up: {error}") from None


def make_resumption(contract: Contract, settings: Settings, world: World) -> Resumption:
    facts: dict[str, Any] = {
        "depth": settings.depth,
        "version": settings.version,
        "seed": contract.seed,
        "global_batch": settings.batch_size * world.size,
    }
    return Resumption(
        "cifar10_resnet20",
        facts,
        save=Path(contract.output_dir) if settings.checkpoint else None,
        load=Path(settings.resume) if settings.resume else None,
    )
