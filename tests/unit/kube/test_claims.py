"""Claims for data sets: found, or made with the storage class that fits."""

from collections.abc import Iterator
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.claims import DEFAULT, DataClaim, ensure_claim
from tests.fakes.kube_api import KubeApi


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


def add_class(server: KubeApi, name: str, provisioner: str, default: bool = False) -> None:
    annotations = {DEFAULT: "true"} if default else {}
    item = {"metadata": {"name": name, "annotations": annotations}, "provisioner": provisioner}
    server.objects["storageclasses", name] = item


def ensure(server: KubeApi, *words: Any) -> DataClaim:
    with server.access.client() as api:
        return ensure_claim(api, "default", "data", "200Gi", *words)


def test_a_claim_is_made_once_with_the_default_class(server: KubeApi) -> None:
    add_class(server, "slow", "nfs.csi.k8s.io")
    add_class(server, "standard", "pd.csi.storage.gke.io", default=True)
    assert ensure(server) == DataClaim("data", True, "200Gi", "standard", is_shared=False)
    spec = server.objects["persistentvolumeclaims", "data"]["spec"]
    assert spec["accessModes"] == ["ReadWriteOnce"]
    assert spec["resources"] == {"requests": {"storage": "200Gi"}}
    assert ensure(server, "slow") == DataClaim("data", False, "200Gi", "standard", is_shared=False)


def test_a_class_of_a_shared_file_system_is_mounted_on_many_nodes(server: KubeApi) -> None:
    add_class(server, "files", "filestore.csi.storage.gke.io")
    assert ensure(server, "files") == DataClaim("data", True, "200Gi", "files", is_shared=True)


def test_the_cluster_must_say_which_class_or_the_user(server: KubeApi) -> None:
    with pytest.raises(UsageError, match="no default storage class") as none:
        ensure(server)
    assert "The cluster has no storage class" in str(none.value.hint)
    add_class(server, "a", "x")
    add_class(server, "b", "y")
    with pytest.raises(UsageError, match="no default storage class") as several:
        ensure(server)
    assert "a, b" in str(several.value.hint)
    with pytest.raises(UsageError, match='no storage class "c"'):
        ensure(server, "c")


def test_a_size_has_a_unit_that_kubernetes_knows(server: KubeApi) -> None:
    with server.access.client() as api, pytest.raises(UsageError, match="such as 200Gi"):
        ensure_claim(api, "default", "data", "200 gigabytes")
