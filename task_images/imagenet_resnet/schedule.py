"""The learning rate of ResNet-50 on ImageNet."""

from task_images.errors import TaskUsageError
from task_images.imagenet_resnet import Settings
from task_images.schedules import Cosine, Formula, MultiStep, PerUpdate, Schedule

# The rate is per so many images of a step, all ranks together (Goyal et al. 2017).
REFERENCE_BATCH = 256


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
