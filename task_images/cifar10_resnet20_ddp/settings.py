"""Parameters of ResNet on CIFAR-10 with DistributedDataParallel."""

from dataclasses import dataclass

from task_images.cifar10_resnet20.settings import Settings as PlainSettings
from task_images.parameters import parameter


@dataclass(frozen=True)
class Settings(PlainSettings):
    """Parameters of the task, with the preset `spec` as defaults: those of the original's code."""

    bucket_mb: float = parameter(25.0, "bucket size in MiB at which gradients are sent", min=0.000001, max=100000)
    schedule: str = "multistep"
    learning_rate: float = 0.1
    scale_rate: bool = False
    warmup_epochs: int = 0
    nesterov: bool = False
    cudnn: str = "default"
