"""The model and the loss of the logistic regression, and its rows."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from task_images.contract import Contract
from task_images.data import ArrayData
from task_images.epsilon_logistic_regression.task import (
    LogisticRegression,
    RegularizedLoss,
)
from task_images.world import World, open_world

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


def test_the_loss_is_the_cross_entropy_of_probabilities_plus_norms() -> None:
    model = LogisticRegression(3)
    outputs, targets = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.0])
    p = [1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(2.0))]
    w = model.weight.detach()
    expected = -(math.log(p[0]) + math.log(1 - p[1])) / 2 + 0.25 * float(w.abs().sum()) + 0.5 * float((w**2).sum())
    assert RegularizedLoss(model, 0.25, 1.0)(outputs, targets).item() == pytest.approx(expected)


def test_rows_gathered_ahead_are_those_gathered_when_asked(world: World) -> None:
    features = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    parts = (features, np.arange(1000)), (features[:3], np.arange(3))
    batches = [list(ArrayData(world, *parts, 30, 5, loaders=loaders).training(2)) for loaders in (0, 1, 2)]
    for first, *others in zip(*batches, strict=True):
        assert torch.equal(first.inputs[:, 0], 4.0 * first.targets)
        assert all(torch.equal(first.inputs, one.inputs) for one in others)
        assert all(torch.equal(first.targets, one.targets) and first.total == one.total for one in others)
    assert [len(one.targets) for one in batches[0]] == [30] * 33 + [10]
