"""The ranks of a run without other processes: missing devices and backends, who is awaited, what is reported."""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from task_images.contract import Contract
from task_images.harness import distributed, nccl
from task_images.harness.distributed import (
    CudaMarks,
    World,
    await_everyone,
    open_world,
    require_sharding,
    sample_gpu,
)
from task_images.harness.errors import EnvironmentUnfitError, PeerLostError, TaskUsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def make_world(device: torch.device = CPU, size: int = 1, *, grouped: bool = False, **variables: str) -> World:
    contract = Contract({"WORLD_SIZE": str(size), **variables})
    return World(contract, device, 3, grouped)


# --- one rank -------------------------------------------------------------------------------------------------------


def test_a_single_rank_needs_no_collectives() -> None:
    world = make_world()
    tensor = torch.tensor([1.0, 2.0])
    assert world.all_reduce(tensor) is tensor
    assert world.broadcast(tensor) is tensor
    assert world.sum([1.5, 2.0]) == [1.5, 2.0]
    assert world.max([1.5, -2.0]) == [1.5, -2.0]
    assert world.gather([1.5, 2.0]) == [[1.5, 2.0]]
    assert world.agree(0.1) == 0.1  # in float64
    assert tensor.tolist() == [1.0, 2.0]
    world.barrier()
    world.await_loading()
    world.synchronize()
    world.close()
    assert (world.is_first, world.threads, world.marks(), world.backend_facts()) == (True, 3, None, {})
    assert world.peak_memory() > 10 << 20  # this process


