"""Trainings in JAX over NumPy: the same updates as torch's optimizers, what ranks exchange, and what is written."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from task_images.contract import Contract
from task_images.harness.errors import DivergedError, TaskUsageError
from task_images.harness.jax_training import JaxModel, JaxOptimizer, JaxProgram, train_in_jax
from task_images.harness.loop import Plan, Position
from task_images.harness.settings import Protocol
from task_images.harness.training import Trainer
from task_images.harness.updates import Update
from tests.unit.task_images.harness.jax_in_numpy import NumpyRanks


class Line(nn.Module):
    """A linear layer that counts its passes, and has a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        self.register_buffer("passes", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("batches", torch.zeros(1, dtype=torch.int64))


def apply(parameters: Any, buffers: Any, inputs: Any) -> Any:
    return inputs @ parameters["weight"].T + parameters["bias"]


def train(parameters: Any, buffers: Any, inputs: Any, targets: Any) -> Any:
    """Half the sum of squares."""
    outputs = apply(parameters, buffers, inputs)
    return 0.5 * ((outputs - targets) ** 2).sum(), (outputs, {"passes": buffers["passes"] + 1})


def unpack(data: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], float, float]:
    return data, 2.0 * len(data[0]), float(len(data[0]))


PROGRAM = JaxProgram(apply, train, unpack)
FIRST = (torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0], [2.0]], dtype=torch.float64))
SECOND = (torch.tensor([[2.0, 1.0]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64))


def make_model(size: int = 1, **more: Any) -> JaxModel:
    return JaxModel(NumpyRanks(size, **more), Line(), PROGRAM)


# --- the model ------------------------------------------------------------------------------------------------------


def test_a_model_has_the_modules_parameters_and_those_of_its_buffers_that_are_fractions() -> None:
    module = Line()
    model = JaxModel(NumpyRanks(), module, PROGRAM)
    assert list(model.parameters) == ["weight", "bias"]
    assert list(model.buffers) == ["passes"]
    model.parameters["weight"][0, 0] = 9.0
    assert module.weight[0, 0].item() == 1.0


def test_calling_it_evaluates_tensors_and_passes_nothing_else_on() -> None:
    found = make_model()(FIRST[0], True, None)
    assert found.tolist() == [[1.5], [-1.5]]
    assert found.dtype == torch.float64


def test_a_pass_gives_loss_outputs_and_gradients_and_moves_buffers() -> None:
    model = make_model()
    loss, outputs, gradients = model.compute_gradients(FIRST)
    # Errors are 0.5 and -3.5.
    assert float(loss) == 0.5 * (0.5**2 + 3.5**2)
    assert outputs.tolist() == [[1.5], [-1.5]]
    assert gradients["weight"] == pytest.approx(np.array([[0.5, -3.5]]))
    assert gradients["bias"] == pytest.approx(np.array([-3.0]))
    assert model.buffers["passes"].tolist() == [1.0]
    model.compute_gradients(SECOND)
    assert model.buffers["passes"].tolist() == [2.0]


def test_gradients_are_summed_in_one_row_and_keep_their_shapes() -> None:
    model = make_model(3, add=lambda row: 10 + np.arange(len(row)))
    found = model.sum_gradients({"weight": np.array([[1.0, 2.0]]), "bias": np.array([3.0])})
    assert {name: one.tolist() for name, one in found.items()} == {"weight": [[11.0, 13.0]], "bias": [15.0]}
    assert model.ranks.rows == [[1.0, 2.0, 3.0]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("size", "others", "mean"), [(2, 3.0, 7.0), (4, 3.0, 5.0)])
def test_buffers_become_their_mean_over_ranks(size: int, others: float, mean: float) -> None:
    """This rank has 8, and the others bring their shares."""
    model = make_model(size, add=lambda row: np.full_like(row, others))
    model.buffers["passes"] += 8
    model.average_buffers()
    assert model.buffers["passes"].tolist() == [mean]


def test_one_rank_and_models_without_buffers_average_nothing() -> None:
    alone, plain = make_model(1), make_model(2)
    plain.buffers = {}
    for model in (alone, plain):
        model.average_buffers()
        assert model.ranks.rows == []  # type: ignore[attr-defined]


# --- the optimizers -------------------------------------------------------------------------------------------------


def make_sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 1.0, **options)


def make_adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1.0, betas=(0.5, 0.75), **options)


