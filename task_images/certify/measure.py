"""The child of a rank: measures what its parent asks for over a pipe, in JSON.

Torch, drivers and communication libraries are only here. If something hangs or crashes, the parent kills this process
and starts another one.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from task_images import gpu
from task_images.contract import Contract
from task_images.world import cpu_threads, prefer_loopback

_MAX_REPEATS = 1000


class Device:
    """The device of this rank, with sizes that fit it."""

    def __init__(self, contract: Contract) -> None:
        self.is_gpu = contract.device == "gpu"
        self.place = torch.device("cuda", contract.local_rank) if self.is_gpu else torch.device("cpu")
        self.name = f"gpu{contract.local_rank}" if self.is_gpu else "cpu"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.order = 8192 if self.is_gpu else 768
        torch.set_num_threads(cpu_threads(contract))
        if self.is_gpu:
            torch.cuda.set_device(self.place)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.place)

    def seconds_per_call(self, call: Callable[[], object], seconds: float) -> float:
        """The time of one call, from as many as fit into `seconds`; one call before does not count."""
        call()
        self.wait()
        count, begun = 0, time.perf_counter()
        while True:
            call()
            count += 1
            self.wait()
            spent = time.perf_counter() - begun
            if spent >= seconds or count >= _MAX_REPEATS:
                return spent / count


# --- alone ----------------------------------------------------------------------------------------------------------


def matmul(device: Device, seconds: float) -> float:
    """10^9 floating-point operations per second of a square product."""
    order = device.order
    left, right = (torch.randn(order, order, dtype=device.dtype, device=device.place) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * order**3 / device.seconds_per_call(lambda: torch.mm(left, right, out=out), seconds) / 1e9


def memory(device: Device, seconds: float) -> float:
    """GB/s read and written by copies of a buffer that no cache holds."""
    source = torch.ones((256 << 20) if device.is_gpu else (16 << 20), dtype=torch.float32, device=device.place)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device.seconds_per_call(lambda: target.copy_(source), seconds) / 1e9


def copies(device: Device, seconds: float, *, to_device: bool) -> float:
    """GB/s between pinned host memory and the device."""
    host = torch.ones(64 << 20, dtype=torch.float32).pin_memory()
    there = torch.empty_like(host, device=device.place)
    source, target = (host, there) if to_device else (there, host)
    return host.nbytes / device.seconds_per_call(lambda: target.copy_(source), seconds) / 1e9


def disk(folder: Path, size: int) -> float:
    """MB/s of writing a file of this rank and waiting until it is on disk. The file is removed."""
    path, block = folder / "certify.disk", os.urandom(1 << 20)
    try:
        begun = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(max(1, size >> 20)):
                file.write(block)
            os.fsync(file.fileno())
        return max(1, size >> 20) * len(block) / (time.perf_counter() - begun) / 1e6
    finally:
        path.unlink(missing_ok=True)


def digest(device: Device) -> str:
    """Of a product of small integers, which float32 represents exactly on any device, whatever the order of sums."""
    index = torch.arange(512, dtype=torch.int64)
    left = ((index[:, None] * 7 + index[None, :] * 13) % 17 - 8).to(torch.float32).to(device.place)
    right = ((index[:, None] * 5 + index[None, :] * 11) % 19 - 9).to(torch.float32).to(device.place)
    product = (left @ right).to(torch.int64).cpu().numpy()
    return hashlib.sha256(product.astype("<i8").tobytes()).hexdigest()[:16]


def node(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    """The tests of a node that `job` names; each the better of two, because a moment of the machine is no property."""
    seconds, long, size = float(job["seconds"]), float(job["long"]), int(job["disk_bytes"])
    folder = Path(os.environ.get("MLBENCH_OUTPUT_DIR", "."))
    known: dict[str, Callable[[], float]] = {
        "matmul.burst": lambda: matmul(device, seconds),
        "matmul.sustained": lambda: matmul(device, long),
        "memory": lambda: memory(device, seconds),
        "disk.write": lambda: disk(folder, size),
    }
    if device.is_gpu:
        known["copy.to_device"] = lambda: copies(device, seconds, to_device=True)
        known["copy.from_device"] = lambda: copies(device, seconds, to_device=False)
    values, errors = {}, {}
    for name in job["tests"]:
        if name in known:
            try:
                values[name] = max(known[name]() for _ in range(1 if name == "matmul.sustained" else 2))
            except (RuntimeError, OSError) as error:
                errors[name] = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
    return {"values": values, "errors": errors, "digest": digest(device)}


# --- together -------------------------------------------------------------------------------------------------------


class Group:
    """Some ranks with a communicator of their own, which can fail without the other ranks."""

    def __init__(self, device: Device, job: dict[str, Any]) -> None:
        self.device, self.rank, self.size = device, int(job["rank"]), int(job["size"])
        host, port = job["store"]
        limit = timedelta(seconds=float(job["limit"]))
        self._store = _OWN_STORE if self.rank == 0 else TCPStore(host, port, is_master=False, timeout=limit)
        store = PrefixStore(str(job["group"]), self._store)
        self._group: Any
        if device.is_gpu:
            gpu.log_to(Path(os.environ.get("MLBENCH_OUTPUT_DIR", ".")), os.environ)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, limit)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce(tensor).wait()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.device.place))
        self.device.wait()

    def operation(self, name: str, size: int) -> Callable[[], object]:
        """A call of a collective; `size` as nccl-tests count it: bytes of the larger side."""
        count = max(self.size, size // 4 // self.size * self.size)
        whole = torch.zeros(count, device=self.device.place)
        part = torch.zeros(count // self.size, device=self.device.place)
        other = torch.zeros_like(whole)
        parts = list(other.chunk(self.size))
        return {
            "all_reduce": lambda: self._group.allreduce(whole).wait(),
            "all_gather": lambda: self._group.allgather([parts], [part]).wait(),
            "reduce_scatter": lambda: self._group._reduce_scatter_base(part, whole, dist.ReduceScatterOptions()).wait(),
            "all_to_all": lambda: self._group.alltoall_base(other, whole, [], []).wait(),
        }[name]

    def time(self, name: str, size: int, samples: int) -> list[float]:
        """Seconds of each call, after a barrier."""
        call = self.operation(name, size)
        call()
        times = []
        for _ in range(samples):
            self.barrier()
            begun = time.perf_counter()
            call()
            self.device.wait()
            times.append(time.perf_counter() - begun)
        return times

    def is_sum_right(self) -> bool:
        """Whether an all-reduce of every rank's number gives the sum that it must."""
        own = torch.full((1024,), float(self.rank + 1), device=self.device.place)
        self.all_reduce(own)
        self.device.wait()
        return bool((own == self.size * (self.size + 1) / 2).all())


