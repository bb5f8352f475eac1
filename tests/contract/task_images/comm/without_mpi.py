"""A program for test_mpi.py: a rank by MPI where mpi4py is not installed."""

import sys

from task_images.harness.distributed import open_world
from task_images.harness.entry import run

if __name__ == "__main__":
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    run(lambda contract: open_world(contract))
