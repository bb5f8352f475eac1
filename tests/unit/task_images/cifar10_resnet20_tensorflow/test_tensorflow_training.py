"""The training in TensorFlow over torch: the network, its updates, what ranks exchange, and what is written."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from task_images.cifar10_resnet20_tensorflow.data import Batch
from task_images.cifar10_resnet20_tensorflow.settings import Settings
from task_images.contract import Contract
from task_images.harness.errors import DivergedError, EnvironmentUnfitError, PeerLostError, TaskUsageError
from task_images.harness.loop import Plan, Position
from task_images.harness.models.resnet import resnet
from task_images.harness.settings import Protocol
from task_images.harness.updates import Update
from tests.unit.task_images.cifar10_resnet20_tensorflow.tensorflow_in_torch import TensorFlow, Variable, load


@pytest.fixture(scope="module")
def modules() -> Any:
    return load()


@pytest.fixture(autouse=True)
def tf(modules: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A new module of TensorFlow, which records nothing yet."""
    made = TensorFlow()
    for name in ("world", "model", "training", "servers"):
        monkeypatch.setattr(getattr(modules, name), "tf", made)
    with torch.no_grad():
        yield made


# --- the network ----------------------------------------------------------------------------------------------------


def copy_into(model: Any, module: nn.Module, blocks: int) -> None:
    """Give a torch module of version 2 the values of a model, and the running statistics too."""
    weights, norms, averages = (iter(part) for part in (model.weights, model.norms, model.averages))
    own = dict(module.named_parameters()) | dict(module.named_buffers())

    def convolve(name: str) -> None:
        own[f"{name}.weight"].copy_(next(weights).detach().permute(3, 2, 0, 1))

    def norm(name: str) -> None:
        for part, values in (("weight", norms), ("bias", norms), ("running_mean", averages), ("running_var", averages)):
            own[f"{name}.{part}"].copy_(next(values).detach())

    convolve("stem")
    for number in range(3 * blocks):
        norm(f"stages.{number}.norm1")
        convolve(f"stages.{number}.convolution1")
        norm(f"stages.{number}.norm2")
        convolve(f"stages.{number}.convolution2")
        if number % blocks == 0:
            convolve(f"stages.{number}.projection")
    norm("norm")
    own["classifier.weight"].copy_(next(weights).detach().T)
    own["classifier.bias"].copy_(next(weights).detach())
    assert next(weights, None) is next(norms, None) is next(averages, None) is None


