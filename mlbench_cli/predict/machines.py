"""The machines of clouds (providers/machines.csv): which of them compute as the machine of a run did, and what their
network carries. gpus.csv has the GPUs by CUDA's names for devices, and by what clouds call them.
"""

import csv
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.predict.model import Link, Measured
from providers.machines import Shape, list_clouds, load_prices, load_shapes

NETWORK_SHARE = 0.8  # share of the documented rate that a stream of messages reaches
NETWORK_ROUND_TRIP = 1e-4  # seconds, in one zone


class Gpu(NamedTuple):
    """A type of GPU. `names` are substrings of CUDA's device name, `sold_as` what clouds call it."""

    key: str
    names: tuple[str, ...]
    sold_as: tuple[str, ...]


class Machine(NamedTuple):
    """A machine type of a cloud."""

    cloud: str
    shape: Shape

    def __str__(self) -> str:
        """Cloud and machine type, as runs on such machines record them."""
        return f"{self.cloud}/{self.shape.name}"

    @property
    def gpu(self) -> Gpu | None:
        """Its GPU; None if it has none, or one that is not in gpus.csv."""
        name = f"{self.cloud}/{self.shape.gpu}"
        return next((gpu for gpu in load_gpus() if name in gpu.sold_as), None)

    @property
    def link(self) -> Link | None:
        """The network between two such machines in one zone; None if it is unknown. "Up to" rates count in full."""
        rate = self.shape.network
        return None if rate is None else Link(1e9 * NETWORK_SHARE * rate, NETWORK_ROUND_TRIP)

    @property
    def price(self) -> float | None:
        """The lowest list price for an hour over all regions; None if it is unknown."""
        table = load_prices(self.cloud)
        prices = (table.price(self.shape.name, region) for region in table.list_regions())
        return min((price for price in prices if price is not None), default=None)


@cache
def load_gpus() -> tuple[Gpu, ...]:
    """The table of GPUs."""
    with resources.files(__package__).joinpath("gpus.csv").open("r", encoding="utf-8") as file:
        return tuple(
            Gpu(row["gpu"], tuple(row["names"].split("|")), tuple(row["sold_as"].split("|")))
            for row in csv.DictReader(file)
        )


def find_gpu(name: str) -> Gpu | None:
    """The GPU for CUDA's device name `name`; the longest match counts."""
    fitting = [(len(word), gpu) for gpu in load_gpus() for word in gpu.names if word in name]
    return max(fitting, key=lambda item: item[0])[1] if fitting else None


def find_machine(name: str) -> Machine:
    """The machine type `name`, with or without its cloud. Raises UsageError that suggests a near name."""
    machines = {
        str(one): one for one in (Machine(cloud, shape) for cloud in list_clouds() for shape in load_shapes(cloud))
    }
    found = machines.get(name) or next((each for each in machines.values() if each.shape.name == name), None)
    if found is None:
        near = did_you_mean(name, [*machines, *(each.shape.name for each in machines.values())])
        raise UsageError(
            f'mlbench does not know the machine type "{name[:60]}".{near}',
            hint="Without --on, predictions are for the machine of the run.",
        )
    return found


def require_measured(machine: Machine, runs: Sequence[Measured]) -> None:
    """Raise UsageError if no run computed on such a machine, or on the same GPU: no table says how fast it is."""
    base = runs[0]
    gpu = find_gpu(base.device)
    # A GPU that is attached to a machine type without one is no part of the type's price.
    is_same = any(one.machine == str(machine) and bool(one.device) == bool(machine.shape.gpu) for one in runs)
    if not is_same and (gpu is None or gpu != machine.gpu):
        raise UsageError(
            f"{base.name} computed on {base.device or 'CPUs'}, which says nothing about {machine}.",
            hint="Run the task for a minute on one such machine, and predict from that run without --on.",
        )
