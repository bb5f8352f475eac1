"""Metrics of a whole data set: each rank keeps sums, which are added over ranks once and then divided. A mean of batch
or rank means would depend on how the data are split."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from task_images.contract import DivergedError
from task_images.world import World


class Metric:
    """A metric computed from sums in float64. Tensors are summed on their device, asynchronously; numbers on the host.

    Subclasses add to the sums and compute the value from them.
    """

    def __init__(self, name: str, sums: int) -> None:
        self.name = name
        self._numbers = [0.0] * sums
        self._tensors: dict[int, Tensor] = {}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch: outputs [n, ...] of the model and targets [n]."""
        raise NotImplementedError

    def value(self, sums: Sequence[float]) -> float:
        """The value of the metric for sums over all batches and ranks."""
        raise NotImplementedError

    def add(self, *values: Tensor | float) -> None:
        """Add one value to each sum, in order. Tensors stay on their device."""
        for index, value in enumerate(values):
            if not isinstance(value, Tensor):
                self._numbers[index] += value
            elif index in self._tensors:
                self._tensors[index] = self._tensors[index] + value.detach()
            else:
                self._tensors[index] = value.detach().to(torch.float64)

    def take(self) -> list[float]:
        """Return this rank's sums, and reset them to zero."""
        sums, tensors = self._numbers, self._tensors
        self._numbers, self._tensors = [0.0] * len(sums), {}
        if tensors:
            # One transfer for all of them.
            for index, value in zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True):
                sums[index] += value
        return sums

    def read(self) -> list[float]:
        """This rank's sums, which stay."""
        sums = self.take()
        self.add(*sums)
        return sums


class Mean(Metric):
    """Weighted mean of numbers, e.g. of a loss per sample. NaN if nothing was added."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)

    def add_mean(self, mean: Tensor | float, weight: float) -> None:
        """Add `weight` samples (or tokens) whose mean is `mean`."""
        mean = mean.detach().to(torch.float64) if isinstance(mean, Tensor) else mean
        self.add(mean * weight, weight)

    def value(self, sums: Sequence[float]) -> float:
        """The mean of sums = (weighted total, weight)."""
        return sums[0] / sums[1] if sums[1] else math.nan


class Perplexity(Mean):
    """exp of the global mean of a loss per token; infinite if that overflows."""

    def __init__(self, name: str = "Perplexity") -> None:
        super().__init__(name)

    def value(self, sums: Sequence[float]) -> float:
        """exp of the mean of sums = (total loss, tokens)."""
        mean = super().value(sums)
        return math.exp(mean) if mean < 700 else mean * math.inf


class TopK(Metric):
    """Prec@k in percent: how often the target is among the k largest outputs [n, classes].

    Outputs [n] or [n, 1] are the probability p of class 1 and are treated as [1-p, p].
    """

    def __init__(self, k: int = 1) -> None:
        super().__init__(f"Prec@{k}", 2)
        self.k = k

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the hits of outputs [n, classes] (or [n]) against targets [n].

        Raises ValueError for fewer than k classes.
        """
        if outputs.dim() == 1 or outputs.shape[1] == 1:
            positive = outputs.reshape(-1)
            outputs = torch.stack([1 - positive, positive], dim=1)
        if self.k > outputs.shape[1]:
            raise ValueError(f"Prec@{self.k} of {outputs.shape[1]} classes")
        best = outputs.topk(self.k, dim=1).indices
        self.add((best == targets.long().reshape(-1, 1)).sum(), float(len(targets)))

    def value(self, sums: Sequence[float]) -> float:
        """Percent of sums = (hits, samples)."""
        return 100.0 * sums[0] / sums[1] if sums[1] else math.nan


class F1(Metric):
    """F1 score of class 1 from global counts; outputs [n] are probabilities, and 1 is predicted from `threshold` up."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__("F1-Score", 3)
        self.threshold = threshold

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count hits, predictions and positives of probabilities [n] against targets [n] of 0 and 1."""
        predicted, actual = outputs.reshape(-1) >= self.threshold, targets.reshape(-1) == 1
        self.add((predicted & actual).sum(), predicted.sum(), actual.sum())

    def value(self, sums: Sequence[float]) -> float:
        """F1 of sums = (hits, predicted, actual), from 0 to 1."""
        hits, predicted, actual = sums
        precision, recall = hits / (predicted + 1e-9), hits / (actual + 1e-9)
        return 2 * precision * recall / (precision + recall + 1e-9)


