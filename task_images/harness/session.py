"""Start and end of a training task."""

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
    """Rendezvous with the other ranks and report the environment, before data are loaded; leave together after success.

    data                 name of the data set; synthetic: whether it is generated
    collective_seconds   timeout of collectives, see open_world
    """
    world = open_world(contract, collective_seconds=collective_seconds)
    report = Reporter(world, data=data, synthetic=synthetic)
    report.environment()
    report.phase("loading")
    yield world, report
    world.close()