def make_pair(modules: Any, depth: int) -> tuple[Any, nn.Module, torch.Tensor]:
    """A model whose norms have something to do, the torch module with its values, and images."""
    model, generator = modules.model.ResNet(depth, seed=1), torch.Generator().manual_seed(4)
    for one in (*model.norms, *model.averages):
        one.assign(torch.rand(one.shape, generator=generator) + 0.5)
    module = resnet(depth, 2)
    copy_into(model, module, (depth - 2) // 6)
    return model, module, torch.randn(3, 9, 8, 3, generator=generator)


@pytest.mark.parametrize("depth", [8, 14])
def test_the_network_is_that_of_torch(modules: Any, depth: int) -> None:
    model, module, images = make_pair(modules, depth)
    expected = module.eval()(images.permute(0, 3, 1, 2))
    torch.testing.assert_close(model(images, training=False), expected, rtol=1e-4, atol=1e-5)


def test_in_training_the_network_uses_its_batchs_statistics_and_moves_the_running_ones_as_torch_does(
    modules: Any,
) -> None:
    model, module, images = make_pair(modules, 8)
    expected = module.train()(images.permute(0, 3, 1, 2))
    torch.testing.assert_close(model(images, training=True), expected, rtol=1e-4, atol=1e-4)
    moved = [one for name, one in module.named_buffers() if "running" in name]
    assert len(moved) == len(model.averages)
    for own, other in zip(model.averages, moved, strict=True):
        torch.testing.assert_close(own.detach(), other, rtol=1e-4, atol=1e-5)


def test_resnet_20_has_the_published_number_of_parameters(modules: Any) -> None:
    model = modules.model.ResNet(20, seed=1)
    assert model.count == 272_538
    assert len(model.parameters) == len(model.weights) + len(model.norms)
    assert [one.is_trainable for one in model.parameters] == [True] * len(model.parameters)
    assert [one.is_trainable for one in model.averages] == [False] * len(model.averages)
    # He et al. 2015: a variance of 2 over the outgoing connections.
    kernel = max(model.weights, key=lambda one: one.numel()).detach()
    assert kernel.shape == (3, 3, 64, 64)
    assert float(kernel.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    # As torch's linear layers: uniform up to 1 / sqrt(inputs).
    classifier = model.weights[-2].detach()
    assert classifier.shape == (64, 10)
    assert 0.95 / 8 < float(classifier.abs().max()) <= 1 / 8
    assert model.weights[-1].shape == (10,)


def test_equal_seeds_give_equal_networks(modules: Any) -> None:
    one, same, other = (modules.model.ResNet(8, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, same.parameters, strict=True))
    assert not torch.equal(one.weights[0], other.weights[0])


@pytest.mark.parametrize("depth", [2, 7, 9, 21])
def test_other_depths_are_refused(modules: Any, depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth 6n\\+2, not {depth}"):
        modules.model.ResNet(depth, 1)


def test_pixels_are_normalized_per_channel(modules: Any) -> None:
    found = modules.training.normalize(torch.tensor([[[[0, 127, 255]]]], dtype=torch.uint8))
    expected = [-0.4914 / 0.2023, (127 / 255 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-5)


# --- updates --------------------------------------------------------------------------------------------------------


class Tiny:
    """A model of one matrix and one norm's scale: outputs are pixels x matrix x scale."""

    def __init__(self, *_: object) -> None:
        self.weights = [Variable(np.array([[1.0, 2.0], [-1.0, 0.5]], np.float32))]
        self.norms = [Variable(np.array([1.5], np.float32))]
        self.averages = [Variable(np.zeros(2, np.float32), trainable=False)]
        self.count = 5

    @property
    def parameters(self) -> list[Variable]:
        return [*self.weights, *self.norms]

    def __call__(self, x: Any, training: bool) -> Any:
        if training:
            self.averages[0].assign_add(torch.ones(2))
        return x.reshape(len(x), -1).float() @ self.weights[0] * self.norms[0]


def make_network(modules: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(modules.training, "ResNet", Tiny)
    monkeypatch.setattr(modules.training, "normalize", lambda pixels: pixels)
    return modules.training.Network(replace(Settings(), **changes), 1)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay_norms", [False, True])
def test_updates_are_those_of_torchs_sgd(
    modules: Any, monkeypatch: pytest.MonkeyPatch, nesterov: bool, decay_norms: bool
) -> None:
    network = make_network(
        modules, monkeypatch, momentum=0.75, nesterov=nesterov, weight_decay=0.25, decay_norms=decay_norms
    )
    matrix, scale = (one.detach().clone().requires_grad_() for one in network.model.parameters)
    groups: list[dict[str, Any]] = [{"params": [matrix]}, {"params": [scale], "weight_decay": 0.25 * decay_norms}]
    reference = torch.optim.SGD(groups, 0.5, momentum=0.75, nesterov=nesterov, weight_decay=0.25)
    for rate in (0.5, 0.25, 0.25):
        matrix.grad, scale.grad = torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([-1.0])
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        network.update(torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0]), torch.tensor(rate))
        torch.testing.assert_close(network.model.weights[0].detach(), matrix.detach())
        torch.testing.assert_close(network.model.norms[0].detach(), scale.detach())
    assert [one.numel() for one in network.variables] == [4, 1, 2, 4, 1]  # parameters, averages, velocities


class Ranks:
    """A world of `size` ranks, of which the others bring `add` to a sum."""

    def __init__(self, size: int = 1, add: Any = 0.0, folder: Path | None = None) -> None:
        self.size, self.rank, self.is_first, self.device = size, 0, True, "CPU:0"
        self.contract = Contract({"MLBENCH_OUTPUT_DIR": str(folder or ""), "MLBENCH_SEED": "1"})
        self.add, self.sums, self.averaged = add, [], []  # type: ignore[var-annotated]

    def all_reduce(self, tensor: Any) -> Any:
        self.sums.append(tensor.tolist())
        return tensor + self.add

    def sum(self, values: list[float]) -> list[float]:
        return [value + self.add for value in values]

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values]

    def broadcast(self, variables: Any) -> None:
        self.averaged.append(("broadcast", len(variables)))

    def average(self, variables: Any) -> None:
        self.averaged.append(("average", len(variables)))


class Losses(list[tuple[float, float]]):
    def add(self, value: Any, weight: float) -> None:
        self.append((float(value), weight))


class Sections(list[str]):
    """A tracker that notes what time is counted as."""

    def section(self, name: str) -> Any:
        self.append(name)
        return nullcontext()


def make_trainer(modules: Any, network: Any, world: Any, **more: Any) -> Any:
    nothing: Any = None
    made = modules.training.TensorFlowTrainer(
        world, nothing, nothing, nothing, Plan(1), name="tiny", network=network,
        **{"details": {"options": {"loaders": 2}}, **more},
    )  # fmt: skip
    made.tracker, made.position, made.losses = Sections(), Position(), Losses()
    made._attach()
    return made


IMAGES = np.array([[1, 0], [0, 2], [3, 1]], np.uint8).reshape(3, 1, 1, 2)
LABELS = np.array([0, 1, 1])


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_is_of_the_mean_loss_with_the_ranks_share(
    modules: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    network = make_network(modules, monkeypatch, momentum=0.0, nesterov=False, weight_decay=0.0)
    world = Ranks(size, 0.125 if size > 1 else 0.0)
    trainer = make_trainer(modules, network, world)
    assert world.averaged == [("broadcast", 2)]
    matrix, scale = (one.detach().clone().requires_grad_() for one in network.model.parameters)
    assert trainer._update(Update([Batch(IMAGES, LABELS, 4)], 1, 3.0, 4.0, 4), 0.5)
    with torch.enable_grad():
        outputs = torch.from_numpy(IMAGES.reshape(3, 2)).float() @ matrix * scale
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(LABELS))
        torch.autograd.backward(loss)
    for own, other in zip(network.model.parameters, (matrix, scale), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(own.detach(), other.detach() - 0.5 * (0.75 * other.grad + world.add))
    assert trainer.losses == [(pytest.approx(loss.item()), 3.0)]
    steps = ["preprocessing", "forward", "loss", "backward", "communication", "optimizer", "metrics"]
    assert trainer.tracker == (steps if size > 1 else [name for name in steps if name != "communication"])
    assert trainer._sent == {"messages": size - 1, "bytes": 4 * 5 * (size - 1)}
    assert network.model.averages[0].tolist() == [1.0, 1.0]


def test_validation_is_over_the_samples_of_all_ranks(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of logits; every figure is a sum over samples, divided once."""
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1]])
    labels = np.array([0, 0, 1])  # right; last of six; behind one, together with the others
    network = SimpleNamespace(prepare=lambda pixels: pixels.long(), evaluate=lambda rows: logits[rows])
    batches = [Batch(np.array([0, 1], np.uint8), labels[:2], 3), Batch(np.array([2], np.uint8), labels[2:], 3)]
    images = SimpleNamespace(validation=lambda: iter(batches))
    validate = modules.training.Validator(Ranks(), network, images)
    losses = nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none")
    found = validate(1)
    assert found == {
        "loss": pytest.approx(losses.mean().item()),
        "Prec@1": pytest.approx(100 / 3),
        "Prec@5": pytest.approx(200 / 3),
    }
    others = modules.training.Validator(Ranks(2, 1.0), network, images)(1)
    assert others["Prec@1"] == pytest.approx(100 * 2 / 4)
    assert others["loss"] == pytest.approx((losses.sum().item() + 1) / 4)


def test_a_validation_loss_that_is_not_finite_ends_the_training(modules: Any) -> None:
    network = SimpleNamespace(prepare=lambda pixels: pixels, evaluate=lambda rows: torch.full((1, 6), torch.nan))
    images = SimpleNamespace(validation=lambda: iter([Batch(np.zeros(1, np.uint8), np.array([0]), 1)]))
    with pytest.raises(DivergedError):
        modules.training.Validator(Ranks(), network, images)(3)


def test_what_a_result_says_of_a_training(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(modules, make_network(modules, monkeypatch), Ranks(2))
    trainer._sent, trainer.position.total = {"messages": 4, "bytes": 80}, 4
    assert trainer._facts(None) == {
        "communication": {"messages": 4, "bytes": 80, "updates": 4},
        "precision": "fp32",
        "options": {"loaders": 2, "precision": "fp32", "reduction": "after the backward pass"},
    }
    assert trainer._read_losses([torch.tensor(0.5), torch.tensor(2.0)]) == [0.5, 2.0]
    assert trainer._check_replicas() == {}
    assert trainer.world.averaged == [("broadcast", 2), ("average", 1)]
    trainer.world.gather = lambda values: [values, [values[0] + 1]]
    with pytest.raises(DivergedError, match="the model of rank 1"):
        trainer._check_replicas()


@pytest.mark.parametrize(("device", "syncs"), [("CPU:0", False), ("GPU:0", True)])
def test_the_clock_waits_for_gpus_only(modules: Any, monkeypatch: pytest.MonkeyPatch, device: str, syncs: bool) -> None:
    trainer = make_trainer(modules, make_network(modules, monkeypatch), Ranks())
    trainer.world.device, calls = device, []
    trainer.world.synchronize = lambda: calls.append("sync")
    trainer._make_tracker().snapshot()
    assert bool(calls) is syncs


def test_a_checkpoint_has_parameters_averages_and_velocities(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = make_trainer(modules, make_network(modules, monkeypatch), Ranks(folder=tmp_path), identity={"depth": 8})
    path = trainer._checkpoint_path()
    assert path == tmp_path / "checkpoint.npz"
    update = Update([Batch(IMAGES, LABELS, 3)], 1, 3.0, 3.0, 3)
    trainer._update(update, 0.5)
    trainer._write(path, {"depth": 8, "position": 1})
    other = make_trainer(modules, make_network(modules, monkeypatch), Ranks(folder=tmp_path), identity={"depth": 8})
    assert other._read(path)["position"] == 1
    for one in (trainer, other):
        one._update(update, 0.5)
    for own, others in zip(trainer.network.variables, other.network.variables, strict=True):
        assert torch.equal(own, others)


# --- the ranks ------------------------------------------------------------------------------------------------------


def make_contract(size: int = 1, rank: int = 0, backend: str = "grpc", device: str = "cpu", **more: str) -> Contract:
    own = {"RANK": str(rank), "WORLD_SIZE": str(size), "MLBENCH_BACKEND": backend, "MLBENCH_DEVICE": device}
    return Contract({**own, **more})


def make_world(modules: Any, size: int = 1, rank: int = 0, **more: Any) -> Any:
    strategy = SimpleNamespace(run=lambda function, args: function(*args)) if size > 1 else None
    return modules.world.World(make_contract(size, rank, **more), "CPU:0", 2, strategy)


def test_one_rank_exchanges_nothing(modules: Any, tf: Any) -> None:
    world = make_world(modules)
    tensor = torch.ones(2)
    assert world.all_reduce(tensor) is tensor
    assert world.sum([1.5, 2.0]) == [1.5, 2.0]
    assert world.gather([1.0, 2.0]) == [[1.0, 2.0]]
    assert world.agree(7.0) == 7.0
    variable = Variable(np.ones(2, np.float32))
    world.broadcast([variable])
    world.average([variable])
    assert variable.tolist() == [1.0, 1.0]
    assert world.backend_facts() == {}
    assert world.is_first


def test_sums_are_in_float64(modules: Any, tf: Any) -> None:
    tf.others = lambda own: torch.full_like(own, 1e-12)
    assert make_world(modules, 2).sum([1.0]) == [1.0 + 1e-12]


def test_every_rank_fills_its_own_row_of_what_is_gathered(modules: Any, tf: Any) -> None:
    given = torch.tensor([[5.0, 6.0], [0.0, 0.0], [7.0, 8.0]], dtype=torch.float64)
    tf.others = lambda own: given.reshape(own.shape)
    world = make_world(modules, 3, rank=1)
    assert world.gather([1.0, 2.0]) == [[5.0, 6.0], [1.0, 2.0], [7.0, 8.0]]
    assert not world.is_first
    tf.others = lambda own: torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    assert world.agree(9.0) == 3.0
    tf.others = lambda own: torch.tensor([3.0, 0.0, 1e15], dtype=torch.float64)
    assert world.peak_memory() == 10**15


def test_all_ranks_get_rank_0s_values(modules: Any, tf: Any) -> None:
    for rank, expected in ((0, [1.0, 2.0, 3.0]), (1, [0.0, 0.0, 0.0])):
        variables = [Variable(np.array([[1.0, 2.0]], np.float32)), Variable(np.array([3.0], np.float32))]
        make_world(modules, 2, rank=rank).broadcast(variables)
        assert [*variables[0].flatten().tolist(), *variables[1].tolist()] == expected


def test_averages_are_over_all_ranks(modules: Any, tf: Any) -> None:
    tf.others = lambda own: torch.full_like(own, 0.5)
    variables = [Variable(np.array([[4.0], [8.0]], np.float32)), Variable(np.array([12.0], np.float32))]
    make_world(modules, 4).average(variables)
    assert variables[0].tolist() == [[1.5], [2.5]]
    assert variables[1].tolist() == [3.5]


def test_barriers_are_sums(modules: Any, tf: Any) -> None:
    met: list[int] = []

    def note(own: Any) -> Any:
        met.append(len(own))
        return torch.zeros_like(own)

    tf.others = note
    world = make_world(modules, 2)
    world.barrier()
    world.await_loading()
    world.close()
    assert met == [1, 1, 1]


def test_memory_and_waiting_are_those_of_the_device(modules: Any, tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.world, "resident_peak", lambda: 1234)
    world = make_world(modules)
    world.synchronize()
    assert (world.peak_memory(), tf.calls) == (1234, [])
    world.device = "GPU:0"
    world.synchronize()
    assert (world.peak_memory(), tf.calls) == (5000, ["sync"])


def test_what_the_environment_says_of_tensorflow(modules: Any, tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.world.platform, "machine", lambda: "x86_64")
    world = make_world(modules)
    tf.build = {"cuda_version": "", "is_cuda_build": "False"}
    facts = {"framework": "tensorflow", "framework_version": "2.20.0"}
    assert world.framework_facts() == {**facts, "device": "cpu:0", "device_name": "x86_64", "libraries": {}}
    gpu = SimpleNamespace(name="/physical_device:GPU:0", is_known=True)
    world.device, tf.gpus = "GPU:0", [gpu]
    tf.build = {"cuda_version": "12.5", "cudnn_version": 9, "other_version": "1"}
    libraries = {"cuda": "12.5", "cudnn": "9"}
    assert world.framework_facts() == {**facts, "device": "gpu:0", "device_name": "H100", "libraries": libraries}
    gpu.is_known = False
    assert world.framework_facts()["device_name"] == "/physical_device:GPU:0"


@pytest.mark.parametrize(("backend", "said"), [("grpc", "ring over gRPC"), ("nccl", "NCCL")])
def test_the_result_names_what_carries_collectives(modules: Any, backend: str, said: str) -> None:
    assert make_world(modules, 2, backend=backend).backend_facts() == {"collectives": said}


def test_ranks_on_cpus_see_no_gpu(modules: Any, tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    tf.gpus = ["a", "b"]
    assert modules.world.configure(make_contract()) == ("CPU:0", 6)
    assert tf.calls == [("tf32", False), ("within", 6), ("between", 2), ("visible", [])]
    with pytest.raises(EnvironmentUnfitError, match="the backend nccl needs a GPU") as error:
        modules.world.configure(make_contract(backend="nccl"))
    assert "--backend grpc" in str(error.value.hint)


def test_ranks_of_a_machine_share_its_gpus(modules: Any, tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tf.gpus = ["a", "b"]
    contract = make_contract(4, 3, "nccl", "gpu", LOCAL_RANK="3")
    assert modules.world.configure(contract, tf32=True, inter_op=5) == ("GPU:0", 1)
    assert tf.calls == [("tf32", True), ("within", 1), ("between", 5), ("visible", ["b"]), ("growth", "b", True)]
    tf.gpus = []
    with pytest.raises(EnvironmentUnfitError, match="TensorFlow finds none here"):
        modules.world.configure(contract)


@pytest.mark.parametrize(
    "name", ["UnavailableError", "DeadlineExceededError", "CancelledError", "AbortedError", "InternalError"]
)
def test_what_tensorflow_raises_when_a_rank_is_gone_is_a_lost_rank(modules: Any, tf: Any, name: str) -> None:
    lost = pytest.raises(PeerLostError, match="lost another rank: Connection reset by peer x")
    with lost as error, modules.world.lost_ranks():
        raise getattr(tf.errors, name)("Connection reset\n  by peer " + "x" * 500)
    assert len(str(error.value)) < 330
    with pytest.raises(tf.errors.InvalidArgumentError), modules.world.lost_ranks():
        raise tf.errors.InvalidArgumentError("shapes differ")


@pytest.mark.parametrize(("backend", "is_nccl"), [("grpc", False), ("nccl", True)])
def test_several_ranks_meet_before_tensorflow_is_asked(
    modules: Any, monkeypatch: pytest.MonkeyPatch, backend: str, is_nccl: bool
) -> None:
    monkeypatch.setattr(modules.world, "free_port", lambda: 77)
    monkeypatch.setattr(modules.world, "rendezvous", lambda contract, port, seconds: [port, seconds])
    monkeypatch.setattr(modules.world, "configure", lambda contract, tf32: ("GPU:0", 3 + tf32))
    made: list[Any] = []

    def make_strategy(tensorflow: Any, addresses: Any, rank: int, *, is_nccl: bool) -> Any:
        made.append((addresses, rank, is_nccl))
        return SimpleNamespace(run=None)

    monkeypatch.setattr(modules.world, "make_strategy", make_strategy)
    world = modules.world.open_world(make_contract(2, 1, backend), 5.0, tf32=True)
    assert made == [([77, 5.0], 1, is_nccl)]
    assert (world.rank, world.size, world.device, world.threads, world.backend) == (1, 2, "GPU:0", 4, backend)
    alone = modules.world.open_world(make_contract(1, 0, backend))
    assert (len(made), alone.threads, alone.backend_facts()) == (1, 3, {})


def test_other_backends_are_refused(modules: Any) -> None:
    with pytest.raises(EnvironmentUnfitError, match='TensorFlow has no communication backend "gloo"'):
        modules.world.open_world(make_contract(2, 0, "gloo"))


def test_without_tensorflow_it_says_what_to_install(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules.world.require_tensorflow()
    monkeypatch.setattr(modules.world, "tf", None)
    with pytest.raises(EnvironmentUnfitError, match="TensorFlow is not installed here") as error:
        modules.world.require_tensorflow()
    assert "mlbench-cli[tensorflow]" in str(error.value.hint)


# --- parameter servers ----------------------------------------------------------------------------------------------


class Link:
    """A connection to another rank."""

    def __init__(self, says: bytes | OSError = b"") -> None:
        self.says, self.sent = says, b""
        self.options: list[Any] = []

    def settimeout(self, seconds: float | None) -> None:
        self.options.append(seconds)

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)

    def recv(self, size: int) -> bytes:
        if isinstance(self.says, OSError):
            raise self.says
        return self.says

    def sendall(self, data: bytes) -> None:
        if isinstance(self.says, OSError):
            raise self.says
        self.sent += data


def open_cluster(modules: Any, monkeypatch: pytest.MonkeyPatch, rank: int, links: dict[int, Any], size: int = 3) -> Any:
    servers, watched = modules.servers, []
    monkeypatch.setattr(servers, "configure", lambda contract, inter_op: ("CPU:0", 2 if inter_op == size + 1 else 0))
    monkeypatch.setattr(servers, "free_port", lambda: 5000)
    monkeypatch.setattr(
        servers, "meet", lambda contract, port, seconds: ([f"10.0.0.{rank}:{port}" for rank in range(size)], links)
    )

    def make_thread(target: Any, daemon: bool) -> Any:
        return SimpleNamespace(start=lambda: watched.append((target.__name__, daemon)))

    monkeypatch.setattr(servers, "threading", SimpleNamespace(Thread=make_thread))
    made = servers.open_cluster(make_contract(size, rank), 9.0)
    assert watched == ([("_watch", True)] if rank == 0 else [])
    return made


CONFIG = {"device_count": {"GPU": 0}, "intra_op_parallelism_threads": 2, "inter_op_parallelism_threads": 4}


def test_rank_0_serves_parameters_to_the_workers_of_all_ranks(
    modules: Any, tf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {1: Link(), 2: Link()}
    cluster = open_cluster(modules, monkeypatch, 0, links)
    common = {"task_index": 0, "protocol": "grpc", "config": CONFIG}
    assert tf.calls == [
        ("server", {"worker": {0: "localhost:0"}}, {"job_name": "worker", **common}),
        ("server", {"ps": {0: "localhost:0"}}, {"job_name": "ps", **common}),
    ]
    jobs = {
        "chief": ["10.0.0.0:5000"],
        "ps": ["10.0.0.0:9002"],
        "worker": ["10.0.0.0:9001", "10.0.0.1:9001", "10.0.0.2:9001"],
    }
    assert cluster.strategy == ("strategy", (jobs, {"task_type": "chief", "task_id": 0, "rpc_layer": "grpc"}))
    assert cluster._coordinator == ("coordinator", cluster.strategy)
    assert cluster._waiting_since == float("inf")
    # Dead machines are found by the kernel: after 10 s of silence it asks 6 times, every 5 s.
    socket = modules.servers.socket
    assert links[1].options == [
        None,  # no timeout: a training may last for days
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    ]
    assert cluster.gather([1.0, 2.0]) == [[1.0, 2.0]]
    cluster.close()
    assert [link.sent for link in links.values()] == [b"\n", b"\n"]


def test_other_ranks_work_until_rank_0_says_that_training_has_ended(
    modules: Any, tf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cluster(modules, monkeypatch, 2, {0: Link(b"\n")}).serve()
    assert [call[1] for call in tf.calls] == [{"worker": {2: "localhost:0"}}]
    for gone in (b"", OSError("reset")):
        with pytest.raises(PeerLostError, match="lost rank 0"):
            open_cluster(modules, monkeypatch, 1, {0: Link(gone)}).serve()


def test_ranks_that_are_gone_do_not_keep_the_others_from_ending(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    links = {1: Link(OSError("reset")), 2: Link()}
    open_cluster(modules, monkeypatch, 0, links).close()
    assert links[2].sent == b"\n"


def test_each_worker_gets_four_batches_ahead_and_results_come_in_the_order_of_calls(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = open_cluster(modules, monkeypatch, 0, {}, size=2)
    events: list[str] = []

    def schedule(function: Any, arguments: Any) -> Any:
        number = arguments[0]
        events.append(f"give {number}")
        values = SimpleNamespace(device=number % 2 or None)
        return SimpleNamespace(fetch=lambda: function(number), _values=values)

    cluster._coordinator = SimpleNamespace(schedule=schedule)
    for number in range(10):
        cluster.give(lambda n: 10 * n, [number], lambda value, rank: events.append(f"{value} of {rank}"))
    assert events == [*(f"give {n}" for n in range(8)), "0 of 0", "give 8", "10 of 1", "give 9"]
    cluster.synchronize()
    assert events[12:] == [f"{10 * n} of {n % 2}" for n in range(2, 10)]
    assert cluster._waiting_since == float("inf")
    cluster.synchronize()
    assert len(events) == 20


class Exit(Exception):
    """The process would have ended."""


class Selector:
    """Connections of which `ended` are readable; after one look the training is over."""

    def __init__(self, cluster: Any, ended: list[int]) -> None:
        self.cluster, self.ended, self.registered = cluster, ended, []  # type: ignore[var-annotated]

    def __enter__(self) -> "Selector":
        return self

    def __exit__(self, *_: object) -> None: ...

    def register(self, link: Any, kind: int, rank: int) -> None:
        self.registered.append(rank)

    def select(self, seconds: float) -> Any:
        assert 0 < seconds <= 1
        if not self.ended:
            self.cluster._is_over = True
        return [(SimpleNamespace(data=rank), None) for rank in self.ended]


def watch(modules: Any, monkeypatch: pytest.MonkeyPatch, cluster: Any, ended: list[int]) -> str:
    selector = Selector(cluster, ended)
    monkeypatch.setattr(modules.servers.selectors, "DefaultSelector", lambda: selector)

    def leave(message: str, hint: str) -> None:
        raise Exit(message)

    monkeypatch.setattr(modules.servers, "_exit", leave)
    try:
        cluster._watch()
    except Exit as error:
        return str(error)
    assert selector.registered == list(cluster._links)
    return ""


def test_a_rank_whose_connection_ends_is_named(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = open_cluster(modules, monkeypatch, 0, {1: Link(), 2: Link()})
    assert watch(modules, monkeypatch, cluster, [2]) == "lost rank 2"
    assert watch(modules, monkeypatch, cluster, []) == ""


def test_workers_that_do_not_answer_in_time_end_the_training(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = open_cluster(modules, monkeypatch, 0, {1: Link()})
    now = [1000.0]
    monkeypatch.setattr(modules.servers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster._waiting_since = 400.0
    assert watch(modules, monkeypatch, cluster, []) == ""
    cluster._is_over, now[0] = False, 1000.5
    assert watch(modules, monkeypatch, cluster, []) == "the workers have not answered for 600 s"


class Served:
    """Rank 0's cluster, whose workers compute at once; `rank` is the one that is next."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.is_first, self.contract = size, 0, True, make_contract(size)
        self.strategy = SimpleNamespace(scope=nullcontext)
        self.next_rank, self.waits = 0, 0

    def give(self, function: Any, arguments: Any, finish: Any) -> None:
        finish(function(*arguments), self.next_rank)

    def synchronize(self) -> None:
        self.waits += 1


def make_served(modules: Any, monkeypatch: pytest.MonkeyPatch, size: int = 2, **changes: Any) -> Any:
    network = make_network(modules, monkeypatch, **changes)
    monkeypatch.setattr(modules.servers, "normalize", lambda pixels: pixels)
    nothing: Any = None
    made = modules.servers.ServerTrainer(
        Served(size), nothing, SimpleNamespace(count=lambda epoch: 3), nothing, Plan(1), name="tiny",
        details={"options": {"loaders": 2}}, network=network, settings=replace(Settings(), **changes),
    )  # fmt: skip
    made.position, made.losses = Position(), Losses()
    made._attach()
    return made


def test_an_update_of_a_worker_is_that_of_a_single_rank(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25, "decay_norms": False}
    served = make_served(modules, monkeypatch, **changes)
    alone = make_trainer(modules, make_network(modules, monkeypatch, **changes), Ranks())
    update = Update([Batch(IMAGES, LABELS, 3)], 1, 3.0, 3.0, 3)
    for rate in (0.5, 0.25):
        assert served._update(update, rate)
        assert alone._update(update, rate)
    shared = served._shared
    for own, other in zip(shared.variables, alone.network.variables, strict=True):
        torch.testing.assert_close(own.detach(), other.detach())
    assert [weight for _, weight in served.losses] == [3.0, 3.0]
    assert served.losses[1][0] == pytest.approx(alone.losses[1][0])
    assert served._late == [0.0, 0.0]
    assert int(served._version) == 2


def test_updates_of_others_meanwhile_are_how_late_one_is(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_served(modules, monkeypatch)
    model, version = served._shared.model, served._version
    evaluate = type(model).__call__

    def compute_while_others_update(self: Any, x: Any, training: bool) -> Any:
        version.assign_add(2)
        return evaluate(self, x, training)

    monkeypatch.setattr(Tiny, "__call__", compute_while_others_update)
    served._update(Update([Batch(IMAGES, LABELS, 3)], 1, 3.0, 3.0, 3), 0.1)
    assert served._late == [2.0]


def test_batches_are_counted_by_worker_and_rank_0s_own_are_not_sent(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_served(modules, monkeypatch)
    for rank, late in ((0, 0.0), (1, 1.0), (1, 4.0)):
        served._count(3.0, 100, torch.tensor([0.5, late]), rank)
    served.position.total = 3
    assert served.losses == [(0.5, 3.0)] * 3
    # 4 bytes of each of 5 parameters and 2 running statistics, both ways.
    assert served._facts(1.0) == {
        "communication": {
            "messages": 2,
            "sent_bytes": 2 * 28 + 200,
            "received_bytes": 2 * 28,
            "updates": 3,
            "updates_by_rank": [1, 2],
            "staleness": {"mean": pytest.approx(5 / 3), "max": 4.0},
        },
        "precision": "fp32",
        "options": {"loaders": 2, "precision": "fp32", "reduction": "none: updates are asynchronous"},
    }
    assert make_served(modules, monkeypatch)._facts(None)["communication"]["staleness"] == {"mean": 0.0, "max": 0.0}


def test_a_batch_counts_with_the_bytes_of_its_images_and_labels(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_served(modules, monkeypatch)
    served.world.next_rank = 1
    served._update(Update([Batch(IMAGES, LABELS, 3)], 1, 3.0, 3.0, 3), 0.1)
    assert served._sent_bytes == 6 + 3 * 8
    assert served._by_rank == [0, 1]


def test_all_updates_are_done_at_the_end_of_an_epoch(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_served(modules, monkeypatch)
    waits = []
    for number in range(3):
        served.position.in_epoch = number
        served._update(Update([Batch(IMAGES, LABELS, 3)], 1, 3.0, 3.0, 3), 0.1)
        waits.append(served.world.waits)
    assert waits == [0, 0, 1]


def test_validation_is_of_the_servers_model_with_the_lateness_since_the_last_one(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_served(modules, monkeypatch)
    served._shared.model.weights[0].assign(torch.full((2, 2), 7.0))
    served._shared.velocities[1].assign(torch.tensor([3.0]))
    served._late = [1.0, 2.0]
    assert served._check_replicas() == {"staleness": 1.5}
    assert served.network.model.weights[0].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert served.network.velocities[1].tolist() == [3.0]
    served._late += [6.0]
    assert served._check_replicas() == {"staleness": 6.0}
    assert served._check_replicas() == {"staleness": 0.0}
    served.network.model.norms[0].assign(torch.tensor([9.0]))
    served._load_state({})
    assert served._shared.model.norms[0].tolist() == [9.0]


def test_a_measured_training_has_as_many_updates_per_worker_as_one_with_collectives(modules: Any) -> None:
    nothing: Any = None
    plan = Plan(1, loss_every=25, protocol=Protocol(warmup=2, blocks=3, updates=10))
    for size, loss_every in ((3, 25), (4, 32)):
        made = modules.servers.ServerTrainer(
            Served(size), nothing, nothing, nothing, plan, network=nothing, settings=Settings()
        )
        found = made.plan.protocol
        assert (found.warmup, found.blocks, found.updates) == (2 * size, 3, 10 * size)
        assert made.plan.loss_every == loss_every  # 8 per worker: some of them are done by then


@pytest.mark.parametrize(
    ("parameters", "device", "what", "hint"),
    [
        ({"strategy": "parameter-server"}, "gpu", "the strategy parameter-server is for CPUs", "strategy=collective"),
        ({"momentum": 0.0, "nesterov": True}, "cpu", "nesterov needs a momentum above 0", "--set momentum=0.9"),
        ({"depth": 21}, "cpu", "the depth 21 is not of the form 6n", "--set depth=20"),
        ({"strategy": "collective"}, "gpu", "", ""),
        ({"momentum": 0.0, "nesterov": False, "depth": 8}, "cpu", "", ""),
        ({"strategy": "parameter-server"}, "cpu", "", ""),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_ranks_meet(
    modules: Any, parameters: dict[str, Any], device: str, what: str, hint: str
) -> None:
    settings = replace(Settings(), **parameters)
    if not what:
        modules.task._check(settings, 2, device)
        return
    with pytest.raises(TaskUsageError, match=what) as error:
        modules.task._check(settings, 2, device)
    assert hint in str(error.value.hint)
