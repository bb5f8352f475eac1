"""ResNet-20 on scikit-learn's handwritten digits: the official image classification in half a minute, on real data."""

from dataclasses import dataclass

from task_images.parameters import ClassifierSettings, HoldOutSettings, PlateauSettings, Task, parameter


@dataclass(frozen=True)
class Settings(PlateauSettings, ClassifierSettings, HoldOutSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    depth: int = parameter(20, "layers of the ResNet, 6n+2", min=8, max=1202)
    batch_size: int = parameter(32, "samples per rank and step", min=1, max=1437)
    learning_rate: float = parameter(
        0.0025,
        "learning rate of one worker; k workers warm up to k times this rate in log2 k epochs",
        min=0,
        max=100,
        formerly="rate",
    )
    plateau_patience: int = 4
    plateau_threshold: float = 0.001
    shift: int = parameter(1, "maximum shift of images in training, in pixels", min=0, max=4)
    validation_share: float = parameter(0.2, "share of every class held out for validation", min=0.01, max=0.9)
    goal_full: float = 98.0
    goal_light: float = 90.0


TASK = Task(
    settings=Settings,
    number="1a",
    title="ResNet-20 on handwritten digits",
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data="the 1797 real digits of scikit-learn (8x8 pixels), which come with the task",
    presets={
        # The protocol of all throughput presets; no goal.
        "throughput": {
            "blocks": 10,
        },
        "tiny": {
            "depth": 8,
            "batch_size": 64,
            "epochs": 20,
            "learning_rate": 0.01,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)
