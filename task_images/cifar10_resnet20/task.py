"""ResNet on CIFAR-10 with synchronous SGD to a validation accuracy: the official image classification."""

from task_images.cifar10_resnet20 import Settings, make_schedule
from task_images.cifar10_resnet20 import data as cifar
from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract
from task_images.data import seed_all
from task_images.images import ImageData
from task_images.methods.base import Method
from task_images.parameters import read_parameters
from task_images.report import training_session
from task_images.resnet import check_depth, resnet


def main(contract: Contract) -> None:
    """Train ResNet on CIFAR-10 with the task's own reduction of gradients."""
    train(contract, read_parameters(Settings, contract.parameters))


def train(contract: Contract, settings: Settings, method: Method | None = None) -> None:
    """One run. `method` is how gradients travel; None: in one flat buffer after the backward pass."""
    _check(settings, contract.world_size)
    synthetic = settings.data == "synthetic"
    name = "images like CIFAR-10, generated" if synthetic else "CIFAR-10"
    with training_session(contract, name, synthetic) as (world, report):
        images = cifar.load_images(settings, contract)
        report.data_identity(images.identity)
        seed_all(contract.seed)
        train_classifier(
            world,
            report,
            settings,
            model=resnet(settings.depth, settings.version, norm=settings.norm),
            data=ImageData(
                world,
                images.training,
                images.validation,
                settings.batch_size,
                contract.seed,
                mean=cifar.MEAN,
                deviation=cifar.DEVIATION,
                padding=4,
                mirror=True,
                loaders=settings.loaders,
                channels_last=settings.channels_last,
                resident=settings.resident,
            ),
            schedule=make_schedule(settings, world.size),
            method=method,
            name="cifar10_resnet20",
            identity={"depth": settings.depth, "version": settings.version, "norm": settings.norm},
            details={
                "images": [len(images.training[1]), len(images.validation[1])],
                "resident": settings.resident,
            },
        )


def _check(settings: Settings, workers: int) -> None:
    check_settings(settings)
    make_schedule(settings, workers)
    check_depth(settings.depth)
