"""The ranks of a run in torch: rendezvous, device, threads, collectives for bookkeeping; and how their models stay
equal.
"""

import contextlib
import ctypes
import os
import platform
import resource
import socket
import sys
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from task_images import Lazy
from task_images.contract import (
    Contract,
    DivergedError,
    EnvironmentUnfitError,
    PeerLostError,
    TaskUsageError,
    install_hint,
)
from task_images.cores import effective_cores

if TYPE_CHECKING:
    from task_images import gpu
    from task_images.mpi import group as mpi
else:
    gpu = Lazy("task_images.gpu")
    mpi = Lazy("task_images.mpi.group")

RENDEZVOUS_SECONDS = 600.0
GROUP_SECONDS = 600.0  # timeout of a collective of the process group
# Includes unpacking and converting data, by one rank per machine.
LOADING_SECONDS = 12 * 3600.0
TENSORFLOW = "grpc"  # the backend of TensorFlow's collectives


class Companion(Protocol):
    """A resource that is closed with the world, for example connections to parameter servers."""

    def close(self) -> None:
        """Close it, after success."""
        ...


class World:
    """All ranks, seen from this one. With one rank, collectives are no-ops and need no process group.

    rank, size         this process's rank, and the number of ranks
    device             the model's device: cpu or cuda:N
    backend            name of the communication backend
    threads            CPU threads of torch
    """

    def __init__(
        self, contract: Contract, device: torch.device, threads: int, grouped: bool, store: Any = None
    ) -> None:
        """`grouped`: whether there is a process group; `store`: the store of its rendezvous."""
        self.contract = contract
        self.rank = contract.rank
        self.size = contract.world_size
        self.backend = contract.backend
        self.device = device
        self.threads = threads
        self._grouped = grouped
        self._store = store
        self.companions: list[Companion] = []
        # NCCL sends only device memory; other backends send bookkeeping from host memory.
        self._small = device if contract.backend == "nccl" else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports."""
        return self.rank == 0

    @property
    def is_gloo_on_gpu(self) -> bool:
        """Whether GPU tensors are sent over gloo, which supports only plain collectives for them: point-to-point
        messages and sharded parameters would abort the process."""
        return self.device.type == "cuda" and self.backend == "gloo"

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> torch.Tensor:
        """`tensor`, reduced over all ranks in place (SUM unless `op` says otherwise)."""
        if self._grouped:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op is None else op)
        return tensor

    def sum(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over ranks, in float64. One collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over ranks, in float64. One collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Each rank's `values` (the same number on all), by rank, on every rank. One collective, in float64."""
        own = torch.tensor(list(values), dtype=torch.float64, device=self._small)
        if not self._grouped:
            return [own.tolist()]
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own)
        return [row.tolist() for row in everyone]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite `tensor` with that of rank `source`, and return it."""
        if self._grouped:
            dist.broadcast(tensor, source)
        return tensor

    def agree(self, value: float) -> float:
        """Rank 0's `value`, so that all ranks make the same decision, e.g. about a time budget."""
        return float(self.broadcast(torch.tensor([value], dtype=torch.float64, device=self._small))[0])

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self._grouped:
            return
        if self.backend == "nccl":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def await_loading(self) -> None:
        """Wait until all ranks have loaded their data; later calls return at once. Uses the rendezvous store, because
        collectives have a timeout of minutes, so that hangs are noticed. Raises PeerLostError."""
        if self._store is not None and self.size > 1:
            await_everyone(self._store, "loaded", self.rank, self.size, LOADING_SECONDS)

    def synchronize(self) -> None:
        """Wait for the device. Does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int:
        """Maximum over ranks of peak bytes: allocated on the GPU, else resident in the process. One collective."""
        is_gpu = self.device.type == "cuda"
        own = torch.cuda.max_memory_allocated(self.device) if is_gpu else resident_peak()
        return int(self.max([float(own)])[0])

    def framework_facts(self) -> dict[str, Any]:
        """Versions of torch and of its communication libraries, and the device, for the environment event."""
        cuda = self.device.type == "cuda"
        if self.backend == TENSORFLOW:
            facts = _tensorflow_version()
            return {
                "framework": "tensorflow",
                "framework_version": facts["tensorflow"],
                "device": str(self.device),
                "device_name": platform.machine(),
                "libraries": {**facts, "torch": torch.__version__},
            }
        return {
            "framework": "torch",
            "framework_version": torch.__version__,
            "framework_commit": torch.version.git_version,  # identifies gloo, which is a part of torch
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            "libraries": {**(_cuda_libraries() if cuda else {}), **self._mpi_library()},
        }

    def _mpi_library(self) -> dict[str, str]:
        library = self.backend_facts().get("library")  # only for MPI: NCCL's version is listed with CUDA's
        return {} if library is None else {"mpi": str(library)}

    def backend_facts(self) -> dict[str, object]:
        """Facts about the backend for the result: with mpi, the library and the detours of tensors."""
        if self._grouped and self.backend == "nccl":
            return gpu.describe()
        if self.backend == TENSORFLOW:
            return {"collectives": "ring over gRPC", **_tensorflow_version()}
        if not self._grouped or self.backend != "mpi":
            return {}
        return mpi.facts()

    def close(self) -> None:
        """Leave together: rank 0 hosts the rendezvous, so it must not leave first. Call only after success."""
        if self._grouped:
            self.barrier()
            for companion in self.companions:
                companion.close()
            dist.destroy_process_group()
            self._grouped = False

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        return self.all_reduce(torch.tensor(list(values), dtype=torch.float64, device=self._small), op).tolist()


def sample_gpu(world: World) -> AbstractContextManager["gpu.GpuSampler | None"]:
    """A context that samples this rank's GPU; does nothing on a CPU."""
    if world.device.type != "cuda":
        return nullcontext()
    return gpu.GpuSampler(world.device, Path(world.contract.output_dir))


