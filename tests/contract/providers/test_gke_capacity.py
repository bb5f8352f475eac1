"""Workers on GKE from capacity that is scarce: reservations and their blocks, zones tried one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store
from tests.fakes.gke import World

Command = Callable[..., Any]
PATH = "projects/demo-project/reservations/mine"
BOOKING = ("PodTemplate", "ProvisioningRequest")
WORDS = ("-t", "a4-highgpu-8g", "--yes")


def create(command: Command, *words: str, nodes: int = 2) -> Any:
    return command("create-cluster", "gke", str(nodes), "rel", *WORDS, *words)


def render_run(cluster: str, workers: int = 2, **more: Any) -> Sequence[Any]:
    """The objects of a run of all workers on the cluster, as its record has it."""
    request = Request(name="r", workers=(workers,), task="digits_resnet", registry="ghcr.io/me", gpu=True, **more)
    (spec,) = resolve(request, Store().cluster(cluster))
    return manifests(spec, "default")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("mine", "mine"),
        (PATH, PATH),
        (
            "mine/reservationBlocks/mine-block-1",
            "projects/demo-project/reservations/mine/reservationBlocks/mine-block-1",
        ),
    ],
)
def test_workers_come_from_a_reservation_or_one_of_its_blocks(
    command: Command, gke_world: World, given: str, asked: str
) -> None:
    gke_world.quotas = {}
    gke_world.reserve("mine", "a4-highgpu-8g", 4)
    result = create(command, "--reservation", given)
    assert result.code == 0, result.err
    affinity = gke_world.find_cluster("rel-2").node_pools[1].config.reservation_affinity
    assert affinity.consume_reservation_type.name == "SPECIFIC_RESERVATION"
    assert (affinity.key, list(affinity.values)) == ("compute.googleapis.com/reservation-name", [asked])


@pytest.mark.parametrize(
    ("given", "nodes", "code", "says"),
    [
        ("Mine!", 2, 2, "is not the name of a reservation"),
        ("mine/blocks/b", 2, 2, "is not the name of a reservation"),
        ("other", 2, 2, "There is no reservation other in europe-west1-b"),
        ("mine/reservationBlocks/b", 2, 2, "There is no block b of the reservation mine"),
        ("h100", 2, 2, "is for a3-highgpu-8g, not a4-highgpu-8g"),
        ("mine", 4, 5, "The reservation mine has 3 machines left in europe-west1-b, 4 are needed"),
        ("mine/reservationBlocks/mine-block-1", 3, 5, "The block mine-block-1 of the reservation mine has 2 machines"),
    ],
)
def test_a_reservation_that_cannot_serve_is_refused_before_money_is_spent(
    command: Command, gke_world: World, given: str, nodes: int, code: int, says: str
) -> None:
    gke_world.quotas = {}
    gke_world.reserve("mine", "a4-highgpu-8g", 4, used=1)
    gke_world.reserve("h100", "a3-highgpu-8g", 4)
    result = create(command, "--reservation", given, nodes=nodes)
    assert result.code == code, result.err
    assert says in result.err
    assert gke_world.clusters == {}


FIRST, SECOND = "europe-west1-b", "europe-west1-d"
ZONES = ("-t", "n1-standard-4", "--zones", f"{FIRST},{SECOND}")


def test_the_next_zone_is_tried_and_what_the_first_left_is_removed(command: Command, gke_world: World) -> None:
    gke_world.empty_zones = {FIRST}
    result = create(command, *ZONES)
    assert result.code == 0, result.err
    assert f"then trying {SECOND}" in result.err
    made = gke_world.find_cluster("rel-2")
    pools = [(pool.name, list(pool.locations)) for pool in made.node_pools]
    assert pools == [("system", []), ("workers", [SECOND])]  # its own: the cluster's zone
    assert [line.split()[0] for line in gke_world.log if line.split()[0] in ("CreateNodePool", "DeleteNodePool")] == [
        "CreateNodePool", "DeleteNodePool", "CreateNodePool",
    ]  # fmt: skip
    record = Store().cluster("rel-2")
    assert (record.location, record.details["location"]) == (FIRST, SECOND)
    again = create(command, *ZONES)  # what exists is adopted, in whatever zone it is
    assert again.code == 0, again.err
    assert len([line for line in gke_world.log if line.startswith("CreateNodePool")]) == 2
    assert Store().cluster("rel-2").details["location"] == SECOND
    assert command("delete-cluster", "gke", "rel-2", "--yes").code == 0
    assert gke_world.clusters == {}


def test_without_machines_in_any_zone_all_are_named_and_the_command_can_be_repeated(
    command: Command, gke_world: World
) -> None:
    gke_world.empty_zones = {FIRST, SECOND}
    result = create(command, *ZONES)
    assert result.code == 5
    assert f"None of the zones {FIRST}, {SECOND} has the machines" in result.err
    assert "GKE cluster rel-2 (ready)" in result.err
    gke_world.empty_zones = set()
    assert create(command, *ZONES).code == 0
    assert len(gke_world.find_cluster("rel-2").node_pools) == 2


def test_runs_book_all_flex_start_machines_at_once(command: Command, gke_world: World) -> None:
    gke_world.quotas = {}
    assert create(command, "-t", "g2-standard-8", "--flex-start").code == 0
    pool = gke_world.find_cluster("rel-2").node_pools[1]
    assert (pool.config.flex_start, pool.queued_provisioning.enabled, pool.initial_node_count) == (True, True, 0)
    assert pool.autoscaling.total_max_node_count == 2
    assert pool.config.reservation_affinity.consume_reservation_type.name == "NO_RESERVATION"
    job, *others = render_run("rel-2")
    template, request = (next(item for item in others if item["kind"] == kind) for kind in BOOKING)
    pod = job["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"mlbench-role": "worker", "cloud.google.com/gke-flex-start": "true"}
    taint = {"key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    assert taint in pod["spec"]["tolerations"]
    assert pod["metadata"]["annotations"]["autoscaling.x-k8s.io/consume-provisioning-request"] == "r-2"
    assert request["spec"]["provisioningClassName"] == "queued-provisioning.gke.io"
    assert request["spec"]["podSets"] == [{"count": 2, "podTemplateRef": {"name": template["metadata"]["name"]}}]
    for field in ("nodeSelector", "tolerations", "affinity"):  # what is booked is what the pods will ask for
        assert template["template"]["spec"][field] == pod["spec"][field]
    (main,), (booked,) = pod["spec"]["containers"], template["template"]["spec"]["containers"]
    assert booked["resources"] == main["resources"]


def test_a_queue_of_kueue_books_by_itself(command: Command, gke_world: World) -> None:
    gke_world.quotas = {}
    assert create(command, "-t", "g2-standard-8", "--flex-start").code == 0
    job, *others = render_run("rel-2", queue="mine")
    assert not {item["kind"] for item in others} & set(BOOKING)
    assert int(job["metadata"]["annotations"]["provreq.kueue.x-k8s.io/maxRunDurationSeconds"]) > 0
    assert not any(key.startswith("autoscaling.x-k8s.io") for key in job["spec"]["template"]["metadata"]["annotations"])


def test_one_flex_start_machine_is_not_queued_for(command: Command, gke_world: World) -> None:
    gke_world.quotas = {}
    assert create(command, "-t", "g2-standard-8", "--flex-start", nodes=1).code == 0
    assert not gke_world.find_cluster("rel-1").node_pools[1].queued_provisioning.enabled
    job, *others = render_run("rel-1", workers=1)
    assert not {item["kind"] for item in others} & set(BOOKING)
    assert job["spec"]["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-flex-start"] == "true"


def test_flex_start_takes_a_compact_placement_of_few_families(command: Command, gke_world: World) -> None:
    gke_world.quotas = {}
    assert create(command, "-t", "g2-standard-8", "--flex-start", "--compact-placement", "--dry-run").code == 2
    assert create(command, "--flex-start", "--compact-placement").code == 0
    assert not gke_world.find_cluster("rel-2").node_pools[1].queued_provisioning.enabled
