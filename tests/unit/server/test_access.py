"""Which runs, experiments and clusters a dashboard may show, and archives that are verified once."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.api import Client, RunHandle
from mlbench_cli.errors import NotFoundError
from mlbench_cli.server import access
from mlbench_cli.server.access import (
    client_of,
    count_runs,
    find_experiment,
    find_run,
    find_runs,
    list_clusters,
    list_experiments,
    list_runs,
    open_checked,
    send_zip,
)
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.storage.store import Store
from tests.unit.results.runs import record_sealed
from tests.unit.server.conftest import Ended


def everything(ended: Ended) -> ServerConfig:
    return ServerConfig(ended.home, 8080, token="t")


def only(ended: Ended, cluster: str) -> ServerConfig:
    return ServerConfig(ended.home, 8080, token="t", cluster=cluster)


def names(handles: Any) -> list[str]:
    return [handle.name for handle in handles]


def test_a_thread_has_one_client_of_a_data_folder(ended: Ended, tmp_path: Path) -> None:
    assert client_of(everything(ended)) is client_of(only(ended, "far"))
    assert client_of(everything(ended)) is not client_of(ServerConfig(tmp_path, 8080))


@pytest.mark.parametrize(
    ("cluster", "shown", "counted"),
    [(None, ["bad", "study-2", "study-1"], 3), ("far", ["bad"], 1), ("local", ["study-2", "study-1"], 2), ("x", [], 0)],
)
def test_runs_of_the_shown_cluster(ended: Ended, cluster: str | None, shown: list[str], counted: int) -> None:
    config = ServerConfig(ended.home, 8080, cluster=cluster)
    assert names(list_runs(config)) == shown
    assert count_runs(config) == counted


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"limit": 1}, ["study-2"]),
        ({"limit": 1, "offset": 1}, ["study-1"]),
        ({"offset": 1}, ["study-1"]),
        ({"limit": 0}, []),
        ({"offset": 2}, []),
        ({"contains": "-1"}, ["study-1"]),
        ({"states": ("failed",)}, []),
        ({"tasks": ("unknown-task",)}, ["study-2", "study-1"]),
    ],
)
def test_pages_count_only_what_is_shown(ended: Ended, options: dict[str, Any], shown: list[str]) -> None:
    """The newest run is on another cluster."""
    assert names(list_runs(only(ended, "local"), **options)) == shown


def test_a_run_is_found_by_name_and_by_id(ended: Ended) -> None:
    assert find_run(everything(ended), "bad").name == "bad"
    assert find_run(everything(ended), ended.runs["bad"].id).name == "bad"
    with pytest.raises(NotFoundError) as caught:
        find_run(everything(ended), "x" * 70)
    assert (caught.value.message, caught.value.hint) == (f'There is no run "{"x" * 60}".', "mlbench status")


@pytest.mark.parametrize("find", [find_run, find_runs])
def test_a_run_of_another_cluster_is_not_found(ended: Ended, find: Any) -> None:
    for name in ("bad", ended.runs["bad"].id):
        with pytest.raises(NotFoundError) as caught:
            find(only(ended, "local"), name)
        assert (caught.value.message, caught.value.hint) == (f'The run "{name}" is not on local.', "mlbench serve")


def test_a_name_stands_for_the_runs_of_an_experiment(ended: Ended) -> None:
    assert names(find_runs(everything(ended), "study")) == ["study-1", "study-2"]
    assert names(find_runs(only(ended, "local"), "study")) == ["study-1", "study-2"]
    assert names(find_runs(everything(ended), ended.runs["bad"].id)) == ["bad"]
    with pytest.raises(NotFoundError, match='The run "study" is not on far'):
        find_runs(only(ended, "far"), "study")
    with pytest.raises(NotFoundError, match='There is no run "nobody"'):
        find_runs(everything(ended), "nobody")


def test_experiments_with_a_run_on_the_shown_cluster(ended: Ended) -> None:
    for config in (everything(ended), only(ended, "local")):
        assert names(list_experiments(config, limit=5)) == ["study"]
        assert list_experiments(config, limit=0) == []
        assert find_experiment(config, "study").name == "study"
    assert list_experiments(only(ended, "far"), limit=5) == []
    with pytest.raises(NotFoundError) as caught:
        find_experiment(only(ended, "far"), "study")
    assert caught.value.message == 'The experiment "study" is not on far.'


def test_the_shown_cluster_is_the_only_one(ended: Ended) -> None:
    assert names(list_clusters(everything(ended))) == ["local", "far"]
    assert names(list_clusters(only(ended, "far"))) == ["far"]


# --- verified archives ----------------------------------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose archives were verified, in turn."""
    found: list[str] = []
    archive = RunHandle.archive

    def verify(self: RunHandle, **options: Any) -> Any:
        assert options == {"unproven": True}
        found.append(self.name)
        return archive(self, **options)

    monkeypatch.setattr(RunHandle, "archive", verify)
    monkeypatch.setattr(access, "_checked", {})
    return found


def test_an_archive_is_verified_when_it_is_opened_first_or_has_changed(
    tmp_path: Path, verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    for name in ("a", "b"):
        record_sealed(store, name, 1, 10.0)
    store.close()
    with Client(tmp_path) as client:
        one, other = client.find_run("a"), client.find_run("b")
        first, second = open_checked(one), open_checked(one)
        assert verified == ["a"]
        assert (first.run["name"], second.run["name"]) == ("a", "a")
        assert first.not_derived == second.not_derived
        path = one.folder / "logs" / "rank-0.log"
        os.utime(path, ns=(1, 1))
        open_checked(one)
        assert verified == ["a", "a"]
        monkeypatch.setattr(access, "MAX_CHECKED", 2)
        open_checked(other)
        open_checked(one)
        assert verified == ["a", "a", "b"]
        monkeypatch.setattr(access, "MAX_CHECKED", 1)
        os.utime(path, ns=(2, 2))
        open_checked(one)
        assert verified == ["a", "a", "b", "a"]
        open_checked(one)
        open_checked(other)  # it had been forgotten for the other one
        assert verified == ["a", "a", "b", "a", "b"]
        assert len(access._checked) == 1


# --- downloads ------------------------------------------------------------------------------------------------------


def test_a_download_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    written: list[Path] = []

    def write(path: Path) -> None:
        written.append(path)
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send_zip(write)
    assert written[0].suffix == ".zip"
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_removed_once_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = send_zip(lambda path: path.write_bytes(b"whole"), filename="a.zip")
    assert Path(answer.path).read_bytes() == b"whole"
    assert answer.background is not None
    answer.background.func(*answer.background.args, **answer.background.kwargs)
    answer.background.func(*answer.background.args, **answer.background.kwargs)  # or already gone
    assert list(tmp_path.iterdir()) == []
