"""Machine types that are newer than the tables: their GPUs come from the cloud when a cluster is planned."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlbench_cli.storage.store import Store
from tests.contract.providers.eks_world import list_made
from tests.fakes.aws_server import AwsClient
from tests.fakes.azure_arm import World as AzureWorld
from tests.fakes.gke import World as GkeWorld

ZONE = "eu-west-1a"
EKS_TYPES = (
    ("g7.12xlarge", "RTX PRO 4500", 2),
    ("g7e.2xlarge", "RTX PRO Server 6000", 1),
    ("g7e.24xlarge", "RTX PRO Server 6000", 4),
    ("g7e.48xlarge", "RTX PRO Server 6000", 8),
    ("p6-b200.48xlarge", "B200", 8),
    ("p6-b300.48xlarge", "B300", 8),
)


@pytest.fixture
def ec2(aws: AwsClient) -> Iterator[AwsClient]:
    aws.rules(
        offered=[[name, ZONE] for name, *_ in EKS_TYPES],
        quotas=dict.fromkeys(("L-DB2E81BA", "L-417A185B", "L-C4BD4855", "L-3819A6DF"), 9999.0),
    )
    yield aws
    aws.rules(offered=[], quotas={})


def plan(command: Callable[..., Any], *words: str) -> Any:
    done = command("create-cluster", *words, "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    return done.json


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "gpu", "gpus"), EKS_TYPES)
def test_eks_plans_gpus_that_ec2_tells(
    command: Callable[..., Any], ec2: AwsClient, machine: str, gpu: str, gpus: int
) -> None:
    planned = plan(command, "eks", "2", "new", "-t", machine, "--zone", ZONE, "--spot")
    details = planned["cluster"]["details"]
    assert (details["gpu"], details["gpus_per_node"]) == (gpu, gpus)
    assert {"GPU device plugin", "GPU probe"} <= {item["kind"] for item in planned["resources"]}


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ("p6e-gb200.36xlarge", "is an ARM machine"),  # for which EKS has other node images
        ("g5.xlrage", 'Did you mean "g5.xlarge"?'),
        *((machine, "NVIDIA") for machine in ("trn2.48xlarge", "inf2.xlarge", "g4ad.xlarge")),
    ],
)
def test_eks_refuses_machines_that_runs_cannot_use(
    command: Callable[..., Any], ec2: AwsClient, machine: str, says: str
) -> None:
    refused = command("create-cluster", "eks", "2", "new", "-t", machine, "--zone", ZONE, "--dry-run")
    assert (refused.code, says in refused.err) == (2, True), refused.err


@pytest.mark.parametrize(
    ("provider", "gpu", "machine"),
    [
        ("gke", "a100-40gb", "a2-highgpu-1g"),
        ("gke", "a100-80gb", "a2-ultragpu-1g"),
        ("gke", "h100-80gb", "a3-highgpu-1g"),
        ("gke", "nvidia-h200-141gb", "a3-ultragpu-8g"),
        ("gke", "rtx-pro-6000", "g4-standard-48"),
        ("eks", "A100-40GB", "p4d.24xlarge"),
        ("eks", "nvidia-h100-80gb", "p5.4xlarge"),
        ("aks", "a100-80gb", "Standard_NC24ads_A100_v4"),
    ],
)
def test_a_gpu_is_known_by_the_names_of_other_clouds(
    command: Callable[..., Any], provider: str, gpu: str, machine: str,
    ec2: AwsClient, gke_world: GkeWorld, azure_world: AzureWorld,
) -> None:  # fmt: skip
    done = command("create-cluster", provider, "1", "new", "--gpu-type", gpu, "--dry-run")
    assert machine in done.out + done.err  # which may not be for sale


def test_a_plan_says_which_prices_are_unknown(command: Callable[..., Any], ec2: AwsClient) -> None:
    done = command("create-cluster", "eks", "2", "new", "-t", "p6-b300.48xlarge", "--zone", ZONE, "--spot", "--dry-run")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if line.startswith("mlbench does not know the price of ")]
    assert "worker p6-b300.48xlarge (spot)" in line
    assert re.search(r"; the rest costs \d+\.\d\d USD/h\.$", line)


def test_eks_takes_network_cards_and_vcpus_from_ec2(command: Callable[..., Any], ec2: AwsClient) -> None:
    words = ("eks", "2", "new", "-t", "p6-b300.48xlarge", "--zone", ZONE, "--spot")
    details = plan(command, *words, "--efa")["cluster"]["details"]
    assert details["devices_per_node"]["vpc.amazonaws.com/efa"] == 16
    assert details["fabric"] == {"name": "EFA", "gbits": 6400}
    ec2.rules(quotas={"L-C4BD4855": 383.0})
    refused = command("create-cluster", *words, "--dry-run")
    assert (refused.code, "need 384" in refused.err) == (5, True)
    no_card = command("create-cluster", "eks", "2", "new", "-t", "g7e.2xlarge", "--zone", ZONE, "--efa", "--dry-run")
    assert (no_card.code, "no EFA network interface" in no_card.err) == (2, True)
    other = command("create-cluster", "eks", "2", "new", "-t", "g7e.2xlarge", "--zone", ZONE, "-g", "4", "--dry-run")
    assert (other.code, "has 1 GPU, not 4" in other.err) == (2, True)


@pytest.mark.slow
def test_eks_gives_machines_whose_first_card_has_no_efa_an_ordinary_one(
    command: Callable[..., Any], ec2: AwsClient
) -> None:
    done = command(
        "create-cluster", "eks", "2", "b300", "-t", "p6-b300.48xlarge", "--zone", ZONE, "--spot", "--efa", "--yes"
    )
    assert done.code == 0, done.err[-600:]
    cards = list_made(ec2, "ec2:CreateLaunchTemplate")[1]["NetworkInterfaces"]
    assert [card["InterfaceType"] for card in cards] == ["interface", *["efa-only"] * 16]
    assert [(card["NetworkCardIndex"], card["DeviceIndex"]) for card in cards] == [(number, 0) for number in range(17)]
    assert command("delete-cluster", "eks", "b300-2", "--yes").code == 0
    assert ec2.list_left("b300-2") == []


def test_eks_counts_the_machines_of_the_system_in_the_quota(command: Callable[..., Any], aws: AwsClient) -> None:
    aws.rules(quotas={"L-1216C47A": 5.0}, offered=[["m5.xlarge", ZONE]])
    try:
        refused = command("create-cluster", "eks", "1", "small", "-t", "m5.xlarge", "--zone", ZONE, "--dry-run")
        assert refused.code == 5, refused.err
        assert "1 × m5.xlarge and 2 × t3.medium need 8" in refused.err
        aws.rules(offered=[["g4dn.xlarge", ZONE]], quotas={"L-1216C47A": 3.0})
        refused = command("create-cluster", "eks", "1", "small", "-t", "g4dn.xlarge", "--zone", ZONE, "--dry-run")
        assert (refused.code, "2 × t3.medium need 4" in refused.err) == (5, True)
    finally:
        aws.rules(quotas={}, offered=[])


def test_eks_asks_for_the_machines_of_the_system_before_it_makes_anything(
    command: Callable[..., Any], aws: AwsClient
) -> None:
    aws.rules(offered=[["m5.xlarge", ZONE]])
    words = ("create-cluster", "eks", "1", "small", "-t", "m5.xlarge", "--zone", ZONE)
    try:
        refused = command(*words, "--system-machine-type", "m9.large", "--yes")
        assert (refused.code, "m9.large is offered in no zone" in refused.err) == (5, True), refused.err
    finally:
        aws.rules(offered=[])
    assert not [entry for entry in aws.log("me") if ":Create" in entry["action"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "gpu", "gpus"),
    [
        ("a4x-highgpu-4g", "nvidia-gb200", 4),
        ("a4x-maxgpu-4g-metal", "nvidia-gb300", 4),
        ("a4-highgpu-8g", "nvidia-b200", 8),
    ],
)
def test_gke_makes_pools_with_the_gpus_that_compute_engine_tells(
    command: Callable[..., Any], gke_world: GkeWorld, machine: str, gpu: str, gpus: int
) -> None:
    done = command("create-cluster", "gke", "1", "new", "-t", machine, "--spot", "--yes", "-o", "json")
    assert done.code == 0, done.err
    details = done.json["cluster"]["details"]
    assert (details["gpu"], details["gpus_per_node"]) == (gpu, gpus)
    assert "GPU probe" in {item["kind"] for item in details["provisioning"]}
    (asked,) = gke_world.find_cluster("new-1").node_pools[1].config.accelerators
    assert (asked.accelerator_type, asked.accelerator_count) == (gpu, gpus)
    assert command("delete-cluster", "gke", "new-1", "--yes").code == 0


def test_gke_never_buys_gpu_machines_as_cpu_machines(command: Callable[..., Any], gke_world: GkeWorld) -> None:
    gke_world.hides_accelerators = True
    words = ("create-cluster", "gke", "1", "new", "-t", "a4x-highgpu-4g", "--spot", "--yes")
    refused = command(*words)
    assert (refused.code, "--gpus-per-node" in refused.err) == (2, True)
    assert gke_world.clusters == {}
    untyped = command(*words, "--gpus-per-node", "4")
    assert (untyped.code, "--gpu-type" in untyped.err) == (2, True)
    assert command(*words, "--gpus-per-node", "4", "--gpu-type", "nvidia-gb200").code == 0
    assert Store().cluster("new-1").details["gpus_per_node"] == 4
    assert command("delete-cluster", "gke", "new-1", "--yes").code == 0


@pytest.mark.parametrize(
    ("machine", "gpu", "gpus", "is_arm"),
    [
        ("Standard_NC144lds_xl_RTXPRO6000BSE_v6", "rtx-pro-6000", 1, False),
        ("Standard_NC288ds_xl_RTXPRO6000BSE_v6", "rtx-pro-6000", 2, False),
        ("Standard_ND128isr_NDR_GB200_v6", "gb200", 4, True),
        ("Standard_ND128isr_GB300_v6", "gb300", 4, True),
    ],
)
def test_aks_plans_gpus_that_azure_tells(
    command: Callable[..., Any], azure_world: AzureWorld, machine: str, gpu: str, gpus: int, is_arm: bool
) -> None:
    planned = plan(command, "aks", "1", "new", "-t", machine, "--gpu-type", gpu, "--num-gpus", str(gpus))
    details = planned["cluster"]["details"]
    assert (details["gpu"], details["gpus_per_node"]) == (gpu, gpus)
    assert {"GPU device plugin", "GPU probe"} <= {item["kind"] for item in planned["resources"]}
    warned = " ".join(planned["plan"]["warnings"])
    assert ("linux/arm64" in warned) is is_arm
    assert "Build images with CUDA 12.8" not in warned
    wrong = command("create-cluster", "aks", "1", "new", "-t", machine, "--num-gpus", "7", "--dry-run")
    assert (wrong.code, f"has {gpus} GPU{'s' if gpus > 1 else ''}, not 7" in wrong.err) == (2, True)
