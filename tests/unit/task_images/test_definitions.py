"""Every preset is accepted by the program; data that come with the task; parameters given by hand."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mlbench_cli.tasks.catalog import load_catalog, load_task
from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.data import generator
from task_images.digits_resnet.task import load_split, make_shift
from task_images.epsilon_logistic_regression.data import find_files, generate
from task_images.epsilon_logistic_regression.task import Settings, make_schedule
from task_images.parameters import read_parameters
from task_images.run import find_in


@pytest.mark.parametrize("name", sorted(load_catalog()))
def test_every_preset_is_accepted_by_the_program(name: str) -> None:
    task = load_task(name)
    settings: Any = find_in(f"task_images.{name}", "Settings", "", "task")
    for preset in task.presets:
        assert asdict(read_parameters(settings, task.resolve(preset))) == task.resolve(preset)


@dataclass(frozen=True)
class Sample:
    count: int = 3
    rate: float = 0.5
    names: list[str] = field(default_factory=list)
    sure: bool = True


def test_parameters_by_hand() -> None:
    assert read_parameters(Sample, {"rate": 2, "names": ["a"]}) == Sample(rate=2.0, names=["a"])


@pytest.mark.parametrize("given", [{"cuont": 3}, {"count": 2.5}, {"count": True}, {"sure": 1}, {"rate": "fast"}])
def test_wrong_parameters_are_usage_errors(given: dict[str, object]) -> None:
    with pytest.raises(TaskUsageError, match=str(next(iter(given)))):
        read_parameters(Sample, given)


def test_the_digits_are_split_by_class_and_by_seed() -> None:
    training, validation = load_split(42, 0.2)
    images = np.concatenate([training[0], validation[0]])
    assert images.shape == (1797, 8, 8)
    assert abs(training[0].mean()) < 1e-4
    assert training[0].std() == pytest.approx(1, abs=1e-3)
    whole = np.bincount(np.concatenate([training[1], validation[1]]))
    assert np.array_equal(np.bincount(validation[1]), np.round(0.2 * whole))
    assert np.array_equal(load_split(42, 0.2).validation[0], validation[0])
    assert np.array_equal(np.bincount(load_split(42, 0.2, hold_out=0.001).validation[1]), np.ones(10))
    assert not np.array_equal(load_split(43, 0.2).validation[1], validation[1])


def test_a_shift_moves_whole_images_and_loses_at_most_the_border() -> None:
    images = torch.zeros(64, 8, 8) - 1
    images[:, 3, 4] = torch.arange(64.0)
    moved, labels = make_shift(1, generator(1, "x"))(images, torch.arange(64))
    assert moved.shape == (64, 3, 8, 8)
    for image, label in zip(moved, labels, strict=True):
        row, column = divmod(int(image[0].argmax()), 8)
        assert image[0, row, column] == label
        assert abs(row - 3) <= 1
        assert abs(column - 4) <= 1
        assert bool((image[0] == image[2]).all())
    places = {int(image[0].argmax()) for image in moved[1:]}
    assert len(places) == 9


def test_generated_epsilon_has_unit_rows_balanced_classes_and_is_repeatable() -> None:
    rows, labels = generate(500, 42, "training", features=64)
    assert rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert 0.4 < labels.mean() < 0.6
    assert set(labels) == {0.0, 1.0}
    assert np.array_equal(generate(500, 42, "training", features=64).rows, rows)
    assert not np.array_equal(generate(500, 42, "validation", features=64).rows, rows)


def test_missing_epsilon_names_the_files_and_the_way_without(tmp_path: object) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"epsilon_normalized and epsilon_normalized\.t") as caught:
        find_files(str(tmp_path))
    assert "--set data=synthetic" in str(caught.value.hint)
    with pytest.raises(EnvironmentUnfitError, match="no data folder"):
        find_files(None)


@pytest.mark.parametrize(("workers", "spec", "legacy"), [(1, 4, 4), (16, 64, 64), (32, 128, 64)])
def test_the_rate_of_the_logistic_regression_grows_with_the_workers(workers: int, spec: float, legacy: float) -> None:
    task = load_task("epsilon_logistic_regression")
    for preset, rate in (("spec", spec), ("legacy", legacy)):
        assert make_schedule(read_parameters(Settings, task.resolve(preset)), workers).rate(0) == rate


@pytest.mark.parametrize(("workers", "alpha"), [(1, 200), (3, 400), (8, 700), (64, 800)])
def test_the_rate_of_2018_is_alpha_over_the_root_of_the_update(workers: int, alpha: float) -> None:
    settings = read_parameters(Settings, load_task("epsilon_logistic_regression").resolve("2018"))
    schedule = make_schedule(settings, workers)
    assert [schedule.rate(update) for update in (0, 3, 99)] == pytest.approx([alpha, alpha / 2, alpha / 10])
