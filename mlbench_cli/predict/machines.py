"""The machines of clouds (providers/machines.csv): which of them compute as the machine of a run did, and what their
network carries. gpus.csv has the GPUs by CUDA's names for devices, and by what clouds call them.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.predict.model import Link, Measured
from providers.machines import Shape, list_clouds, load_prices, load_shapes

NETWORK_SHARE = 0.8  # share of the documented rate that a stream of messages reaches
NETWORK_ROUND_TRIP = 1e-4  # seconds, in one zone


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. `names` are substrings of CUDA's device name, `sold_as` what clouds call it."""

    key: str
    names: tuple[str, ...]
    sold_as: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """A machine type of a cloud. `attached` is the GPU added to a type that has none, e.g. a T4 on Google's N1."""

    cloud: str
    shape: Shape
    attached: str = ""

    @property
    def kind(self) -> str:
        """Cloud and machine type, as runs on such machines record them."""
        return f"{self.cloud}/{self.shape.name}"

    @property
    def gpu(self) -> Gpu | None:
        """Its GPU; None if it has none, or one that is not in gpus.csv."""
        name = f"{self.cloud}/{self.attached or self.shape.gpu}"
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
        items = [item for item in (self.shape.name, self.attached) if item]
        by_region = [[table.price(item, region) for item in items] for region in table.list_regions()]
        return min((sum(p or 0.0 for p in parts) for parts in by_region if None not in parts), default=None)

    def __str__(self) -> str:
        return f"{self.kind}+{self.attached}" if self.attached else self.kind


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


def find_machine(text: str) -> Machine:
    """The machine type named `text`: with or without its cloud, and perhaps "+GPU" for an attached one.

    Raises UsageError that suggests a near name.
    """
    name, _, added = text.partition("+")
    machines = {
        f"{cloud}/{shape.name}": Machine(cloud, shape) for cloud in list_clouds() for shape in load_shapes(cloud)
    }
    found = machines.get(name) or next((each for each in machines.values() if each.shape.name == name), None)
    if found is None:
        near = did_you_mean(name, [*machines, *(each.shape.name for each in machines.values())])
        raise UsageError(
            f'mlbench does not know the machine type "{text[:60]}".{near}',
            hint="Without --on, predictions are for the machine of the run.",
        )
    if not added:
        return found
    sold = [
        name.partition("/") for gpu in load_gpus() for name in gpu.sold_as if added in (gpu.key, name.partition("/")[2])
    ]
    with_gpu = [Machine(found.cloud, found.shape, item) for cloud, _, item in sold if cloud == found.cloud]
    # A GPU that can be attached has a price of its own.
    if found.shape.gpu or not with_gpu or with_gpu[0].price is None:
        raise UsageError(
            f'mlbench knows no {found.shape.name} with a GPU "{added[:60]}" attached.',
            hint="For example --on gke/n1-standard-8+t4",
        )
    return with_gpu[0]


def require_measured(machine: Machine, runs: Sequence[Measured]) -> None:
    """Raise UsageError if no run computed on such a machine, or on the same GPU: no table says how fast it is."""
    base = runs[0]
    gpu = find_gpu(base.device)
    if (gpu is None or gpu != machine.gpu) and all(one.machine != machine.kind for one in runs):
        raise UsageError(
            f"{base.name} computed on {base.device or 'CPUs'}, which says nothing about {machine}.",
            hint="Run the task for a minute on one such machine, and predict from that run.",
        )
