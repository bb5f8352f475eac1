"""An image classification, from model and data to the result.

with training_session(contract, data="CIFAR-10") as (world, report):
    images = ...                                    # load
    seed_all(contract.seed)
    train_classifier(world, report, settings, model, data, schedule)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from task_images import Lazy
from task_images.contract import TaskUsageError
from task_images.data import Data
from task_images.methods.base import Bsp, Method, prepare_method
from task_images.metrics import TopK
from task_images.parameters import ClassifierSettings, LongClassifierSettings
from task_images.report import Reporter, make_accuracy_goal
from task_images.schedules import Schedule
from task_images.train import (
    Loss,
    Plan,
    Precision,
    Samples,
    Trainer,
    Unit,
    count_parameters,
)
from task_images.world import World

if TYPE_CHECKING:
    from task_images import speed
else:
    speed = Lazy("task_images.speed")


def check_settings(settings: ClassifierSettings) -> None:
    """Raises TaskUsageError for conflicting settings, before anything is opened or loaded."""
    if settings.nesterov and not settings.momentum:
        raise TaskUsageError("nesterov needs a momentum above 0", "--set momentum=0.9, or --set nesterov=false")


def train_classifier(
    world: World,
    report: Reporter,
    settings: ClassifierSettings,
    model: nn.Module,
    data: Data,
    schedule: Schedule,
    *,
    classes: int = 10,
    loss: Loss = nn.functional.cross_entropy,
    measure: bool = False,
    groups: Callable[[nn.Module, float], Iterable[Any]] | None = None,
    method: Method | None = None,
    name: str = "",
    identity: Mapping[str, Any] | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Train `model` (initialized on the CPU) with synchronous SGD until the Prec@1 goal, and report the result.

    classes    number of classes; below five there is no Prec@5
    loss       training loss; validation uses cross-entropy
    measure    measure throughput only, without validation and goal
    groups     (model, weight decay) -> parameter groups of the optimizer; None: a single group
    method     gradient exchange; None: one flat buffer after the backward pass
    name       the task's name in checkpoints; identity: settings that must match to resume from one
    """
    model = model.to(world.device)
    long = settings if isinstance(settings, LongClassifierSettings) else None
    same = {"seed": world.contract.seed, "global_batch": settings.batch_size * world.size}
    facts: dict[str, Any] = {"parameters": count_parameters(model.parameters()), "global_batch": same["global_batch"]}
    precision = Precision(long.precision if long else "fp32", world.device)
    chosen = prepare_method(world, lambda: method or Bsp())
    if long:
        long = replace(long, compile=speed.choose_compile(long.compile, world.contract))
        speed.apply_speed(long, model)
        facts["options"] = {name: getattr(long, name) for name in ("channels_last", "loaders")}
    samples = Samples(
        data,
        world,
        model,
        loss,
        metrics=[] if measure else [TopK(k) for k in (1, 5) if k <= classes],
        training_metrics=[] if measure else [TopK(1)],
        validation_loss=nn.functional.cross_entropy,
        precision=precision,
        compiled=long is not None and long.compile != "no",
    )
    goal = make_accuracy_goal(settings.goal_full, settings.goal_light, settings.goal_on, world.contract.goal)
    Trainer(
        world,
        report,
        samples,
        schedule,
        Plan.of(settings),
        name=name,
        validate=None if measure else samples.validate,
        goal=None if measure else goal,
        details={**facts, **(details or {})},
        identity={**(identity or {}), **same},
        unit=Unit("images"),
        make_optimizer=lambda model: torch.optim.SGD(
            groups(model, settings.weight_decay) if groups else model.parameters(),
            lr=0.0,  # set by the schedule before every update
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            fused=True,
        ),
        method=chosen,
        precision=precision,
        arithmetic=settings,
        compile=long.compile if long else "no",
    ).run()
