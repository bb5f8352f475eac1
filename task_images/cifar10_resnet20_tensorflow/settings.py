"""Parameters of ResNet on CIFAR-10 in TensorFlow."""

from dataclasses import dataclass

from task_images.cifar10_resnet20.settings import CifarSettings
from task_images.parameters import (
    AccuracySettings,
    CheckpointSettings,
    SgdSettings,
    TrainingSettings,
    parameter,
)

COLLECTIVE, PARAMETER_SERVER = "collective", "parameter-server"


@dataclass(frozen=True)
class Settings(CifarSettings, SgdSettings, AccuracySettings, TrainingSettings, CheckpointSettings):
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