class Dice(Metric):
    """Soft Dice coefficient (2 sum p y + e) / (sum p + sum y + e), e = 1e-4, from global sums; outputs [n] are p."""

    def __init__(self) -> None:
        super().__init__("Dice Coefficient", 2)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add overlap and total of probabilities [n] and targets [n] of 0 and 1."""
        p, y = outputs.reshape(-1).double(), targets.reshape(-1).double()
        self.add((p * y).sum(), p.sum() + y.sum())

    def value(self, sums: Sequence[float]) -> float:
        """The coefficient of sums = (overlap, total), from 0 to 1."""
        return (2 * sums[0] + 1e-4) / (sums[1] + 1e-4)


Values = dict[str, float]


def collect(world: World, metrics: Sequence[Metric]) -> Values:
    """name -> value over all ranks; resets the metrics. One collective, so every rank must call it."""
    own = [metric.take() for metric in metrics]
    total = world.sum([number for sums in own for number in sums])
    values: Values = {}
    start = 0
    for metric, sums in zip(metrics, own, strict=True):
        values[metric.name] = metric.value(total[start : start + len(sums)])
        start += len(sums)
    return values


MAX_HELD = 64  # losses that are read together


class TrainingLoss:
    """Losses of this rank's passes; their means are over all ranks, which must request them after the same updates."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, float, int]] = []
        self._recent, self._whole = Mean("loss"), Mean("loss")
        self._diverged_at = math.inf  # step of the first loss that is not finite

    def add(self, mean: Tensor | float, weight: float, step: int) -> None:
        """Add this rank's mean loss over `weight` samples (or tokens) in `step` of the epoch. On a device it stays
        there until a mean is requested, or until there are MAX_HELD."""
        self._held.append((mean, weight, step))
        if len(self._held) == MAX_HELD:
            self._fold()

    def collect_recent(self, world: World, epoch: int) -> float | None:
        """The mean since the last call, None if every update since then was skipped (fp16); one collective. Raises
        DivergedError, on every rank, if it is not finite."""
        self._fold()
        total, weight = world.sum(self._recent.take())
        if not weight:
            return None
        if not math.isfinite(total):
            step = -world.max([-self._diverged_at])[0]
            raise make_divergence_error(f"the training loss is {total / weight} in epoch {epoch}, at step {step:.0f}")
        return total / weight

    def collect_whole(self, world: World) -> float:
        """The mean since the last call of this method, NaN if nothing was added; one collective."""
        self._fold()
        return collect(world, [self._whole])["loss"]

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums that are not yet part of a mean."""
        self._fold()
        return {"recent": self._recent.read(), "whole": self._whole.read()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of `state_dict`."""
        self._recent.add(*state["recent"])
        self._whole.add(*state["whole"])

    def _fold(self) -> None:
        if not self._held:
            return
        means, weights, steps = map(list, zip(*self._held, strict=True))
        if isinstance(means[0], Tensor):
            means = torch.stack(means).tolist()  # one transfer
        self._held = []
        bad = (step for mean, step in zip(means, steps, strict=True) if not math.isfinite(mean))
        self._diverged_at = min(self._diverged_at, next(bad, math.inf))
        for mean in (self._recent, self._whole):
            mean.add(sum(map(operator.mul, means, weights)), sum(weights))


def check_finite(values: Mapping[str, float], epoch: int) -> Values:
    """Check and return the `values` of a validation. Raises DivergedError if their loss is not finite: the last update
    may have broken a model whose training loss was still finite."""
    if not math.isfinite(values.get("loss", 0.0)):
        raise make_divergence_error(f"the validation loss is {values['loss']} in epoch {epoch}")
    return dict(values)


def make_divergence_error(what: str) -> DivergedError:
    """The error for a non-finite figure named `what`."""
    return DivergedError(f"{what}: the training has diverged", "A lower learning rate may help.")
