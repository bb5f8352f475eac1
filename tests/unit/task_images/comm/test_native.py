"""Which of torch's engines a method gets, with which settings, and how one rank trains with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from task_images.comm import ddp, native
from task_images.comm.ddp import DdpAllReduce
from task_images.comm.native import ShardedModel, ShardedOptimizer, make_native
from task_images.comm.presets import resolve
from task_images.harness.errors import TaskUsageError
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is imported when an engine is made, without the seconds that it takes."""
    found: list[str] = []
    monkeypatch.setattr(native, "importlib", SimpleNamespace(import_module=found.append))
    return found


@pytest.mark.parametrize(
    ("name", "axes", "kind", "settings"),
    [
        ("ddp", {}, DdpAllReduce, (25.0, False, None)),
        ("ddp", {"plan": "threshold:1MiB"}, DdpAllReduce, (1.0, False, None)),
        ("ddp", {"plan": "threshold:512KiB"}, DdpAllReduce, (0.5, False, None)),
        ("ddp", {"codec": "fp16"}, DdpAllReduce, (25.0, False, torch.float16)),
        ("ddp", {"codec": "bf16"}, DdpAllReduce, (25.0, False, torch.bfloat16)),
        ("ddp-static", {}, DdpAllReduce, (25.0, True, None)),
        ("zero1", {"plan": "threshold:2MiB"}, ShardedOptimizer, (2.0, False, None)),
    ],
)
def test_an_engine_has_the_methods_buckets_and_format(
    name: str, axes: dict[str, str], kind: type, settings: Any, imported: list[str]
) -> None:
    made: Any = make_native(resolve(name, axes))
    assert (made._bucket_mb, made._static, made._wire) == settings
    assert type(made) is kind
    assert imported == ["torch._dynamo"]  # so that its seconds do not count as training


@pytest.mark.parametrize(("name", "in_groups"), [("fsdp2", False), ("hsdp", True)])
def test_sharded_models_are_sharded_over_all_ranks_or_in_groups(name: str, in_groups: bool) -> None:
    made: Any = make_native(resolve(name))
    assert type(made) is ShardedModel
    assert made._in_groups is in_groups


@pytest.mark.parametrize("name", ["ddp", "ddp-static", "zero1", "fsdp2", "hsdp"])
def test_one_rank_trains_as_with_its_optimizer_alone(name: str) -> None:
    def body(world: ThreadWorld) -> Any:
        strategy = make_native(resolve(name))
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        assert strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0)) is model
        assert strategy.keeps_optimizer_state
        strategy.begin(3.0, 4.0, 2 if name != "ddp-static" else 1)
        with strategy.last_pass():
            model(torch.tensor([[4.0, 8.0]])).backward()
        strategy.step(0.5)
        state = strategy.state_dict()
        strategy.load_state_dict(state)
        assert strategy.check_replicas() is None
        return model.weight.tolist(), strategy.bucket_bytes(), strategy.stats(), strategy.method_state(), set(state)

    [(weights, sizes, figures, method, state)] = run_ranks(1, body)
    assert weights == [[1 - 0.5 * 0.75 * 4, 1 - 0.5 * 0.75 * 8]]
    assert (sizes, method) == ([], {})
    assert figures == {"updates": 1.0, "messages": 0.0, "bytes": 0.0}
    assert state == {"model", "optimizer", "method"}


def test_the_parts_of_a_model_that_are_sharded_are_its_layers() -> None:
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3)
    blocks = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2))])
    model = nn.Module()
    model.embedding, model.blocks, model.act = embedding, blocks, nn.ReLU()
    model.named = nn.ModuleDict({"head": head})
    model.last = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    assert native._list_blocks(model) == [embedding, blocks[0], blocks[2], head, model.last[0]]


@pytest.mark.parametrize(("weight", "total", "factor"), [(1.0, 4.0, 1.0), (3.0, 4.0, 3.0), (2.0, 16.0, 0.5)])
def test_gradients_of_sharded_models_are_means_so_unequal_batches_are_weighted_before(
    weight: float, total: float, factor: float
) -> None:
    made: Any = ShardedModel(in_groups=False)
    made.world, made._weight, made._total = SimpleNamespace(size=4), weight, total
    gradient = torch.tensor([8.0])
    found = made._weigh(gradient)
    assert found.item() == 8.0 * factor
    assert (found is gradient) is (factor == 1.0)


