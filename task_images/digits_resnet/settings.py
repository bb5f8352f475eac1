"""Parameters of ResNet-20 on digits."""

from dataclasses import dataclass

from task_images.parameters import ClassifierSettings, HoldOutSettings, PlateauSettings, parameter


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
