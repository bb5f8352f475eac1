"""L2-regularized logistic regression on epsilon: 2000 parameters, so a benchmark of the network's latency.

The loss's gradient is computed in closed form:

    z = X w,  loss = mean(log(1 + exp z) - y z) + l1 sum |w| + l2/2 sum w^2
    gradient = X' (sigmoid(z) - y) / n + l1 sign(w) + l2 w

Autograd finds the same gradient by some twenty small operations, which take longer than both matrix products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from task_images.classification import make_sample_trainer
from task_images.contract import Contract
from task_images.data import ArrayData, seed_all
from task_images.epsilon_logistic_regression.data import FEATURES, count_rows, find_files, generate, hold_out, read
from task_images.loop import Plan, Unit
from task_images.methods.base import Bsp, Method, prepare_method
from task_images.parameters import (
    AccuracyOnSettings,
    AccuracySettings,
    CudaSettings,
    HoldOutSettings,
    PlateauSettings,
    Task,
    TrainingSettings,
    parameter,
    read_parameters,
)
from task_images.report import made_up, make_accuracy_goal
from task_images.schedules import InverseSqrt, PerUpdate, Schedule, follow_plateaus
from task_images.train import F1, Dice, PassLoss, TopK, collect
from task_images.world import World, training_session


@dataclass(frozen=True)
class Settings(PlateauSettings, AccuracySettings, AccuracyOnSettings, HoldOutSettings, TrainingSettings, CudaSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter(
        "libsvm", "libsvm: the real files; synthetic: generated, of the same shape", choices=("libsvm", "synthetic")
    )
    training_rows: int = parameter(20000, "generated training samples (8 kB each and rank)", min=1, max=400000)
    validation_rows: int = parameter(5000, "generated validation samples", min=1, max=100000)
    batch_size: int = parameter(128, "samples per rank and step", min=1, max=400000)
    epochs: int = parameter(164, "maximum number of epochs", min=1, max=100000)
    schedule: str = parameter(
        "plateau",
        "plateau: learning_rate x workers, reduced on a plateau; sqrt: alpha / sqrt(t)",
        choices=("plateau", "sqrt"),
    )
    learning_rate: float = parameter(
        4.0, "learning rate of one worker, and the minimum rate", min=0, max=10000, formerly="rate"
    )
    scale_limit: int = parameter(0, "number of workers up to which the rate grows; 0: no limit", min=0, max=4096)
    plateau_factor: float = 0.75
    alpha: float = parameter(
        0.0, "of the schedule sqrt; 0: the value tuned for the number of workers", min=0, max=100000
    )
    average: str = parameter("gradients", "what the ranks average", choices=("gradients", "weights"))
    l1: float = parameter(0.0, "factor of the sum of absolute weights", min=0, max=100)
    l2: float = parameter(2.5e-06, "factor of half the sum of squared weights", min=0, max=100)
    loaders: int = parameter(1, "threads that gather rows ahead; 0: gather when asked", min=0, max=64)
    goal_full: float = 89.0
    goal_light: float = 80.0


TASK = Task(
    settings=Settings,
    number="2a",
    title="Logistic regression on epsilon",
    legacy_name="PyTorch Linear Logistic Regression",
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=(
        "epsilon_normalized(.bz2) and epsilon_normalized.t(.bz2) in LIBSVM's format in the data folder; or generated"
    ),
    files={
        "when": {"data": "libsvm"},
        "folders": [".", "epsilon"],
        "wanted": [
            ["epsilon_normalized", "epsilon_normalized.bz2"],
            ["epsilon_normalized.t", "epsilon_normalized.t.bz2"],
        ],
        "instead": "--set data=synthetic",
    },
    notes=[
        (
            "MLBench's text asks for 80 % accuracy and its figure for 89 %. The goal is that of its "
            "code: 89 %, and 80 % for --light. Its"
        ),
        "figure also has the training loss 0.2828, which charts of the loss show as a line.",
        (
            "The gradient is computed in closed form, and reported losses 25 at a time; tests compare"
            " both with autograd. The section"
        ),
        ("backward contains the gradient, the section loss the share of each update in the reported loss."),
    ],
    workers={"sensible": 32, "reason": "a step sends 8 kB, so more ranks only wait, and published results end there"},
    free=["loaders"],
    presets={
        "legacy": {
            "batch_size": 100,
            "epochs": 20,
            "scale_limit": 16,
            "plateau_patience": 0,
            "average": "weights",
        },
        "2018": {
            "batch_size": 100,
            "schedule": "sqrt",
        },
        # The protocol of all throughput presets; no goal.
        "throughput": {
            "data": "synthetic",
            "training_rows": 12800,
            "validation_rows": 1000,
            "blocks": 10,
        },
        "tiny": {
            "data": "synthetic",
            "training_rows": 2000,
            "validation_rows": 500,
            "epochs": 20,
            "goal_full": 80.0,
            "goal_light": 70.0,
        },
    },
)


Rows = tuple[Tensor, Tensor]  # features [n, columns] and labels [n] of 0 and 1


class LogisticRegression(nn.Module):
    """rows [n, columns] -> logits [n], without a bias. Initial weights are those of torch's linear layer."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns).uniform_(-(columns**-0.5), columns**-0.5))

    def forward(self, rows: Tensor) -> Tensor:
        return rows.mv(self.weight)


