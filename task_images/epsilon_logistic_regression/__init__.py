"""L2-regularized logistic regression on epsilon: 2000 parameters, so a benchmark of the network's latency."""

from dataclasses import dataclass

from task_images.parameters import (
    AccuracyOnSettings,
    AccuracySettings,
    CudaSettings,
    HoldOutSettings,
    PlateauSettings,
    Task,
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


TASK = Task(
    settings=Settings,
    number="2a",
    title="Logistic regression on epsilon",
    legacy_name="PyTorch Linear Logistic Regression",
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=(
        "epsilon_normalized(.bz2) and epsilon_normalized.t(.bz2) in LIBSVM's format in the data folder; or generated"
    ),
    files={
        "when": {"data": "libsvm"},
        "folders": [".", "epsilon"],
        "wanted": [
            ["epsilon_normalized", "epsilon_normalized.bz2"],
            ["epsilon_normalized.t", "epsilon_normalized.t.bz2"],
        ],
        "instead": "--set data=synthetic",
    },
    notes=[
        (
            "MLBench's text asks for 80 % accuracy and its figure for 89 %. The goal is that of its "
            "code: 89 %, and 80 % for --light. Its"
        ),
        "figure also has the training loss 0.2828, which charts of the loss show as a line.",
        (
            "The gradient is computed in closed form, and reported losses 25 at a time; tests compare"
            " both with autograd. The section"
        ),
        ("backward contains the gradient, the section loss the share of each update in the reported loss."),
    ],
    workers={"sensible": 32, "reason": "a step sends 8 kB, so more ranks only wait, and published results end there"},
    free=["loaders"],
    presets={
        "legacy": {
            "batch_size": 100,
            "epochs": 20,
            "scale_limit": 16,
            "plateau_patience": 0,
            "average": "weights",
        },
        "2018": {
            "batch_size": 100,
            "schedule": "sqrt",
        },
        # The protocol of all throughput presets; no goal.
        "throughput": {
            "data": "synthetic",
            "training_rows": 12800,
            "validation_rows": 1000,
            "blocks": 10,
        },
        "tiny": {
            "data": "synthetic",
            "training_rows": 2000,
            "validation_rows": 500,
            "epochs": 20,
            "goal_full": 80.0,
            "goal_light": 70.0,
        },
    },
)
