"""Learning rates. A formula of the step (or epoch) t is a frozen, callable object: rate = formula(t), t from 0.

Training loops use a `Schedule`: `PerUpdate` and `PerEpoch` wrap a formula, `Plateau` follows the loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from task_images.parameters import PlateauSettings

Formula = Callable[[float], float]


class Schedule(Protocol):
    """The interface of schedules for training loops."""

    def rate(self, update: int) -> float:
        """The rate of update number `update` (from 0 over the whole run)."""
        ...

    def after_epoch(self, loss: float) -> None:
        """Call after an epoch; `loss` is its validation loss, the same on all ranks."""
        ...


@dataclass
class PerUpdate:
    """A formula of the number of completed updates."""

    formula: Formula

    def rate(self, update: int) -> float:
        """The formula at `update`."""
        return self.formula(update)

    def after_epoch(self, loss: float) -> None:
        """Does nothing: epochs do not matter."""


@dataclass
class PerEpoch:
    """A formula of the number of completed epochs."""

    formula: Formula
    epochs: int = 0

    def rate(self, update: int) -> float:
        """The formula at the number of completed epochs."""
        return self.formula(self.epochs)

    def after_epoch(self, loss: float) -> None:
        """Count the epoch."""
        self.epochs += 1


@dataclass
class Plateau:
    """Linear warm-up from `start` to `target`, one step per epoch; then multiplied by `factor` whenever the loss has
    not improved by more than `threshold` for `patience` + 1 consecutive epochs, but at least `floor`.

    Epoch 1 runs at `start`; after epoch e <= warmup the rate is (e/warmup) target + (1 - e/warmup) start. Warm-up
    epochs do not count for the plateau. With warmup = 0 the rate is `target` from the beginning.
    """

    start: float
    target: float
    warmup: int
    factor: float
    patience: int
    threshold: float
    floor: float
    epochs: int = field(default=0, init=False)
    best: float = field(default=math.inf, init=False)
    bad_epochs: int = field(default=0, init=False)
    current: float = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.start if self.warmup else self.target

    def rate(self, update: int) -> float:
        """The current rate, which changes only after epochs."""
        return self.current

    def after_epoch(self, loss: float) -> None:
        """Warm up, or lower the rate if the loss has not improved for too long."""
        self.epochs += 1
        if self.epochs <= self.warmup:
            self.current = LinearWarmup(self.start, self.target, self.warmup)(self.epochs)
            return
        if loss < self.best - self.threshold:
            self.best = loss
            self.bad_epochs = 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.patience:
            self.current = max(self.floor, self.current * self.factor)
            self.bad_epochs = 0


def follow_plateaus(settings: PlateauSettings, rate: float, target: float, warmup: int) -> Plateau:
    """The schedule that the parameters describe, from `rate`, which is also its lowest one."""
    factor, patience = settings.plateau_factor, settings.plateau_patience
    return Plateau(rate, target, warmup, factor, patience, settings.plateau_threshold, floor=rate)


def log2_warmup(workers: int) -> int:
    """floor(log2 workers) epochs: the warm-up of the official image classification."""
    return workers.bit_length() - 1


@dataclass(frozen=True)
class Constant:
    """A constant rate."""

    value: float

    def __call__(self, t: float) -> float:
        return self.value


@dataclass(frozen=True)
class LinearWarmup:
    """`start` at t = 0, `target` from t = steps, linear in between."""

    start: float
    target: float
    steps: float

    def __call__(self, t: float) -> float:
        if t >= self.steps:
            return self.target
        share = t / self.steps
        return share * self.target + (1 - share) * self.start


@dataclass(frozen=True)
class MultiStep:
    """Linear warm-up from `start`, then `target`, multiplied by `factor` at each milestone reached (t >= milestone)."""

    target: float
    milestones: tuple[float, ...]
    factor: float
    warmup: float = 0
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.milestones and self.warmup >= min(self.milestones):
            raise ValueError("the warm-up must end before the first milestone")

    def __call__(self, t: float) -> float:
        if t < self.warmup:
            return LinearWarmup(self.start, self.target, self.warmup)(t)
        return self.target * self.factor ** sum(milestone <= t for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up from `start`, then half a cosine from `target` down to 0 at t = end."""

    target: float
    end: float
    warmup: float = 0
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup >= self.end:
            raise ValueError("the warm-up must end before the training")

    def __call__(self, t: float) -> float:
        if t < self.warmup:
            return LinearWarmup(self.start, self.target, self.warmup)(t)
        share = min(1.0, (t - self.warmup) / (self.end - self.warmup))
        return self.target * (1 + math.cos(math.pi * share)) / 2
