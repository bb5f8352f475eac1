"""epsilon's files and generated rows, and what the settings of the logistic regression become in a training."""

from pathlib import Path

import numpy as np
import pytest

from task_images.epsilon_logistic_regression.data import (
    Dense,
    count_rows,
    find_files,
    hold_out,
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
