"""Killed while the workers move to the next zone: the next command goes on in it, and nothing is left at the end.

Boundaries: the requests around that for workers in the first zone, which has none, around the removal of what has come,
and around that for workers in the next zone. `benchmarks/leaks.py` kills at every request of such a creation on GKE.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import NIGHTLY
from tests.fakes.gke import Google
from tests.fakes.zygote import Zygote

FIRST, SECOND = "europe-west1-b", "europe-west1-d"
CREATE = ("create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--zones", f"{FIRST},{SECOND}", "--yes")
DELETE = ("delete-cluster", "gke", "rel-2", "--yes")


def list_boundaries(log: Sequence[str], create: str, delete: str) -> list[int]:
    """The numbers of the requests around each change of the workers: both creations, and the removal between them."""
    first, last = (number for number, line in enumerate(log) if line.startswith(create))
    (removal,) = (number for number, line in enumerate(log) if line.startswith(delete))
    assert first < removal < last
    return sorted({first, first + 1, removal - 1, removal, removal + 1, last - 1, last})


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_on_gke_the_next_client_goes_on_in_the_next_zone(
    google: Google, zygote: Zygote, tmp_path: Path, stride: int
) -> None:
    def client(words: Sequence[str], home: str) -> tuple[int, str]:
        assert google.world.pidfile is not None
        environment = {**google.environment, "MLBENCH_HOME": str(tmp_path / home)}
        return zygote.run(list(words), environment, google.world.pidfile)

    google.reset(empty_zones={FIRST})
    assert client(CREATE, "calm")[0] == 0
    for number in list_boundaries(google.world.log, "CreateNodePool", "DeleteNodePool")[::stride]:
        world = google.reset(empty_zones={FIRST}, trouble={number: "kill-after"})
        line = f"request {number}"
        assert client(CREATE, f"home-{number}")[0] == -9, line
        world.trouble = {}
        code, said = client(CREATE, f"home-{number}")
        assert code == 0, (line, said)
        pools = [(pool.name, list(pool.locations)) for pool in world.find_cluster("rel-2").node_pools]
        assert pools == [("system", []), ("workers", [SECOND])], line
        assert client(DELETE, f"empty-{number}")[0] == 0
        assert world.clusters == {}, line
