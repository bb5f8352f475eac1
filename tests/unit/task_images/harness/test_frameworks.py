"""How ranks become members of JAX and TensorFlow: what is configured, and which calls a collective makes."""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from task_images.contract import Contract
from task_images.harness import framework_ranks, jax_ranks, tensorflow_ranks
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.framework_ranks import FrameworkRanks, from_numpy, to_numpy
from task_images.harness.frameworks import FRAMEWORKS, open_framework
from task_images.harness.jax_ranks import JaxRanks
from task_images.harness.tensorflow_ranks import TensorFlowRanks


def make_world(rank: int, size: int, backend: str = "jax", device: str = "cpu") -> Any:
    contract = Contract(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "10.0.0.1",
            "MLBENCH_DEVICE": device,
            "MLBENCH_BACKEND": backend,
        }
    )
    return SimpleNamespace(
        contract=contract, rank=rank, size=size, threads=3, backend=backend, companions=[], agree=lambda port: port
    )


class Jax:
    """The module `jax`: it notes its configuration, and a distributed array has this rank's row alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[Any] = []
        self.settings: dict[str, str] = {}
        self.donated: list[tuple[int, ...]] = []
        self.config = SimpleNamespace(update=self.settings.__setitem__)
        self.distributed = SimpleNamespace(
            initialize=lambda *given, **more: self.calls.append(("initialize", given, more)),
            shutdown=lambda: self.calls.append("shutdown"),
        )
        self.sharding = SimpleNamespace(
            Mesh=lambda devices, axes: ("mesh", list(devices), axes),
            NamedSharding=lambda mesh, spec: ("sharding", mesh, spec),
            PartitionSpec=lambda *axes: ("spec", axes),
        )
        self.lax = SimpleNamespace(
            **{
                name: lambda row, *given, name=name, **more: self._note(name, row, given, more)
                for name in ("psum", "all_gather", "psum_scatter", "all_to_all")
            }
        )

    def local_devices(self) -> list[str]:
        return ["own"]

    def devices(self) -> list[str]:
        return [f"cpu:{rank}" for rank in range(self.size)]

    def device_put(self, array: Any, device: str) -> Any:
        assert device == "own"
        return array

    def make_array_from_single_device_arrays(self, shape: Any, sharding: Any, rows: list[Any]) -> Any:
        [row] = rows
        return Distributed(shape, row)

    def shard_map(self, function: Any, mesh: Any, in_specs: Any, out_specs: Any, check_vma: bool) -> Any:
        assert (in_specs, out_specs, check_vma) == (("spec", ("ranks",)), ("spec", ("ranks",)), False)
        return lambda array: Distributed(array.shape, function(array.row))

    def jit(self, function: Any, donate_argnums: tuple[int, ...]) -> Any:
        self.donated.append(donate_argnums)
        return function

    def _note(self, name: str, row: Any, given: Any, more: Any) -> Any:
        self.calls.append((name, given, more))
        return row * self.size


class Distributed:
    """An array [ranks, elements], of which this rank has a row [1, elements]."""

    def __init__(self, shape: Any, row: Any) -> None:
        self.shape, self.row, self.is_awaited = shape, row, False
        self.addressable_shards = [SimpleNamespace(data=row)]

    def block_until_ready(self) -> "Distributed":
        self.is_awaited = True
        return self


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the process, as far as frameworks read it."""
    made: dict[str, str] = {}
    for module in (jax_ranks, tensorflow_ranks):
        monkeypatch.setattr(module, "os", SimpleNamespace(environ=made))
    return made


def open_jax(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> JaxRanks:
    monkeypatch.setitem(sys.modules, "jax", Jax(size))
    monkeypatch.setattr(jax_ranks, "free_port", lambda: 4321)
    return JaxRanks(make_world(rank, size))


def test_jax_uses_the_ranks_share_of_the_cpus_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    ranks = open_jax(monkeypatch, 0, 1)
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "2", "PJRT_NPROC": "3"}
    assert ranks.jax.settings == {"jax_platforms": "cpu"}
    assert ranks.jax.calls == []
    ranks.close()
    assert ranks.jax.calls == []
    environment.update(PJRT_NPROC="1", TF_CPP_MIN_LOG_LEVEL="0")
    open_jax(monkeypatch, 0, 1)
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "0", "PJRT_NPROC": "1"}


