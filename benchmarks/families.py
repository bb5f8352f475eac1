"""Every machine of all clouds' tables through `create-cluster --dry-run`: accepted, or refused with which reason.

Each machine is planned on demand, as spot, and with its fast network if it has one, without an account. What mlbench
accepts for GKE and AKS is then held against the rules of the doubles (disks, ways to buy, GPUs): a machine that one
accepts and the other refuses is a contradiction, and the exit code is 1. The rules are assumptions:
docs/development/clouds-assumptions.md.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLAIN_GKE = ("n1-standard-8", "n2-standard-8", "n4-standard-8", "c2-standard-8", "c4-standard-8", "e2-standard-8")


def main() -> int:
    """Print the table; 1 if mlbench and the double contradict each other."""
    contradictions = 0
    began = time.monotonic()
    print(f"{'cloud':<6}{'machine':<27}{'way':<13}{'price/h':>10}  verdict")
    count = 0
    for cloud, machine, way, price, verdict, contradiction in (*plan_gke(), *plan_eks(), *plan_aks()):
        shown = "unknown" if price is None else f"{price:.2f}"
        print(f"{cloud:<6}{machine:<27}{way:<13}{shown:>10}  {verdict}{contradiction}")
        contradictions += bool(contradiction)
        count += 1
    seconds = time.monotonic() - began
    print(f"{count} plans in {seconds:.1f} s; contradictions {contradictions}, wanted 0")
    return 1 if contradictions else 0


Options = Mapping[str, Any]
Row = tuple[str, str, str, float | None, str, str]


def plan_gke() -> Iterator[Row]:
    """Each machine of the table, and some without GPUs."""
    from google.cloud import container_v1

    from providers.gke.options import ATTACHED_TO, FABRICS, SHAPED, GkeOptions
    from providers.gke.provider import GkeProvider
    from providers.gke.resources import WorkerPool
    from tests.fakes.gke import World
    from tests.fakes.gke_facts import ApiError

    provider = GkeProvider()
    for machine in (*SHAPED, *PLAIN_GKE, ATTACHED_TO[1]):
        ways: list[tuple[str, Options]] = [
            ("on demand", {}),
            ("spot", {"spot": True}),
            ("flex-start", {"flex_start": True}),
        ]
        ways += [("fast network", {"spot": True, "fast_network": True})] if machine in FABRICS else []
        for way, more in ways:
            gpus: Options = {"gpu_type": "t4", "num_gpus": 1} if machine == ATTACHED_TO[1] else {}
            options = {"machine_type": machine, "zone": "us-central1-a", "project": "p", **gpus, **more}
            price, verdict = plan(provider, options)
            contradiction = ""
            if verdict == "accepted":
                cluster = provider.new_cluster("x-2", 2, GkeOptions(**options))
                (pool,) = [item for item in provider.resources(cluster) if isinstance(item, WorkerPool)]
                try:
                    World().check_machine(container_v1.NodePool(pool.request()))
                except ApiError as error:
                    contradiction = f"   BUT THE DOUBLE: {error}"
            yield "gke", machine, way, price, verdict, contradiction


def plan_eks() -> Iterator[Row]:
    """Each machine of the table, with and without its fast network cards."""
    from providers.eks.options import GPU_MACHINES
    from providers.eks.provider import EksProvider

    for machine, facts in GPU_MACHINES.items():
        ways: list[tuple[str, Options]] = [("on demand", {}), ("spot", {"spot": True})]
        ways += [("EFA", {"efa": True})] if facts.efa else []
        for way, more in ways:
            options = {"machine_type": machine, "region": "us-east-1", **more}
            yield ("eks", machine, way, *plan(EksProvider(), options), "")


def plan_aks() -> Iterator[Row]:
    """Each machine of the table, on demand, as spot and close together."""
    from providers.aks.options import MACHINES, AksOptions
    from providers.aks.provider import AksProvider
    from providers.aks.resources import WorkerPool
    from tests.fakes.azure_arm import World
    from tests.fakes.azure_facts import SIZES
    from tests.fakes.azure_rules import ApiError

    provider = AksProvider()
    subscription = "00000000-0000-0000-0000-000000000000"
    for machine in MACHINES:
        for way, more in (("on demand", {}), ("spot", {"spot": True}), ("close", {"compact_placement": True})):
            options: Options = {"machine_type": machine, "region": "eastus", "subscription": subscription, **more}
            price, verdict = plan(provider, options)
            contradiction = ""
            if verdict == "accepted" and machine in SIZES:
                cluster = provider.new_cluster("x-2", 2, AksOptions(**options))
                (pool,) = [item for item in provider.resources(cluster) if isinstance(item, WorkerPool)]
                try:
                    World().check_pool("workers", pool.request()["properties"], "eastus")
                except ApiError as error:
                    contradiction = f"   BUT THE DOUBLE: {error}"
            yield "aks", machine, way, price, verdict, contradiction


def plan(provider: Any, options: Options) -> tuple[float | None, str]:
    """The price of a cluster of two, and "accepted" or why it is refused."""
    from mlbench_cli.clusters.manage import CreationRequest, sketch_cluster
    from mlbench_cli.errors import MlbenchError

    try:
        planned = sketch_cluster(CreationRequest(provider, 2, "x", options))
    except MlbenchError as error:
        return None, f"refused: {error.message}"
    assert planned is not None
    return planned.plan.total, "accepted"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
