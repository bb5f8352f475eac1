"""Parameters of MNIST."""

from dataclasses import dataclass

from task_images.parameters import ClassifierSettings, parameter


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
