"""How much longer making and removing a cluster takes than the cloud's own waits, on doubles whose waits are known.

Prints, for each cloud, the ratio of the whole to the sum of the waits that cannot be at the same time (the critical
path); the budget is 1.05. Repeated, the least of each counts: the rest is what else the machine was doing.
`--charts FOLDER` draws the last pass of each.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGET = 1.05
# Waits one after the other. GKE: cluster, node pool; the cluster takes its pools along. EKS: stack, control plane,
# add-ons, node groups, DNS; node groups, control plane, stack.
CRITICAL = {"gke": (2, 1), "eks": (5, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("providers", nargs="*", default=list(CRITICAL), help="default: gke eks")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds of each of the cloud's waits")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--charts", type=Path)
    given = parser.parse_args()
    worst = 0.0
    print(f"{'cloud':<6}{'what':<8}{'seconds':>9}{'waits':>9}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        passes = {
            name: [
                measure_life_cycle(name, given.wait, Path(folder) / f"{name}{number}") for number in range(given.repeat)
            ]
            for name in given.providers
        }
        for name, measured in passes.items():
            for place, what in enumerate(("create", "delete")):
                seconds = min(times[place] for times in measured)
                waits = CRITICAL[name][place] * given.wait
                worst = max(worst, seconds / waits)
                print(f"{name:<6}{what:<8}{seconds:>9.2f}{waits:>9.2f}{seconds / waits:>8.3f}")
        if given.charts:
            _draw([Path(folder) / f"{name}{given.repeat - 1}" for name in given.providers], given.charts)
    print(f"worst {worst:.3f}, wanted at most {BUDGET}: {'reached' if worst <= BUDGET else 'NOT REACHED'}")


def measure_life_cycle(name: str, wait: float, home: Path) -> tuple[float, float]:
    """Seconds that making and removing took."""
    from mlbench_cli.storage.store import Store
    from providers.lifecycle import down, up

    home.mkdir()
    with {"gke": _gke, "eks": _eks}[name](wait, home) as (provider, options):
        store = Store(home)
        cluster = provider.new_cluster(f"{name}-2", 2, options)
        began = time.monotonic()
        made = up(cluster, provider.resources(cluster), store)
        created = time.monotonic() - began
        began = time.monotonic()
        down(made, provider.resources(made), store)
        return created, time.monotonic() - began


@contextmanager
def _gke(wait: float, home: Path) -> Iterator[tuple[Any, Any]]:
    from providers.gke import GkeProvider, api
    from providers.gke.options import GkeOptions
    from tests.fakes.gke import Google

    google = Google(home / "google")
    os.environ.update(google.environment, MLBENCH_HOME=str(home))
    for cached in (api.client, api.credentials, api.token):
        cached.cache_clear()
    google.reset(seconds=wait, looks=1)
    try:
        yield GkeProvider(), GkeOptions(gpu_type="l4", spot=True)
    finally:
        google.close()


@contextmanager
def _eks(wait: float, home: Path) -> Iterator[tuple[Any, Any]]:
    from providers.eks import EksProvider
    from providers.eks.options import EksOptions
    from tests.contract.providers.eks_world import forget
    from tests.fakes.aws_server import AwsServer

    aws = AwsServer()
    aws.become("bench")
    forget()  # what an earlier pass has known
    warm_up_double()
    forget()
    aws.rules(seconds=wait)
    try:
        yield EksProvider(), EksOptions(machine_type="g4dn.xlarge")
    finally:
        aws.stop()


def warm_up_double() -> None:
    """The double itself reads a lot when it is asked for the first time; that is none of mlbench's time."""
    from tests.contract.providers.eks_world import make, remove

    with tempfile.TemporaryDirectory() as folder:
        make("warm-1", Path(folder) / "home", nodes=1)
        remove("warm-1", Path(folder) / "empty")


def _draw(homes: list[Path], folder: Path) -> None:
    from mlbench_cli.results.figures import provisioning
    from mlbench_cli.storage.store import Store
    from providers.lifecycle import find_deleted_cluster

    found = [find_deleted_cluster(Store(home), f"{home.name[:3]}-2") for home in homes]
    for path in provisioning.draw([cluster for cluster in found if cluster is not None], folder):
        print(path)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
