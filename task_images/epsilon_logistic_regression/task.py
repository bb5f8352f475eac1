"""L2-regularized logistic regression on epsilon: 2000 parameters, so a benchmark of the network's latency."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from task_images.contract import Contract
from task_images.data import ArrayData, seed_all
from task_images.epsilon_logistic_regression.data import FEATURES, count_rows, find_files, generate, hold_out, read
from task_images.methods.base import Bsp, Method, prepare_method
from task_images.metrics import F1, Dice, TopK
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
from task_images.report import made_up, make_accuracy_goal, training_session
from task_images.schedules import PerUpdate, Schedule, follow_plateaus
from task_images.train import Plan, Samples, Trainer, Unit


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
    learning_rate: float = parameter(4.0, "learning rate of one worker, and the minimum rate", min=0, max=10000)
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
    measured_on=["CPU", "1 x H100"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=(
        "epsilon_normalized and epsilon_normalized.t in LIBSVM's format, plain, .bz2 or .xz, in the data folder; or "
        "generated"
    ),
    files={
        "when": {"data": "libsvm"},
        "folders": [".", "epsilon"],
        "wanted": [
            ["epsilon_normalized", "epsilon_normalized.bz2", "epsilon_normalized.xz"],
            ["epsilon_normalized.t", "epsilon_normalized.t.bz2", "epsilon_normalized.t.xz"],
        ],
        "instead": "--set data=synthetic",
    },
    notes=[
        "MLBench's text asks for 80 % accuracy and its figure for 89 %. The goal is that of its code: 89 %, and"
        " 80 % for --light. Its figure also has the training loss 0.2828, which charts of the loss show as a "
        "line.",
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

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = self.model.weight
        loss = binary_cross_entropy_with_logits(outputs, targets) + self.l2 / 2 * _as_whole(weights.square().sum())
        return loss + self.l1 * _as_whole(weights.abs().sum()) if self.l1 else loss


def _as_whole(value: Tensor) -> Tensor:
    """The sum over ranks, if `value` is a rank's part of it; all ranks call it."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


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
        samples = Samples(
            rows, world, model, loss, [TopK(1), F1(), Dice()], training_metrics=[TopK(1)], scores=torch.sigmoid
        )
        Trainer(
            world,
            report,
            samples,
            make_schedule(settings, world.size),
            Plan.of(settings),
            validate=samples.validate,
            goal=make_accuracy_goal(settings.goal_full, settings.goal_light, settings.goal_on, contract.goal),
            unit=Unit("rows"),
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=settings.learning_rate, fused=True),
            method=prepare_method(world, lambda: _own_method(settings)),
            arithmetic=settings,
            details={
                **({} if files is None else {"target_loss": TARGET_LOSS}),
                "parameters": FEATURES,
                "rows": [len(training.labels), len(validation.labels)],
                "options": {"loaders": settings.loaders},
            },
        ).run()


def make_schedule(settings: Settings, workers: int) -> Schedule:
    """Plateau from learning_rate x workers (at most scale_limit of them), or alpha / sqrt(t) with t from 1."""
    if settings.schedule == "sqrt":
        alpha = settings.alpha or ALPHA_2018[max(tuned for tuned in ALPHA_2018 if tuned <= workers)]
        return PerUpdate(lambda update: alpha / math.sqrt(update + 1))
    scaled = settings.learning_rate * min(workers, settings.scale_limit or workers)
    return follow_plateaus(settings, settings.learning_rate, scaled, warmup=0)


class MeanOfWeights(Method):
    """Each rank updates with its own gradients, then the weights are averaged with equal weight per rank.

    Equal to Bsp for plain SGD with equal batches. The original logistic regression works this way.
    """

    name = "weights"
    overflows_apart = True

    def reduce(self) -> None:
        """Nothing is sent: only the number of samples is divided out."""
        self.scale_gradients(self.world.size * self.share)

    def mix(self, rate: float) -> None:
        """Average the weights."""
        self.write_weights(self.average(self.read_weights()))


def _own_method(settings: Settings) -> Method:
    return MeanOfWeights() if settings.average == "weights" else Bsp()