def make_groups(module: nn.Module) -> torch.optim.Optimizer:
    """The bias at half the rate and without decay."""
    return torch.optim.AdamW(
        [
            {"params": [module.get_parameter("weight")], "weight_decay": 0.5},
            {"params": [module.get_parameter("bias")], "weight_decay": 0.0, "rate_factor": 0.5},
        ],
        1.0,
        betas=(0.5, 0.75),
    )


@pytest.mark.parametrize(
    "make",
    [
        make_sgd,
        partial(make_sgd, momentum=0.5),
        partial(make_sgd, momentum=0.5, nesterov=True),
        partial(make_sgd, momentum=0.75, weight_decay=0.25),
        partial(make_adamw, weight_decay=0.0),
        partial(make_adamw, weight_decay=0.25),
        partial(make_adamw, weight_decay=0.25, eps=0.125),
        make_groups,
    ],
    ids=["sgd", "momentum", "nesterov", "decay", "adam", "adamw", "eps", "groups"],
)
@pytest.mark.parametrize("clip", [None, 1.5, 100.0])
def test_updates_are_those_of_torchs_optimizer(make: Any, clip: float | None) -> None:
    module = Line()
    model = JaxModel(NumpyRanks(), module, PROGRAM)
    own = JaxOptimizer(model, module, make(module))
    reference = make(module)
    for number, rate in enumerate((0.25, 0.25, 0.125, 0.5), 1):
        gradients = {"weight": np.array([[3.0, -4.0 * number]]), "bias": np.array([0.5 - number])}
        for name, parameter in module.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name].copy())
        for group in reference.param_groups:
            group["lr"] = rate * group.get("rate_factor", 1.0)
        expected = nn.utils.clip_grad_norm_(module.parameters(), np.inf if clip is None else clip)
        reference.step()
        norm = own.step(model, gradients, rate, number, np.inf if clip is None else clip)
        assert float(norm) == pytest.approx(expected.item())
        for name, parameter in module.named_parameters():
            assert model.parameters[name] == pytest.approx(parameter.detach().numpy(), rel=1e-6), (name, number)


def test_sgd_keeps_one_array_per_parameter_and_adamw_two() -> None:
    for make, kept in ((make_sgd, [["weight", "bias"], []]), (make_adamw, [["weight", "bias"]] * 2)):
        module = Line()
        model = JaxModel(NumpyRanks(), module, PROGRAM)
        own = JaxOptimizer(model, module, make(module))
        assert [list(part) for part in own.state] == kept
        own.step(model, {"weight": np.ones((1, 2)), "bias": np.ones(1)}, 0.5, 1, np.inf)
        assert [list(part) for part in own.state] == kept


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_other_optimizers_are_named(kind: Any) -> None:
    module = Line()
    with pytest.raises(TaskUsageError, match=f"the backend jax has no optimizer {kind.__name__}") as error:
        JaxOptimizer(JaxModel(NumpyRanks(), module, PROGRAM), module, kind(module.parameters()))
    assert error.value.hint == "Choose AdamW or SGD, or another backend."


# --- the training ---------------------------------------------------------------------------------------------------


class Sections(list[str]):
    """A tracker that notes what time is counted as."""

    def section(self, name: str) -> Any:
        self.append(name)
        return nullcontext()


class Losses(list[tuple[float, float]]):
    def add(self, value: Any, weight: float) -> None:
        self.append((float(value), weight))


@dataclass(frozen=True)
class Validator:
    model: Any

    def __call__(self, epoch: int) -> dict[str, float]:
        return {}


