"""The watch on a run's pods survives whatever befalls its connections, and costs the same for any number of pods."""

import time
from collections.abc import Callable, Iterator

import pytest

from mlbench_cli.kube.api import ApiError
from mlbench_cli.kube.watch import GONE, PodWatch
from tests.fakes.kube_api import Fault, KubeApi

PODS = "/api/v1/namespaces/default/pods"
LABELS = {"mlbench/run": "r"}


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


def put(server: KubeApi, name: str, phase: str = "Pending") -> None:
    server.put("pods", {"metadata": {"name": name, "labels": LABELS}, "status": {"phase": phase}})


def list_seen(watch: PodWatch) -> dict[str, str]:
    return {
        pod["metadata"]["name"]: "gone" if pod.get(GONE) else pod["status"].get("phase", "") for pod in watch.pods()
    }


def until(watch: PodWatch, wanted: Callable[[], bool]) -> None:
    """Wait; the test's own time limit ends it if that never comes."""
    while not wanted():
        watch.wait(watch.version, 0.1)


def test_what_comes_changes_and_goes_is_seen(server: KubeApi) -> None:
    put(server, "a")
    server.put("pods", {"metadata": {"name": "other", "labels": {"mlbench/run": "x"}}})
    watch = PodWatch(server.access, "default", "mlbench/run=r", period=30)
    until(watch, lambda: list_seen(watch) == {"a": "Pending"})
    put(server, "b")
    put(server, "a", "Running")
    until(watch, lambda: list_seen(watch) == {"a": "Running", "b": "Pending"})
    server.remove("pods", "a")
    until(watch, lambda: list_seen(watch) == {"a": "gone", "b": "Pending"})
    watch.close()
    assert server.requests[f"GET {PODS}"] == 1
    assert server.requests[f"GET {PODS} watch"] == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("watch=true", cut=100),
        Fault("watch=true", cut=0),
        Fault("watch=true", stall=0),  # half open: nothing comes, nothing ends
        Fault("watch=true", status=410),
        Fault("watch=true", status=500),
        Fault("watch=true", status=429, retry_after="0.1"),
        Fault("limit=", status=503),
        Fault("limit=", cut=20),
    ],
)
def test_a_fault_costs_no_change(server: KubeApi, fault: Fault) -> None:
    server.faults.append(fault)
    put(server, "a")
    watch = PodWatch(server.access, "default", "mlbench/run=r", period=1)
    put(server, "b")
    until(watch, lambda: set(list_seen(watch)) == {"a", "b"})
    put(server, "b", "Running")
    server.remove("pods", "a")
    until(watch, lambda: list_seen(watch) == {"a": "gone", "b": "Running"})
    watch.close()


def test_an_old_version_is_answered_by_a_new_list(server: KubeApi) -> None:
    put(server, "a")
    # The watch breaks at once; before it comes back, the history is gone.
    server.faults.append(Fault("watch=true", cut=0))
    watch = PodWatch(server.access, "default", "mlbench/run=r", period=2)
    until(watch, lambda: set(list_seen(watch)) == {"a"})
    put(server, "b")
    server.compact()
    until(watch, lambda: set(list_seen(watch)) == {"a", "b"})
    watch.close()


def test_missing_rights_are_told(server: KubeApi) -> None:
    server.faults.append(Fault("limit=", times=100, status=403))
    watch = PodWatch(server.access, "default", "mlbench/run=r")
    with pytest.raises(ApiError) as caught:
        watch.wait(0, 30)
    assert caught.value.exit_code == 3
    watch.close()


def test_closing_does_not_wait_for_the_server(server: KubeApi) -> None:
    watch = PodWatch(server.access, "default", "mlbench/run=r", period=3600)
    until(watch, lambda: watch.version > 0)
    time.sleep(0.2)
    watch.close()
    assert not watch._thread.is_alive()


def test_a_thousand_pods_cost_one_list_and_one_watch(server: KubeApi) -> None:
    for number in range(1000):
        put(server, f"p{number:04}")
    watch = PodWatch(server.access, "default", "mlbench/run=r", period=30)
    until(watch, lambda: len(watch.pods()) == 1000)
    for number in range(1000):
        put(server, f"p{number:04}", "Running")
    until(watch, lambda: set(list_seen(watch).values()) == {"Running"})
    watch.close()
    assert server.requests[f"GET {PODS}"] == 10  # pages of one list
    assert server.requests[f"GET {PODS} watch"] == 1