class RegularizedLoss:
    """(logits, labels) -> mean cross-entropy plus l1 sum |w| + l2/2 sum w^2 of the model's weights.

    On logits the cross-entropy is the same as on probabilities, but it cannot saturate.
    """

    def __init__(self, model: LogisticRegression, l1: float, l2: float) -> None:
        self.model, self.l1, self.l2 = model, l1, l2
        self._whole = model.weight

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all weights in their own tensor; a method may have put parts of them on each rank."""
        return self.model.weight is self._whole

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(outputs, targets) + self.sum_norms(self.model.weight)

    def sum_norms(self, weights: Tensor) -> Tensor:
        """l1 sum |w| + l2/2 sum w^2, a scalar."""
        squares = weights.dot(weights) if self.is_whole else _as_whole(weights.square().sum())
        value = squares * (self.l2 / 2)
        return value.add(_as_whole(weights.abs().sum()), alpha=self.l1) if self.l1 else value

    def add_gradient(self, weights: Tensor, factor: float) -> None:
        """Add `factor` times the gradient of the norms to that of the weights, if there is one."""
        if weights.grad is None:
            return
        if self.l2:
            weights.grad.add_(weights, alpha=factor * self.l2)
        if self.l1:
            weights.grad.add_(weights.sign(), alpha=factor * self.l1)


class LogisticWork:
    """A pass on rows; see training.Work."""

    def __init__(self, prepare: Callable[..., Rows], loss: RegularizedLoss) -> None:
        self._prepare, self._loss = prepare, loss
        self._accuracy = TopK(1)

    def prepare(self, part: object) -> Rows:
        """Rows and labels on the device."""
        return self._prepare(part, training=True)

    def forward(self, model: nn.Module, data: Rows) -> Tensor:
        """Logits of the rows; with a graph of autograd only if a wrapper, weights in parts or gates in front of the
        forward pass need one: gates tell a training pass by it, and let others pass."""
        if model is not self._loss.model or not self._loss.is_whole or model._forward_pre_hooks:
            return model(data[0])  # type: ignore[no-any-return]
        with torch.no_grad():
            return model(data[0])  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, data: Rows) -> PassLoss:
        """The mean loss over the rows; its number is computed when it is read."""
        return RowsLoss(self._loss, outputs, data)

    def read_losses(self, means: list["LateMean"]) -> list[float]:
        """The mean losses of several passes; those of equal size are computed together."""
        found = [0.0] * len(means)
        for size in {len(mean.targets) for mean in means}:
            places = [place for place, mean in enumerate(means) if len(mean.targets) == size]
            columns = zip(*(means[place] for place in places), strict=True)
            logits, targets, norms = (torch.stack(column) for column in columns)
            self._accuracy.add(((logits > 0) == (targets == 1)).sum(), float(targets.numel()))
            entropies = binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
            for place, value in zip(places, (entropies + norms).tolist(), strict=True):
                found[place] = value
        return found

    def collect_metrics(self, world: World) -> dict[str, float]:
        """The accuracy of the passes whose losses were read since the last call, over all ranks. Collective."""
        return collect(world, [self._accuracy])


class LateMean(NamedTuple):
    """What the mean loss of a pass is computed from."""

    logits: Tensor
    targets: Tensor
    norms: Tensor


class RowsLoss(PassLoss):
    """The loss of a pass, whose gradient needs no autograd."""

    __slots__ = ("_data", "_loss", "_outputs")

    def __init__(self, loss: RegularizedLoss, outputs: Tensor, data: Rows) -> None:
        self._loss, self._outputs, self._data = loss, outputs, data
        self.mean = LateMean(outputs.detach(), data[1], loss.sum_norms(loss.model.weight.detach()))
        self.weight = len(data[1])

    @property
    def value(self) -> Tensor:
        """The loss as autograd knows it, for those who count or time its operations."""
        return self._loss(self._loss.model(self._data[0]), self._data[1])

    @torch.no_grad()
    def backward(self, factor: float) -> None:
        """Add `factor` times the gradient. Weights in parts get theirs from autograd but for that of the norms, which
        is added when theirs is the mean over ranks: each rank has its part."""
        loss, (rows, targets) = self._loss, self._data
        errors = torch.sigmoid(self._outputs).sub_(targets)
        weights, share = loss.model.weight, factor / len(errors)
        if not loss.is_whole:
            self._outputs.backward(errors.mul_(share))  # type: ignore[no-untyped-call]
            loss.add_gradient(loss.model.weight, factor)
        elif self._outputs.requires_grad or _has_hooks(weights):  # somebody waits for autograd to come by
            gradient = torch.addmv(weights, rows.t(), errors, beta=factor * loss.l2, alpha=share)
            if loss.l1:
                gradient.add_(weights.sign(), alpha=factor * loss.l1)
            weights.backward(gradient)  # type: ignore[no-untyped-call]
        else:
            if weights.grad is None:
                weights.grad = torch.zeros_like(weights)
            weights.grad.addmv_(rows.t(), errors, alpha=share)
            loss.add_gradient(weights, factor)


class PlainSgd(torch.optim.SGD):
    """w -= rate x gradient: one operation per parameter, without the overhead of torch's optimizers."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    weights.add_(weights.grad, alpha=-group["lr"])

    # torch wraps steps that are not marked so in a record for its profiler.
    step.hooked = True  # type: ignore[attr-defined]


