"""A program for test_collectives.py: meets the others or gives up soon."""

from task_images.contract import Contract
from task_images.harness.distributed import open_world
from task_images.harness.entry import run


def main(contract: Contract) -> None:
    open_world(contract, rendezvous_seconds=4).close()


if __name__ == "__main__":
    run(main)