def test_ranks_meet_at_rank_0_and_leave_together(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    ranks = open_jax(monkeypatch, 1, 2)
    assert ranks.jax.settings == {"jax_platforms": "cpu", "jax_cpu_collectives_implementation": "gloo"}
    assert ranks.jax.calls == [("initialize", ("10.0.0.1:4321", 2, 1), {"local_device_ids": [0]})]
    assert ranks.sharding == ("sharding", ("mesh", ["cpu:0", "cpu:1"], ("ranks",)), ("spec", ("ranks",)))
    ranks.close()
    assert ranks.jax.calls[1:] == ["shutdown"]


def test_a_rank_puts_its_row_into_a_distributed_array_and_gets_it_back(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    ranks = open_jax(monkeypatch, 0, 4)
    host = torch.tensor([1.0, 2.0, 3.0])
    array = ranks.put(host)
    assert (array.shape, array.row.tolist()) == ((4, 3), [[1.0, 2.0, 3.0]])
    array.row[0, 0] = 7.0  # a copy: JAX may keep its memory
    assert host.tolist() == [1.0, 2.0, 3.0]
    found = ranks.get(array)
    assert found.tolist() == [7.0, 2.0, 3.0]
    found[0] = 0.0
    assert array.row[0, 0] == 7.0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", ("psum", ("ranks",), {})),
        ("all_gather", ("all_gather", ("ranks",), {"tiled": True})),
        ("reduce_scatter", ("psum_scatter", ("ranks",), {"tiled": True})),
        ("all_to_all", ("all_to_all", ("ranks", 0, 0), {"tiled": True})),
    ],
)
@pytest.mark.parametrize(("donate", "donated"), [(True, (0,)), (False, ())])
def test_a_collective_is_one_call_of_xla_that_has_ended_when_it_returns(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str, call: Any, donate: bool, donated: Any
) -> None:
    ranks = open_jax(monkeypatch, 0, 2)
    ranks.jax.calls.clear()
    found = ranks.collective(name, donate=donate)(ranks.put(torch.tensor([1.0, 2.0])))
    assert (found.row.tolist(), found.is_awaited) == ([[2.0, 4.0]], True)
    assert ranks.jax.calls == [call]
    assert ranks.jax.donated == [donated]


