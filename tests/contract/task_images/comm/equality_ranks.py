"""A program for benchmarks/equality.py: torch's own engines on real ranks, a line for each case."""

from task_images.comm.methods import NATIVE, MethodError, check
from task_images.contract import Contract
from task_images.harness.distributed import open_world
from task_images.harness.entry import run
from tests.unit.task_images.comm.equality import SETTINGS, Cell, expect, find_error, list_methods, name_cell, train


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    for method in list_methods():
        if method.engine not in NATIVE:
            continue
        for name in SETTINGS:
            try:
                check(method, world.size)
            except MethodError:
                print("CELL", method.name, name, Cell.refused.value, flush=True)
                continue
            found, _ = train(world, method, name)
            error = find_error([found], [expect(method, name, world.size)[world.rank]])
            verdict = name_cell(method, name, world.max([error])[0])
            print("CELL", method.name, name, verdict.cell.value, verdict.why, flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
