"""The official image classification (synchronous SGD, Nesterov, warm-up of log2 k epochs, plateau) on digits."""

from dataclasses import dataclass

import torch
from torch import nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.contract import Contract
from task_images.digits_resnet.data import CHANNELS, as_channels, load_split, shifted
from task_images.harness.accumulation import count_parameters
from task_images.harness.data import ArrayData
from task_images.harness.distributed import open_world
from task_images.harness.goals import GoalWatch
from task_images.harness.metrics import TopK
from task_images.harness.models.resnet import resnet
from task_images.harness.parameters import read_parameters
from task_images.harness.report import Reporter
from task_images.harness.schedules import Plateau, log2_warmup
from task_images.harness.seeds import generator, seed_all
from task_images.harness.training import Trainer


@dataclass(frozen=True)
class Settings:
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    depth: int = 20
    batch_size: int = 32
    epochs: int = 164
    rate: float = 0.0025
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    plateau_factor: float = 0.5
    plateau_patience: int = 4
    plateau_threshold: float = 0.001
    shift: int = 1
    validation_share: float = 0.2
    goal_full: float = 98.0
    goal_light: float = 90.0


def main(contract: Contract) -> None:
    settings = read_parameters(Settings, contract.parameters)
    training, validation = load_split(contract.seed, settings.validation_share)
    world = open_world(contract)
    report = Reporter(world, data="scikit-learn digits")
    report.environment()
    report.phase("loading")

    seed_all(contract.seed)
    model = resnet(settings.depth, channels=CHANNELS).to(world.device)
    augmentation = generator(contract.seed, "augmentation", world.rank)
    data = ArrayData(
        world,
        training,
        validation,
        settings.batch_size,
        contract.seed,
        prepare_training=shifted(settings.shift, augmentation),
        prepare_validation=as_channels,
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = Plateau(
        start=settings.rate,
        target=settings.rate * world.size,
        warmup=log2_warmup(world.size),
        factor=settings.plateau_factor,
        patience=settings.plateau_patience,
        threshold=settings.plateau_threshold,
        floor=settings.rate,
    )
    Trainer(
        world=world,
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        schedule=schedule,
        strategy=GradientAllReduce(),
        data=data,
        metrics=[TopK(1), TopK(5)],
        goal=GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, contract.goal),
        report=report,
        epochs=settings.epochs,
        details={"parameters": count_parameters(model.parameters()), "global_batch": settings.batch_size * world.size},
    ).run()
    world.close()
