"""--network and --network-method: what they mean on each kind of cluster, and what is refused at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.experiment import expand
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import Request

KIND = Cluster("demo-2", "kind", details={"functional_only": True})
ATTACHED = Cluster("team", "attached")
SLURM = Cluster("campus", "slurm", details={"partition": "all"})
MACHINE = Machine(cores=16, gpus=0)


def spec(cluster: Cluster = KIND, **options: Any) -> RunSpec:
    request = Request(name="x", workers=(2,), **{"command": "true", "image": "i:1", **options})
    return resolve(request, cluster, MACHINE if cluster is LOCAL else None)[0]


def test_on_kind_this_machine_shapes_the_links() -> None:
    found = spec(network="1000mbit,5ms")
    assert (found.network, found.kubernetes.network_method) == ("1gbit,5ms", "nsenter")
    assert RunSpec.from_dict(found.to_dict()) == found
    assert found.functional_only


def test_the_method_is_part_of_the_hash_and_old_hashes_stay() -> None:
    plain = spec(ATTACHED)
    assert "network_method" not in plain.to_dict()["kubernetes"]
    shaped = spec(ATTACHED, network="1gbit", network_method="chaos-mesh")
    assert len({plain.hash, shaped.hash, spec(ATTACHED, network="1gbit", network_method="annotation").hash}) == 3


def test_both_are_axes_of_a_matrix() -> None:
    axes = {"network": ("1gbit", "100mbit"), "network_method": ("annotation", "chaos-mesh")}
    request = Request(name="x", workers=(2,), command="true", image="i:1", matrix=axes)
    found = expand(request, ATTACHED)
    assert {(item.spec.network, item.spec.kubernetes.network_method) for item in found} == {
        (network, method) for network in axes["network"] for method in axes["network_method"]
    }


def test_gpus_of_this_machine_communicate_through_the_links() -> None:
    """NCCL's guide: between hosts, which NCCL_HOSTID names, only a network is used, and NCCL_NET chooses which."""
    request = Request(name="x", workers=(2,), task="digits_resnet", preset="tiny", network="1gbit", gpu=True)
    found = resolve(request, LOCAL, Machine(cores=16, gpus=2))[0]
    assert (found.device, found.backend) == ("gpu", "nccl")
    (plan,) = LocalEngine().render(found).documents
    assert {name: plan["environment"][name] for name in ("NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_MNNVL_ENABLE")} == {
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_MNNVL_ENABLE": "0",
    }
    assert [rank["environment"]["NCCL_HOSTID"] for rank in plan["ranks"]] == ["worker-0", "worker-1"]
    (plain,) = LocalEngine().render(replace(found, network=None)).documents
    assert "NCCL_NET" not in plain["environment"]
    assert "NCCL_HOSTID" not in plain["ranks"][0]["environment"]


@pytest.mark.parametrize(
    ("cluster", "options", "reason", "hint"),
    [
        (ATTACHED, {"network": "1gbit"}, "cannot shape the network", "--network-method annotation"),
        (ATTACHED, {"network": "1gbit", "network_method": "nsenter"}, "containers on this machine", "chaos-mesh"),
        (ATTACHED, {"network": "1gbit,5ms", "network_method": "annotation"}, "a rate but no delay", "--network 1gbit"),
        (
            ATTACHED,
            {"network": "model:1gbit", "task": "digits_resnet", "command": None},
            "modeled networks are only for local runs",
            "local",
        ),
        (ATTACHED, {"network": "1gbit", "network_method": "chaos"}, 'Did you mean "chaos-mesh"', None),
        (ATTACHED, {"network_method": "annotation"}, "needs --network", "--network 1gbit"),
        (KIND, {"network": "1gbit", "host_network": True}, "such pods use the node's network", "--host-network"),
        (KIND, {"network": "1gbit", "run_on_all": False}, "a command that all workers run", "--run-on-all"),
        (KIND, {"network": "1gbit", "backend": "mpi", "run_on_all": True}, "shared memory", "--backend gloo"),
        (
            ATTACHED,
            {"network": "1gbit", "network_method": "annotation", "gpu": True, "backend": "nccl"},
            "GPUs works only on this machine",
            "--network",
        ),
        (KIND, {"network": "1gbit,loss=1%"}, "loss is not supported", None),
        (
            ATTACHED,
            {"network": "1gbit", "network_method": "annotation", "spread": False},
            "one worker per node",
            "--no-spread",
        ),
        (SLURM, {"network": "1gbit", "image": None}, "between pods", "network.json"),
        (
            LOCAL,
            {"network": "1gbit", "network_method": "annotation", "image": None},
            "does not apply on the local",
            None,
        ),
    ],
)
def test_what_cannot_be_shaped_or_proved_is_refused(
    cluster: Cluster, options: Mapping[str, Any], reason: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=reason) as refusal:
        spec(cluster, **options)
    assert hint is None or hint in str(refusal.value.hint)


def test_annotations_ask_for_both_directions_and_buckets_are_emptied_before_the_proof() -> None:
    found = spec(ATTACHED, network="100mbit", network_method="annotation")
    (job, *_) = manifests(found, "default")
    template = job["spec"]["template"]
    asked = {key: value for key, value in template["metadata"]["annotations"].items() if "bandwidth" in key}
    assert asked == {
        "kubernetes.io/ingress-bandwidth": "102500000",  # headers are no payload
        "kubernetes.io/egress-bandwidth": "102500000",
    }
    environment = {item["name"]: item.get("value") for item in template["spec"]["containers"][0]["env"]}
    assert environment["MLBENCH_PROBE_DRAIN"] == "100000000"


def test_a_single_worker_waits_for_no_network() -> None:
    request = Request(name="x", workers=(1,), command="true", image="i:1", network="1gbit")
    documents = manifests(resolve(request, KIND)[0], "default")
    assert "MLBENCH_NETWORK" not in str(documents[0])
