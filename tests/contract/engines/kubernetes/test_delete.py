"""`mlbench delete` where a cluster refuses, is gone, or keeps what it should delete."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.app import run
from tests.fakes.kube_api import Fault, KubeApi
from tests.fakes.kubelet import Kubelet

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """The cluster "there", reached by a kubeconfig in the data folder."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("MLBENCH_HOME", str(home))
    monkeypatch.setattr("mlbench_cli.kube.api.RETRY_SECONDS", 0.5)
    with KubeApi() as server, Kubelet(server, tmp_path / "pods"):
        server.record(home)
        yield server


def start(name: str) -> int:
    return run(["run", name, "1", "--cluster", "there", "--command", "true", "--image", "image:1", "--yes"])


def is_known(name: str, capsys: Captured) -> bool:
    capsys.readouterr()
    assert run(["status"]) == 0
    return f"{name}-1" in capsys.readouterr().out


def test_a_run_that_its_cluster_refused_is_deleted_as_the_refusal_says(server: KubeApi, capsys: Captured) -> None:
    server.faults.append(Fault(".*/jobs", times=1000, status=403, message='User "me" cannot create resource "jobs"'))
    assert start("a") == 3
    assert "discard the run: mlbench delete a-1" in capsys.readouterr().err
    assert run(["delete", "a-1", "--yes"]) == 0
    assert not is_known("a", capsys)


@pytest.mark.parametrize("trouble", ["its rights", "its kubeconfig", "the cluster"])
def test_a_run_whose_cluster_is_lost_is_deleted_by_force(
    server: KubeApi, tmp_path: Path, capsys: Captured, trouble: str
) -> None:
    assert start("a") == 0
    if trouble == "its rights":
        server.faults.append(Fault(".*/jobs", times=1000, status=403, message='User "me" cannot get resource "jobs"'))
    elif trouble == "its kubeconfig":
        (tmp_path / "home/kubeconfig").unlink()
    else:
        server.is_down = True
    assert run(["delete", "a-1", "--yes"]) in (3, 4, 10)
    assert "mlbench delete a-1 --force" in capsys.readouterr().err
    assert run(["delete", "a-1", "--yes", "--force"]) == 0
    assert "What a-1 may have left on there stays" in capsys.readouterr().err
    assert not is_known("a", capsys)


def test_what_a_delete_waits_for_is_told_and_until_when(
    server: KubeApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.engine.QUIET_SECONDS", 0.1)
    assert start("a") == 0
    held = {
        **server.objects["configmaps", "a-1"]["metadata"],
        "ownerReferences": [],
        "finalizers": ["corp.example/keep"],
    }
    server.put("configmaps", {"metadata": held})
    server.faults.append(Fault("DELETE .*configmaps", times=3, status=404))  # it goes with the fourth
    capsys.readouterr()
    assert run(["delete", "a-1", "--yes"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"a-1: waiting until \d\d:\d\d:\d\d UTC for .*ConfigMap a-1 \(kept by corp.example/keep\)", said)
    assert said.count("waiting until") == 1
