"""The role of Google's IAM that mlbench prints is enough: every request of the commands wants a permission of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.kube.objects import PREFIXES
from mlbench_cli.model.run import Run
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store
from providers.doctor import load_policy
from tests.fakes.gke import World
from tests.fakes.gke_rights import KINDS, permission_of_kubernetes
from tests.fakes.kube_api import KubeApi
from tests.fakes.registry import FakeDocker, FakeRegistry

ALLOWED = set(load_policy("gke")["includedPermissions"])
CREATE = ("create-cluster", "gke", "2", "rel", "--yes", "--probe-image", "none")
COMMANDS = (
    (*CREATE, "--gpu-type", "l4", "--spot", "--ttl", "2h", "--registry", "auto"),
    ("list-clusters", "--cloud"),
    ("gc", "gke", "--dry-run"),
    ("delete-cluster", "gke", "rel-2", "--yes"),
    (*CREATE, "-t", "a3-highgpu-8g", "--fast-network"),
    ("gc", "gke", "--all", "--yes"),
    (*CREATE, "-t", "a3-highgpu-8g", "--reservation", "mine/reservationBlocks/mine-block-1"),
    ("delete-cluster", "gke", "rel-2", "--yes"),
    (*CREATE, "--region", "europe-west1"),
    ("delete-cluster", "gke", "rel-2", "--yes"),
    ("doctor", "gke"),
)


@pytest.mark.slow
def test_every_request_of_every_command_is_allowed(
    command: Callable[..., Any], gke_world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gke_world.quotas = {}
    gke_world.reserve("mine", "a3-highgpu-8g", 8)
    for number, words in enumerate(COMMANDS):
        if "--all" in words:  # clusters that this machine does not know
            monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"elsewhere{number}"))
        gke_world.permissions.clear()
        result = command(*words)
        assert result.code in ((0, 7) if words[0] == "doctor" else (0,)), (words, result.err)  # 7: something is missing
        assert gke_world.permissions, words
        assert sorted(gke_world.permissions - ALLOWED) == [], words


def test_pushing_images_wants_what_the_role_has(
    command: Callable[..., Any], gke_world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Docker's own requests are the registry's: uploads and downloads."""
    assert command("create-cluster", "gke", "2", "rel", "--yes", "--registry", "auto").code == 0
    registry = FakeRegistry()
    try:
        monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", registry.url)
        monkeypatch.setenv("PATH", str(FakeDocker(tmp_path / "programs").folder))
        gke_world.permissions.clear()
        pushed = command("images", "push", "allreduce")
        assert pushed.code == 0, pushed.err
        methods = {line.split()[0] for line in registry.world.log}
        assert {"HEAD", "POST", "PATCH", "PUT"} <= methods
        uses = {"download" if method in ("HEAD", "GET") else "upload" for method in methods}
        wanted = {f"artifactregistry.repositories.{use}Artifacts" for use in uses}
        assert wanted | gke_world.permissions <= ALLOWED
    finally:
        registry.close()


def test_a_run_s_requests_to_its_cluster_want_what_the_role_has(
    command: Callable[..., Any], gke_world: World, tmp_path: Path
) -> None:
    """From connecting by Google's API to what a run asks of Kubernetes, recorded by a server that keeps objects."""
    gke_world.quotas = {}
    words = ("-t", "a4-highgpu-8g", "--spot", "--fast-network", "-k", "1.36", "--probe-image", "none")
    assert command("create-cluster", "gke", "2", "rel", "--yes", *words).code == 0
    allowed = ALLOWED
    gke_world.permissions.clear()
    options: Any = {"task": "allreduce", "registry": "ghcr.io/me", "gpu": True, "workers": (2,)}
    (spec,) = resolve(Request(name="r", **options), Store().cluster("rel-2"))
    kinds = {item["kind"] for item in manifests(spec, "default")}
    assert kinds == {"Job", "ConfigMap", "Service", "NetworkPolicy", "ResourceClaimTemplate"}
    created = {
        permission_of_kubernetes("POST", f"{PREFIXES[kind][0]}/namespaces/n/{PREFIXES[kind][1]}") for kind in kinds
    }
    assert created <= allowed
    with KubeApi() as server:
        cluster = Store().cluster("rel-2")
        without = replace(cluster, details={**cluster.details, "gpus_per_node": 0})
        (plain,) = resolve(Request(name="s", **{**options, "gpu": False}), without)
        run = Run("id", plain, tmp_path, "2026-01-01T00:00:00Z")
        engine = KubernetesEngine(server.access)
        engine.submit(run, engine.render(plain))
        engine.cancel(run)
        requests = [line.removesuffix(" watch").split(" ", 1) for line in server.requests]
        assert len(requests) > 5
        wanted = {permission_of_kubernetes(method, path) for method, path in requests}
        assert sorted(wanted - allowed) == []
    assert {f"container.{KINDS[kind]}.list" for kind in ("pods", "events", "nodes")} <= allowed  # observing
    assert {"container.pods.getLogs", "container.pods.exec"} <= allowed  # logs and results


def test_doctor_asks_iam_for_every_permission(command: Callable[..., Any], gke_world: World) -> None:
    gke_world.denied = {"container.clusters.create", "compute.networks.delete"}
    checks = {item["what"]: item for item in command("doctor", "gke", "-o", "json").json["checks"]}
    assert checks["gke rights"]["state"] == "missing"
    assert checks["gke rights"]["found"] == "IAM would deny compute.networks.delete, container.clusters.create"
    assert "policy.json" in checks["gke rights"]["hint"]
    gke_world.denied = set()
    assert "IAM grants all" in command("doctor", "gke").out
