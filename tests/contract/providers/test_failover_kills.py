"""Killed while the workers move to the next zone: the next command goes on in it, and nothing is left at the end.

Boundaries: the requests around that for workers in the first zone, which has none, around the removal of what has come,
and around that for workers in the next zone. `benchmarks/leaks.py` kills at every request of such a creation on GKE.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mlbench_cli.clusters.zone_failover import create_in_first_zone
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.lifecycle import up
from tests import NIGHTLY
from tests.contract.providers.eks_world import PATIENCE, Case, forget, together, warm
from tests.fakes.aws_server import AwsClient
from tests.fakes.gke import Google
from tests.fakes.zygote import Zygote

FIRST, SECOND = "europe-west1-b", "europe-west1-d"
CREATE = ("create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--zones", f"{FIRST},{SECOND}", "--yes")
DELETE = ("delete-cluster", "gke", "rel-2", "--yes")
ZONES = ("eu-west-1a", "eu-west-1b")


def list_boundaries(log: Sequence[str], create: str, delete: str) -> list[int]:
    """The numbers of the requests around each change of the workers: both creations, and the removal between them."""
    first, last = (number for number, line in enumerate(log) if line.startswith(create))
    (removal,) = (number for number, line in enumerate(log) if line.startswith(delete))
    assert first < removal < last
    return sorted({first, first + 1, removal - 1, removal, removal + 1, last - 1, last})


# --- GKE --------------------------------------------------------------------------------------------------------------


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


# --- EKS --------------------------------------------------------------------------------------------------------------


def make_in_first_zone(name: str, home: Path) -> Cluster:
    home.mkdir(parents=True, exist_ok=True)
    provider, store = EksProvider(), Store(home)
    cluster = provider.new_cluster(name, 2, EksOptions(machine_type="m5.large", zones=",".join(ZONES)))
    known = store.find_cluster(cluster.identity)

    def create(placed: Cluster) -> Cluster:
        return up(placed, provider.resources(placed), store, patience=PATIENCE)

    return create_in_first_zone(provider, cluster, known, create, lambda text: None)


@pytest.fixture
def scarce(aws_server: AwsClient) -> Iterator[AwsClient]:
    """A double whose first zone has no such machines."""
    aws = aws_server.copy()
    forget()
    before = dict(os.environ)
    try:
        warm(aws)
        offered = [["m5.large", zone] for zone in ZONES]
        aws.rules(no_capacity=[f"m5.large@{ZONES[0]}"], offered=offered)
        yield aws
    finally:
        aws.stop()
        os.environ.clear()
        os.environ.update(before)
        forget()


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_on_eks_the_next_client_goes_on_in_the_next_zone(scarce: AwsClient, tmp_path: Path, stride: int) -> None:
    reference = Case(scarce, tmp_path, "ref-2")
    work = [lambda: reference.start_process(lambda: make_in_first_zone("ref-2", reference.folder / "home"))]
    assert together(work) == [0], reference.error
    create, delete = "cloudformation:CreateStack mlbench-ref-2-workers", "cloudformation:DeleteStack"
    window = list_boundaries(reference.log, create, delete)[::stride]
    cases = [Case(scarce, tmp_path, f"kill{number}-2") for number in window]
    killed = together([start(case, number) for case, number in zip(cases, window, strict=True)])
    assert set(killed) <= {-9, 0}, killed  # on a busy machine fewer questions are asked
    assert -9 in killed
    for case in cases:
        scarce.calm(case.name)
    assert together([start(case, None) for case in cases]) == [0] * len(cases)
    for case in cases:
        record = Store(case.folder / "home").cluster(case.name)
        assert (record.state, ClusterDetails.of(record).location) == ("ready", ZONES[1])
    assert together([case.removing for case in cases]) == [0] * len(cases)
    assert {case.name: case.list_left() for case in cases if case.list_left()} == {}


def start(case: Case, kill_at: int | None) -> Callable[[], int]:
    """What starts the process of a case, which is killed at a request."""
    return lambda: case.start_process(lambda: make_in_first_zone(case.name, case.folder / "home"), kill_at)
