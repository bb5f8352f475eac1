"""How much longer making and removing a cluster takes than the cloud's own waits, on a double whose waits are known.

Prints the ratio of the whole to the sum of the waits that cannot be at the same time; the budget is 1.05.
"""

import os
import tempfile
import time
from pathlib import Path

WAIT = 5.0  # seconds of each operation: cluster, node pool, removal
BUDGET = 1.05


def main() -> None:
    from tests.fakes.gke import Google

    with tempfile.TemporaryDirectory() as folder:
        google = Google(Path(folder) / "google")
        os.environ.update(google.environment, MLBENCH_HOME=str(Path(folder) / "home"))
        google.reset(seconds=WAIT, looks=1)
        try:
            measure(Path(folder) / "home")
        finally:
            google.close()


def measure(home: Path) -> None:
    from mlbench_cli.store import Store
    from providers.gke import GkeOptions, GkeProvider
    from providers.lifecycle import down, up

    home.mkdir()
    provider, store = GkeProvider(), Store(home)
    cluster = provider.describe("rel-2", 2, GkeOptions(gpu_type="l4", spot=True))
    began = time.monotonic()
    made = up(cluster, provider.resources(cluster), store)
    show("create", time.monotonic() - began, 2 * WAIT)
    began = time.monotonic()
    down(made, provider.resources(made), store)
    show("delete", time.monotonic() - began, WAIT)


def show(what: str, seconds: float, waits: float) -> None:
    verdict = "within" if seconds <= BUDGET * waits else "OVER"
    print(f"{what}: {seconds:.2f} s for waits of {waits:.2f} s, ratio {seconds / waits:.3f}, {verdict} {BUDGET}")


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
