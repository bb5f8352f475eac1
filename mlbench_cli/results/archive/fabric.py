"""Whether NCCL used the fast network that the run's machines have. Pure: from the spec and the facts of the ranks.

A machine with a fabric works without it, too: NCCL falls back to TCP, sums are right, and the bandwidth between
machines is a fraction of what the machine is sold for. Names of networks: aws-ofi-nccl ("Libfabric", formerly "AWS
Libfabric"), Google's plugins ("GPUDirectTCPX_v7", "FasTrak" of TCPXO, "gIB"), NCCL itself ("IB", "Socket").
"""

from collections.abc import Mapping
from typing import Any

from mlbench_cli.goals import is_finite_number
from mlbench_cli.results.archive.conditions import Condition
from mlbench_cli.results.archive.events import one_line
from mlbench_cli.spec import RunSpec

# Beginnings of the names of networks that go past the kernel's TCP. Anything else, "FastSocket" too, is slower.
FAST_NETWORKS = ("AWS Libfabric", "Libfabric", "GPUDirectTCPX", "FasTrak", "gIB", "IB")


def check_fabric(spec: RunSpec, environments: Mapping[int, Mapping[str, Any]]) -> Condition | None:
    """The condition of a run on several machines that used a slower network than they have; None if it did not.

    Ranks that did not tell their network, because they ended early or used no NCCL, are left out.
    """
    fabric = spec.kubernetes.fabric
    gbits = fabric.get("gbits")
    if not fabric or spec.workers < 2 or not is_finite_number(gbits):
        return None
    used = {rank: network for rank, facts in environments.items() if (network := _find_network(facts))}
    slow = {rank: network for rank, network in used.items() if not network.startswith(FAST_NETWORKS)}
    if not slow:
        return None
    names = ", ".join(sorted(set(slow.values())))
    reason = f"NCCL used {names}; the machines have {gbits:g} Gbit/s of {fabric.get('name')}"
    return Condition("slow_network", reason, {"slow_ranks": len(slow), "nominal_gbits": float(gbits)})


def _find_network(facts: Mapping[str, Any]) -> str | None:
    """The network that a rank's NCCL chose, of its environment event."""
    found = facts.get("nccl")
    network = found.get("network") if isinstance(found, Mapping) else None
    return one_line(network) if isinstance(network, str) else None
