"""The same as the official image classification, but with gradients reduced in buckets during the backward pass."""

from dataclasses import dataclass

from task_images.cifar10_resnet20.task import Settings as PlainSettings
from task_images.cifar10_resnet20.task import train
from task_images.comm.ddp import DdpAllReduce
from task_images.contract import Contract
from task_images.harness.parameters import read_parameters


@dataclass(frozen=True)
class Settings(PlainSettings):
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    schedule: str = "multistep"
    learning_rate: float = 0.1
    scale_rate: bool = False
    warmup_epochs: int = 0
    nesterov: bool = False
    bucket_mb: float = 25.0
    cudnn: str = "default"


def main(contract: Contract) -> None:
    """Train ResNet on CIFAR-10 with gradients reduced by DistributedDataParallel."""
    settings = read_parameters(Settings, contract.parameters)
    train(contract, settings, DdpAllReduce(settings.bucket_mb))
