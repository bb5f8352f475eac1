"""The backend mpi for stock torch: a process group over mpi4py and MPICH wheels, without compiling anything.

    from task_images.mpi import group as mpi
    dist.init_process_group(mpi.register(), ...)      # as with any other backend, e.g. under torchrun

torch reserves the name "mpi" for builds against an MPI library, hence another internal name. Ranks need no mpiexec (see
`pmi`); ranks that a launcher started as MPI ranks keep its numbering.

A group has the collectives and messages of trainings, not all that torch has. Collectives run in the caller's thread
and are done when the call returns, also asynchronous ones: none overlaps with computation. Messages between two ranks
use MPI's non-blocking calls.

MPI cannot reduce half precision, which is summed as float32. GPU tensors are copied through host memory. Both are
reported as detours.

MPI collectives do not fail on the other ranks when a rank dies: the launcher must end them, as all engines of mlbench
do.
"""

import atexit
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

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
    mpi = _mpi()
    ranks = list(options.global_ranks_in_group)
    if ranks:
        members = mpi.COMM_WORLD.Get_group().Incl(ranks)
        # Different ranks may create groups concurrently: the tag tells them apart.
        communicator = mpi.COMM_WORLD.Create_group(members, tag=sum(options.group_id.encode()) % 32768)
        return MpiGroup(mpi, communicator)
    _start(mpi, options.store, options.group_rank, options.group_size)
    return MpiGroup(mpi, mpi.COMM_WORLD.Dup(), _part)


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


# --- one communicator as a process group ------------------------------------------------------------------------------

# Types that MPI cannot reduce, and the type used instead.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_SUM = dist.ReduceOp.SUM
_OPS = {
    _SUM: "SUM",
    dist.ReduceOp.AVG: "SUM",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.MAX: "MAX",
}


