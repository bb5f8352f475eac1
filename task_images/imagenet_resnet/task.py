"""Image classification on ImageNet as the field runs it: large batches, linear scaling of the rate, gradual warm-up."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from task_images.comm.ddp import DdpAllReduce
from task_images.contract import Contract
from task_images.harness.cache import data_folder
from task_images.harness.classification import LongSettings, check_settings, train_classifier
from task_images.harness.distributed import World
from task_images.harness.errors import TaskUsageError
from task_images.harness.identity import made_up
from task_images.harness.models.imagenet import MODELS, imagenet_model
from task_images.harness.models.inception import LEAST_SIDE
from task_images.harness.models.layers import NORMS
from task_images.harness.opening import opening
from task_images.harness.parameters import check_choices, read_parameters
from task_images.harness.report import Reporter
from task_images.harness.schedules import Cosine, Formula, MultiStep, PerUpdate, Schedule
from task_images.harness.seeds import seed_all
from task_images.imagenet_resnet.data import FakeData, FileData, generate
from task_images.imagenet_resnet.folders import load

# The rate is per so many images of a step, all ranks together (Goyal et al. 2017).
REFERENCE_BATCH = 256

# From this size on even a single image has more than one pixel at the end of every network.
SIDE_FOR_ONE = 64

NAMES = {
    "imagenet": "ImageNet (ILSVRC 2012)",
    "generated": "images in the folders of ImageNet, generated",
    "fake": "one batch of random numbers, no files and no decoding",
}

CHOICES = {
    "data": tuple(NAMES),
    "model": MODELS,
    "norm": NORMS,
    "schedule": ("cosine", "multistep"),
    "reduction": ("ddp", "flat"),
}


@dataclass(frozen=True)
class Settings(LongSettings):
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    data: str = "imagenet"
    classes: int = 1000
    training_images: int = 10_000
    validation_images: int = 1000
    steps: int = 10
    side: int = 224
    shorter: int = 256
    least_crop: float = 0.08
    draft: bool = True
    model: str = "resnet50"
    width: float = 1.0
    norm: str = "batch"
    zero_init: bool = True
    batch_size: int = 64
    epochs: int = 90
    schedule: str = "cosine"
    rate: float = 0.1
    warmup_epochs: float = 5.0
    milestones: list[int] = field(default_factory=lambda: [30, 60, 80])
    step_factor: float = 0.1
    label_smoothing: float = 0.1
    decay_all: bool = False
    reduction: str = "ddp"
    bucket_mb: float = 25.0
    goal_full: float = 75.9
    goal_light: float = 70.0
    loaders: int = 4


def main(contract: Contract) -> None:
    """Find or generate the images and train the chosen network to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    _check(settings, contract.world_size)
    ddp = DdpAllReduce(settings.bucket_mb) if settings.reduction == "ddp" else None
    synthetic = settings.data != "imagenet"
    with opening(contract, NAMES[settings.data], synthetic) as (world, report):
        data, images = make_data(world, settings, report)
        _check_batches(settings, data.least)
        seed_all(contract.seed)
        train_classifier(
            world,
            report,
            settings,
            model=imagenet_model(
                settings.model, settings.classes, width=settings.width, norm=settings.norm, zero_init=settings.zero_init
            ),
            data=data,
            schedule=make_schedule(settings, world.size, data.steps),
            classes=settings.classes,
            loss=partial(cross_entropy, label_smoothing=settings.label_smoothing),
            measure=settings.data == "fake",
            groups=None if settings.decay_all else without_decay_of_scales,
            strategy=ddp,
            name="imagenet_resnet",
            identity={
                "network": settings.model,
                **{name: getattr(settings, name) for name in ("width", "norm", "classes")},
                **images,
            },
            details={"model": settings.model, **images},
            closing=data.facts,
        )