def test_all_outputs_of_a_sharded_model_that_have_gradients_are_weighted() -> None:
    made: Any = ShardedModel(in_groups=False)
    made.world, made._weight, made._total = SimpleNamespace(size=2), 2.0, 2.0
    gradients = []
    for outputs in ((3, 5), 3):
        x = torch.ones(1, requires_grad=True)
        made_of = [factor * x for factor in ([outputs] if isinstance(outputs, int) else outputs)]
        made._weigh_outputs(None, None, made_of[0] if isinstance(outputs, int) else (*made_of, torch.ones(1)))
        torch.autograd.backward(made_of)
        assert x.grad is not None
        gradients.append(x.grad.item())
    assert gradients == [16.0, 6.0]


@pytest.mark.parametrize(("fused", "kind"), [(False, torch.optim.SGD), (True, torch.optim.AdamW)])
def test_sgd_of_sharded_parameters_is_not_fused(fused: bool, kind: Any) -> None:
    made: Any = ShardedModel(in_groups=False)
    made.world = SimpleNamespace(size=2)
    made.optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1, fused=True)
    made._connect()
    assert made.optimizer.param_groups[0]["fused"] is fused
    alone: Any = ShardedModel(in_groups=False)
    alone.world, alone.optimizer = SimpleNamespace(size=1), torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True)
    alone._connect()
    assert alone.optimizer.param_groups[0]["fused"] is True


def test_only_the_last_pass_of_a_sharded_model_reduces_gradients() -> None:
    made: Any = ShardedModel(in_groups=False)
    calls: list[bool] = []
    made.world, made.model = SimpleNamespace(size=2), SimpleNamespace(set_requires_gradient_sync=calls.append)
    made.begin(1.0, 2.0)
    made.begin(1.0, 2.0, 2)
    with made.last_pass():
        assert calls == [True, False, True]
    made.world.size = 1
    made.begin(1.0, 2.0, 2)
    with made.last_pass():
        assert len(calls) == 3


def test_a_sharded_model_is_saved_whole_on_rank_0_and_spread_over_the_ranks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    for name in ("get_model_state_dict", "get_optimizer_state_dict"):
        monkeypatch.setattr(native, name, lambda *given, options, name=name: {name: (given, options)})
    for name in ("set_model_state_dict", "set_optimizer_state_dict"):
        monkeypatch.setattr(native, name, lambda *given, options, name=name: calls.append((name, given, options)))
    made: Any = ShardedModel(in_groups=False)
    made.world, made.model, made.optimizer = SimpleNamespace(size=2), "model", "optimizer"
    state = made.state_dict()
    assert state == {
        "model": {"get_model_state_dict": (("model",), native.WHOLE)},
        "optimizer": {"get_optimizer_state_dict": (("model", "optimizer"), native.WHOLE)},
        "method": {},
    }
    made.load_state_dict(state)
    assert calls == [
        ("set_model_state_dict", ("model", state["model"]), native.SPREAD),
        ("set_optimizer_state_dict", ("model", "optimizer", state["optimizer"]), native.SPREAD),
    ]
    # On the CPU, so that a model that fits on no GPU alone can be saved.
    assert (native.WHOLE.full_state_dict, native.WHOLE.cpu_offload) == (True, True)
    assert (native.SPREAD.full_state_dict, native.SPREAD.cpu_offload) == (True, False)
    assert made.check_replicas() is None


@pytest.mark.parametrize(
    ("in_groups", "size", "local", "mesh"),
    [
        (False, 4, 2, (("cpu", (4,)), {})),
        (True, 4, 2, (("cpu", (2, 2)), {"mesh_dim_names": ("replicate", "shard")})),  # a group per node
        (True, 8, 8, (("cpu", (2, 4)), {"mesh_dim_names": ("replicate", "shard")})),  # halves of one node
        (True, 6, 1, (("cpu", (2, 3)), {"mesh_dim_names": ("replicate", "shard")})),
    ],
)
def test_each_layer_is_sharded_over_all_ranks_or_within_its_group(
    monkeypatch: pytest.MonkeyPatch, in_groups: bool, size: int, local: int, mesh: Any
) -> None:
    sharded: list[Any] = []
    monkeypatch.setattr(native, "require_sharding", lambda world: None)
    monkeypatch.setattr(native, "init_device_mesh", lambda *given, **more: (given, more))
    monkeypatch.setattr(native, "fully_shard", lambda module, mesh: sharded.append((module, mesh)))
    made: Any = ShardedModel(in_groups)
    contract = SimpleNamespace(local_world_size=local)
    made.world = SimpleNamespace(size=size, device=torch.device("cpu"), contract=contract)
    made._weight, made._total = 3.0, 2.0 * size
    model: Any = nn.Sequential(nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU()), nn.Flatten(), nn.Linear(2, 1))
    model.to(memory_format=torch.channels_last)
    assert made._prepare(model) is model
    assert sharded == [(model[0][0], mesh), (model[2], mesh), (model, mesh)]
    assert model[0][0].weight.is_contiguous()
    output = model(torch.ones(1, 2, 2, 2))
    torch.autograd.backward(output.sum())
    assert model[2].bias.grad.item() == 1.5  # the share of this rank's samples, times the number of ranks


