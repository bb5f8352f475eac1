"""ResNet v2 on CIFAR-10 with SGD in TensorFlow 2 to a validation accuracy.

The mathematics of the official image classification: one global batch per step, shared by the ranks; gradients weighted
by samples and summed over all ranks before the update; every rank validates on its shard and all agree on the sums.
With a parameter server, ranks update its weights independently instead, each with batches of its own (`servers`).
"""

from collections.abc import Callable
from functools import partial

from task_images.cifar10_resnet20 import data as cifar
from task_images.cifar10_resnet20 import make_schedule
from task_images.cifar10_resnet20_tensorflow import PARAMETER_SERVER, Settings
from task_images.cifar10_resnet20_tensorflow.data import Images
from task_images.cifar10_resnet20_tensorflow.world import World, open_world, require_tensorflow
from task_images.contract import Contract
from task_images.errors import TaskUsageError
from task_images.goals import GoalWatch
from task_images.loop import Plan, SampleBatches, Unit
from task_images.parameters import read_parameters
from task_images.report import Reporter


def main(contract: Contract) -> None:
    """Check the settings, connect the ranks, load the images and train to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    is_served = settings.strategy == PARAMETER_SERVER
    parts = 1 if is_served else contract.world_size  # of the batch of an update, one per rank
    _check(settings, parts, contract.device)
    require_tensorflow()

    from task_images.cifar10_resnet20_tensorflow.servers import Cluster, ServerTrainer, open_cluster
    from task_images.cifar10_resnet20_tensorflow.training import Network, TensorFlowTrainer, Validator

    world: World = open_cluster(contract) if is_served else open_world(contract, tf32=settings.tf32)
    synthetic = settings.data == "synthetic"
    report = Reporter(world, "images like CIFAR-10, generated" if synthetic else "CIFAR-10", synthetic)
    report.environment()
    if isinstance(world, Cluster) and not world.is_first:
        world.serve()
        return
    report.phase("loading")
    images = cifar.load_images(settings, contract)
    report.data_identity(images.identity)
    data = Images(images, settings.batch_size, world.rank, parts, contract.seed, settings.loaders)
    network = Network(settings, contract.seed)
    same = {"seed": contract.seed, "global_batch": settings.batch_size * parts}
    make_trainer: Callable[..., TensorFlowTrainer] = (
        partial(ServerTrainer, settings=settings) if is_served else TensorFlowTrainer
    )
    make_trainer(
        world,
        report,
        SampleBatches(data),
        make_schedule(settings, parts),
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
            "options": {name: getattr(settings, name) for name in ("loaders", "strategy", "tf32")},
        },
        identity={"depth": settings.depth, **same},
        unit=Unit("images"),
        network=network,
    ).run()
    world.close()


def _check(settings: Settings, parts: int, device: str) -> None:
    make_schedule(settings, parts)
    if settings.strategy == PARAMETER_SERVER and device != "cpu":
        raise TaskUsageError(
            "the strategy parameter-server is for CPUs", "Leave out --gpu, or --set strategy=collective."
        )
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")
    if (settings.depth - 2) % 6:
        raise TaskUsageError(f"the depth {settings.depth} is not of the form 6n+2", "--set depth=20, 32, 44, 56 or 110")
