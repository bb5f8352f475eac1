"""What environment and config file say of options that nobody gave, as far as it concerns the cluster."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.runs.defaults import default_cluster, with_defaults
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store

SLURM, HOSTS, GKE = (Cluster(name, name) for name in ("slurm", "hosts", "gke"))
KNOWN = {"registry": "ghcr.io/cluster", "namespace": "cluster"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has set everything in the environment."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    for name in ("home", "data"):
        (tmp_path / name).mkdir()
    values = {"DATA_DIR": str(tmp_path / "data"), "REGISTRY": "ghcr.io/me", "NAMESPACE": "team", "TIMEOUT": "2h"}
    for name, value in values.items():
        monkeypatch.setenv(f"MLBENCH_{name}", value)
    return tmp_path


@pytest.mark.parametrize(
    ("cluster", "changes"),
    [
        (LOCAL, {"data_dir": "data"}),
        (SLURM, {}),
        (HOSTS, {}),
        (GKE, {"registry": "ghcr.io/me", "namespace": "team"}),
        (Cluster("kind", "kind"), {"registry": "ghcr.io/me", "namespace": "team"}),
        (Cluster("own", "gke", details=KNOWN), {}),
        (Cluster("own", "gke", details={"registry": "ghcr.io/cluster"}), {"namespace": "team"}),
        (Cluster("own", "attached", details={"namespace": "cluster", "registry": ""}), {"registry": "ghcr.io/me"}),
    ],
)
def test_defaults_that_concern_a_cluster(home: Path, cluster: Cluster, changes: dict[str, Any]) -> None:
    if "data_dir" in changes:
        changes = {"data_dir": str(home / changes["data_dir"])}
    assert with_defaults(Request(name="x"), cluster) == Request(name="x", timeout="2h", **changes)


def test_options_that_were_given_stay(home: Path) -> None:
    asked = Request(data_dir="mine", timeout="5m")
    assert with_defaults(asked, LOCAL) == asked
    asked = Request(registry="mine", namespace="own", timeout="5m")
    assert with_defaults(asked, GKE) == asked


def test_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA_DIR", "REGISTRY", "NAMESPACE", "TIMEOUT"):
        monkeypatch.delenv(f"MLBENCH_{name}")
    for cluster in (LOCAL, SLURM, GKE):
        assert with_defaults(Request(name="x"), cluster) == Request(name="x")


def test_a_data_folder_that_does_not_exist_names_where_it_was_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_DATA_DIR", str(home / "none"))
    with pytest.raises(NotFoundError) as caught:
        with_defaults(Request(), LOCAL)
    assert caught.value.message == f"MLBENCH_DATA_DIR: the folder {home / 'none'} does not exist."
    assert caught.value.hint == "mlbench config, or --data-dir DIR"
    assert with_defaults(Request(data_dir="mine"), LOCAL).data_dir == "mine"
    assert with_defaults(Request(), GKE).data_dir is None


def test_the_cluster_of_commands_that_name_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(home / "home")
    far, near = Cluster("far", "attached"), Cluster("near", "attached")
    for cluster in (far, near):
        store.record_cluster(cluster)
    assert default_cluster(store).name == "local"
    store.choose_cluster(store.cluster("far"))
    assert default_cluster(store).name == "far"
    (home / "home" / "config.toml").write_text('cluster = "near"\n')
    assert default_cluster(store).name == "near"
    monkeypatch.setenv("MLBENCH_CLUSTER", "local")
    assert default_cluster(store).name == "local"
    monkeypatch.setenv("MLBENCH_CLUSTER", "nera")
    with pytest.raises(NotFoundError) as caught:
        default_cluster(store)
    assert caught.value.message.startswith('MLBENCH_CLUSTER: There is no cluster "nera".')
    assert caught.value.hint == "mlbench config, or mlbench list-clusters"