class Work:
    """A work that looks at what it has computed."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def prepare(self, part: Any) -> Any:
        return part

    def observe(self, outputs: Tensor, data: Any) -> None:
        self.seen.append((outputs.tolist(), data))

    def collect_metrics(self, world: object) -> dict[str, float]:
        return {"Prec@1": 50.0}


def make_trainer(
    ranks: NumpyRanks | None = None,
    *,
    clip: float | None = None,
    plan: Plan | None = None,
    make_optimizer: Any = make_sgd,
    folder: Path | None = None,
    **more: Any,
) -> Any:
    """A trainer with its model, before its first update."""
    ranks = ranks or NumpyRanks()
    contract = Contract({"MLBENCH_OUTPUT_DIR": str(folder or "")})
    world: Any = SimpleNamespace(
        contract=contract, size=ranks.size, rank=0, is_first=True, companions=[ranks], gather=lambda values: [values]
    )
    nothing: Any = None
    work: Any = Work()
    torchs: Any = Trainer(
        world, nothing, nothing, nothing, plan or Plan(1), name="line", work=work, model=Line(),
        make_optimizer=make_optimizer, strategy=nothing, clip=clip, **more,
    )  # fmt: skip
    trainer: Any = train_in_jax(torchs, lambda jax: PROGRAM)
    trainer.tracker, trainer.position, trainer.losses = Sections(), Position(), Losses()
    trainer._attach()
    return trainer


def test_an_update_adds_the_gradients_of_its_passes_weighted_with_the_ranks_share() -> None:
    """Errors are 0.5, -3.5 and, of the second pass, 1.5. This rank has 3 of 4 samples."""
    trainer = make_trainer()
    assert trainer._update(Update([FIRST, SECOND], 2, 3.0, 4.0, 4), 0.5)
    model = trainer._model
    # The sums of the gradients: 0.5 + 3, -3.5 + 1.5, and 0.5 - 3.5 + 1.5.
    assert model.parameters["weight"] == pytest.approx(np.array([[1 - 0.375 * 3.5, -2 + 0.375 * 2.0]]))
    assert model.parameters["bias"] == pytest.approx(np.array([0.5 + 0.375 * 1.5]))
    # Sums of squares over what the program says, each with its weight.
    assert trainer.losses == [(6.25 / 4, 2.0), (1.125 / 2, 1.0)]
    assert trainer.tracker == [
        *("preprocessing", "backward", "metrics") * 2,
        *("optimizer", "metrics"),
    ]
    assert trainer._sent == {"messages": 0, "bytes": 0}
    assert model.buffers["passes"].tolist() == [2.0]


def test_ranks_exchange_the_sum_of_their_shares_once_per_update() -> None:
    ranks = NumpyRanks(2, add=lambda row: np.array([0.25, 0.0, 1.0]))
    trainer = make_trainer(ranks)
    for _ in range(2):
        trainer._model.parameters = {"weight": np.array([[1.0, -2.0]]), "bias": np.array([0.5])}
        trainer._update(Update([FIRST], 1, 2.0, 4.0, 4), 1.0)
    assert np.array(ranks.rows) == pytest.approx(np.array([[0.25, -1.75, -1.5]] * 2))
    assert trainer._model.parameters["weight"] == pytest.approx(np.array([[0.5, -0.25]]))
    assert trainer._model.parameters["bias"] == pytest.approx(np.array([1.0]))
    assert trainer._sent == {"messages": 2, "bytes": 2 * 4 * 3}
    assert trainer.tracker[:5] == ["preprocessing", "backward", "metrics", "communication", "optimizer"]


def test_a_work_sees_the_outputs_of_its_passes_but_not_while_speed_is_measured() -> None:
    trainer = make_trainer()
    trainer._update(Update([FIRST], 1, 2.0, 2.0, 2), 0.0)
    assert trainer.torch.work.seen == [([[1.5], [-1.5]], FIRST)]
    assert trainer._collect_training_values() == {"Prec@1": 50.0}
    measured = make_trainer(plan=Plan(1, protocol=Protocol(warmup=1, blocks=2, updates=1)))
    measured._update(Update([FIRST], 1, 2.0, 2.0, 2), 0.0)
    assert measured.torch.work.seen == []
    assert "metrics" not in measured.tracker[:2]


def test_gradients_are_clipped_to_the_trainings_limit() -> None:
    """The gradients of the first pass are 0.5, -3.5 and -3."""
    norm = (0.5**2 + 3.5**2 + 3.0**2) ** 0.5
    trainer = make_trainer(clip=1.0)
    trainer._update(Update([FIRST], 1, 1.0, 1.0, 2), 1.0)
    assert trainer._model.parameters["bias"] == pytest.approx(np.array([0.5 + 3.0 / norm]), rel=1e-5)


def test_the_optimizer_counts_updates_from_one() -> None:
    """Without correction of the bias the first step of Adam would not be the rate."""
    trainer = make_trainer(make_optimizer=partial(make_adamw, weight_decay=0.0))
    trainer._update(Update([FIRST], 1, 1.0, 1.0, 2), 0.25)
    assert trainer._model.parameters["bias"] == pytest.approx(np.array([0.75]), rel=1e-5)
    assert trainer._model.parameters["weight"] == pytest.approx(np.array([[0.75, -1.75]]), rel=1e-5)


def test_gradients_that_are_not_finite_end_the_training() -> None:
    trainer = make_trainer(clip=1.0)
    with np.errstate(invalid="ignore"), pytest.raises(DivergedError, match="the norm of the gradients is not finite"):
        trainer._update(Update([FIRST], 1, float("inf"), 1.0, 2), 1.0)


def test_validation_uses_the_model_in_jax() -> None:
    trainer = make_trainer(validate=Validator("the torch module"))
    assert trainer.validate.model is trainer._model


def test_what_a_result_says_of_a_training_in_jax() -> None:
    trainer = make_trainer(details={"options": {"model": "line", "precision": "bf16"}})
    trainer._sent, trainer.position.total = {"messages": 3, "bytes": 36}, 7
    assert trainer._facts(2.0) == {
        "communication": {"messages": 3, "bytes": 36, "updates": 7},
        "precision": "fp32",
        "options": {"model": "line", "compile": "xla", "precision": "fp32", "reduction": "after the backward pass"},
    }
    assert make_trainer()._facts(None)["options"] == {
        "compile": "xla",
        "precision": "fp32",
        "reduction": "after the backward pass",
    }
    assert trainer._read_losses([np.float32(0.5), np.array(2.0)]) == [0.5, 2.0]


def test_replicas_are_compared_and_their_buffers_averaged() -> None:
    ranks = NumpyRanks(2, add=lambda row: np.full_like(row, 2.0))
    trainer = make_trainer(ranks)
    trainer._model.buffers["passes"] += 4
    trainer.world.gather = lambda values: [values, values]
    assert trainer._check_replicas() == {}
    assert trainer._model.buffers["passes"].tolist() == [4.0]  # 4/2 and 2
    trainer.world.gather = lambda values: [values, [values[0] + 1]]
    with pytest.raises(DivergedError, match="the model of rank 1 differs"):
        trainer._check_replicas()


@pytest.mark.parametrize("make_optimizer", [partial(make_sgd, momentum=0.5), make_adamw])
def test_a_checkpoint_has_parameters_buffers_and_momenta(tmp_path: Path, make_optimizer: Any) -> None:
    """A training that is resumed goes on as the one that was not stopped."""
    trainer = make_trainer(make_optimizer=make_optimizer, folder=tmp_path, identity={"seed": 3})
    path = trainer._checkpoint_path()
    assert path == tmp_path / "checkpoint.npz"
    trainer._update(Update([FIRST], 1, 1.0, 1.0, 2), 0.25)
    trainer._write(path, {"seed": 3, "position": 1})
    other = make_trainer(make_optimizer=make_optimizer, folder=tmp_path, identity={"seed": 3})
    assert other._read(path)["position"] == 1
    for one in (trainer, other):
        one.position.total = 1
        one._update(Update([SECOND], 1, 1.0, 1.0, 2), 0.25)
    for own, others in zip(trainer._stored, other._stored, strict=True):
        assert list(own) == list(others)
        for name, values in own.items():
            assert values.tolist() == others[name].tolist(), name
    assert other._model.buffers["passes"].tolist() == [2.0]
    foreign = make_trainer(make_optimizer=make_optimizer, folder=tmp_path, identity={"seed": 4})
    with pytest.raises(TaskUsageError, match="seed = 3, this run has 4"):
        foreign._read(path)


@pytest.mark.parametrize(
    ("environment", "precision", "what", "instead"),
    [
        ({"MLBENCH_METHOD": '{"name": "bsp"}'}, "fp32", "exchange gradients by a method", "Leave out --method."),
        ({"MLBENCH_CALIBRATE": "1"}, "fp32", "be calibrated", "Leave out --calibrate."),
        ({}, "bf16", "compute in bf16", "--set precision=fp32"),
    ],
)
def test_what_only_torch_does_is_refused(environment: dict[str, str], precision: str, what: str, instead: str) -> None:
    nothing: Any = None
    world: Any = SimpleNamespace(contract=Contract(environment))
    trainer: Any = Trainer(
        world, nothing, nothing, nothing, Plan(1), work=nothing, model=Line(), make_optimizer=make_sgd,
        strategy=nothing, precision=SimpleNamespace(used=precision),  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(TaskUsageError, match=f"a training with the backend jax cannot {what}") as error:
        train_in_jax(trainer, lambda jax: PROGRAM)
    assert error.value.hint == instead


def test_the_training_in_jax_is_that_of_torch_in_all_that_the_loop_decides() -> None:
    trainer = make_trainer(plan=Plan(5), precision=SimpleNamespace(used="fp32"), identity={"seed": 9})
    own = trainer.torch
    assert (trainer.world, trainer.plan, trainer.name, trainer.identity) == (own.world, own.plan, "line", {"seed": 9})
    assert not trainer._keeps_elastic
