"""ResNet v2 on CIFAR-10 with synchronous SGD in TensorFlow 2 to a validation accuracy.

The mathematics of the official image classification: one global batch per step, shared by the ranks; gradients weighted
by samples and summed over all ranks before the update; every rank validates on its shard and all agree on the sums.
"""

from task_images.cifar10_resnet20 import data as cifar
from task_images.cifar10_resnet20.schedule import make_schedule
from task_images.cifar10_resnet20_tensorflow.data import Images
from task_images.cifar10_resnet20_tensorflow.settings import Settings
from task_images.cifar10_resnet20_tensorflow.world import open_world
from task_images.contract import Contract
from task_images.harness.errors import TaskUsageError
from task_images.harness.goals import GoalWatch
from task_images.harness.loop import Plan, Unit
from task_images.harness.parameters import read_parameters
from task_images.harness.report import Reporter
from task_images.harness.updates import SampleBatches


def main(contract: Contract) -> None:
    """Check the settings, connect the ranks, load the images and train to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    _check(settings, contract.world_size)
    world = open_world(contract, tf32=settings.tf32)
    synthetic = settings.data == "synthetic"
    report = Reporter(world, "images like CIFAR-10, generated" if synthetic else "CIFAR-10", synthetic)
    report.environment()
    report.phase("loading")
    images = cifar.load_images(settings, contract)
    report.data_identity(images.identity)

    from task_images.cifar10_resnet20_tensorflow.training import Network, TensorFlowTrainer, Validator

    data = Images(images, settings.batch_size, world.rank, world.size, contract.seed, settings.loaders)
    network = Network(settings, contract.seed)
    same = {"seed": contract.seed, "global_batch": settings.batch_size * world.size}
    TensorFlowTrainer(
        world,
        report,
        SampleBatches(data),
        make_schedule(settings, world.size),
        Plan(
            settings.epochs,
            settings.budget_seconds,
            checkpoint=settings.checkpoint,
            resume=settings.resume,
            protocol=settings.protocol,
        ),
        name="cifar10_resnet20_tensorflow",
        validate=Validator(world, network, data),
        goal=GoalWatch("Prec@1", ">=", settings.goal_full, settings.goal_light, contract.goal),
        details={
            "parameters": network.model.count,
            "global_batch": same["global_batch"],
            "images": [len(images.training[1]), len(images.validation[1])],
            "options": {"loaders": settings.loaders, "tf32": settings.tf32},
        },
        identity={"depth": settings.depth, **same},
        unit=Unit("images"),
        network=network,
    ).run()
    world.close()


def _check(settings: Settings, workers: int) -> None:
    make_schedule(settings, workers)
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")
    if (settings.depth - 2) % 6:
        raise TaskUsageError(f"the depth {settings.depth} is not of the form 6n+2", "--set depth=20, 32, 44, 56 or 110")
