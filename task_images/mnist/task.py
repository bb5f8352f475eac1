"""The tutorial's network and training as a task of the catalog: synchronous SGD on MNIST to a validation accuracy."""

from dataclasses import replace

from torch.nn.functional import nll_loss

from task_images.arrays import synthetic_images
from task_images.cache import data_folder
from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract
from task_images.data import ImageData
from task_images.errors import TaskUsageError
from task_images.mnist import Settings
from task_images.mnist.data import CLASSES, DEVIATION, MEAN, SIDE, Mnist, read
from task_images.mnist.ordinary import Net
from task_images.parameters import read_parameters
from task_images.schedules import Constant, PerEpoch
from task_images.seeds import seed_all
from task_images.world import World, training_session


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
            replace(settings, batch_size=share),
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
            details={"images": [len(images.training[1]), len(images.validation[1])]},
        )


def load_images(world: World, settings: Settings) -> Mnist:
    """MNIST from the data folder, or generated images like it."""
    if settings.data == "synthetic":
        sizes = {"training": settings.training_images, "validation": settings.validation_images}
        seed = world.contract.seed
        parts = [synthetic_images(size, CLASSES, SIDE, seed, part, channels=1) for part, size in sizes.items()]
        return Mnist(parts[0], parts[1], generated=True)
    return read(data_folder(world.contract), print)
