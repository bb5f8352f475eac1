"""The same as the official image classification, but with gradients reduced in buckets during the backward pass."""

from task_images.cifar10_resnet20.task import train
from task_images.cifar10_resnet20_ddp import Settings
from task_images.contract import Contract
from task_images.methods.ddp import Ddp
from task_images.parameters import read_parameters


def main(contract: Contract) -> None:
    """Train ResNet on CIFAR-10 with gradients reduced by DistributedDataParallel."""
    settings = read_parameters(Settings, contract.parameters)
    train(contract, settings, Ddp(bucket=f"{settings.bucket_mb}MiB"))
