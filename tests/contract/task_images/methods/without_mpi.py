"""A program for test_mpi.py: a rank by MPI where mpi4py is not installed."""

import sys

from task_images.contract import Contract
from task_images.run import run
from task_images.world import open_world


def main(contract: Contract) -> None:
    open_world(contract)


if __name__ == "__main__":
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    run(main)
