"""A small network on MNIST: synchronous SGD on MNIST to a validation accuracy."""

from dataclasses import dataclass

from torch.nn.functional import nll_loss

from task_images.cache import data_folder
from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract, TaskUsageError
from task_images.data import seed_all
from task_images.images import ImageData, synthetic_images
from task_images.mnist.data import CLASSES, DEVIATION, FILES, MEAN, SIDE, Mnist, read
from task_images.mnist.ordinary import Net
from task_images.parameters import ClassifierSettings, Task, parameter, read_parameters
from task_images.report import training_session
from task_images.schedules import Constant, PerEpoch
from task_images.world import World


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
    learning_rate: float = parameter(0.01, "learning rate, the same for any number of ranks", min=0, max=100)
    loaders: int = parameter(2, "threads that load ahead", min=0, max=64)
    momentum: float = 0.5
    nesterov: bool = False
    weight_decay: float = 0.0


TASK = Task(
    settings=Settings,
    number="tutorial",
    title="Small convolutional network on MNIST",
    measured_on=["CPU", "1 x H100"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=("MNIST (60,000 + 10,000 gray images of 28x28), 12 MB, downloaded if the data folder has none; or generated"),
    free=["loaders"],
    files={
        "when": {"data": "mnist"},
        "folders": [".", "mnist", "MNIST", "MNIST/raw", "raw", "data/MNIST/raw"],
        "wanted": [
            [name, f"{name}.gz", dotted, f"{dotted}.gz"]
            for pair in FILES.values()
            for name, dotted in ((name, name.replace("-idx", ".idx")) for name in pair)
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


def main(contract: Contract) -> None:
    """Load the images and train the tutorial's network to the goal.

    Raises TaskUsageError if the batch cannot be shared among the ranks.
    """
    settings = read_parameters(Settings, contract.parameters)
    check_settings(settings)
    share = settings.batch_size // contract.world_size
    if not share:
        raise TaskUsageError(
            f"a batch of {settings.batch_size} images cannot be shared among {contract.world_size} ranks",
            f"--set batch_size={contract.world_size}, or more",
        )
    synthetic = settings.data == "synthetic"
    data = "images like MNIST, generated" if synthetic else "MNIST"
    with training_session(contract, data, synthetic) as (world, report):
        images = load_images(world, settings)
        report.data_identity(images.identity)
        seed_all(contract.seed)
        model = Net()
        seed_all(contract.seed, world.rank)  # each rank drops out others
        train_classifier(
            world,
            report,
            settings,
            model=model,
            data=ImageData(
                world,
                images.training,
                images.validation,
                share,
                contract.seed,
                mean=[MEAN],
                deviation=[DEVIATION],
                loaders=settings.loaders,
            ),
            schedule=PerEpoch(Constant(settings.learning_rate)),
            loss=nll_loss,
            details={
                "images": [len(images.training[1]), len(images.validation[1])],
                "global_batch": share * world.size,
            },
        )


def load_images(world: World, settings: Settings) -> Mnist:
    """MNIST from the data folder, or generated images like it."""
    if settings.data == "synthetic":
        sizes = {"training": settings.training_images, "validation": settings.validation_images}
        seed = world.contract.seed
        parts = [synthetic_images(size, CLASSES, SIDE, seed, part, channels=1) for part, size in sizes.items()]
        return Mnist(parts[0], parts[1], generated=True)
    return read(data_folder(world.contract), print)
