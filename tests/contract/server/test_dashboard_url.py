"""`mlbench get-dashboard-url` for a dashboard that the Helm chart has installed in the current cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.app import run
from tests.fakes.kube_api import KubeApi

LABELS = {"app.kubernetes.io/name": "mlbench", "app.kubernetes.io/instance": "team"}


def deployment(url: str) -> dict[str, object]:
    """As the chart writes it."""
    container = {"name": "dashboard", "args": ["--cluster=here", "--port=8443", f"--public-url={url}"]}
    token = {"name": "token", "secret": {"secretName": "mine"}}
    return {
        "metadata": {"name": "team-dashboard", "namespace": "default", "labels": LABELS},
        "spec": {"template": {"spec": {"containers": [container], "volumes": [token]}}},
    }


@pytest.fixture
def cluster(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """The current cluster of an empty home."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with KubeApi() as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        assert run(["attach-cluster", "shared"]) == 0
        assert run(["set-cluster", "shared"]) == 0
        yield server


@pytest.mark.parametrize(
    ("url", "forward"),
    [
        ("https://m.example.com", ""),
        ("http://127.0.0.1:8443", "kubectl --namespace default port-forward service/team-dashboard 8443"),
    ],
)
def test_the_chart_s_dashboard_is_found_in_the_current_cluster(
    cluster: KubeApi, capsys: pytest.CaptureFixture[str], url: str, forward: str
) -> None:
    cluster.objects["deployments", "team-dashboard"] = deployment(url)
    capsys.readouterr()
    assert run(["get-dashboard-url"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{url}/\n"
    assert (forward in err, "get secret mine" in err) == (True, True)


def test_without_one_the_answer_says_how_to_get_one(cluster: KubeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["get-dashboard-url"]) == 4
    assert "mlbench serve" in capsys.readouterr().err
