"""Workers on GKE from capacity that is scarce: reservations and their blocks."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.gke import World

Command = Callable[..., Any]
PATH = "projects/demo-project/reservations/mine"
WORDS = ("-t", "a4-highgpu-8g", "--yes")


def create(command: Command, *words: str, nodes: int = 2) -> Any:
    return command("create-cluster", "gke", str(nodes), "rel", *WORDS, *words)


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
        ("h100", 2, 2, "is of a3-highgpu-8g, not a4-highgpu-8g"),
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
