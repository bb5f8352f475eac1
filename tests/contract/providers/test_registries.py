"""`create-cluster --registry auto` on the doubles: made with the cluster, filled, used by digest, deleted with it."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from tests.contract.providers.eks_world import make, remove
from tests.fakes.aws_server import AwsClient
from tests.fakes.gke import World
from tests.fakes.registry import FakeDocker, FakeRegistry

CREATE = ["create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--yes"]
REPOSITORY = "projects/demo-project/locations/europe-west1/repositories/mlbench-rel-2"
PREFIX = "europe-west1-docker.pkg.dev/demo-project/mlbench-rel-2"


@pytest.mark.slow
def test_a_repository_of_artifact_registry_comes_and_goes_with_its_cluster(
    command: Any, gke_world: World, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = command(*CREATE, "--registry", "auto", "--ttl", "2h")
    assert result.code == 0, result.err
    assert gke_world.repositories[REPOSITORY]["labels"]["mlbench-cluster"] == "rel-2"
    assert f"Its registry {PREFIX} is empty" in result.err
    # Google's own token opens it, in a Docker configuration of its own that is gone afterwards.
    registry.world.users = {"oauth2accesstoken": f"token-{gke_world.tokens}"}
    docker = FakeDocker(tmp_path / "programs")
    monkeypatch.setenv("PATH", str(docker.folder))
    pushed = command("images", "push", "allreduce")
    assert pushed.code == 0, pushed.err
    config = docker.calls[-1].config
    assert config
    assert not Path(config).exists()
    digest = registry.world.manifests["demo-project/mlbench-rel-2/allreduce"][__version__]
    dry = command("run", "x", "2", "--task", "allreduce", "--dry-run", "-o", "json")
    assert f"{PREFIX}/allreduce@{digest}" in dry.out
    # From another machine, which knows it by its labels only.
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "elsewhere"))
    deleted = command("delete-cluster", "gke", "rel-2", "--yes")
    assert deleted.code == 0, deleted.err
    assert (gke_world.clusters, gke_world.repositories) == ({}, {})


def test_the_machines_may_pull_from_the_cluster_s_repository(command: Any, gke_world: World) -> None:
    image = f"{PREFIX}/allreduce:1"
    gke_world.repositories[REPOSITORY] = {"labels": {"mlbench-cluster": "rel-2"}}
    assert "403 Forbidden" in str(gke_world.refuse_pull(image))  # as in organizations since May 2024
    gke_world.repositories.clear()
    assert command(*CREATE, "--registry", "auto").code == 0
    assert gke_world.refuse_pull(image) is None
    (binding,) = gke_world.repository_policies[REPOSITORY]["bindings"]
    assert binding["role"] == "roles/artifactregistry.reader"
    assert all("artifactregistry" not in item["role"] for item in gke_world.policy["bindings"])
    again = command(*CREATE, "--registry", "auto")
    assert again.code == 0, again.err
    assert len(gke_world.repository_policies[REPOSITORY]["bindings"]) == 1
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0


def test_who_may_not_let_the_machines_pull_is_warned(command: Any, gke_world: World) -> None:
    gke_world.repository_policy_denied = True
    made = command(*CREATE, "--registry", "auto")
    assert made.code == 0, made.err
    assert "add-iam-policy-binding mlbench-rel-2" in made.err
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0


def test_doctor_names_a_default_account_without_a_role(command: Any, gke_world: World) -> None:
    line = {item["what"]: item for item in command("doctor", "gke", "-o", "json").json["checks"]}
    assert line["gke default node account"]["state"] == "missing"
    assert "container.defaultNodeServiceAccount" in line["gke default node account"]["hint"]
    member = "serviceAccount:123456789-compute@developer.gserviceaccount.com"
    gke_world.policy["bindings"] = [{"role": "roles/editor", "members": [member]}]
    line = {item["what"]: item for item in command("doctor", "gke", "-o", "json").json["checks"]}
    assert line["gke default node account"]["state"] == "ok"


@pytest.mark.slow
def test_an_image_for_other_processors_is_refused_before_the_run(
    command: Any, gke_world: World, registry: FakeRegistry
) -> None:
    assert command(*CREATE, "--registry", "auto").code == 0
    place = "demo-project/mlbench-rel-2/allreduce"
    registry.world.manifests[place] = {__version__: "sha256:1"}
    registry.world.users = {"oauth2accesstoken": f"token-{gke_world.tokens}"}
    wanted = ("run", "x", "2", "--task", "allreduce", "--namespace", "default", "--timeout", "1s")
    for platforms in (["linux/arm64"], ["linux/arm64", "linux/riscv64"]):
        registry.world.platforms[place] = platforms
        result = command(*wanted)
        assert result.code == 2, result.err
        assert f"is for {' and '.join(platforms)}, and the workers of rel-2 are linux/amd64" in result.err
        assert "mlbench images push allreduce --cluster rel-2 --platform linux/amd64" in result.err
    for platforms in (["linux/amd64"], ["linux/arm64", "linux/amd64"], []):
        registry.world.platforms[place] = platforms
        assert "and the workers of" not in command(*wanted).err


def test_a_repository_is_kept_on_request_with_what_deletes_it(
    command: Any, gke_world: World, registry: FakeRegistry
) -> None:
    assert command(*CREATE, "--registry", "auto").code == 0
    asked = command("delete-cluster", "gke", "rel-2")
    assert "and its image repository (--keep-images keeps that)" in asked.err
    deleted = command("delete-cluster", "gke", "rel-2", "--yes", "--keep-images")
    assert deleted.code == 0, deleted.err
    assert "gcloud artifacts repositories delete mlbench-rel-2" in deleted.err
    assert list(gke_world.repositories) == [REPOSITORY]
    assert gke_world.clusters == {}


def test_somebody_elses_repository_is_not_touched(command: Any, gke_world: World, registry: FakeRegistry) -> None:
    gke_world.repositories[REPOSITORY] = {"name": REPOSITORY, "labels": {}}
    result = command(*CREATE, "--registry", "auto")
    assert result.code == 2
    assert 'The image repository "mlbench-rel-2" exists, but was not created by mlbench' in result.err
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0
    assert list(gke_world.repositories) == [REPOSITORY]


def test_a_registry_without_our_images_is_refused_before_money_is_spent(
    command: Any, gke_world: World, registry: FakeRegistry
) -> None:
    result = command(*CREATE, "--registry", "ghcr.io/me")
    assert result.code == 2
    assert "mlbench images push --registry ghcr.io/me" in result.err
    assert gke_world.log == []
    registry.world.manifests["me/allreduce"] = {__version__: "sha256:1"}
    result = command(*CREATE, "--registry", "ghcr.io/me")
    assert result.code == 0, result.err
    assert ClusterDetails.of(Store().cluster("rel-2")).registry == "ghcr.io/me"


@pytest.mark.slow
def test_a_repository_of_ecr_comes_and_goes_with_its_cluster(aws: AwsClient, tmp_path: Path) -> None:
    options = EksOptions(machine_type="m5.large", registry="auto")
    made = make("images-2", tmp_path / "home", options)
    registry = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mlbench-images-2:"
    assert ClusterDetails.of(made).registry == registry
    assert "repository mlbench-images-2" in aws.list_left("images-2")
    user, password = EksProvider().fetch_registry_login(made)
    assert (user, bool(password)) == ("AWS", True)
    [found] = [item for item in EksProvider().discover({}) if item.name == "images-2"]
    assert ClusterDetails.of(found).registry_made
    remove("images-2", tmp_path / "empty")
    assert aws.list_left("images-2") == []


def test_a_prefix_of_ones_own_is_checked_for_its_form() -> None:
    with pytest.raises(UsageError, match="is not an image prefix"):
        EksProvider().new_cluster("x", 1, EksOptions(region="eu-west-1", registry="my registry"))
    made = EksProvider().new_cluster("x", 1, EksOptions(region="eu-west-1", registry="ghcr.io/me/"))
    assert isinstance(made, Cluster)
    assert made.details["registry"] == "ghcr.io/me"
