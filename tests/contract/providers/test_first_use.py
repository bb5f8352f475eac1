"""What a first use of each cloud meets, row by row of the page of assumptions: a plan, or a refusal before money."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.contract.providers.test_aks_end import SUBNET
from tests.contract.providers.test_gke_refusals import SHARED
from tests.fakes.aws_server import AwsClient

ROOT = Path(__file__).parents[3]
ZONE = "eu-west-1a"
EKS_TYPES = ("m5.xlarge", "g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g6e.xlarge", "g6e.24xlarge", "g7.12xlarge",
             "g7e.2xlarge", "p6-b300.48xlarge")  # fmt: skip
ARM = "Standard_ND128isr_NDR_GB200_v6"


class Use(NamedTuple):
    """A command, as it is typed after `create-cluster CLOUD 2 first`, its exit code on a dry run, and what it says."""

    row: str  # the beginning of the row on the page
    cloud: str
    words: Sequence[str]
    code: int = 0
    says: str = ""


def _gke(row: str, *words: str, code: int = 0, says: str = "") -> Use:
    return Use(row, "gke", words, code, says)


def _eks(row: str, *words: str, code: int = 0, says: str = "") -> Use:
    return Use(row, "eks", (*words, "--zone", ZONE), code, says)


def _aks(row: str, *words: str, code: int = 0, says: str = "") -> Use:
    return Use(row, "aks", words, code, says)


USES = (
    _gke("GKE with CPUs, L4, T4, A100, also spot"),
    _gke("GKE with CPUs, L4, T4, A100, also spot", "--num-cpus", "4"),
    _gke("GKE with CPUs, L4, T4, A100, also spot", "--gpu-type", "l4", "--spot"),
    _gke("GKE with CPUs, L4, T4, A100, also spot", "--gpu-type", "t4"),
    _gke("GKE with CPUs, L4, T4, A100, also spot", "--gpu-type", "a100", says="may still fail"),
    _gke("GKE `--registry auto`", "--registry", "auto"),
    _gke("GKE and AKS `--ttl`", "--ttl", "2h", says="2h"),
    _gke("GKE A3 High", "-t", "a3-megagpu-8g", "--fast-network", "--spot", says="NCCL plugin"),
    _gke("GKE A4X, B300", "-t", "a4x-highgpu-4g", "--spot"),
    _gke("GKE on a Shared VPC", *SHARED, code=2, says="--pods-range"),
    _gke("GKE, EKS and AKS where a policy", "--tag", "team=research", "--secure-boot"),
    _eks("EKS with CPUs, G4dn", "-t", "m5.xlarge"),
    _eks("EKS with CPUs, G4dn", "-t", "g4dn.xlarge", "--spot"),
    _eks("EKS with CPUs, G4dn", "-t", "g6e.xlarge"),
    _eks("EKS with CPUs, G4dn", "-t", "m5.xlarge", "--ttl", "2h", says="2h"),
    _eks("EKS in a company's network", "-t", "m5.xlarge", "--private-nodes", says="NAT"),
    _eks("EKS in a company's network", "-t", "m5.xlarge", "--subnets", "subnet-01234567,subnet-76543210", code=4),
    _eks("GKE, EKS and AKS where a policy", "-t", "m5.xlarge", "--tag", "Team=a=b/c"),
    _eks("EKS `--efa`, several machines", "-t", "g6e.24xlarge", "--efa", says="--base efa"),
    _eks("EKS `--efa --capacity-reservation`", "-t", "p6-b300.48xlarge", "--efa", "--capacity-reservation",
         "cr-0123456789abcdef0", code=4, says="aws ec2 describe-capacity-reservations"),
    _eks("EKS g7e, p6-b300; P5e and P5en on demand", "-t", "g7e.2xlarge"),
    _eks("EKS g7e, p6-b300; P5e and P5en on demand", "-t", "p6-b300.48xlarge", "--spot"),
    _eks("EKS g7e, p6-b300; P5e and P5en on demand", "-t", "p5e.48xlarge", code=2, says="--capacity-reservation"),
    _eks("EKS G7", "-t", "g7.12xlarge", says="GPU probe"),
    _aks("AKS with CPUs, T4, A100, H100 NVL"),
    _aks("AKS with CPUs, T4, A100, H100 NVL", "--gpu-type", "t4", "--spot"),
    _aks("AKS with CPUs, T4, A100, H100 NVL", "--gpu-type", "h100-nvl"),
    _aks("AKS `--subnet`", "--subnet", SUBNET),
    _aks("AKS `--subnet`", "--identity", "mine", code=2, says="az identity show"),
    _aks("GKE, EKS and AKS where a policy", "--tag", "Owner=me@example.org"),
    _aks("AKS `--gpu-type a10`", "--gpu-type", "a10", says="CUDA 12.8"),
    _aks("AKS ND sizes with InfiniBand", "--gpu-type", "h100", code=2, says="--slow-network-ok"),
    _aks("AKS RTX PRO 6000", "-t", ARM, "--gpu-type", "gb200", says="linux/arm64"),
)  # fmt: skip

# Rows that no plan of a cluster shows, and the test of each.
ELSEWHERE = {
    "attached GKE Autopilot": (
        "contract/providers/test_cluster_commands.py",
        "test_autopilot_is_known_by_its_nodes_and_its_runs_say_what_they_need",
    ),
    "any cloud, images pushed from an Arm laptop": (
        "contract/test_images.py",
        "test_images_for_a_cloud_are_built_for_its_workers",
    ),
    "attached cluster with RDMA cards in `--pod-patch`": (
        "contract/engines/kubernetes/test_locked_memory.py",
        "test_pods_with_rdma_cards_lock_64_mib_and_those_of_another_user_do_not",
    ),
    "attached OpenShift": (
        "contract/engines/kubernetes/test_pod_patch.py",
        "test_a_patch_is_merged_into_the_pods",
    ),
}


@pytest.fixture
def ec2(aws: AwsClient) -> Iterator[AwsClient]:
    codes = ("L-1216C47A", "L-34B43A08", "L-DB2E81BA", "L-3819A6DF", "L-417A185B", "L-C4BD4855", "L-7212CCBC")
    aws.rules(offered=[[name, ZONE] for name in EKS_TYPES], quotas=dict.fromkeys(codes, 9999.0))
    yield aws
    aws.rules(offered=[], quotas={})


def test_each_row_of_the_page_has_its_test() -> None:
    page = (
        (ROOT / "docs/development/clouds-assumptions.md")
        .read_text("utf-8")
        .partition("## What to expect on first use")[2]
    )
    table = page.partition("\nSources:")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][2:]
    known = {use.row for use in USES} | set(ELSEWHERE)
    assert [row for row in rows if not any(row.startswith(start) for start in known)] == []
    assert [start for start in known if not any(row.startswith(start) for row in rows)] == []
    for file, name in ELSEWHERE.values():
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text("utf-8"), file


@pytest.mark.parametrize("use", [pytest.param(use, id=f"{use.cloud} {' '.join(use.words)[:60]}") for use in USES])
def test_a_first_use_is_planned_or_refused_before_money(
    command: Callable[..., Any], use: Use, request: pytest.FixtureRequest
) -> None:
    world = request.getfixturevalue({"gke": "gke_world", "eks": "ec2", "aks": "azure_world"}[use.cloud])
    if use.cloud == "aks":
        world.vnets[SUBNET.partition("/subnets/")[0].lower()] = ["10.0.0.0/16"]
    before = len(world.log("me")) if use.cloud == "eks" else len(world.log)
    done = command("create-cluster", use.cloud, "2", "first", *use.words, "--dry-run")
    assert done.code == use.code, done.err
    assert use.says in done.out + done.err
    if use.code:
        assert "\nNext: " in done.err
    asked = [str(entry) for entry in (world.log("me") if use.cloud == "eks" else world.log)[before:]]
    assert not [line for line in asked if line.startswith(("Create", "Insert", "PUT")) or ":Create" in line]


@pytest.mark.usefixtures("ec2")
def test_machines_of_eks_that_work_by_now_are_planned_without_a_warning_of_their_driver(
    command: Callable[..., Any],
) -> None:
    """G7 as G6: the images of EKS have a driver for both."""
    told = {}
    for kind in ("g6.xlarge", "g7.12xlarge"):
        done = command("create-cluster", "eks", "2", "first", "-t", kind, "--zone", ZONE, "--dry-run", "-o", "json")
        assert done.code == 0, done.err
        told[kind] = done.json["plan"]["warnings"]
    assert [words for words in told["g7.12xlarge"] if words not in told["g6.xlarge"] and "--efa" not in words] == []
    assert not any("driver" in words or "detect" in words for words in told["g7.12xlarge"])
