"""How a training task begins and ends around its data and its model."""

from collections.abc import Iterator
from contextlib import contextmanager

from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.ranks import GROUP_SECONDS
from task_images.harness.report import Reporter


@contextmanager
def training_session(
    contract: Contract, data: str, synthetic: bool = False, collective_seconds: float = GROUP_SECONDS
) -> Iterator[tuple[World, Reporter]]:
    """Meet the other ranks and say what there is, before the data are loaded; part together after success.

    data                 name of the data set; synthetic: it is generated
    collective_seconds   longest time that a rank may keep the others waiting, see open_world
    """
    world = open_world(contract, collective_seconds=collective_seconds)
    report = Reporter(world, data=data, synthetic=synthetic)
    report.environment()
    report.phase("loading")
    yield world, report
    world.close()
