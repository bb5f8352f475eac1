"""A cluster with GPUs is ready only when a container has used them: the probe's own script, run as a process."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from providers.eks.options import EksOptions
from providers.gpu_probe import NAME, find_driver_problem, parse_report
from templates import FOLDER
from tests.contract.providers.eks_world import make, remove
from tests.fakes.aws_server import AwsClient
from tests.fakes.gke import World
from tests.fakes.kube_pods import Node, run_container

CREATE = ["create-cluster", "gke", "2", "rel", "--gpu-type", "l4", "--spot", "--yes"]
SCRIPT = (FOLDER / "kubernetes" / "gpu-probe.sh").read_text("utf-8")


def run_probe(node: Node, *, torch: bool = False) -> tuple[int, dict[str, str]]:
    container = {"command": ["sh", "-c", SCRIPT], "env": [{"name": "MLBENCH_PROBE_GPUS", "value": "2"}]}
    code, message = run_container(container, node, torch=torch)
    return code, parse_report(message)


@pytest.mark.parametrize("mounted", [True, False])
@pytest.mark.parametrize("torch", [True, False])
def test_the_probe_reports_what_it_found(mounted: bool, torch: bool) -> None:
    code, report = run_probe(Node({}, gpus=2, mounted=mounted), torch=torch)
    assert code == 0
    assert report == {"gpu": "NVIDIA L4", "driver": "580.159.03", "memory": "23034 MiB", "gpus": "2"} | (
        {"torch": "2.15.0+cu132", "cuda": "13.2"} if torch else {}
    )


def test_fewer_gpus_than_expected_fail_the_probe() -> None:
    code, report = run_probe(Node({}, gpus=1))
    assert (code, report["error"]) == (1, "the container sees 1 of 2 GPUs")


def test_a_cluster_on_gke_ends_with_a_probe_of_its_driver(command: Any, gke_world: World) -> None:
    result = command(*CREATE)
    assert result.code == 0, result.err
    assert "GPUs of a worker: 1 × NVIDIA L4, driver 580.159.03" in result.err
    assert "The driver of the workers is" not in result.err  # 580 is the first that will do
    assert ClusterDetails.of(Store().cluster("rel-2")).gpu_probe["driver"] == "580.159.03"
    pod = gke_world.pods_of("").found[NAME]
    assert pod["spec"]["containers"][0]["image"].startswith("mirror.gcr.io/library/python:")
    # The pod is the proof: the same command does not repeat it.
    result = command(*CREATE)
    assert result.code == 0, result.err
    assert f"GPU probe {NAME} exists already" in result.err
    assert "it is of another image" in command(*CREATE, "--probe-image", "example.com/ours:1").err


def test_a_driver_that_is_older_than_the_images_is_named(command: Any, gke_world: World) -> None:
    result = command(*CREATE, "--gpu-driver", "default")
    assert result.code == 0, result.err
    assert "GKE's own driver may be older than 580" in result.err
    assert "The driver of the workers is 535.274.02; images with CUDA 13" in result.err


def test_torch_in_the_image_decides_whether_the_driver_will_do(command: Any, gke_world: World) -> None:
    gke_world.torch_in_images = True
    result = command(*CREATE, "--gpu-driver", "default", "--probe-image", "example.com/ours:1")
    assert result.code == 1
    assert "The NVIDIA driver on your system is too old (found version 12020)" in result.err
    assert "--gpu-driver latest" in result.err
    assert "mlbench delete-cluster gke rel-2" in result.err
    assert Store().cluster("rel-2").state == "failed"
    gke_world.drivers["DEFAULT"] = "580.159.03"  # GKE's own moves with the version of its nodes
    result = command(*CREATE, "--gpu-driver", "default", "--probe-image", "example.com/ours:1")
    assert result.code == 0, result.err
    assert "torch 2.15.0+cu132 ran a kernel and an all-reduce" in result.err


def test_an_image_that_cannot_be_pulled_ends_the_wait(command: Any, gke_world: World) -> None:
    gke_world.unpullable["example.com/none:1"] = "failed to authorize: unexpected status: 403 Forbidden"
    result = command(*CREATE, "--probe-image", "example.com/none:1")
    assert result.code == 1
    assert "The nodes cannot pull the image example.com/none:1" in result.err
    assert "task_images/build.sh" in result.err


def test_a_probe_that_no_worker_can_run_ends_the_wait_with_the_schedulers_words(
    command: Any, gke_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.gpu_probe.UNSCHEDULABLE_SECONDS", 0.5)
    gke_world.gpus_taken = True
    result = command(*CREATE)
    assert result.code == 1
    assert "creating GPU probe mlbench-gpu-probe: no worker takes its pod: 0/2 nodes are available" in result.err
    assert 'No worker can run the GPU probe, which asks for 1 GPU: "0/2 nodes are available' in result.err
    assert "kubectl describe nodes" in result.err
    gke_world.gpus_taken = False
    assert command(*CREATE).code == 0


def test_without_gpus_or_on_request_there_is_no_probe(command: Any, gke_world: World) -> None:
    kinds = {}
    for words in (["--gpu-type", "l4", "--probe-image", "none"], ["-t", "n1-standard-4"], ["--gpu-type", "l4"]):
        result = command("create-cluster", "gke", "2", "rel", *words, "--dry-run", "-o", "json")
        kinds[words[-1]] = [item["kind"] for item in result.json["resources"]]
    assert [name for name, listed in kinds.items() if "GPU probe" in listed] == ["l4"]


@pytest.mark.slow
def test_a_cluster_on_eks_ends_with_a_probe(aws: AwsClient, tmp_path: Path) -> None:
    home = tmp_path / "home"
    made = make("probed-2", home, EksOptions(machine_type="g4dn.xlarge"))
    assert ClusterDetails.of(made).gpu_probe["driver"] == "580.159.03"
    assert made.details["provisioning"][-1]["kind"] == "GPU probe"
    remove("probed-2", tmp_path / "empty")
    assert aws.list_left("probed-2") == []


def test_torch_that_ran_is_believed_more_than_a_number() -> None:
    assert find_driver_problem({"driver": "535.1", "torch": "2.9.0+cu126"}) is None
    assert find_driver_problem({"driver": "not known"}) is None
