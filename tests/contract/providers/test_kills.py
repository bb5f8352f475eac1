"""GKE and AKS killed at every request: whatever a command leaves, deletion and `gc` find it, and repetitions go on.

A kill comes after the request was done, before its answer: what a kill before it leaves is what the one before has
left. Requests that change nothing leave the cloud as they find it, but for those right after a change. EKS:
test_eks_leaks.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import NIGHTLY
from tests.fakes.gke import Google
from tests.fakes.zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # nightly, all requests are tried
EVERY = pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
OPTIONS = {
    "gke": ("--gpu-type", "l4"),
    "gke, with networks of its own": ("-t", "a3-highgpu-8g", "--fast-network", "--probe-image", "none"),
    "aks": ("--gpu-type", "t4", "--compact-placement", "--zones", "1", "--registry", "auto"),
}
LEFT: dict[str, Callable[[Any], list[str]]] = {
    "gke": lambda world: [*world.clusters, *world.networks.found],
    "aks": lambda world: [*world.groups, *world.clusters, *world.others],
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """For clients that a double may kill."""
    started = Zygote(
        *("mlbench_cli.app", "mlbench_cli.commands.create_cluster", "mlbench_cli.commands.delete_cluster"),
        *("mlbench_cli.commands.gc", "mlbench_cli.clusters.zone_failover", "providers.lifecycle"),
        *("providers.gke.provider", "providers.gke.discover", "google.cloud.container_v1", "google.auth"),
        *("google.auth.transport.requests", "providers.aks.provider", "providers.aks.discover", "azure.core"),
        *("azure.identity", "azure.core.pipeline.policies", "msal", "kubernetes.client", "jinja2", "urllib3", "yaml"),
    )
    yield started
    started.close()


@dataclass(frozen=True)
class Cloud:
    """A double, and clients of it in processes of their own, each with a data folder of a name."""

    name: str
    options: Sequence[str]
    double: Any
    zygote: Zygote
    folder: Path

    @property
    def left(self) -> list[str]:
        return LEFT[self.name](self.double.world)

    def reset(self, **rules: Any) -> Any:
        return self.double.reset(**rules, **({"quotas": {}} if self.name == "gke" else {}))

    def run(self, words: Sequence[str], home: str) -> tuple[int, str]:
        environment = {**self.double.environment, "MLBENCH_HOME": str(self.folder / home)}
        return self.zygote.run([words[0], self.name, *words[1:], "--yes"], environment, self.double.world.pidfile)

    def create(self, home: str) -> tuple[int, str]:
        return self.run(("create-cluster", "2", "rel", *self.options), home)

    def delete(self, home: str) -> tuple[int, str]:
        return self.run(("delete-cluster", "rel-2"), home)

    def collect(self, home: str) -> tuple[int, str]:
        return self.run(("gc", "--all", "--everybody"), home)

    def read_requests(self) -> tuple[list[str], list[str]]:
        """What a creation and what a deletion ask for, when nothing happens."""
        world = self.reset()
        assert self.create("calm")[0] == 0
        making = list(world.log)
        assert self.delete("calm")[0] == 0
        return making, world.log[len(making) :]


@pytest.fixture(params=OPTIONS)
def cloud(request: pytest.FixtureRequest, zygote: Zygote, tmp_path: Path) -> Cloud:
    name = request.param.partition(",")[0]
    double = request.getfixturevalue({"gke": "google", "aks": "azure_double"}[name])
    return Cloud(name, OPTIONS[request.param], double, zygote, tmp_path)


def list_changes(log: Sequence[str]) -> list[int]:
    """The requests that change something, those right after them, the first and the last."""
    found = {number for number, line in enumerate(log) if not line.startswith(("Get", "List", "Policy", "GET", "POST"))}
    return sorted({0, len(log) - 1, *found, *(number + 1 for number in found if number + 1 < len(log))})


def list_kills(log: Sequence[str]) -> list[tuple[int, str]]:
    return [(0, "kill-before"), *((number, "kill-after") for number in list_changes(log))]


@EVERY
def test_what_a_killed_creation_leaves_is_found_from_anywhere(cloud: Cloud, stride: int) -> None:
    making, _ = cloud.read_requests()
    left = {}
    for number, when in list_kills(making)[::stride]:
        world = cloud.reset(trouble={number: when})
        code, said = cloud.create(f"home-{number}-{when}")
        assert code == -9, said
        world.trouble = {}
        # Half of them are deleted by name, half by collecting; both from an empty data folder.
        remove, exists = cloud.delete if number % 2 else cloud.collect, bool(cloud.left)
        code, said = remove(f"empty-{number}-{when}")
        assert code == (0 if exists or remove == cloud.collect else 4), said
        if cloud.left:
            left[f"{when} {making[number]}"] = cloud.left
    assert left == {}


def test_a_creation_that_was_killed_goes_on_and_asks_for_nothing_twice(cloud: Cloud) -> None:
    making, _ = cloud.read_requests()
    is_once = {line for line in making if line.startswith(("Create", "PUT"))}
    once = [line for line in making if line in is_once and "roleAss" not in line and "Identit" not in line]
    for number in (number for number, line in enumerate(making) if line in once):
        world = cloud.reset(trouble={number: "kill-after"})
        assert cloud.create(f"home-{number}")[0] == -9
        world.trouble = {}
        code, said = cloud.create(f"home-{number}")
        assert code == 0, said
        assert sorted(line for line in world.log if line in once) == sorted(once), making[number]


@EVERY
def test_a_deletion_that_was_killed_goes_on(cloud: Cloud, stride: int) -> None:
    _, removing = cloud.read_requests()
    for number, when in list_kills(removing)[::stride]:
        world = cloud.reset()
        assert cloud.create(f"made-{number}-{when}")[0] == 0
        before = len(world.log)
        world.trouble = {before + number: when}
        code, said = cloud.delete(f"made-{number}-{when}")
        was_reached = len(world.log) - before > number  # on a busy machine it is polled less often than before
        assert code == (-9 if was_reached else 0), said
        world.trouble = {}
        assert cloud.collect(f"empty-{number}-{when}")[0] == 0
        assert cloud.left == [], f"{when} {removing[number]}"


@EVERY
def test_workers_that_were_moving_to_the_next_zone_get_there(
    google: Google, zygote: Zygote, tmp_path: Path, stride: int
) -> None:
    """Killed around the creation of workers in a zone that has none, their removal, and their creation in the next.
    `benchmarks/leaks.py` kills at every request of such a creation."""
    zones = ("europe-west1-b", "europe-west1-d")
    cloud = Cloud("gke", ("-t", "n1-standard-4", "--zones", ",".join(zones)), google, zygote, tmp_path)
    log = cloud.reset(empty_zones={zones[0]}).log
    assert cloud.create("calm")[0] == 0
    moves = [number for number, line in enumerate(log) if line.startswith(("CreateNodePool", "DeleteNodePool"))]
    assert len(moves) == 3
    for number in sorted({moves[0] + 1, moves[1] - 1, moves[1] + 1, moves[2] - 1, *moves})[::stride]:
        world = cloud.reset(empty_zones={zones[0]}, trouble={number: "kill-after"})
        assert cloud.create(f"home-{number}")[0] == -9, number
        world.trouble = {}
        code, said = cloud.create(f"home-{number}")
        assert code == 0, (number, said)
        pools = [(pool.name, list(pool.locations)) for pool in world.find_cluster("rel-2").node_pools]
        assert pools == [("system", []), ("workers", [zones[1]])], number
        assert cloud.delete(f"empty-{number}")[0] == 0
        assert cloud.left == [], number
