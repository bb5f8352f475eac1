"""The client half on a Mac: each command runs in a process from which Linux is taken away (tests/fakes/mac.py)."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from tests.contract.engines.kubernetes.test_engine import put_pod, terminated_pod
from tests.fakes.gke import Google
from tests.fakes.kind_tools import World
from tests.fakes.kube_api import KubeApi

SECONDS = 300


class Mac:
    """A Mac with a data folder of its own."""

    def __init__(self, home: Path) -> None:
        self.environment = {**os.environ, "MLBENCH_HOME": str(home)}

    def mlbench(self, *words: str, code: int = 0) -> str:
        """What a command prints."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.fakes.mac", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == code, f"{done.returncode}: {done.stderr}{done.stdout}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.mlbench(*words, "-o", "json"))


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path / "home")


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    servers = Google(tmp_path_factory.mktemp("google"))
    yield servers
    servers.close()


@pytest.mark.slow
def test_clusters_are_listed_and_planned(mac: Mac, google: Google, tmp_path: Path) -> None:
    world = World(tmp_path / "world")
    mac.environment |= {"KIND_WORLD": str(world.path), "PATH": f"{world.bin}:/usr/bin:/bin"}
    assert [cluster["name"] for cluster in mac.json("list-clusters")["clusters"]] == ["local"]
    kind = mac.json("create-cluster", "kind", "2", "rel", "--dry-run")
    assert kind["cluster"]["name"] == "rel-2"
    google.reset()
    mac.environment |= google.environment
    gke = mac.json("create-cluster", "gke", "2", "rel", "--dry-run", "--yes")
    assert gke["cluster"]["name"] == "rel-2"
    assert "rel" not in mac.mlbench("list-clusters")


@pytest.mark.nightly
def test_a_cluster_is_attached_and_runs_on_it(mac: Mac, server: KubeApi, tmp_path: Path) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig")
    attached = mac.json("attach-cluster", "there", "--kubeconfig", str(tmp_path / "kubeconfig"))
    assert attached["cluster"]["provider"] == "attached"
    words = [
        "run",
        "r",
        "2",
        "--cluster",
        "there",
        "--command",
        "true",
        "--image",
        "i:1",
        "--set",
        "run.keep=0",
        "--yes",
    ]
    mac.mlbench(*words, "--dry-run")
    mac.mlbench(*words, "--detach")
    assert mac.json("status", "r-2")["outcome"] is None
    put_pod(server, 0, **terminated_pod(3))
    put_pod(server, 1, **terminated_pod(0))
    assert mac.json("status", "r-2")["ended"] == "failed"
    mac.mlbench("wait", "r-2", code=7)
    assert "3" in mac.mlbench("status", "r-2")
    mac.mlbench("delete", "r-2", "--yes", "--force")


@pytest.mark.slow
def test_results_are_proved_compared_and_drawn(
    mac: Mac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Archives from elsewhere; "elsewhere" is this machine as it is."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))
    archives = []
    for name in ("a", "b"):
        assert run(["run", name, "1", "--command", "true", "--yes"]) == 0
        archives.append(str(tmp_path / f"{name}.zip"))
        assert run(["download", f"{name}-1", "--output", archives[-1]]) == 0
    capsys.readouterr()
    assert [item["problems"] for item in mac.json("verify", *archives)["archives"]] == [[], []]
    mac.mlbench("compare", *archives)
    mac.mlbench("charts", str(tmp_path / "figures"), *archives, "--yes")
    assert list((tmp_path / "figures").glob("*.svg"))
    with zipfile.ZipFile(archives[0]) as file:
        assert "run.json" in file.namelist()


@pytest.mark.slow
def test_a_local_run_works_as_far_as_the_system_allows(mac: Mac) -> None:
    mac.mlbench("run", "here", "1", "--command", "true", "--yes")
    shown = mac.json("status", "here-1")
    assert shown["outcome"] == "completed"
    mac.mlbench("logs", "here-1")
    mac.mlbench("doctor")


@pytest.mark.slow
def test_a_queue_of_runs_is_stopped(mac: Mac) -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(200)'"
    mac.mlbench("run", "q", "1", "--repeat", "2", "--detach", "--command", command)
    mac.mlbench("cancel", "q")
    shown = mac.json("status", "q-1-r2")
    assert [finding["code"] for finding in shown["findings"]] == ["queue_ended"]
