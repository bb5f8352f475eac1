"""Two commands on one cluster at a time: what one has read may be old when its turn comes, so it is read again."""

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store
from tests.fakes.gke import World

Command = Callable[..., Any]
CREATE = ("create-cluster", "gke", "1", "rel", "--yes")
HOUR = 3600


class Person(io.TextIOBase):
    """Somebody at a terminal who does something before they answer the first question, and agrees to all."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.waiting = [work]

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        if self.waiting:
            self.waiting.pop()()
        return "y\n"


@pytest.fixture
def while_asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something done while the next question of a command waits for its answer, which is yes."""

    def order(work: Callable[[], object]) -> None:
        person = Person(work)
        monkeypatch.setattr(sys, "stdin", person)
        monkeypatch.setattr(sys.stderr, "isatty", person.isatty, raising=False)

    return order


def end_of_record() -> float:
    return ClusterDetails.of(Store().cluster("rel-1")).expires or 0


def end_of_label(world: World) -> int:
    return int(world.find_cluster("rel-1").resource_labels["mlbench-expires"])


def record_run() -> None:
    Store().record_run(RunSpec("a-1", "rel-1", "kubernetes", "custom", "spec", ("true",), "gloo", 1))


def test_gc_keeps_a_cluster_whose_end_was_moved_meanwhile(command: Command, gke_world: World, while_asked: Any) -> None:
    assert command(*CREATE, "--ttl", "1h").code == 0
    gke_world.find_cluster("rel-1").resource_labels["mlbench-expires"] = "1000000000"
    while_asked(lambda: command(*CREATE, "--ttl", "2h"))
    result = command("gc", "gke", "--expired")
    assert result.code == 0, result.err
    assert "rel-1 has changed and is no longer eligible" in result.err
    assert gke_world.find_cluster("rel-1")


@pytest.mark.parametrize(("words", "code"), [(("delete-cluster", "rel-1"), 2), (("gc", "gke", "--expired"), 8)])
def test_a_run_that_was_started_meanwhile_keeps_its_cluster(
    command: Command, gke_world: World, while_asked: Any, words: tuple[str, ...], code: int
) -> None:
    assert command(*CREATE, "--ttl", "1h").code == 0
    gke_world.find_cluster("rel-1").resource_labels["mlbench-expires"] = "1000000000"
    while_asked(record_run)
    result = command(*words)
    assert result.code == code, result.err
    assert "rel-1" in result.err
    assert gke_world.find_cluster("rel-1")


def test_a_cluster_that_was_deleted_during_a_push_stays_forgotten(
    command: Command, gke_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*CREATE, "--registry", "auto").code == 0

    def push(*_: object) -> Mapping[str, str]:
        assert command("delete-cluster", "rel-1", "--yes").code == 0
        return {"allreduce:4": "sha256:01"}

    monkeypatch.setattr("mlbench_cli.commands.images.push_images", push)
    result = command("images", "push", "allreduce", "--cluster", "rel-1")
    assert (result.code, "The cluster rel-1 has been deleted" in result.err) == (0, True)
    assert [cluster.name for cluster in Store().clusters()] == ["local"]


def test_a_name_that_is_taken_elsewhere_meanwhile_is_refused(
    command: Command, gke_world: World, while_asked: Any
) -> None:
    def take() -> None:
        store = Store()
        assert command(*CREATE).code == 0
        made = store.cluster("rel-1")
        store.forget_cluster(made)
        store.record_cluster(replace(made, location="europe-west1-d"))
        gke_world.clusters.clear()

    while_asked(take)
    result = command(*CREATE[:-1])
    assert (result.code, "cost money until it is deleted" in result.err) == (2, True)
    assert gke_world.clusters == {}


def test_digests_stay_when_the_cluster_is_created_again(command: Command, gke_world: World) -> None:
    assert command(*CREATE, "--registry", "auto").code == 0
    assert Store().record_images(Store().cluster("rel-1").identity, {"allreduce:4": "sha256:01"})
    assert command(*CREATE, "--registry", "auto").code == 0
    assert ClusterDetails.of(Store().cluster("rel-1")).images == {"allreduce:4": "sha256:01"}
    assert command(*CREATE, "--registry", "ghcr.io/me").code == 0  # another registry has other images
    assert ClusterDetails.of(Store().cluster("rel-1")).images == {}


def test_a_repeated_creation_keeps_the_end_and_moves_it_only_if_asked(command: Command, gke_world: World) -> None:
    assert command(*CREATE, "--ttl", "1h", "--tag", "team=research").code == 0
    before = end_of_record()
    again = command(*CREATE)
    assert (again.code, "(--ttl changes that)" in again.err) == (0, True)
    assert end_of_record() == end_of_label(gke_world) == before
    assert command(*CREATE, "--ttl", "5h").code == 0
    assert end_of_record() == end_of_label(gke_world) >= before + 4 * HOUR - 60
    assert gke_world.find_cluster("rel-1").resource_labels["team"] == "research"
    refused = command(*CREATE, "--ttl", "none")
    assert (refused.code, "--ttl 30d" in refused.err) == (2, True)


def test_a_cluster_without_an_end_gets_none_by_a_repeated_creation(command: Command, gke_world: World) -> None:
    assert command(*CREATE, "--ttl", "none").code == 0
    assert command(*CREATE).code == 0
    assert end_of_record() == 0
    assert "mlbench-expires" not in gke_world.find_cluster("rel-1").resource_labels
