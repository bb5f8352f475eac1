"""The official image classification (synchronous SGD, Nesterov, warm-up of log2 k epochs, plateau) on digits."""

from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract
from task_images.data import ArrayData
from task_images.digits_resnet import Settings
from task_images.digits_resnet.data import CHANNELS, as_channels, identify, load_split, make_shift
from task_images.models.resnet import resnet
from task_images.parameters import read_parameters
from task_images.schedules import follow_plateaus, log2_warmup
from task_images.seeds import lasting_generator, seed_all
from task_images.world import training_session


def main(contract: Contract) -> None:
    """Split the digits by the seed and train ResNet on them to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    check_settings(settings)
    training, validation = load_split(contract.seed, settings.validation_share, settings.hold_out)
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
            schedule=follow_plateaus(
                settings, settings.learning_rate, settings.learning_rate * world.size, log2_warmup(world.size)
            ),
        )