def open_world(
    contract: Contract,
    rendezvous_seconds: float = RENDEZVOUS_SECONDS,
    *,
    collective_seconds: float = GROUP_SECONDS,
    grouped_alone: bool = False,
) -> World:
    """Rendezvous with the other ranks, and set up device and threads.

    Raises EnvironmentUnfitError (exit 78) if backend or device are unavailable, and PeerLostError (exit 75) with the
    ranks that did not arrive within `rendezvous_seconds`. A collective that takes `collective_seconds` fails the run. A
    single rank gets a process group only with `grouped_alone`, for measuring collectives.
    """
    device = _device(contract)
    backend = _find_backend(contract, device)
    collective_seconds = contract.collective_seconds or collective_seconds
    threads = cpu_threads(contract)
    torch.set_num_threads(threads)
    keep_freed_memory()
    store = None
    if contract.world_size > 1 or grouped_alone:
        store = _meet(contract, backend, device, rendezvous_seconds, collective_seconds)
    return World(contract, device, threads, store is not None, store)


def _device(contract: Contract) -> torch.device:
    if contract.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentUnfitError(
            "the run needs a GPU, but torch finds none here", "Run with --device cpu, or on machines with GPUs."
        )
    count = torch.cuda.device_count()
    if contract.local_world_size > count:
        raise EnvironmentUnfitError(
            f"{contract.local_world_size} ranks of this worker want a GPU each, but torch finds {count}",
            "Run with --processes-per-worker equal to the number of GPUs, or with more GPUs.",
        )
    device = torch.device("cuda", contract.local_rank)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:  # its memory is full, or another program uses it exclusively
        raise EnvironmentUnfitError(
            f"the GPU cannot be used: {str(error).splitlines()[0]}", "nvidia-smi shows which process uses it."
        ) from None
    return device


def _find_backend(contract: Contract, device: torch.device) -> str:
    """torch's name for the run's backend."""
    backend = contract.backend
    if backend == "mpi":
        return mpi.register()
    if backend == TENSORFLOW:
        _require_tensorflow()
        return "gloo"  # for bookkeeping
    if backend == "nccl" and device.type != "cuda":
        raise EnvironmentUnfitError(
            "the backend nccl needs a GPU and the run's device is cpu", "Choose --backend gloo, or --device gpu."
        )
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise EnvironmentUnfitError(
            f'this build of torch has no communication backend "{backend}"', "Choose --backend gloo."
        )
    return backend


def _require_tensorflow() -> None:
    """Raises EnvironmentUnfitError without TensorFlow."""
    if find_spec("tensorflow") is None:
        raise EnvironmentUnfitError(
            "the backend grpc needs the package tensorflow, which is missing", install_hint("tensorflow")
        )


def _tensorflow_version() -> dict[str, str]:
    """The version of TensorFlow. Builds for CPUs are a package of another name."""
    for name in ("tensorflow-cpu", "tensorflow"):
        with contextlib.suppress(PackageNotFoundError):
            return {"tensorflow": version(name)}
    return {"tensorflow": "?"}


def require_sharding(world: World) -> None:
    """Raises TaskUsageError for sharded parameters on GPUs with gloo."""
    if world.size > 1 and world.is_gloo_on_gpu:
        raise TaskUsageError(
            "sharded parameters on GPUs need the backend nccl, not gloo", "--backend nccl, with a GPU for every rank"
        )