# --- DistributedDataParallel ----------------------------------------------------------------------------------------


class Wrapped:
    """DistributedDataParallel as far as a strategy asks it."""

    def __init__(self, **logged: Any) -> None:
        self.require_backward_grad_sync = True
        self.logged = logged

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.logged


def make_wrapped(static: bool = False, wire: Any = None, **logged: Any) -> Any:
    made: Any = DdpAllReduce(25.0, static, wire)
    made._wrapped, made._stats = Wrapped(**logged), {"updates": 3.0, "messages": 6.0, "bytes": 48.0}
    made._weight, made._total = 1.0, 4.0
    return made


def test_only_the_last_pass_of_an_update_exchanges_gradients() -> None:
    made = make_wrapped()
    synchronizes = []
    for passes in (1, 2):
        made.begin(1.0, 2.0, passes)
        synchronizes.append(made._wrapped.require_backward_grad_sync)
        with made.last_pass():
            synchronizes.append(made._wrapped.require_backward_grad_sync)
    assert synchronizes == [True, True, False, True]


def test_a_static_graph_has_one_pass_per_update() -> None:
    make_wrapped(static=True).begin(1.0, 2.0, 1)
    with pytest.raises(TaskUsageError, match=r"an update has 2 passes, and .* supports only one") as error:
        make_wrapped(static=True).begin(1.0, 2.0, 2)
    assert "--method ddp" in str(error.value.hint)


def test_torchs_figures_are_in_seconds() -> None:
    made = make_wrapped(
        avg_backward_compute_time=2_000_000_000,
        avg_backward_comm_time=500_000_000,
        avg_backward_compute_comm_overlap_time=250_000_000,
    )
    assert made.stats() == {
        "updates": 3.0,
        "messages": 6.0,
        "bytes": 48.0,
        "backward_seconds": 2.0,
        "communication_seconds": 0.5,
        "overlapped_seconds": 0.25,
    }
    assert make_wrapped().stats()["backward_seconds"] == 0.0


@pytest.mark.parametrize(
    ("logged", "sizes"),
    [
        ({"rebuilt_bucket_sizes": "100, 200", "bucket_sizes": "300"}, [100, 200]),
        ({"rebuilt_bucket_sizes": "", "bucket_sizes": "300"}, [300]),
        ({"bucket_sizes": "1,2, "}, [1, 2]),
        ({}, []),
    ],
)
def test_buckets_are_those_that_torch_has_built_last(logged: dict[str, Any], sizes: list[int]) -> None:
    assert make_wrapped(**logged).bucket_bytes() == sizes


@pytest.mark.parametrize(("wire", "size"), [(None, 16), (torch.float16, 8)])
def test_a_bucket_is_weighted_and_sent_in_the_methods_format(
    monkeypatch: pytest.MonkeyPatch, wire: Any, size: int
) -> None:
    sent: list[Any] = []

    def all_reduce(tensor: Any, async_op: bool) -> Any:
        sent.append((tensor.dtype, tensor.tolist(), async_op))
        future: Any = torch.futures.Future()
        future.set_result([tensor.mul_(2)])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(ddp, "all_reduce", all_reduce)
    made = make_wrapped(wire=wire)
    gradients = torch.tensor([4.0, 8.0, 0.0, -4.0])
    found = made._reduce_bucket(None, SimpleNamespace(buffer=lambda: gradients)).wait()
    assert found.dtype is torch.float32
    assert found.tolist() == gradients.tolist() == [2.0, 4.0, 0.0, -2.0]
    assert sent == [(wire or torch.float32, [1.0, 2.0, 0.0, -1.0], True)]
    assert made._stats == {"updates": 3.0, "messages": 7.0, "bytes": 48.0 + size}
