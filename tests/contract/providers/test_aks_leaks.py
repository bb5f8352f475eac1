"""AKS killed, and refused, at every request: whatever a command leaves, deletion and `gc` find it by its group."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlbench_cli.errors import CredentialError
from providers.aks.options import AksOptions
from tests import NIGHTLY
from tests.contract.providers.test_aks import create, error_of, make_cluster, remove_from_nothing
from tests.fakes.azure_arm import World
from tests.fakes.azure_web import AzureDouble
from tests.fakes.zygote import Zygote

CREATE = [
    "create-cluster",
    "aks",
    "2",
    "rel",
    "--gpu-type",
    "t4",
    "--compact-placement",
    "--zones",
    "1",
    "--registry",
    "auto",
    "--yes",
]
DELETE = ["delete-cluster", "aks", "rel-2", "--yes"]
PASSING = ("429-before", "500-after")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote(
        *("mlbench_cli.app", "mlbench_cli.commands.create_cluster", "mlbench_cli.commands.delete_cluster"),
        *("mlbench_cli.commands.gc", "providers.lifecycle", "providers.aks.provider", "providers.aks.discover"),
        *("azure.core", "azure.identity", "azure.core.pipeline.policies", "msal", "requests", "urllib3", "yaml"),
        *("kubernetes.client", "jinja2", "providers.workload_cleanup", "mlbench_cli.clusters.zone_failover"),
    )
    yield started
    started.close()


@pytest.fixture
def client(zygote: Zygote, azure_double: AzureDouble, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """`mlbench WORDS` in a process of its own, which the double may kill, with a data folder of that name."""

    def run(argv: list[str], home: str) -> tuple[int, str]:
        environment = {**azure_double.environment, "MLBENCH_HOME": str(tmp_path / home)}
        assert azure_double.world.pidfile is not None
        return zygote.run(argv, environment, azure_double.world.pidfile)

    return run


def _kills(log: list[str]) -> list[tuple[int, str]]:
    """To be killed before a request is to be killed after the one before it, so the first alone has a "before"."""
    return [(0, "kill-before"), *((number, "kill-after") for number in range(len(log)))]


def _changes(log: list[str]) -> list[int]:
    """The requests that change something, and those right after them: all others leave the world as they find it."""
    found = {number for number, line in enumerate(log) if line.startswith(("PUT", "DELETE", "PATCH"))}
    return sorted({0, len(log) - 1, *found, *(number + 1 for number in found if number + 1 < len(log))})


@pytest.mark.slow
@pytest.mark.timeout(1800)  # [all] is nightly
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_killed_at_every_boundary_of_creation_nothing_leaks(
    azure_world: World, azure_double: AzureDouble, client: Callable[..., tuple[int, str]], stride: int
) -> None:
    assert client(CREATE, "calm")[0] == 0
    log = list(azure_world.log)
    left = {}
    for number, when in [(0, "kill-before"), *((number, "kill-after") for number in _changes(log))][::stride]:
        world = azure_double.reset(trouble={number: when})
        code, printed = client(CREATE, f"home-{number}-{when}")
        assert code == -9, printed
        world.trouble = {}
        # Half of them are deleted by name, half by collecting; both from an empty data folder.
        removal = DELETE if number % 2 else ["gc", "aks", "--all", "--everybody", "--yes"]
        exists = bool(world.groups)
        code, printed = client(removal, f"empty-{number}-{when}")
        assert code == (0 if exists or removal != DELETE else 4), printed
        if world.groups or world.clusters or world.others:
            left[f"{when} {log[number]}"] = list(world.groups)
    assert left == {}


@pytest.mark.slow
def test_killed_after_a_change_of_creation_it_goes_on(
    azure_world: World, azure_double: AzureDouble, client: Callable[..., tuple[int, str]]
) -> None:
    assert client(CREATE, "calm")[0] == 0
    log = list(azure_world.log)
    once = [line for line in log if line.startswith("PUT") and "roleAss" not in line and "Identit" not in line]
    for number in (number for number, line in enumerate(log) if line in once):
        world = azure_double.reset(trouble={number: "kill-after"})
        assert client(CREATE, f"home-{number}")[0] == -9
        world.trouble = {}
        code, printed = client(CREATE, f"home-{number}")
        assert code == 0, printed
        asked = [line for line in world.log if line in once]
        assert sorted(asked) == sorted(once), log[number]  # nothing is asked for twice


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_killed_at_every_request_of_deletion_it_goes_on(
    azure_world: World, azure_double: AzureDouble, client: Callable[..., tuple[int, str]], tmp_path: Path, stride: int
) -> None:
    cluster = make_cluster(options=AksOptions())
    create(cluster, tmp_path / "calm")
    before = len(azure_world.log)
    assert client(DELETE, "calm")[0] == 0
    removing = azure_world.log[before:]
    for number, when in _kills(removing)[::stride]:
        world = azure_double.reset()
        create(cluster, tmp_path / f"made-{number}-{when}")
        before = len(world.log)
        world.trouble = {before + number: when}
        code, printed = client(DELETE, f"made-{number}-{when}")
        was_reached = len(world.log) - before > number  # on a busy machine it is polled less often than before
        assert code == (-9 if was_reached else 0), printed
        world.trouble = {}
        remove_from_nothing(tmp_path / f"empty-{number}-{when}")
        assert (world.groups, world.clusters, world.others) == ({}, {}, {}), f"{when} {removing[number]}"


@pytest.mark.timeout(900)  # [all] is nightly
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
@pytest.mark.parametrize("trouble", [*PASSING, "403-before"])
def test_an_error_at_any_request_leaks_nothing(
    azure_world: World, azure_double: AzureDouble, tmp_path: Path, trouble: str, stride: int
) -> None:
    cluster = make_cluster(options=AksOptions())
    world = azure_double.reset()
    create(cluster, tmp_path / "calm")
    log = list(world.log)
    for number in _changes(log)[::stride]:
        world = azure_double.reset(trouble={number: trouble})
        error = error_of(functools.partial(create, cluster, tmp_path / f"home-{number}"))
        # On a busy machine Azure is asked less often than before, and the trouble may never come.
        troubled = world.log[number] if number < len(world.log) else None
        # Who may not assign roles gets a cluster all the same.
        if trouble in PASSING or troubled is None or troubled.startswith("PUT roleAssignments"):
            assert error is None, (troubled, error)
        else:
            assert isinstance(error, CredentialError), (troubled, error)
            assert bool(error.details.get("exists")) == bool(world.groups)
        world.trouble = {}
        remove_from_nothing(tmp_path / f"empty-{number}")
        assert (world.groups, world.clusters, world.others) == ({}, {}, {}), f"{trouble} at {troubled}"


def test_a_cluster_that_is_being_created_is_deleted_with_its_group(
    azure_world: World, client: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    azure_world.looks = 10
    azure_world.trouble = {"GET operations": "403-after"}
    assert isinstance(error_of(lambda: create(make_cluster(), tmp_path / "home")), CredentialError)
    azure_world.trouble = {}
    remove_from_nothing(tmp_path / "empty")
    assert (azure_world.groups, azure_world.clusters) == ({}, {})


def test_a_group_that_azure_does_not_show_everywhere_yet_is_waited_for(azure_world: World, tmp_path: Path) -> None:
    azure_world.late = 3
    create(make_cluster(), tmp_path / "home")
    assert (azure_world.late, len(azure_world.clusters)) == (0, 1)
    remove_from_nothing(tmp_path / "empty")
    assert (azure_world.groups, azure_world.clusters) == ({}, {})


def test_the_reason_for_which_azure_gives_up_a_deletion_is_told_and_the_next_one_follows(
    azure_world: World, client: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    create(make_cluster(), tmp_path / "home")
    azure_world.blocked = 1
    code, printed = client(DELETE, "home")
    assert code == 0, printed
    assert "ResourceGroupDeletionBlocked" in printed
    assert "publicIPAddresses/p" in printed
    assert (azure_world.groups, azure_world.clusters) == ({}, {})
