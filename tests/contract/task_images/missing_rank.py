"""A program for test_collectives.py: meets the others or gives up soon."""

from task_images.contract import Contract
from task_images.run import run
from task_images.world import open_world


def main(contract: Contract) -> None:
    open_world(contract, rendezvous_seconds=4).close()


if __name__ == "__main__":
    run(main)
