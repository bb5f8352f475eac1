"""ResNet-20 on CIFAR-10, the official image classification: synchronous SGD, warm-up of log2 k epochs, plateau.

What every framework that trains it shares is here, without torch; the training is in `task`.
"""

from dataclasses import dataclass

from task_images.contract import TaskUsageError
from task_images.parameters import LongClassifierSettings, PlateauSettings, Task, parameter
from task_images.schedules import MultiStep, PerEpoch, Schedule, follow_plateaus, log2_warmup


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
    learning_rate: float = parameter(0.02, "learning rate of one worker", min=0, max=100)
    scale_rate: bool = parameter(True, "warm up to learning_rate x workers")
    warmup_epochs: int = parameter(
        -1, "epochs of linear warm-up; -1: log2 of the workers, rounded down", min=-1, max=100000
    )
    milestones: list[int] = parameter([82, 109], "epochs after which multistep multiplies the rate by step_factor")
    step_factor: float = parameter(0.1, "of multistep", min=0, max=1)


@dataclass(frozen=True)
class Settings(CifarSettings, LongClassifierSettings):
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


TASK = Task(
    settings=Settings,
    number="1a",
    title="ResNet-20 on CIFAR-10",
    legacy_name="PyTorch Cifar-10 ResNet-20",
    measured_on=["CPU", "1 x H100"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=(
        "CIFAR-10 (50,000 + 10,000 color images of 32x32), 170 MB, downloaded if the data folder has none; or generated"
    ),
    free=["checkpoint_every", "checkpoint_dir", "channels_last", "compile", "loaders", "resident"],
    files={
        "when": {"data": "cifar10"},
        "folders": [".", "data", "cifar10", "cifar-10-binary", "cifar-10-python"],
        "wanted": [
            [
                *("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
                *("cifar-10-binary.tar", "cifar-10-python.tar", "*_batch*"),
            ]
        ],
        "download": "170 MB",
        "default_folder": True,
        "instead": "--set data=synthetic",
    },
    workers={"sensible": 32, "reason": "each of 32 ranks has 13 steps an epoch, and published results end there"},
    notes=[
        "As in MLBench's code the rate never falls below that of one worker, 0.02; so with one worker it never falls."
    ],
    presets={
        # What the original's code did.
        "legacy": {
            "nesterov": False,
            "channels_last": False,
        },
        # The older specification: 0.1 per 256 samples and worker, cut by ten at epochs 82 and 109.
        "2018": {
            "batch_size": 32,
            "schedule": "multistep",
            "learning_rate": 0.0125,
            "warmup_epochs": 5,
        },
        # The original's image for the study of scaled learning rates, as of 2019.
        "scaling-lr": {
            "schedule": "multistep",
            "learning_rate": 0.1,
            "warmup_epochs": 5,
            "nesterov": False,
        },
        # The protocol of all throughput presets; no goal. Images stay on the device, cuDNN takes the fastest algorithm.
        "throughput": {
            "data": "synthetic",
            "training_images": 12800,
            "validation_images": 1000,
            "resident": True,
            "cudnn": "benchmark",
            "tf32": True,
            "blocks": 10,
        },
        # The same with kernels replayed as CUDA graphs: a step of so small a model must not wait for the host.
        "throughput-graphs": {
            "data": "synthetic",
            "training_images": 12800,
            "validation_images": 1000,
            "resident": True,
            "cudnn": "benchmark",
            "tf32": True,
            "compile": "graphs",
            "blocks": 10,
        },
        "tiny": {
            "data": "synthetic",
            "training_images": 600,
            "validation_images": 200,
            "depth": 8,
            "batch_size": 32,
            "epochs": 20,
            "learning_rate": 0.05,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)


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