def make_data(world: World, settings: Settings, report: Reporter) -> tuple[FileData | FakeData, dict[str, object]]:
    """The batches, and what the result says of them."""
    seed = world.contract.seed
    if settings.data == "fake":
        data = FakeData(
            world, settings.batch_size, settings.steps, settings.classes, settings.side, seed, settings.channels_last
        )
        report.data_identity(made_up({"training images": settings.batch_size * settings.steps}))
        return data, {"decoding": False}
    folder = data_folder(world.contract)
    if settings.data == "generated":
        sizes = {"train": settings.training_images, "val": settings.validation_images}
        folder = generate(folder, settings.classes, sizes, settings.shorter, seed)
    images = load(folder, settings.classes, print)
    report.data_identity(images.identity if settings.data == "imagenet" else made_up(images.identity.counts))
    files = FileData(
        world,
        images,
        settings.batch_size,
        seed,
        side=settings.side,
        shorter=settings.shorter,
        least_crop=settings.least_crop,
        loaders=settings.loaders,
        draft=settings.draft,
        channels_last=settings.channels_last,
    )
    return files, {
        "decoding": "draft" if settings.draft else "full",
        "images": [len(images.training), len(images.validation)],
    }


def make_schedule(settings: Settings, workers: int, steps: int) -> Schedule:
    """rate x global batch / 256, reached linearly from `rate` (if that is less) in the warm-up; then down along half a
    cosine, or in steps. Update by update, `steps` of them an epoch. Raises TaskUsageError."""
    target = settings.rate * settings.batch_size * workers / REFERENCE_BATCH
    start = min(settings.rate, target)
    try:
        formula: Formula = (
            Cosine(target, settings.epochs, settings.warmup_epochs, start)
            if settings.schedule == "cosine"
            else MultiStep(target, tuple(settings.milestones), settings.step_factor, settings.warmup_epochs, start)
        )
    except (ValueError, TypeError) as error:
        raise TaskUsageError(
            f"{settings.warmup_epochs:g} epochs of warm-up, {settings.epochs} in all, milestones {settings.milestones}:"
            f" {error}",
            "--set warmup_epochs=0 leaves the warm-up out.",
        ) from None
    return PerUpdate(lambda update: formula(update / steps))


def without_decay_of_scales(model: nn.Module, weight_decay: float) -> Iterator[dict[str, Any]]:
    """Parameter groups: weights of convolutions and linear layers with decay; scales, shifts and biases without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield {"params": [item for item in parameters if item.dim() > 1], "weight_decay": weight_decay}
    yield {"params": [item for item in parameters if item.dim() <= 1], "weight_decay": 0.0}


def _check(settings: Settings, workers: int) -> None:
    check_settings(settings)
    check_choices(settings, CHOICES)
    make_schedule(settings, workers, 1)
    if settings.data == "generated" and min(settings.training_images, settings.validation_images) < settings.classes:
        raise TaskUsageError(
            f"{settings.training_images} and {settings.validation_images} images are too few for"
            f" {settings.classes} classes",
            f"--set classes={min(settings.training_images, settings.validation_images)}, or more images",
        )
    if settings.model.startswith("inception") and settings.side < LEAST_SIDE:
        raise TaskUsageError(
            f"images of {settings.side} pixels vanish on their way through {settings.model}", "--set side=299"
        )
    if settings.shorter < settings.side:
        raise TaskUsageError(
            f"the middle {settings.side} pixels cannot be cut out of images scaled to {settings.shorter}",
            f"--set shorter={settings.side * 8 // 7}",
        )


def _check_batches(settings: Settings, least: int) -> None:
    """Small images are one pixel at the end of the network: a batch of one has no statistics then."""
    if least == 1 and settings.norm == "batch" and settings.side < SIDE_FOR_ONE:
        raise TaskUsageError(
            f"a rank has 1 image in a step: no statistics of a batch if images have {settings.side} pixels",
            f"--set norm=group, side={SIDE_FOR_ONE}, or another batch_size",
        )
