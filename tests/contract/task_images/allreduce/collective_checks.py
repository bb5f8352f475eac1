"""A program for test_collective_runs.py: every collective on every rank, right, and with each fault that must show.

As a program of its own it runs these checks; as `tests.contract.task_images.allreduce.collective_checks task` the task
on the backend "faulty".
"""

import os

from task_images.allreduce.operations import COLLECTIVES, DTYPES, Buffers, make_call
from task_images.allreduce.task import in_parts, time_samples
from task_images.allreduce.task import main as task
from task_images.clock import Tracker
from task_images.contract import Contract
from task_images.run import run
from task_images.world import World, open_world
from tests.contract.task_images import faulty_group

OLD = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_to_all": "alltoall_base"}


def wrong(world: World, collective: str, place: str, dtype: str, elements: int) -> int:
    """Wrong elements over all ranks after two samples."""
    call = make_call(collective, Buffers.of(world, dtype), elements, place)
    time_samples(world, Tracker(), call, 2)
    return int(world.sum([call.wrong()])[0])


def all_of(world: World) -> list[tuple[str, str]]:
    return [
        (name, place)
        for name, kind in COLLECTIVES.items()
        for place in kind.places
        if world.size > 1 or not kind.is_pair
    ]


def right_results_pass(world: World) -> None:
    for collective, place in all_of(world):
        for dtype in DTYPES:
            for elements in in_parts([1, 3 * world.size, 120_001], world.size):
                found = wrong(world, collective, place, dtype, elements)
                assert found == 0, f"{collective} {place} {dtype} {elements}: {found} wrong"


def what_is_lost_or_changed_shows(world: World) -> None:
    for fault in ("lose", "flip"):
        for collective, place in all_of(world):
            if (collective, fault) == ("reduce", "flip"):
                continue  # rank 1 keeps nothing of a reduction to rank 0
            names = {"ping_pong": ("send", "recv"), "bidirectional": ("send", "recv")}
            name = collective.replace("_", "") if collective == "all_reduce" else OLD.get(collective, collective)
            faults = dict.fromkeys(names.get(collective, (name,)), fault)
            if fault == "flip":
                faults.pop("send", None)  # what was sent is not looked at again
            faulty_group.FAULTS.update(faults)
            found = wrong(world, collective, place, "fp32", 4 * world.size)
            faulty_group.FAULTS.clear()
            assert found > 0, f"{collective} {place}, {fault}: nothing is seen"


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60, grouped_alone=True)
    checks = [right_results_pass] if world.size == 1 else [right_results_pass, what_is_lost_or_changed_shows]
    for check in checks:
        check(world)
        print("OK", check.__name__, flush=True)
    world.close()


if __name__ == "__main__":
    faulty_group.register()
    run(task if os.environ.get("FAULTS") else main)
