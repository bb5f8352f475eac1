"""The learning rate of the image classification on CIFAR-10, for every framework that trains it."""

from task_images.cifar10_resnet20 import CifarSettings
from task_images.errors import TaskUsageError
from task_images.schedules import MultiStep, PerEpoch, Schedule, follow_plateaus, log2_warmup


def make_schedule(settings: CifarSettings, workers: int) -> Schedule:
    """The rate of one worker, linearly warmed up to that of `workers`; then halved on plateaus, or cut at milestones.

    Epoch by epoch. Warm-up: warmup_epochs, or floor(log2 workers) if that is -1. Raises TaskUsageError.
    """
    target = settings.learning_rate * (workers if settings.scale_rate else 1)
    warmup = log2_warmup(workers) if settings.warmup_epochs < 0 else settings.warmup_epochs
    if settings.schedule == "plateau":
        return follow_plateaus(settings, settings.learning_rate, target, warmup)
    try:
        milestones = tuple(settings.milestones)
        return PerEpoch(MultiStep(target, milestones, settings.step_factor, warmup, settings.learning_rate))
    except (ValueError, TypeError) as error:
        raise TaskUsageError(f"milestones {settings.milestones} and {warmup} epochs of warm-up: {error}") from None
