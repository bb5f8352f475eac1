"""Results of several machines whose NCCL did not use the fast network that they have, and what pods get to use it."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.conditions import Conditions, check_fabric
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from tests.unit.results.archive.test_judge import SPEC, event, judge_run, observe_end

EFA = {"name": "EFA", "gbits": 3200}


def spec_on(fabric: dict[str, object], workers: int = 2) -> RunSpec:
    cluster = Cluster("c", "eks", details={"fabric": fabric, "gpus_per_node": 8, "registry": "ghcr.io/me"})
    (spec,) = resolve(Request(name="r", workers=(workers,), task="allreduce", gpu=True), cluster)
    return spec


def ranks(*networks: str | None) -> Mapping[int, Any]:
    return {rank: {"nccl": {"network": name}} if name else {} for rank, name in enumerate(networks)}


def test_a_rank_that_fell_back_to_tcp_labels_the_result() -> None:
    found = check_fabric(spec_on(EFA), ranks("Libfabric", "Socket"))
    assert found is not None
    assert found.phrase == "slow-network: NCCL used Socket; the machines have 3200 Gbit/s of EFA"
    assert found.figures == {"slow_ranks": 1, "nominal_gbits": 3200.0}
    labeled = Conditions(slow_network=found)
    assert labeled.labels == ("slow_network",)
    assert Conditions.from_dict(labeled.to_dict()) == labeled


@pytest.mark.parametrize("name", ["AWS Libfabric", "Libfabric", "GPUDirectTCPX_v7", "FasTrak", "gIB", "IB"])
def test_the_fast_networks_of_the_clouds_are_known(name: str) -> None:
    assert check_fabric(spec_on(EFA), ranks(name, name)) is None


@pytest.mark.parametrize(
    ("fabric", "workers", "networks"),
    [
        ({}, 2, ("Socket",)),
        (EFA, 1, ("Socket",)),
        (EFA, 2, (None, None)),
        ({"name": "x", "gbits": "y"}, 2, ("Socket",)),
    ],
)
def test_nothing_is_labeled_without_a_fabric_other_machines_or_a_word_of_nccl(
    fabric: dict[str, object], workers: int, networks: tuple[str | None, ...]
) -> None:
    assert check_fabric(spec_on(fabric, workers), ranks(*networks)) is None


@pytest.mark.parametrize(
    ("devices", "memlock", "found"),
    [
        ({"rdma/ib": "1"}, 8 << 20, True),
        ({"vpc.amazonaws.com/efa": "4"}, 8 << 20, True),
        ({"rdma/ib": "1"}, 1 << 30, False),
        ({"rdma/ib": "1"}, "unlimited", False),
        ({"rdma/ib": "1"}, None, False),
        ({"rdma/ib": "1"}, True, False),
        ({}, 8 << 20, False),
    ],
)
def test_too_little_lockable_memory_is_found_where_network_cards_need_it(
    devices: dict[str, str], memlock: object, found: bool
) -> None:
    spec = replace(SPEC, engine="kubernetes", kubernetes=replace(SPEC.pods, devices=devices))
    facts: dict[str, Any] = {} if memlock is None else {"memlock_bytes": memlock}
    told = event("environment", **facts)
    judgement = judge_run(observe_end("exited", 0, 0), {"outcome": "completed"}, spec, before=told)
    findings = [item for item in judgement.findings if item.code == "memlock_low"]
    assert bool(findings) is found
    if findings:
        assert "8 MiB" in findings[0].summary
        assert "root" in (findings[0].hint or "")


def test_the_judge_finds_it_in_the_ranks_events() -> None:
    spec = replace(SPEC, engine="kubernetes", kubernetes=replace(SPEC.pods, fabric=EFA))
    fell_back = event("environment", nccl={"network": "Socket", "interfaces": "[0]eth0:10.0.0.1<0>"})
    judgement = judge_run(observe_end("exited", 0, 0), {"outcome": "completed"}, spec, before=fell_back)
    conditions = judgement.result["conditions"]
    assert "slow_network" in conditions["labels"]
    assert judgement.environment["ranks"]["0"]["nccl"]["network"] == "Socket"
    fast = event("environment", nccl={"network": "Libfabric"})
    judgement = judge_run(observe_end("exited", 0, 0), {"outcome": "completed"}, spec, before=fast)
    assert judgement.result["conditions"]["slow_network"] is None


def test_workers_with_efa_get_cards_huge_pages_and_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    made = EksProvider().new_cluster("c-2", 2, EksOptions(machine_type="p5.48xlarge", efa=True, registry="ghcr.io/me"))
    assert ClusterDetails.of(made).fabric == EFA
    (spec,) = resolve(Request(name="r", workers=(2,), task="allreduce", gpu=True), made)
    (container,) = manifests(spec, "default")[0]["spec"]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits["vpc.amazonaws.com/efa"] == "32"
    assert limits["nvidia.com/gpu"] == "8"
    assert int(limits["hugepages-2Mi"]) == 5120 * 2**20
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert manifests(spec, "default")[0]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 0
    assert {"name": "FI_PROVIDER", "value": "efa"} in container["env"]
    assert {"name": "MLBENCH_FABRIC", "value": "3200 EFA"} in container["env"]
    plain = EksProvider().new_cluster("c-2", 2, EksOptions(machine_type="p5.48xlarge", registry="ghcr.io/me"))
    (spec,) = resolve(Request(name="r", workers=(2,), task="allreduce", gpu=True), plain)
    (container,) = manifests(spec, "default")[0]["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec.pods.fabric == EFA
