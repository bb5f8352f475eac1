"""The tutorial: an ordinary training script (`ordinary`), and the same made a benchmark in ten lines (`benchmark`)."""

from dataclasses import dataclass

from task_images.parameters import ClassifierSettings, Task, parameter


@dataclass(frozen=True)
class Settings(ClassifierSettings):
    """Parameters of the task, with the preset `spec` as defaults: the tutorial's, with the goal of CIFAR-10 (1a)."""

    data: str = parameter(
        "mnist", "mnist: the real images; synthetic: generated, of the same shape", choices=("mnist", "synthetic")
    )
    training_images: int = parameter(60000, "generated training images (1 kB each and rank)", min=1, max=1000000)
    validation_images: int = parameter(10000, "generated validation images", min=1, max=1000000)
    batch_size: int = parameter(128, "images per step, shared among the ranks", min=1, max=65536)
    epochs: int = 10
    learning_rate: float = parameter(
        0.01, "learning rate, the same for any number of ranks", min=0, max=100, formerly="rate"
    )
    loaders: int = parameter(2, "threads that load ahead", min=0, max=64)
    momentum: float = 0.5
    nesterov: bool = False
    weight_decay: float = 0.0


TASK = Task(
    settings=Settings,
    number="tutorial",
    title="The tutorial's small convolutional network on MNIST",
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=("MNIST (60,000 + 10,000 gray images of 28x28), 12 MB, downloaded if the data folder has none; or generated"),
    free=["loaders"],
    files={
        "when": {"data": "mnist"},
        "folders": [".", "mnist"],
        "wanted": [
            ["train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"],
            ["train-labels-idx1-ubyte", "train-labels-idx1-ubyte.gz"],
            ["t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"],
            ["t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz"],
        ],
        "download": "12 MB",
        "default_folder": True,
        "instead": "--set data=synthetic",
    },
    presets={
        # The protocol of all throughput presets; no goal.
        "throughput": {
            "data": "synthetic",
            "training_images": 12800,
            "validation_images": 1000,
            "blocks": 10,
        },
        "tiny": {
            "data": "synthetic",
            "training_images": 1200,
            "validation_images": 200,
            "batch_size": 32,
            "epochs": 20,
            "learning_rate": 0.05,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)
