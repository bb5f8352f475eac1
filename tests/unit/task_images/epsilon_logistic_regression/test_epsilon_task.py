"""epsilon's files and generated rows, and what the settings of the logistic regression become in a training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_images.epsilon_logistic_regression import task
from task_images.epsilon_logistic_regression.data import (
    Dense,
    count_rows,
    find_files,
    generate,
    hold_out,
)
from task_images.epsilon_logistic_regression.task import (
    Settings,
)

NAMES = ("epsilon_normalized", "epsilon_normalized.t")


def make_rows(count: int) -> Dense:
    rows = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    return Dense(rows, np.arange(count, dtype=np.float32))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (NAMES, NAMES),
        ([f"{name}.bz2" for name in NAMES], [f"{name}.bz2" for name in NAMES]),
        ([NAMES[0], f"{NAMES[1]}.bz2"], [NAMES[0], f"{NAMES[1]}.bz2"]),
        ([*NAMES, f"{NAMES[0]}.bz2"], NAMES),  # plain text needs no unpacking
        ([f"epsilon/{name}" for name in NAMES], [f"epsilon/{name}" for name in NAMES]),
        ([f"{NAMES[0]}.bz2", f"epsilon/{NAMES[0]}", NAMES[1]], [f"{NAMES[0]}.bz2", NAMES[1]]),
    ],
)
def test_files_are_plain_or_compressed_in_the_folder_or_below(
    tmp_path: Path, present: list[str], found: list[str]
) -> None:
    (tmp_path / "epsilon").mkdir()
    for name in present:
        (tmp_path / name).touch()
    assert find_files(str(tmp_path)) == tuple(tmp_path / name for name in found)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "held"), [(10, 0.2, 2), (10, 0.25, 2), (10, 0.26, 3), (10, 0.01, 1), (10, 0.5, 5)]
)
def test_the_last_rows_are_held_out_without_a_copy(count: int, share: float, held: int) -> None:
    whole = make_rows(count)
    training, validation = hold_out(whole, share)
    assert validation.labels.tolist() == list(range(count - held, count))
    assert training.labels.tolist() == list(range(count - held))
    assert np.array_equal(np.concatenate([training.rows, validation.rows]), whole.rows)
    assert training.rows.base is not None
    assert np.shares_memory(validation.rows, whole.rows)
    assert count_rows(training, validation) == {"training rows": count - held, "validation rows": held}


def test_generated_rows_are_nearly_linear_with_features_of_decaying_size() -> None:
    """A quarter of the signal is noise: the best model labels 1 - arctan(0.25) / pi = 92 % of the rows correctly."""
    rows, labels = generate(6000, 1, "training", features=50)
    weights = rows[:4000].T @ (2 * labels[:4000] - 1) / rows[:4000].var(0)  # features are independent
    right = ((rows[4000:] @ weights > 0) == (labels[4000:] == 1)).mean()
    assert 0.88 < right < 0.94
    deviations = np.sort(rows.std(0))[::-1]
    assert deviations[5] / deviations[20] == pytest.approx((21 / 6) ** 1.3, rel=0.1)
    assert deviations[10] / deviations[40] == pytest.approx((41 / 11) ** 1.3, rel=0.1)
    assert rows.std(0)[1:].max() > rows.std(0)[0]  # in an order of the seed's


# --- the task -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "workers", "rate"),
    [
        ({"learning_rate": 3.0}, 1, 3.0),
        ({"learning_rate": 3.0}, 20, 60.0),
        ({"learning_rate": 3.0, "scale_limit": 16}, 15, 45.0),
        ({"learning_rate": 3.0, "scale_limit": 16}, 16, 48.0),
        ({"learning_rate": 3.0, "scale_limit": 16}, 17, 48.0),
        ({"schedule": "sqrt"}, 1, 200.0),
        ({"schedule": "sqrt"}, 2, 400.0),
        ({"schedule": "sqrt"}, 7, 600.0),
        ({"schedule": "sqrt"}, 8, 700.0),
        ({"schedule": "sqrt"}, 15, 700.0),
        ({"schedule": "sqrt"}, 16, 800.0),
        ({"schedule": "sqrt", "alpha": 30.0}, 16, 30.0),  # given by hand
    ],
)
def test_the_first_rate(settings: dict[str, Any], workers: int, rate: float) -> None:
    schedule = task.make_schedule(Settings(**settings), workers)
    assert schedule.rate(0) == pytest.approx(rate)