def all_reduce(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    """GB/s of an all-reduce of the group, the best of its calls."""
    times = Group(device, job).time("all_reduce", job["bytes"], job["samples"])
    return {"values": {job["test"]: job["bytes"] / min(times) / 1e9}}


def collective(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    """Time a collective of the group, and check a sum."""
    group = Group(device, job)
    right, times = group.is_sum_right(), group.time(job["operation"], job["bytes"], job["samples"])
    return {"right": right, "times": times, "transport": gpu.describe().get("network") if device.is_gpu else "TCP"}


def train(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    """Train a small perceptron data-parallel for some seconds, with a checkpoint at the end; what its steps took."""
    group = Group(device, job)
    width, batch = (8192, 4096) if device.is_gpu else (256, 64)
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device.place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch, width, device=device.place)
    steps: list[float] = []
    go_on = torch.ones(1, device=device.place)
    begun = time.perf_counter()
    while True:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        for item in model.parameters():
            assert item.grad is not None
            group.all_reduce(item.grad)
            item.grad /= group.size
        optimizer.step()
        device.wait()
        steps.append(time.perf_counter() - start)
        go_on.fill_(float(time.perf_counter() - begun < float(job["seconds"]) and len(steps) < 10 * _MAX_REPEATS))
        group.all_reduce(go_on)
        if float(go_on) < group.size:
            break
    checkpoint = save_and_load(model) if group.rank == 0 else {}
    group.barrier()
    return {"steps": steps, "batch": batch, **checkpoint, "wall": time.perf_counter() - begun}


def save_and_load(model: torch.nn.Module) -> dict[str, float]:
    """The size of a checkpoint, and seconds to write it to disk and to read it."""
    path = Path(os.environ.get("MLBENCH_OUTPUT_DIR", ".")) / "certify.checkpoint"
    try:
        begun = time.perf_counter()
        with open(path, "wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter()
        torch.load(path, weights_only=True)
        return {"bytes": path.stat().st_size, "write": written - begun, "read": time.perf_counter() - written}
    finally:
        path.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Of torch and of what it computes and communicates with."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip}
    if torch.cuda.is_available():
        found["gpus"] = str(torch.cuda.device_count())
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {key: str(value) for key, value in found.items() if value}


_OWN_STORE: Any = None


def main() -> None:
    """Answer jobs until the parent ends."""
    global _OWN_STORE
    parent, contract = Connection(int(sys.argv[1])), Contract()
    prefer_loopback(contract)
    device = Device(contract)
    # Groups of which this is the first rank meet in it.
    _OWN_STORE = TCPStore(
        "0.0.0.0", int(sys.argv[2]), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    jobs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "node": lambda job: node(device, job),
        "all_reduce": lambda job: all_reduce(device, job),
        "collective": lambda job: collective(device, job),
        "training": lambda job: train(device, job),
    }
    hello = {"device": device.name, "port": _OWN_STORE.port, "versions": versions()}
    parent.send_bytes(json.dumps(hello).encode())
    while True:
        job = json.loads(parent.recv_bytes())
        try:
            answer = jobs[job["do"]](job)
        except (RuntimeError, MemoryError, OSError) as error:
            answer = {"error": " ".join(str(error).split())[:300]}
        parent.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    with suppress(EOFError):
        main()
