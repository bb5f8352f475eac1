"""The official image classification (synchronous SGD, Nesterov, warm-up of log2 k epochs, plateau) on digits."""

from dataclasses import dataclass

from task_images.contract import Contract
from task_images.digits_resnet.data import CHANNELS, as_channels, identify, load_split, make_shift
from task_images.harness.classification import ClassifierSettings, check_settings, train_classifier
from task_images.harness.data import ArrayData
from task_images.harness.models.resnet import resnet
from task_images.harness.parameters import read_parameters
from task_images.harness.schedules import Plateau, log2_warmup
from task_images.harness.seeds import lasting_generator, seed_all
from task_images.harness.session import training_session


@dataclass(frozen=True)
class Settings(ClassifierSettings):
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    depth: int = 20
    batch_size: int = 32
    learning_rate: float = 0.0025
    plateau_factor: float = 0.5
    plateau_patience: int = 4
    plateau_threshold: float = 0.001
    shift: int = 1
    validation_share: float = 0.2
    goal_full: float = 98.0
    goal_light: float = 90.0


def main(contract: Contract) -> None:
    """Split the digits by the seed and train ResNet on them to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    check_settings(settings)
    training, validation = load_split(contract.seed, settings.validation_share)
    with training_session(contract, "scikit-learn digits") as (world, report):
        report.data_identity(identify())
        seed_all(contract.seed)
        train_classifier(
            world,
            report,
            settings,
            model=resnet(settings.depth, channels=CHANNELS),
            data=ArrayData(
                world,
                training,
                validation,
                settings.batch_size,
                contract.seed,
                prepare_training=make_shift(
                    settings.shift, lasting_generator(contract.seed, "augmentation", world.rank)
                ),
                prepare_validation=as_channels,
            ),
            schedule=Plateau(
                start=settings.learning_rate,
                target=settings.learning_rate * world.size,
                warmup=log2_warmup(world.size),
                factor=settings.plateau_factor,
                patience=settings.plateau_patience,
                threshold=settings.plateau_threshold,
                floor=settings.learning_rate,
            ),
        )