class MpiWork(dist.Work):
    """A collective, which is done, or a message in flight. `arrive` copies received data to its destination."""

    def __init__(self, tensors: Any, request: Any = None, arrive: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._tensors, self._request, self._arrive = tensors, request, arrive

    def wait(self, timeout: Any = None) -> bool:
        """Wait for MPI."""
        if self._request:
            self._request.Wait()
            self._close()
        return True

    def is_completed(self) -> bool:
        """Ask MPI without waiting."""
        if self._request and self._request.Test():
            self._close()
        return not self._request

    is_success = is_completed

    def result(self) -> Any:
        """The tensors of the call."""
        return self._tensors

    def get_future(self) -> Any:
        """Wait, then return a completed future."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def _close(self) -> None:
        self._request = None
        if self._arrive:
            self._arrive()


class MpiGroup(dist.ProcessGroup):
    """One communicator as a process group. Methods have the names and argument orders with which torch calls them."""

    def __init__(self, mpi: Any, communicator: Any, after_shutdown: Callable[[], None] | None = None) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._comm = communicator
        self._after_shutdown = after_shutdown
        self._types = {kind: getattr(mpi, name) for kind, name in _TYPES.items()}
        self._ops = {op: getattr(mpi, name) for op, name in _OPS.items()}
        self._address, self._byte, self._in_place = mpi.buffer.fromaddress, mpi.BYTE, mpi.IN_PLACE
        self._done = MpiWork([])

    def name(self) -> str:
        """The backend's name, read by torch."""
        return "mpi"

    getBackendName = name

    # torch keeps a group's name and the backends per device in C++, where subclasses cannot set them.

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._group_name = name

    @property
    def group_name(self) -> Any:
        """The name that torch assigned to this group."""
        return self._group_name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """Free the communicator; a second call does nothing."""
        if self._comm:
            self._comm.Free()
            self._comm = None
            if self._after_shutdown:
                self._after_shutdown()

    abort = shutdown

    # -- reductions: typed, using MPI's operations

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Reduce each tensor over ranks, in place."""
        # The most common call first: at small sizes, each access to `opts` or the tensor is measurable against MPI.
        if opts is not None and not opts.asyncOp and opts.reduceOp == _SUM and type(tensors) is list:
            tensor = tensors[0]
            if len(tensors) == 1 and tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in self._types:
                self._comm.Allreduce(self._in_place, self._typed(tensor), self._ops[_SUM])
                return self._done
        op, is_mean = self._reduction(opts)
        for tensor in _as_list(tensors):
            buffer = self._reducible(tensor)
            self._comm.Allreduce(self._in_place, self._typed(buffer), op)
            self._return(buffer, tensor, is_mean)
        return MpiWork(tensors)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Reduce each tensor to the root `opts.rootRank`; other ranks keep theirs."""
        op, is_mean = self._reduction(opts)
        for tensor in _as_list(tensors):
            buffer = self._reducible(tensor)
            if self.rank() == opts.rootRank:
                self._comm.Reduce(self._in_place, self._typed(buffer), op, opts.rootRank)
                self._return(buffer, tensor, is_mean)
            else:
                self._comm.Reduce(self._typed(buffer), None, op, opts.rootRank)
        return MpiWork(tensors)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op, is_mean = self._reduction(opts)
        send = self._reducible(input)
        is_usable = output.dtype is send.dtype and output.is_cpu and output.is_contiguous()
        receive = output if is_usable else torch.empty(output.shape, dtype=send.dtype)
        send = self._apart(send, receive)
        self._comm.Reduce_scatter_block(self._typed(send), self._typed(receive), op)
        self._return(receive, output, is_mean)
        return MpiWork([output])

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    # -- transfers: bytes of any type

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Overwrite each tensor with the root's."""
        for tensor in _as_list(tensors):
            buffer = self._movable(tensor)
            self._comm.Bcast(self._bytes(buffer), opts.rootRank)
            self._return(buffer, tensor)
        return MpiWork(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Gather each input of all ranks into the outputs [ranks]."""
        nested = [outputs] if isinstance(outputs[0], Tensor) else outputs
        for parts, tensor in zip(nested, _as_list(inputs), strict=True):
            send = self._movable(tensor)  # named, because nothing else references it if it is a copy
            receive = torch.empty((len(parts), *tensor.shape), dtype=tensor.dtype)
            self._comm.Allgather(self._bytes(send), self._bytes(receive))
            for part, row in zip(parts, receive, strict=True):
                part.detach().copy_(row)
        return MpiWork(outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        receive = self._movable(output, copy=False)
        send = self._apart(self._movable(input), receive)
        self._comm.Allgather(self._bytes(send), self._bytes(receive))
        self._return(receive, output)
        return MpiWork([output])

    all_gather_single = _allgather_base

    def barrier(self, opts: Any = None, *_: Any) -> dist.Work:
        """Wait for all ranks."""
        self._comm.Barrier()
        return MpiWork([])

    # -- point to point

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        """Send one tensor to a rank of this group."""
        buffer = self._movable(tensors[0])
        return MpiWork([buffer], self._comm.Isend(self._bytes(buffer), dstRank, tag))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from a rank of this group."""
        [tensor] = tensors
        buffer = self._movable(tensor, copy=False)
        request = self._comm.Irecv(self._bytes(buffer), srcRank, tag)
        return MpiWork(tensors, request, lambda: self._return(buffer, tensor))

    # -- implementation

    def _reduction(self, opts: Any) -> tuple[Any, bool]:
        """MPI's operation, and whether to divide its result by the number of ranks."""
        op = _SUM if opts is None else opts.reduceOp.op
        try:
            return self._ops[op], op == dist.ReduceOp.AVG
        except KeyError:
            raise ValueError(f"the backend mpi has no reduction {op}") from None

    def _reducible(self, tensor: Tensor) -> Tensor:
        """The tensor itself if MPI can reduce it in place, else a copy in host memory with a type that MPI supports."""
        kind = _WIDER.get(tensor.dtype, tensor.dtype)
        if kind not in self._types:
            raise ValueError(f"the backend mpi cannot reduce tensors of type {kind}")
        if kind is not tensor.dtype:
            _detours.add(f"{tensor.dtype} reduced as {kind}".replace("torch.", ""))
            return self._host_copy(tensor, kind)
        return self._movable(tensor)

    def _movable(self, tensor: Tensor, copy: bool = True) -> Tensor:
        """The tensor itself if it is contiguous in host memory, else a copy there (or an empty buffer)."""
        if tensor.is_cpu and tensor.is_contiguous():
            return tensor
        return self._host_copy(tensor, tensor.dtype) if copy else torch.empty(tensor.shape, dtype=tensor.dtype)

    def _host_copy(self, tensor: Tensor, kind: torch.dtype) -> Tensor:
        if not tensor.is_cpu:
            _detours.add("GPU tensors copied through host memory")
        return tensor.detach().to("cpu", kind, copy=True, memory_format=torch.contiguous_format)

    def _apart(self, send: Tensor, receive: Tensor) -> Tensor:
        """`send`, or a copy if it overlaps with `receive`, which torch allows and MPI does not."""
        start, end = receive.data_ptr(), receive.data_ptr() + receive.nbytes
        if not (send.data_ptr() < end and start < send.data_ptr() + send.nbytes):
            return send
        _detours.add("input copied if it shares memory with the output")
        return send.clone()

    def _return(self, buffer: Tensor, tensor: Tensor, is_mean: bool = False) -> None:
        """Divide by the number of ranks if a mean is wanted, and copy the buffer back if it is a copy."""
        if is_mean:
            buffer = buffer.detach()
            buffer.div_(self.size(), rounding_mode=None if buffer.is_floating_point() else "trunc")
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)

    def _typed(self, tensor: Tensor) -> list[Any]:
        return [self._address(tensor.data_ptr(), tensor.nbytes), self._types[tensor.dtype]]

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [self._address(tensor.data_ptr(), tensor.nbytes), self._byte]


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
