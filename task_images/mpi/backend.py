"""The backend mpi for stock torch: a process group over mpi4py and MPICH wheels, without compiling anything.

    from task_images.mpi import backend as mpi
    dist.init_process_group(mpi.register(), ...)      # as with any other backend, e.g. under torchrun

torch reserves the name "mpi" for builds against an MPI library, hence another internal name. Ranks need no mpiexec (see
`pmi`); ranks that a launcher started as MPI ranks keep its numbering.

MPI collectives do not fail on the other ranks when a rank dies: the launcher must end them, as all engines of mlbench
do.
"""

import atexit
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from task_images.contract import EnvironmentUnfitError
from task_images.mpi.pmi import Manager, forget_shared_memory, is_launched, library

NAME = "mlbench_mpi"
INSTALL = "pip install mpi4py mpich"

_facts: dict[str, object] = {}
_detours: set[str] = set()
_manager: Manager | None = None
_left_in_peace = False


def register() -> str:
    """Register the backend with torch, and return its name.

    Raises EnvironmentUnfitError if the wheels are missing or no MPI library can be loaded.
    """
    _mpi()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _open_group, extended_api=True, devices=["cpu", "cuda"])
    return NAME


def facts() -> dict[str, Any]:
    """Facts for the result: `library`, `launcher`, and `detours`, the conversions and copies so far."""
    return {**_facts, "detours": sorted(_detours)}


def _mpi() -> Any:
    """mpi4py's module MPI, with the library loaded but not initialized."""
    if find_spec("mpi4py") is None:
        raise EnvironmentUnfitError("the backend mpi needs the packages mpi4py and mpich; mpi4py is missing", INSTALL)
    mpi4py = import_module("mpi4py")
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        return import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
    # mpi4py searches the interpreter's prefix, but Debian's pip installs into /usr/local.
    path = _library_of_the_wheel()
    if path is None or "MPI4PY_LIBMPI" in os.environ:
        raise EnvironmentUnfitError(f"mpi4py finds no MPI library: {why}", INSTALL)
    os.environ["MPI4PY_LIBMPI"] = path
    try:
        return import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise EnvironmentUnfitError(f"mpi4py cannot load {path}: {why}", INSTALL) from None


def _library_of_the_wheel() -> str | None:
    """The path of the library in the package mpich; None if it is not installed."""
    try:
        files = distribution("mpich").files or ()
    except PackageNotFoundError:
        return None
    return next((str(Path(str(file.locate())).resolve()) for file in files if file.name == "libmpi.so.12"), None)


def _open_group(options: Any, _: Any) -> Any:
    """Called by torch to create a process group. `options` have store, group_rank, group_size,
    global_ranks_in_group."""
    from task_images.mpi.group import MpiGroup

    mpi = _mpi()
    ranks = list(options.global_ranks_in_group)
    if ranks:
        members = mpi.COMM_WORLD.Get_group().Incl(ranks)
        # Different ranks may create groups concurrently: the tag tells them apart.
        communicator = mpi.COMM_WORLD.Create_group(members, tag=sum(options.group_id.encode()) % 32768)
        return MpiGroup(mpi, communicator, _detours)
    _start(mpi, options.store, options.group_rank, options.group_size)
    return MpiGroup(mpi, mpi.COMM_WORLD.Dup(), _detours, _part)


def _start(mpi: Any, store: Any, rank: int, size: int) -> None:
    global _left_in_peace, _manager
    version = mpi.Get_library_version().splitlines()[0].strip("\0 ")
    if not mpi.Is_initialized():
        if is_launched():
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
            mpi.COMM_WORLD.Barrier()
            forget_shared_memory()
        elif version.startswith("Open MPI"):
            raise EnvironmentUnfitError(
                f"{version} needs mpirun to start", f"{INSTALL}, or start the task with mpirun."
            )
        else:
            _manager = Manager(store, rank, size)
            _manager.start_mpi()
        _facts.update(library=" ".join(version.split()), launcher="external" if is_launched() else "none")
        atexit.register(_finalize)
    world = mpi.COMM_WORLD
    world.Set_errhandler(mpi.ERRORS_RETURN)
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        raise EnvironmentUnfitError(
            f"MPI says rank {world.Get_rank()} of {world.Get_size()}, the run says rank {rank} of {size}",
            "Start the task without mpirun, or with as many ranks as the run has.",
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise EnvironmentUnfitError(f"{version} was started without support for threads")
    _left_in_peace = False


def _part() -> None:
    global _left_in_peace
    _left_in_peace = True


def _finalize() -> None:
    # MPI_Finalize waits for all ranks, which will not arrive if this one exits because of an error.
    if not _left_in_peace:
        return
    if _manager:
        _manager.end_mpi()
    else:
        library().MPI_Finalize()