def test_collectives_reduce_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which the other has twice the numbers."""
    made: list[Any] = []

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        made.append((op, tensor.dtype))
        tensor.mul_(3 if op == dist.ReduceOp.SUM else 2)

    def all_gather(everyone: list[torch.Tensor], own: torch.Tensor) -> None:
        for rank, part in enumerate(everyone, 1):
            part.copy_(own * rank)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: tensor.fill_(10 + source))
    world = make_world(size=2, grouped=True)
    assert world.sum([1.0, 2.0]) == [3.0, 6.0]
    assert world.max([1.0, 2.0]) == [2.0, 4.0]
    assert world.all_reduce(torch.ones(1)).tolist() == [3.0]
    assert made == [
        (dist.ReduceOp.SUM, torch.float64),
        (dist.ReduceOp.MAX, torch.float64),
        (dist.ReduceOp.SUM, torch.float32),
    ]
    assert world.gather([1.0, 2.0]) == [[1.0, 2.0], [2.0, 4.0]]
    assert world.agree(7.0) == 10.0
    assert world.broadcast(torch.zeros(1), 1).tolist() == [11.0]


@pytest.mark.parametrize(("backend", "options"), [("nccl", {"device_ids": [1]}), ("gloo", {})])
def test_a_barrier_of_nccl_names_the_device(
    backend: str, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda **given: seen.append(given))
    make_world(GPU, 2, grouped=True, MLBENCH_BACKEND=backend).barrier()
    assert seen == [options]


def test_a_world_is_left_together_and_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: steps.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: steps.append("destroy"))
    monkeypatch.setattr(distributed, "_probe_network", lambda contract, store, stage: steps.append(stage))
    world = make_world(size=2, grouped=True)
    world.companions.append(SimpleNamespace(close=lambda: steps.append("companion")))
    world.close()
    world.close()
    assert steps == ["barrier", "companion", "destroy", "after"]


@pytest.mark.parametrize(
    ("device", "backend", "size", "is_refused"),
    [(CPU, "gloo", 2, False), (GPU, "nccl", 2, False), (GPU, "gloo", 1, False), (GPU, "gloo", 2, True)],
)
def test_shards_on_gpus_need_nccl(device: torch.device, backend: str, size: int, is_refused: bool) -> None:
    world = make_world(device, size, MLBENCH_BACKEND=backend)
    assert world.is_gloo_on_gpu is (device is GPU and backend == "gloo")
    if is_refused:
        with pytest.raises(TaskUsageError, match="need the backend nccl"):
            require_sharding(world)
    else:
        require_sharding(world)


def test_the_environment_names_torch_and_what_it_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_world().framework_facts() == {
        "framework": "torch",
        "framework_version": torch.__version__,
        "framework_commit": torch.version.git_version,
        "device": "cpu",
        "device_name": platform.machine(),
        "libraries": {},
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    facts = make_world(GPU).framework_facts()
    assert (facts["device"], facts["device_name"]) == ("cuda:1", "card 1")
    assert facts["libraries"] == {"cuda": "13.0", "cudnn": "91000", "nccl": "2.27.3"}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert make_world(GPU).framework_facts()["libraries"] == {"rocm": "6.4", "miopen": "91000", "rccl": "2.27.3"}
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert make_world(GPU).framework_facts()["libraries"] == {"rocm": "6.4", "miopen": "91000"}


def test_a_gpus_memory_is_what_was_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1234 + device.index)
    world = make_world(GPU)
    assert world.peak_memory() == 1235
    assert isinstance(world.marks(), CudaMarks)
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    world.synchronize()
    make_world(CPU).synchronize()
    assert seen == [GPU]


def test_a_gpu_is_sampled_by_its_address_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1A, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(distributed, "GpuSampler", lambda address, folder, is_amd: (address, folder, is_amd))
    monkeypatch.setattr(torch.version, "hip", None)
    assert sample_gpu(make_world(GPU, MLBENCH_OUTPUT_DIR="/out")) == ("00000001:1a:02.0", Path("/out"), False)  # type: ignore[comparison-overlap]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert sample_gpu(make_world(GPU))[2] is True  # type: ignore[index]
    assert isinstance(sample_gpu(make_world()), nullcontext)


# --- devices and backends -------------------------------------------------------------------------------------------


def prepare_gpus(monkeypatch: pytest.MonkeyPatch, count: int, error: str = "") -> list[torch.device]:
    chosen: list[torch.device] = []

    def choose(device: torch.device) -> None:
        chosen.append(device)
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    return chosen


def test_each_rank_of_a_worker_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = prepare_gpus(monkeypatch, 2)
    contract = Contract({"MLBENCH_DEVICE": "gpu", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert distributed._device(contract) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert distributed._device(Contract({})) == CPU


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [
        (0, "", "needs a GPU, but torch finds none"),
        (1, "", "2 ranks of this worker want a GPU each, but torch finds 1"),
        (2, "out of memory\nmore", "the GPU cannot be used: out of memory$"),
    ],
)
def test_a_gpu_that_is_missing_or_in_use_is_an_unfit_environment(
    monkeypatch: pytest.MonkeyPatch, count: int, error: str, words: str
) -> None:
    prepare_gpus(monkeypatch, count, error)
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        distributed._device(Contract({"MLBENCH_DEVICE": "gpu", "LOCAL_WORLD_SIZE": "2"}))
    assert caught.value.hint


def test_backends_that_this_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(backend: str, device: torch.device = CPU) -> str:
        return distributed._find_backend(Contract({"MLBENCH_BACKEND": backend}), device)

    assert find("gloo") == "gloo"
    with pytest.raises(EnvironmentUnfitError, match="nccl needs a GPU and the run's device is cpu"):
        find("nccl")
    with pytest.raises(EnvironmentUnfitError, match='no communication backend "carrier-pigeon"') as caught:
        find("carrier-pigeon")
    assert caught.value.hint == "Choose --backend gloo."
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == "nccl")
    assert find("nccl", GPU) == "nccl"
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match='no communication backend "nccl"'):
        find("nccl", GPU)


def test_one_rank_meets_nobody_unless_it_measures_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []

    def meet(contract: Contract, backend: str, device: torch.device, seconds: float, collective: float) -> str:
        met.append((backend, device, seconds, collective))
        return "store"

    monkeypatch.setattr(distributed, "_meet", meet)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert open_world(Contract({}))._grouped is False
    assert open_world(Contract({}), 5.0, grouped_alone=True)._store == "store"
    assert open_world(Contract({"WORLD_SIZE": "2"}), 5.0, collective_seconds=7.0)._grouped is True
    open_world(Contract({"WORLD_SIZE": "2", "MLBENCH_COLLECTIVE_SECONDS": "9"}), 5.0, collective_seconds=7.0)
    assert met[0][2] == 5.0
    assert met[1:] == [("gloo", CPU, 5.0, 7.0), ("gloo", CPU, 5.0, 9)]


# --- who is awaited -------------------------------------------------------------------------------------------------


class Store:
    """A store whose waiting fails at once unless the key is there."""

    def __init__(self, arrived: Sequence[int] = ()) -> None:
        self.values: dict[str, bytes] = {f"here/{rank}": b"1" for rank in arrived}
        self.count, self.waited = len(arrived), timedelta()

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        assert key.endswith("/count")
        self.count += amount
        return self.count

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.waited = limit
        if not set(keys) <= self.values.keys():
            raise RuntimeError("timeout")

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.values.keys()


def test_the_last_rank_tells_the_others_and_waits_for_nobody() -> None:
    store = Store(arrived=[0, 1])
    await_everyone(store, "here", 2, 3, 5.0)
    assert store.values["here/all"] == b"1"
    assert store.waited == timedelta()
    store.count = 0
    await_everyone(store, "here", 0, 3, 5.0)
    assert store.waited == timedelta(seconds=5)


@pytest.mark.parametrize(
    ("event", "size", "words"),
    [
        ("here", 4, r"2 of 4 ranks did not connect within 2\.5 s: 1, 3$"),
        ("loaded", 4, r"3 of 4 ranks did not load their data within 2\.5 s: 1, 2, 3$"),
        ("here", 10, r"8 of 10 ranks did not connect within 2\.5 s: 1, 3, 4, 5, 6, 7, 8, 9$"),
        ("here", 11, r"9 of 11 ranks did not connect within 2\.5 s: 1, 3, 4, 5, 6, 7, 8, 9 \.\.\.$"),
    ],
)
def test_ranks_that_are_missing_are_named_eight_at_most(event: str, size: int, words: str) -> None:
    with pytest.raises(PeerLostError, match=words) as caught:
        await_everyone(Store(arrived=[2]), event, 0, size, 2.5)
    assert caught.value.hint == "See their logs for the cause."


def test_loading_is_awaited_only_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(distributed, "await_everyone", lambda *words: seen.append(words))
    for size in (1, 2):
        contract = Contract({"WORLD_SIZE": str(size)})
        World(contract, CPU, 1, grouped=True, store="store").await_loading(9.0)
        World(contract, CPU, 1, grouped=False).await_loading(9.0)
    assert seen == [("store", "loaded", 0, 2, 9.0)]


@pytest.mark.parametrize(
    ("variables", "events"),
    [
        ({"WORLD_SIZE": "2"}, [("network", 0, {"stage": "before", "drain": 3})]),
        ({"WORLD_SIZE": "1"}, []),
        ({"WORLD_SIZE": "2", "MLBENCH_NETWORK": "1gbit"}, []),
        ({"WORLD_SIZE": "2", "RANK": "1"}, []),
    ],
)
def test_the_network_is_measured_between_ranks_unless_the_engine_does(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], events: list[Any]
) -> None:
    found: list[Any] = []

    def measure(store: object, rank: int, size: int, stage: str, master: str) -> Any:
        assert (store, size, master) == ("store", 2, "host")
        return {"stage": stage, "drain": 3} if rank == 0 else None

    monkeypatch.setattr(distributed, "measure_network", measure)
    monkeypatch.setattr(distributed, "emit", lambda event, rank, **fields: found.append((event, rank, fields)))
    distributed._probe_network(Contract({"MASTER_ADDR": "host", **variables}), "store", "before")
    assert found == events


# --- the process group ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "host", "names", "interface", "barriers"),
    [
        ("gloo", "127.0.0.1", ["lo", "eth0"], "lo", 1),
        ("gloo", "localhost", ["lo"], "lo", 1),
        ("gloo", "localhost", ["eth0"], None, 1),
        ("gloo", "10.0.0.7", ["lo"], None, 1),
        ("nccl", "10.0.0.7", ["lo"], None, 0),
    ],
)
def test_a_group_is_made_after_all_have_met_and_the_network_was_measured(
    monkeypatch: pytest.MonkeyPatch, backend: str, host: str, names: list[str], interface: str | None, barriers: int
) -> None:
    steps: list[Any] = []
    environ: dict[str, str] = {}

    def meet(*words: object, timeout: timedelta) -> Any:
        steps.append((*words, timeout))
        return iter([("store", *words[1:])])

    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    monkeypatch.setattr(distributed, "PrefixStore", lambda prefix, store: (prefix, store))
    monkeypatch.setattr(distributed, "rendezvous", meet)
    monkeypatch.setattr(distributed, "await_everyone", lambda *words: steps.append(words))
    monkeypatch.setattr(distributed, "_probe_network", lambda contract, store, stage: steps.append((store, stage)))
    monkeypatch.setattr(nccl, "log_to", lambda folder, variables: steps.append(("log", str(folder))))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: steps.append((name, options)))
    monkeypatch.setattr(dist, "barrier", lambda: steps.append("barrier"))
    contract = Contract(
        {
            "WORLD_SIZE": "4",
            "RANK": "2",
            "MASTER_ADDR": host,
            "MASTER_PORT": "99",
            "MLBENCH_BACKEND": backend,
            "MLBENCH_OUTPUT_DIR": "/out",
        }
    )
    assert distributed._meet(contract, backend, GPU, 5.0, 7.0) == "store"
    options = {"store": ("group", "store"), "rank": 2, "world_size": 4, "timeout": timedelta(seconds=7)}
    assert steps == [
        ("env://", 2, 4, timedelta(seconds=5)),
        ("store", "here", 2, 4, 5.0),
        ("store", "before"),
        *([("log", "/out")] if backend == "nccl" else []),
        (backend, {**options, "device_id": GPU if backend == "nccl" else None}),
        *["barrier"] * barriers,
    ]
    expected = {"MASTER_ADDR": host, "MASTER_PORT": "99"}
    assert environ == (expected if interface is None else {**expected, "GLOO_SOCKET_IFNAME": interface})


def test_a_rendezvous_that_fails_names_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object, timeout: timedelta) -> Any:
        raise RuntimeError("timed\n out " + 400 * "x")

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(distributed, "rendezvous", fail)
    contract = Contract({"WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "99"})
    with pytest.raises(PeerLostError) as caught:
        distributed._meet(contract, "gloo", CPU, 2.5, 7.0)
    assert str(caught.value) == "no rendezvous at host:99 within 2.5 s: " + ("timed out " + 400 * "x")[:300]


def test_times_on_a_gpu_are_those_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            seen.append(stream)

        def synchronize(self) -> None:
            seen.append("waited")

        def elapsed_time(self, last: object) -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device.index}")
    marks = CudaMarks(GPU)
    first, last = marks.record(), marks.record()
    marks.wait(last)
    assert marks.seconds_between(first, last) == 0.25
    assert seen == ["stream of 1", "stream of 1", "waited"]


def test_nccl_moves_bookkeeping_through_the_device() -> None:
    assert make_world(GPU, MLBENCH_BACKEND="nccl")._small == GPU
    assert make_world(GPU, MLBENCH_BACKEND="gloo")._small == CPU
