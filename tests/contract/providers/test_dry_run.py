"""`create-cluster --dry-run` without an account: what the cluster would be and cost, and what was not checked."""

from typing import Any

import pytest

from mlbench_cli.storage.store import Store
from tests.contract.providers.eks_world import forget
from tests.fakes.aws_server import AwsClient
from tests.fakes.gke import World


def test_gke_without_credentials(command: Any, gke_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    words = ("create-cluster", "gke", "2", "rel", "-t", "a3-highgpu-8g", "--zone", "us-central1-a", "--dry-run")
    result = command(*words, "-o", "json")
    assert result.code == 0, result.err
    plan = result.json["plan"]
    assert "Not checked, because there are no credentials" in plan["warnings"][0]
    assert "Gbit/s of GPUDirect-TCPX" in " ".join(plan["warnings"])
    (worker,) = [line for line in plan["lines"] if line["what"].startswith("worker")]
    assert (worker["count"], worker["price_per_hour"]) == (2, 87.83)
    assert plan["price_per_hour"] > 2 * 87.83
    assert "of a project of yours" in command(*words).err
    default = command("create-cluster", "gke", "2", "rel", "--dry-run", "-o", "json").json["plan"]
    assert None not in [line["price_per_hour"] for line in default["lines"]]  # in the default zone
    assert gke_world.log == []
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    real = command(*words[:-1], "--yes")  # not a dry run: credentials are asked for
    assert real.code == 3
    wrong = command("create-cluster", "gke", "2", "rel", "--gpu-type", "v100", "--dry-run")
    assert wrong.code == 2


def test_eks_without_credentials_or_region(
    command: Any, aws: AwsClient, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(key, raising=False)
    request.addfinalizer(forget)
    forget()
    words = ("create-cluster", "eks", "2", "rel", "-t", "g5.xlarge", "--dry-run")
    result = command(*words, "-o", "json")
    assert result.code == 0, result.err
    plan = result.json["plan"]
    assert plan["location"] == "us-east-1"
    assert "Not checked, because there are no credentials" in plan["warnings"][0]
    assert {line["what"]: line["price_per_hour"] for line in plan["lines"]}["worker g5.xlarge"] == 1.006
    spot = command(*words, "--spot", "-o", "json").json["plan"]
    assert spot["price_per_hour"] is None  # the price of now is asked of AWS: unknown, and not that of others
    real = command(*words[:-1], "--yes")  # not a dry run: a region and credentials are asked for
    assert (real.code, "--region" in real.err) == (2, True)
    assert command(*words[:-1], "--yes", "--region", "us-east-1").code == 3
