"""AKS refused at every request: whatever a command leaves, deletion and `gc` find it by its group."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CredentialError
from providers.aks.options import AksOptions
from tests import NIGHTLY
from tests.contract.providers.conftest import error_of
from tests.contract.providers.test_aks import create, make_cluster, remove_from_nothing
from tests.contract.providers.test_kills import list_changes
from tests.fakes.azure_arm import World
from tests.fakes.azure_web import AzureDouble

DELETE = ["delete-cluster", "aks", "rel-2", "--yes"]
PASSING = ("429-before", "500-after")


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
    for number in list_changes(log)[::stride]:
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


def test_a_cluster_that_is_being_created_is_deleted_with_its_group(azure_world: World, tmp_path: Path) -> None:
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
    azure_world: World, command: Callable[..., Any], tmp_path: Path
) -> None:
    create(make_cluster(), tmp_path / "home")
    azure_world.blocked = 1
    done = command(*DELETE)
    assert done.code == 0, done.err
    assert "ResourceGroupDeletionBlocked" in done.err
    assert "publicIPAddresses/p" in done.err
    assert (azure_world.groups, azure_world.clusters) == ({}, {})
