"""Parameters of ImageNet's task, what they mean for the learning rate, and what does not go together."""

from dataclasses import dataclass, field

from task_images.harness.classification import CheckpointedSettings, check_settings
from task_images.harness.errors import TaskUsageError
from task_images.harness.models.imagenet import MODELS
from task_images.harness.models.inception import LEAST_SIDE
from task_images.harness.models.layers import NORMS
from task_images.harness.parameters import check_choices
from task_images.harness.schedules import Cosine, Formula, MultiStep, PerUpdate, Schedule

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
    "decoders": ("threads", "processes"),
}


@dataclass(frozen=True)
class Settings(CheckpointedSettings):
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
    learning_rate: float = 0.1
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
    decoders: str = "threads"


def make_schedule(settings: Settings, workers: int, steps: int) -> Schedule:
    """learning_rate x global batch / 256, reached linearly from `learning_rate` (if that is less) in the warm-up; then
    down along half a cosine, or in steps. Update by update, `steps` of them an epoch. Raises TaskUsageError."""
    target = settings.learning_rate * settings.batch_size * workers / REFERENCE_BATCH
    start = min(settings.learning_rate, target)
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


def check(settings: Settings, workers: int) -> None:
    """Raises TaskUsageError for what does not go together, before anything is opened or loaded."""
    check_settings(settings)
    check_choices(settings, CHOICES)
    make_schedule(settings, workers, 1)
    if settings.decoders == "processes" and not settings.loaders:
        raise TaskUsageError("decoders=processes needs a number of them", "--set loaders=4")
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


def check_batches(settings: Settings, least: int) -> None:
    """Small images are one pixel at the end of the network: a batch of one has no statistics then."""
    if least == 1 and settings.norm == "batch" and settings.side < SIDE_FOR_ONE:
        raise TaskUsageError(
            f"a rank has 1 image in a step: no statistics of a batch if images have {settings.side} pixels",
            f"--set norm=group, side={SIDE_FOR_ONE}, or another batch_size",
        )