def _as_whole(value: Tensor) -> Tensor:
    """The sum over ranks, if `value` is a rank's part of it; all ranks call it."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def _has_hooks(parameter: Tensor) -> bool:
    """Whether somebody asked to be called when the gradient is there."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


# The dotted line in the figure of the training loss in MLBench's documentation.
TARGET_LOSS = 0.2828
# The rate over sqrt(t), tuned per number of workers in the 2018 specification.
ALPHA_2018 = {1: 200.0, 2: 400.0, 4: 600.0, 8: 700.0, 16: 800.0}


def main(contract: Contract) -> None:
    """Load or generate the rows and train a logistic regression to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    synthetic = settings.data == "synthetic"
    files = None if synthetic else find_files(contract.data_dir)
    with training_session(contract, "epsilon, generated" if synthetic else "epsilon", synthetic) as (
        world,
        report,
    ):
        if files is None:
            training = generate(settings.training_rows, contract.seed, "training")
            validation = generate(settings.validation_rows, contract.seed, "validation")
        else:
            training, validation, identity = read(files)
        report.data_identity(made_up(count_rows(training, validation)) if files is None else identity)
        if settings.hold_out:
            training, validation = hold_out(training, settings.hold_out)
        seed_all(contract.seed)
        model = LogisticRegression(FEATURES).to(world.device)
        loss = RegularizedLoss(model, settings.l1, settings.l2)
        rows = ArrayData(world, training, validation, settings.batch_size, contract.seed, loaders=settings.loaders)
        make_sample_trainer(
            world,
            report,
            rows,
            model,
            loss,
            lambda model: PlainSgd(model.parameters(), lr=settings.learning_rate),
            make_schedule(settings, world.size),
            Plan(settings.epochs, settings.budget_seconds, protocol=settings.protocol),
            method=prepare_method(world, lambda: _own_method(settings)),
            metrics=[TopK(1), F1(), Dice()],
            goal=make_accuracy_goal(settings.goal_full, settings.goal_light, settings.goal_on, contract.goal),
            scores=torch.sigmoid,
            arithmetic=settings,
            work=LogisticWork(rows.prepare, loss),
            unit=Unit("rows"),
            details={
                **({} if files is None else {"target_loss": TARGET_LOSS}),
                "parameters": FEATURES,
                "rows": [len(training.labels), len(validation.labels)],
                "options": {"loaders": settings.loaders, "gradient": "closed form"},
            },
        ).run()


def make_schedule(settings: Settings, workers: int) -> Schedule:
    """Plateau from learning_rate x workers (at most scale_limit of them), or alpha / sqrt(t) with t from 1."""
    if settings.schedule == "sqrt":
        alpha = settings.alpha or ALPHA_2018[max(tuned for tuned in ALPHA_2018 if tuned <= workers)]
        decay = InverseSqrt(alpha)
        return PerUpdate(lambda update: decay(update + 1))
    scaled = settings.learning_rate * min(workers, settings.scale_limit or workers)
    return follow_plateaus(settings, settings.learning_rate, scaled, warmup=0)


class MeanOfWeights(Method):
    """Each rank updates with its own gradients, then the weights are averaged with equal weight per rank.

    Equal to Bsp for plain SGD with equal batches. The original logistic regression works this way.
    """

    name = "weights"

    def reduce(self) -> None:
        """Nothing is sent: only the number of samples is divided out."""
        self.scale_gradients(self.world.size * self.share)

    def agree(self, finite: bool) -> bool:
        """Each rank has its own gradients."""
        return self.world.size == 1 or self.world.max([0.0 if finite else 1.0])[0] == 0

    def mix(self, rate: float) -> None:
        """Average the weights."""
        self.write_weights(self.average(self.read_weights()))


def _own_method(settings: Settings) -> Method:
    return MeanOfWeights() if settings.average == "weights" else Bsp()
