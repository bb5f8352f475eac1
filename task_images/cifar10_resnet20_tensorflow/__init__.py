"""ResNet-20 v2 on CIFAR-10 with TensorFlow 2: the image classification 1a in another framework, without torch."""

from dataclasses import dataclass, replace

from task_images import cifar10_resnet20
from task_images.cifar10_resnet20 import CifarSettings
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


TASK = replace(
    cifar10_resnet20.TASK,
    settings=Settings,
    title="ResNet-20 v2 on CIFAR-10 with TensorFlow 2",
    measured_on=["CPU"],
    legacy_name="Tensorflow Cifar-10 ResNet-20 Open-MPI",
    # TensorFlow's own collectives: a ring over gRPC, or NCCL; or its parameter server, over gRPC, as the original had.
    backends=["grpc", "nccl"],
    method=None,
    notes=[
        (
            "With strategy=parameter-server, ranks update the weights on rank 0 asynchronously: an "
            "update is one batch of one rank at"
        ),
        (
            "the learning rate of one worker. Rank 0 cuts the images and validates. The time of an "
            "update counts as other. CPUs only."
        ),
    ],
    free=["checkpoint", "loaders"],
    presets={
        # The original's code: 0.1, cut by ten after 32,000 and 48,000 steps of one worker: 82 and 123 epochs. Its
        # batch of 128 x workers per worker, and its epochs of as many data sets, are bugs that are not repeated.
        "legacy": {
            "schedule": "multistep",
            "learning_rate": 0.1,
            "scale_rate": False,
            "warmup_epochs": 0,
            "milestones": [82, 123],
            "weight_decay": 0.0002,
            "decay_norms": False,
        },
        "throughput": {
            "data": "synthetic",
            "training_images": 12800,
            "validation_images": 1000,
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
