"""Logistic regression: the model, its loss, and the loss's gradient in closed form.

    z = X w,  loss = mean(log(1 + exp z) - y z) + l1 sum |w| + l2/2 sum w^2
    gradient = X' (sigmoid(z) - y) / n + l1 sign(w) + l2 w

Autograd finds the same gradient by some twenty small operations, which take longer than both matrix products.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from task_images.metrics import TopK, collect
from task_images.train import PassLoss
from task_images.world import World

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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])

    # torch wraps steps that are not marked so in a record for its profiler.
    step.hooked = True  # type: ignore[attr-defined]


def _as_whole(value: Tensor) -> Tensor:
    """The sum over ranks, if `value` is a rank's part of it; all ranks call it."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def _has_hooks(parameter: Tensor) -> bool:
    """Whether somebody asked to be called when the gradient is there."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
