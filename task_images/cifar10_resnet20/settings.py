"""Parameters of ResNet on CIFAR-10."""

from dataclasses import dataclass

from task_images.parameters import CheckpointedSettings, PlateauSettings, parameter


@dataclass(frozen=True)
class CifarSettings(PlateauSettings):
    """Images, depth and learning rate, for every framework that trains it."""

    data: str = parameter(
        "cifar10", "cifar10: the real images; synthetic: generated, of the same shape", choices=("cifar10", "synthetic")
    )
    training_images: int = parameter(50000, "generated training images (3 kB each and rank)", min=1, max=1000000)
    validation_images: int = parameter(10000, "generated validation images", min=1, max=1000000)
    depth: int = parameter(20, "layers of the ResNet, 6n+2: 20, 32, 44, 56, 110", min=8, max=1202)
    schedule: str = parameter("plateau", "what follows the warm-up", choices=("plateau", "multistep"))
    learning_rate: float = parameter(0.02, "learning rate of one worker", min=0, max=100, formerly="rate")
    scale_rate: bool = parameter(True, "warm up to learning_rate x workers")
    warmup_epochs: int = parameter(
        -1, "epochs of linear warm-up; -1: log2 of the workers, rounded down", min=-1, max=100000
    )
    milestones: list[int] = parameter([82, 109], "epochs after which multistep multiplies the rate by step_factor")
    step_factor: float = parameter(0.1, "of multistep", min=0, max=1)


@dataclass(frozen=True)
class Settings(CifarSettings, CheckpointedSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    resident: bool = parameter(
        False, "keep all images on the device and crop them there, instead of loading ahead; same batches"
    )
    version: int = parameter(1, "1: activation after the sum; 2: before the convolutions", min=1, max=2)
    norm: str = parameter(
        "batch",
        "normalization; group: independent of the batch, so the curve does not depend on the number of ranks",
        choices=("batch", "group"),
    )
    cudnn: str = "deterministic"
