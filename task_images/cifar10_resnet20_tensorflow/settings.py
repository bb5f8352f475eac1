"""The parameters of ResNet on CIFAR-10 in TensorFlow, in a module that does not load TensorFlow."""

from dataclasses import dataclass

from task_images.cifar10_resnet20.schedule import ScheduleSettings
from task_images.harness.settings import AccuracySettings, CheckpointSettings, SgdSettings, TrainingSettings


@dataclass(frozen=True)
class Settings(SgdSettings, AccuracySettings, TrainingSettings, CheckpointSettings, ScheduleSettings):
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    data: str = "cifar10"
    training_images: int = 50_000
    validation_images: int = 10_000
    depth: int = 20
    batch_size: int = 128
    epochs: int = 164
    decay_norms: bool = True
    loaders: int = 2
    tf32: bool = False
