"""What a person reads during `mlbench run --create` on each kind of cluster: `pytest -rP` on this file prints it.

The clouds are doubles. Their machines run no pods, so a run meets a Kubernetes API whose nodes do.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.storage.store import Store
from providers import registry
from tests import NIGHTLY
from tests.contract.providers.conftest import Told
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet

RUN = ("run", "big", "1", "2", "--image", "my/task:1", "--command", "sh -c 'echo hello'", "--timeout", "1h")
OPTIONS = {
    "kind": (),
    "gke": ("--gpu-type", "t4", "--spot", "--zone", "europe-west1-b"),
    "eks": ("--machine-type", "m5.xlarge", "--region", "eu-west-1"),
    "aks": ("--machine-type", "Standard_D4s_v5"),
}
WORLDS = {"kind": "world", "gke": "gke_world", "eks": "aws", "aks": "azure_world"}
# What belongs into a log, not before a person: punctuation from two sentences that were joined, values of Python,
# digests in full, addresses of mlbench's own Kubernetes objects, zeros behind a price; and that a cluster keeps results
# which is deleted when they have been fetched.
LEAKS = re.compile(
    r"\b0\.00\d*0 USD|keeps the results|"
    r"\.[,.:;]|\b(None|True|False|nan)\b|[0-9a-f]{64}|mlbench-hold/|\bhold\b|\(\)|\d{4,}\.\d{3,} "
)


@pytest.fixture
def nodes_of_clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with KubeApi() as server, Kubelet(server, tmp_path / "pods"):
        for name in registry.PAID:
            monkeypatch.setattr(type(registry.load(name)), "connect", lambda self, cluster: server.access)
        yield


def read(done: Told, words: tuple[str, ...]) -> list[str]:
    print(f"$ mlbench {' '.join(words)}\n{done.err}{done.out}[{done.code}]\n")
    return done.err.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("cloud", OPTIONS if NIGHTLY else ["gke"])
def test_one_command_reads_well_from_its_plan_to_the_deletion(
    command: Callable[..., Told], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    request.getfixturevalue(WORLDS[cloud])
    request.getfixturevalue("nodes" if cloud == "kind" else "nodes_of_clouds")
    monkeypatch.setenv("COLUMNS", "80")
    words = (*RUN, "--create", cloud, *OPTIONS[cloud], "--yes")
    lines = read(command(*words), words)
    assert [str(row.outcome) for row in Store().runs()] == ["completed", "completed"]
    assert lines[-1] == "The cluster big-2 is deleted; no resources remain."
    assert [line for line in lines if LEAKS.search(line)] == []
    table = lines[1 : next(number for number, line in enumerate(lines) if line.split()[:1] == ["total"]) + 1]
    assert [line for line in table if len(line) > 80] == []
    home = str(Store().folder)
    assert [line for line in lines if home in line and not line.startswith("Archives of")] == []


def test_a_plan_without_an_account_says_what_it_could_not_check(
    command: Callable[..., Told], world: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for cloud, login in (("gke", "gcloud auth"), ("eks", "aws configure"), ("aks", "az login")):
        words = (*RUN, "--create", cloud, "--gpu-type", "t4", "--spot", "--dry-run")
        done: Any = command(*words)
        lines = read(Told(done.code, "", done.err), words)
        assert done.code == 0
        assert [line for line in lines if LEAKS.search(line)] == []
        assert any(login in line for line in lines if line.startswith("Warning: Not checked"))