def test_sums_of_a_training_are_compiled_once(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    ranks = open_jax(monkeypatch, 0, 3)
    assert ranks.all_reduce(np.array([1.0, 2.0])).tolist() == [3.0, 6.0]
    assert ranks.all_reduce(np.array([5.0])).tolist() == [15.0]
    assert ranks.jax.donated == [(0,)]


# --- TensorFlow -----------------------------------------------------------------------------------------------------


class TensorFlow:
    """The module `tensorflow`: strategies and collectives are noted, tensors are numpy's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        threading = SimpleNamespace(
            set_intra_op_parallelism_threads=lambda number: self.calls.append(("within", number)),
            set_inter_op_parallelism_threads=lambda number: self.calls.append(("between", number)),
        )
        self.config = SimpleNamespace(threading=threading)
        context = SimpleNamespace(
            all_gather=lambda own, axis: self._note("gather", axis, own),
            all_reduce=lambda op, own: self._note("reduce", op, own),
        )
        self.distribute = SimpleNamespace(
            get_strategy=lambda: self._strategy("default"),
            get_replica_context=lambda: context,
            ReduceOp=SimpleNamespace(SUM="sum"),
            MultiWorkerMirroredStrategy=lambda communication_options: self._strategy(communication_options),
            experimental=SimpleNamespace(
                CommunicationImplementation=SimpleNamespace(NCCL="nccl", RING="ring"),
                CommunicationOptions=lambda implementation, timeout_seconds: (implementation, timeout_seconds),
            ),
        )

    def constant(self, array: Any) -> "Values":
        return Values(array)

    def identity(self, tensor: Any) -> Any:
        self.calls.append("copy")
        return tensor

    def function(self, function: Any) -> Any:
        return function

    def _note(self, name: str, how: Any, own: Any) -> Any:
        self.calls.append((name, how))
        return own

    def _strategy(self, kind: Any) -> Any:
        self.calls.append(("strategy", kind))
        return SimpleNamespace(run=lambda function, args: function(*args))


class Values:
    def __init__(self, values: Any) -> None:
        self.values = values

    def numpy(self) -> Any:
        return self.values


def open_tensorflow(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> TensorFlowRanks:
    monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow())
    places = [f"10.0.0.{number}:99" for number in range(size)]
    monkeypatch.setattr(tensorflow_ranks, "find_addresses", lambda world: places)
    return TensorFlowRanks(make_world(rank, size, "grpc"))


def test_one_rank_of_tensorflow_needs_no_servers(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    ranks = open_tensorflow(monkeypatch, 0, 1)
    assert ranks._tf.calls == [("within", 3), ("between", 2), ("strategy", "default")]
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}
    assert "TF_CONFIG" not in os.environ


def test_several_ranks_of_tensorflow_are_workers_that_know_each_other(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "of another run")
    ranks = open_tensorflow(monkeypatch, 1, 2)
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.0:99", "10.0.0.1:99"]},
        "task": {"type": "worker", "index": 1},
    }
    assert ranks._tf.calls[-1] == ("strategy", ("ring", 600.0))


@pytest.mark.parametrize(
    ("name", "calls"), [("all_gather", [("gather", 0)]), ("all_reduce", ["copy", ("reduce", "sum")])]
)
def test_a_collective_of_tensorflow_leaves_its_input_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str, calls: list[Any]
) -> None:
    ranks = open_tensorflow(monkeypatch, 0, 1)
    ranks._tf.calls.clear()
    found = ranks.collective(name, donate=False)(ranks.put(torch.tensor([1.0, 2.0])))
    assert ranks._tf.calls == calls
    assert ranks.get(found).tolist() == [1.0, 2.0]


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "kind"), FRAMEWORKS.items())
def test_frameworks_are_for_cpus(backend: str, kind: type[FrameworkRanks]) -> None:
    with pytest.raises(EnvironmentUnfitError, match=f"the backend {backend} is for CPUs here") as error:
        kind(make_world(0, 1, backend, "gpu"))
    assert "--backend nccl" in str(error.value.hint)


@pytest.mark.parametrize(("kind", "package"), [(JaxRanks, "jax"), (TensorFlowRanks, "tensorflow")])
def test_a_framework_that_is_missing_is_named_with_its_extra(
    kind: type[FrameworkRanks], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework_ranks, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfitError, match=f"{kind.backend} needs the package {package}, which is m") as error:
        kind.find()
    assert f"mlbench-cli[{package}]" in str(error.value.hint)
    monkeypatch.setattr(framework_ranks, "find_spec", lambda name: name == package or None)
    assert kind.find() == "gloo"


def test_versions_are_those_of_the_builds_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"jax": "0.9.1", "tensorflow-cpu": "2.20.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(framework_ranks, "version", version)
    assert JaxRanks.facts() == {"jax": "0.9.1", "jaxlib": "?"}
    assert TensorFlowRanks.facts() == {"tensorflow": "2.20.0"}
    installed["tensorflow"] = "2.21.0"
    assert TensorFlowRanks.facts() == {"tensorflow": "2.21.0"}


def test_a_world_opens_its_framework_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(FrameworkRanks):
        backend = "jax"

    monkeypatch.setitem(FRAMEWORKS, "jax", Opened)
    world = make_world(1, 2)
    world.companions.append("a pool of links")
    found = open_framework(world)
    assert (found.rank, found.size) == (1, 2)
    assert open_framework(world) is found
    assert world.companions == ["a pool of links", found]


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int8, torch.int64])
def test_tensors_and_arrays_share_their_memory(kind: torch.dtype) -> None:
    host = torch.tensor([1, 2, 3]).to(kind)
    array = to_numpy(host)
    array[0] = 9
    assert host.tolist() == [9, 2, 3]
    again = from_numpy(array)
    assert again.dtype is kind
    again[1] = 8
    assert array.tolist() == [9, 8, 3]


def test_bfloat16_travels_as_the_same_bits() -> None:
    """With a type of numpy of the same name and size, as that of the package ml_dtypes."""
    host = torch.tensor([1.0, -2.5, 3.0]).to(torch.bfloat16)
    bits = SimpleNamespace(dtype=SimpleNamespace(name="bfloat16"), view=host.view(torch.int16).numpy().view)
    found = from_numpy(bits)
    assert found.dtype is torch.bfloat16
    assert found.tolist() == [1.0, -2.5, 3.0]
