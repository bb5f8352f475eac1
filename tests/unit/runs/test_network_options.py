"""--network: what it means on this machine, and what is refused at once."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import Request

ATTACHED = Cluster("team", "attached")
SLURM = Cluster("campus", "slurm", details={"partition": "all"})
MACHINE = Machine(cores=16, gpus=0)


def spec(cluster: Cluster, **options: Any) -> RunSpec:
    request = Request(name="x", workers=(2,), **{"command": "true", "image": "i:1", **options})
    return resolve(request, cluster, MACHINE if cluster is LOCAL else None)[0]


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
        (ATTACHED, {"network": "1gbit"}, "this machine only", "--cluster local"),
        (ATTACHED, {"network": "model:1gbit", "task": "digits_resnet", "command": None}, "this machine only", "local"),
        (SLURM, {"network": "1gbit", "image": None}, "this machine only", "--cluster local"),
    ],
)
def test_what_cannot_be_shaped_or_proved_is_refused(
    cluster: Cluster, options: Mapping[str, Any], reason: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=reason) as refusal:
        spec(cluster, **options)
    assert hint is None or hint in str(refusal.value.hint)
