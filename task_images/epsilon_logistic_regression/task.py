"""Logistic regression with synchronous SGD to a validation accuracy."""

import torch

from task_images.cache import made_up
from task_images.contract import Contract
from task_images.data import ArrayData
from task_images.epsilon_logistic_regression import Settings
from task_images.epsilon_logistic_regression.data import FEATURES, count_rows, find_files, generate, hold_out, read
from task_images.epsilon_logistic_regression.regression import (
    LogisticRegression,
    LogisticWork,
    PlainSgd,
    RegularizedLoss,
)
from task_images.goals import make_accuracy_goal
from task_images.loop import Plan, Unit
from task_images.methods.allreduce import Bsp, MeanOfWeights
from task_images.methods.base import Method
from task_images.methods.check import prepare_method
from task_images.metrics import F1, Dice, TopK
from task_images.parameters import read_parameters
from task_images.schedules import InverseSqrt, PerUpdate, Schedule, follow_plateaus
from task_images.seeds import seed_all
from task_images.train import make_sample_trainer
from task_images.world import training_session

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


def _own_method(settings: Settings) -> Method:
    return MeanOfWeights() if settings.average == "weights" else Bsp()
