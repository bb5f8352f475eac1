"""Parameters of the logistic regression."""

from dataclasses import dataclass

from task_images.parameters import (
    AccuracyOnSettings,
    AccuracySettings,
    CudaSettings,
    HoldOutSettings,
    PlateauSettings,
    TrainingSettings,
    parameter,
)


@dataclass(frozen=True)
class Settings(PlateauSettings, AccuracySettings, AccuracyOnSettings, HoldOutSettings, TrainingSettings, CudaSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter(
        "libsvm", "libsvm: the real files; synthetic: generated, of the same shape", choices=("libsvm", "synthetic")
    )
    training_rows: int = parameter(20000, "generated training samples (8 kB each and rank)", min=1, max=400000)
    validation_rows: int = parameter(5000, "generated validation samples", min=1, max=100000)
    batch_size: int = parameter(128, "samples per rank and step", min=1, max=400000)
    epochs: int = parameter(164, "maximum number of epochs", min=1, max=100000)
    schedule: str = parameter(
        "plateau",
        "plateau: learning_rate x workers, reduced on a plateau; sqrt: alpha / sqrt(t)",
        choices=("plateau", "sqrt"),
    )
    learning_rate: float = parameter(
        4.0, "learning rate of one worker, and the minimum rate", min=0, max=10000, formerly="rate"
    )
    scale_limit: int = parameter(0, "number of workers up to which the rate grows; 0: no limit", min=0, max=4096)
    plateau_factor: float = 0.75
    alpha: float = parameter(
        0.0, "of the schedule sqrt; 0: the value tuned for the number of workers", min=0, max=100000
    )
    average: str = parameter("gradients", "what the ranks average", choices=("gradients", "weights"))
    l1: float = parameter(0.0, "factor of the sum of absolute weights", min=0, max=100)
    l2: float = parameter(2.5e-06, "factor of half the sum of squared weights", min=0, max=100)
    loaders: int = parameter(1, "threads that gather rows ahead; 0: gather when asked", min=0, max=64)
    goal_full: float = 89.0
    goal_light: float = 80.0
