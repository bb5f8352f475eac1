"""Every command that prints facts prints them as one JSON document, with RFC 3339 times; so do its errors."""

import json
from pathlib import Path

import pytest

from mlbench_cli import commands
from mlbench_cli.app import run
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")
WITHOUT = {
    **dict.fromkeys(("create-cluster", "data"), "its sub-commands take it"),
    "help": "it prints help",
}


def test_every_command_has_the_option(capsys: Captured) -> None:
    for name in sorted(set(commands.names()) - set(WITHOUT)):
        assert run([name, "--help-all" if name == "run" else "--help"]) == 0
        assert " -o" in capsys.readouterr().out, name
        assert run([name, "--no-such-option", "-o", "json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage", name


def test_results(capsys: Captured) -> None:
    for name in ("a", "b"):
        assert run(["run", name, "1", "--command", "true"]) == 0
    document = answer(capsys, "download", "a-1", "--to", "a.zip")
    assert document["file"] == str(Path("a.zip").absolute())
    assert document["bytes"] == Path("a.zip").stat().st_size
    assert answer(capsys, "verify", "a.zip")["archives"][0]["ok"] is True
    document = answer(capsys, "charts", "figures", "--yes")
    assert document["folder"] == str(Path("figures").absolute())
    assert all(Path(path).is_file() for path in document["files"])
    assert answer(capsys, "logs", "a-1")["lines"] == []
    document = answer(capsys, "delete", "a-1", "--yes")
    assert [(item["name"], item["deleted"]) for item in document["runs"]] == [("a-1", True)]
    assert run(["delete", "a-1", "-yo", "json"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "not_found"


def test_what_failed_in_part_is_one_document(capsys: Captured) -> None:
    assert run(["run", "a", "1", "--command", "true"]) == 0
    assert run(["run", "b", "1", "--command", "sleep 100", "--detach"]) == 0
    for words in (["download", "--to", "zips"], ["delete", "--yes"]):
        capsys.readouterr()
        assert run([*words, "a-1", "b-1", "-o", "json"]) == 2
        printed = capsys.readouterr()
        document = json.loads(printed.out)
        assert [item["name"] for item in document["runs"]] == ["a-1"]
        assert document["error"]["code"] == "usage"
        assert "Warning: b-1: " in printed.err
    assert run(["delete", "b-1", "--yes", "--force"]) == 0


def test_a_path_behind_o_is_taken_as_the_original_took_it(capsys: Captured) -> None:
    assert run(["run", "a", "1", "--command", "true"]) == 0
    assert run(["download", "a-1", "-o", "x.zip"]) == 0
    assert "to name the file, use --to x.zip" in capsys.readouterr().err
    assert run(["download", "a-1", "-o", "OUT.ZIP"]) == 0
    assert run(["verify", "OUT.ZIP"]) == 0
    assert run(["export", "csv", "OUT.CSV", "OUT.ZIP"]) == 0
    assert run(["download", "a-1", "--output", "y.zip"]) == 0
    assert Path("x.zip").read_bytes() == Path("y.zip").read_bytes()


def test_clusters(capsys: Captured, home: Path) -> None:
    home.mkdir()
    store = Store(home)
    store.record_cluster(Cluster("gone", "attached", details={"expires": 1_800_000_000}))
    assert answer(capsys, "set-cluster", "gone")["current"] == "gone"
    clusters = {item["name"]: item for item in answer(capsys, "list-clusters")["clusters"]}
    assert clusters["gone"]["expires"] == "2027-01-15T08:00:00.000Z"
    document = answer(capsys, "delete-cluster", "gone", "--yes")
    assert (document["cluster"], document["deleted"]) == ("gone", True)


def test_known_clusters_are_shown_if_no_cloud_answers(
    capsys: Captured, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(home))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "GOOGLE_APPLICATION_CREDENTIALS", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "1")
    document = answer(capsys, "list-clusters", "--cloud")
    assert [cluster["name"] for cluster in document["clusters"]] == ["local"]