def _cuda_libraries() -> dict[str, str]:
    """Versions of the GPU libraries of torch."""
    is_amd = torch.version.hip is not None  # torch uses NVIDIA's names for AMD's libraries
    found: dict[str, Any] = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    found["miopen" if is_amd else "cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if dist.is_nccl_available():
        found["rccl" if is_amd else "nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: str(version) for name, version in found.items() if version is not None}


def _meet(contract: Contract, backend: str, device: torch.device, seconds: float, collective_seconds: float) -> Any:
    """Create the process group of all ranks; returns the store of the rendezvous."""
    rank, size = contract.rank, contract.world_size
    os.environ.setdefault("MASTER_ADDR", contract.master_addr)
    os.environ.setdefault("MASTER_PORT", str(contract.master_port))
    prefer_loopback(contract)
    place = f"{contract.master_addr}:{contract.master_port}"
    limit = timedelta(seconds=seconds)
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=limit)))
        await_everyone(store, "here", rank, size, seconds)
    except PeerLostError:
        raise
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise PeerLostError(f"no rendezvous at {place} within {seconds:g} s: {why}") from None
    if backend == "nccl":
        gpu.log_to(Path(contract.output_dir), os.environ)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collective_seconds),
        device_id=device if contract.backend == "nccl" else None,
    )
    if backend == "gloo":
        # The call above returns once this rank has its connections. If it then failed at once, e.g. because of bad
        # input, another rank that is still connecting would fail too, and would log only lost connections.
        dist.barrier()
    return store


def cpu_threads(contract: Contract) -> int:
    """CPU threads of this rank: OMP_NUM_THREADS if the engine set it, else this rank's share of the usable CPUs."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit():
        return max(1, int(given))
    return max(1, effective_cores() // contract.local_world_size)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory for the next step. By default it returns the memory to the kernel,
    which must zero every page again: 4 % of a step of the tiny decoder. No effect with other C libraries.

    Source: mallopt(3), M_TRIM_THRESHOLD (-1), M_TOP_PAD (-2), M_MMAP_THRESHOLD (-3, 32 MiB at most).
    """
    with contextlib.suppress(AttributeError, OSError):
        choose = ctypes.CDLL(None).mallopt
        for option, size in ((-1, 1 << 30), (-2, 64 << 20), (-3, 32 << 20)):
            choose(option, size)


def resident_peak() -> int:
    """Peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def prefer_loopback(contract: Contract) -> None:
    """Let gloo use the loopback interface if all ranks are on this machine. Otherwise it binds to the address of this
    machine's host name, which may not resolve or may be blocked."""
    if contract.master_addr in ("127.0.0.1", "localhost") and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def await_everyone(store: Any, event: str, rank: int, size: int, seconds: float) -> None:
    """Wait until all ranks have called this for `event`, using one counter and one key for any number of ranks.

    Unlike torch's rendezvous, which reports only a timeout, this says which ranks are missing.
    """
    store.set(f"{event}/{rank}", b"1")
    if store.add(f"{event}/count", 1) == size:
        store.set(f"{event}/all", b"1")
        return
    try:
        store.wait([f"{event}/all"], timedelta(seconds=seconds))
    except RuntimeError:
        missing = [other for other in range(size) if not store.check([f"{event}/{other}"])]
        names = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        what = "did not connect" if event == "here" else "did not load their data"
        raise PeerLostError(
            f"{len(missing)} of {size} ranks {what} within {seconds:g} s: {names}",
            "See their logs for the cause.",
        ) from None


def broadcast_state(world: World, model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers, so that equality does not depend on equal seeds."""
    if world.size == 1:
        return
    for tensors in _by_type([item.detach() for item in (*model.parameters(), *model.buffers())]).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        unpack(world.broadcast(flat), tensors)


def average_buffers(world: World, model: nn.Module) -> None:
    """Replace floating-point buffers (the running statistics of BatchNorm) by their mean over ranks."""
    if world.size == 1:
        return
    buffers = [buffer.detach() for buffer in model.buffers() if buffer.is_floating_point()]
    for tensors in _by_type(buffers).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) / world.size
        unpack(world.all_reduce(flat), tensors)


def check_identical(world: World, model: nn.Module) -> None:
    """Compare a checksum of all parameters. Raises DivergedError, on every rank, naming the ranks that differ."""
    if world.size == 1:
        return
    parameters = (parameter.detach().cpu().contiguous().reshape(-1) for parameter in model.parameters())
    check_same(world, (parameter.view(torch.uint8).numpy().data for parameter in parameters))


def check_same(world: World, parameters: Iterable[bytes | memoryview]) -> None:
    """Raises DivergedError, on every rank, naming the ranks whose parameters have another checksum than rank 0's."""
    checksum = 0
    for parameter in parameters:
        checksum = zlib.crc32(parameter, checksum)
    sums = [row[0] for row in world.gather([float(checksum)])]
    odd = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
    if odd:
        raise DivergedError(f"the model of rank {', '.join(odd)} differs from that of rank 0")


def measure_distance(world: World, parameters: Iterable[Tensor]) -> float:
    """The distance between the ranks' parameters: the root mean squared distance from their mean, divided by the norm
    of the mean. Collective."""
    own = torch.cat([parameter.detach().reshape(-1).float() for parameter in parameters])
    mean = world.all_reduce(own / world.size)
    squares = world.sum([float((own - mean).square().sum())])[0] / world.size
    return float(squares**0.5 / max(float(mean.norm()), 1e-30))


def _by_type(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the numbers of a flat tensor into tensors that have as many together."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
