"""ResNet-20 on CIFAR-10 with torch's DistributedDataParallel, as most people train: the image classification, but with
gradients reduced in buckets during the backward pass. Not the official benchmark.
"""

from dataclasses import dataclass, replace

from task_images import cifar10_resnet20
from task_images.cifar10_resnet20 import Settings as PlainSettings
from task_images.cifar10_resnet20.data import prepare_data as prepare_data
from task_images.cifar10_resnet20.task import train
from task_images.contract import Contract
from task_images.methods.ddp import Ddp
from task_images.parameters import read_parameters


@dataclass(frozen=True)
class Settings(PlainSettings):
    """Parameters of the task, with the preset `spec` as defaults: those of the original's code."""

    schedule: str = "multistep"
    learning_rate: float = 0.1
    scale_rate: bool = False
    warmup_epochs: int = 0
    nesterov: bool = False
    cudnn: str = "default"


TASK = replace(
    cifar10_resnet20.TASK,
    settings=Settings,
    title="ResNet-20 on CIFAR-10 with DistributedDataParallel",
    measured_on=["CPU"],
    legacy_name="PyTorch Cifar-10 ResNet-20 (DDP)",
    method={"own": "ddp"},
    presets={
        "legacy": {
            "channels_last": False,
        },
        "throughput": cifar10_resnet20.TASK.presets["throughput"],
        "throughput-graphs": cifar10_resnet20.TASK.presets["throughput-graphs"],
        "tiny": {
            "data": "synthetic",
            "training_images": 600,
            "validation_images": 200,
            "depth": 8,
            "batch_size": 32,
            "epochs": 20,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)


def main(contract: Contract) -> None:
    """Train ResNet on CIFAR-10 with gradients reduced by DistributedDataParallel."""
    settings = read_parameters(Settings, contract.parameters)
    train(contract, settings, Ddp())
