"""The logistic regression's gradient in closed form is autograd's, and its training the same."""

import contextlib
import io
import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from task_images.classification import make_sample_trainer
from task_images.contract import Contract
from task_images.data import ArrayData
from task_images.epsilon_logistic_regression.task import (
    LogisticRegression,
    LogisticWork,
    PlainSgd,
    RegularizedLoss,
)
from task_images.loop import Plan
from task_images.methods.base import Bsp
from task_images.report import Reporter
from task_images.schedules import Constant, PerUpdate
from task_images.train import TopK
from task_images.world import World, open_world
from tests.contract.task_images.ranks import Record

COLUMNS = 40


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    threads = torch.get_num_threads()
    yield open_world(Contract({"OMP_NUM_THREADS": "1"}))
    torch.set_num_threads(threads)


def make_model() -> LogisticRegression:
    torch.manual_seed(1)
    return LogisticRegression(COLUMNS)


def test_initial_weights_are_those_of_a_linear_layer() -> None:
    model = make_model()
    torch.manual_seed(1)
    assert torch.equal(model.weight, torch.nn.Linear(COLUMNS, 1, bias=False).weight[0])


def make_rows(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(number, COLUMNS, generator=generator), (torch.rand(number, generator=generator) < 0.5).float()


def test_the_loss_is_the_cross_entropy_of_probabilities_plus_norms() -> None:
    model = LogisticRegression(3)
    outputs, targets = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.0])
    p = [1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(2.0))]
    w = model.weight.detach()
    expected = -(math.log(p[0]) + math.log(1 - p[1])) / 2 + 0.25 * float(w.abs().sum()) + 0.5 * float((w**2).sum())
    assert RegularizedLoss(model, 0.25, 1.0)(outputs, targets).item() == pytest.approx(expected)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_the_gradient_is_that_of_autograd_and_adds_up_with_and_without_hooks(
    l1: float, l2: float, hooked: bool
) -> None:
    found, wanted = make_model(), make_model()
    seen: list[Tensor] = []
    if hooked:
        found.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    work = LogisticWork(lambda part, training: part, RegularizedLoss(found, l1, l2))
    for rows, factor in ((make_rows(7), 1.0), (make_rows(5), 4.0)):
        passed = work.loss(work.forward(found, rows), rows)
        passed.backward(factor)
        value = RegularizedLoss(wanted, l1, l2)(wanted(rows[0]), rows[1])
        torch.autograd.backward(value * factor)
        assert work.read_losses([passed.mean]) == pytest.approx([value.item()], rel=1e-6)
        torch.testing.assert_close(passed.value, value)  # what is counted and timed has a gradient, too
        assert passed.value.requires_grad
        assert not any(part.requires_grad for part in passed.mean)
    torch.testing.assert_close(found.weight.grad, wanted.weight.grad)
    assert len(seen) == 2 * hooked


def train(world: World, *, closed: bool) -> tuple[Tensor, list[float], list[float]]:
    """Weights, losses and accuracies of two epochs, the last batch of which is smaller."""
    model = make_model()
    features, labels = make_rows(100)
    rows = (features.numpy(), labels.numpy())
    data = ArrayData(world, rows, rows, 16, 1, loaders=int(closed))
    loss = RegularizedLoss(model, 0.001, 0.01)
    sgd = partial(torch.optim.SGD, fused=True)
    trainer = make_sample_trainer(
        world, Reporter(world, "rows", synthetic=True), data, model, loss,
        lambda model: (PlainSgd if closed else sgd)(model.parameters(), lr=0.0),
        PerUpdate(Constant(0.5)), Plan(2), method=Bsp(), metrics=[TopK(1)],
        training_metrics=[TopK(1)],
        work=LogisticWork(data.prepare, loss) if closed else None, scores=torch.sigmoid,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.run()
    losses = [point[name] for point in trainer.curve for name in ("train_loss", "loss")]
    return model.weight.detach(), losses, [point["train_Prec@1"] for point in trainer.curve]


def test_a_training_is_that_of_autograd_and_of_torchs_optimizer(world: World) -> None:
    weights, losses, accuracies = train(world, closed=True)
    wanted, expected, shares = train(world, closed=False)
    assert accuracies == shares
    assert 50 < accuracies[0] < accuracies[1] < 100
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] > losses[-1]
    torch.testing.assert_close(weights, wanted)


def test_plain_sgd_takes_only_what_has_a_gradient() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = PlainSgd([Record(params=[first]), Record(params=[second], lr=2.0)], lr=0.5)
    first.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    assert first.tolist() == [0.5, 0.0, -0.5]
    second.grad = torch.ones(2)
    optimizer.step()
    assert first.tolist() == [0.0, -1.0, -2.0]
    assert second.tolist() == [-1.0, -1.0]


def test_rows_gathered_ahead_are_those_gathered_when_asked(world: World) -> None:
    features = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    parts = (features, np.arange(1000)), (features[:3], np.arange(3))
    batches = [list(ArrayData(world, *parts, 30, 5, loaders=loaders).training(2)) for loaders in (0, 1, 2)]
    for first, *others in zip(*batches, strict=True):
        assert torch.equal(first.inputs[:, 0], 4.0 * first.targets)
        assert all(torch.equal(first.inputs, one.inputs) for one in others)
        assert all(torch.equal(first.targets, one.targets) and first.total == one.total for one in others)
    assert [len(one.targets) for one in batches[0]] == [30] * 33 + [10]
