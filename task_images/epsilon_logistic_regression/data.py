"""epsilon from files, or something of its shape made on the spot."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from task_images.cache import DataIdentity, compare_data
from task_images.epsilon_logistic_regression.libsvm import Dense, Floats, load, load_with_digest
from task_images.errors import EnvironmentUnfitError
from task_images.published import EPSILON, fetch_published
from task_images.seeds import numpy_generator

FEATURES = 2000
OFFICIAL = {"training rows": 400_000, "validation rows": 100_000}
TRAINING = "epsilon_normalized"
VALIDATION = "epsilon_normalized.t"
SOURCE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html#epsilon"

_BLOCK = 4096
# Relative to the signal: no model can label more than 1 - arctan(0.25)/pi = 92 % of the samples correctly. Linear
# models reach about 90 % on epsilon.
_NOISE = 0.25
_DECAY = 1.3


def find_files(data_dir: str | None) -> tuple[Path, Path]:
    """Training and validation file, plain or .bz2, in the data folder or its sub-folder `epsilon`.

    Raises EnvironmentUnfitError that names the files wanted and the way without them.
    """
    folders = [Path(data_dir), Path(data_dir, "epsilon")] if data_dir else []
    found = [
        next(
            (folder / (name + end) for folder in folders for end in ("", ".bz2") if (folder / (name + end)).is_file()),
            None,
        )
        for name in (TRAINING, VALIDATION)
    ]
    training, validation = found
    if training is None or validation is None:
        place = f"in {data_dir}" if data_dir else "because the run has no data folder"
        missing = " and ".join(name for name, path in zip((TRAINING, VALIDATION), found, strict=True) if path is None)
        raise EnvironmentUnfitError(
            f"the data set epsilon is missing: {missing} (or the same with .bz2) is missing {place}",
            f"mlbench data prepare epsilon_logistic_regression fetches them ({SOURCE}); or use generated data: "
            "--set data=synthetic",
        )
    return training, validation


def read(files: tuple[Path, Path], features: int = FEATURES) -> tuple[Dense, Dense, DataIdentity]:
    """Training and validation set from the files, and whether they are the published ones."""
    (training, first), (validation, second) = (load_with_digest(file, features) for file in files)
    both = hashlib.sha256(f"{first}\n{second}\n".encode()).hexdigest()
    return training, validation, compare_data(count_rows(training, validation), OFFICIAL, f"sha256:{both}")


def hold_out(training: Dense, share: float) -> tuple[Dense, Dense]:
    """The training rows but the last `share` of them, and those; without a copy, because the files are 3.2 GB.

    The rows of both, files and generated ones, are in no order.
    """
    cut = len(training.labels) - max(1, round(share * len(training.labels)))
    return Dense(training.rows[:cut], training.labels[:cut]), Dense(training.rows[cut:], training.labels[cut:])


def count_rows(training: Dense, validation: Dense) -> dict[str, int]:
    """Numbers of rows by part."""
    return {"training rows": len(training.labels), "validation rows": len(validation.labels)}


def generate(rows: int, seed: int, part: str, features: int = FEATURES) -> Dense:
    """`rows` samples of unit norm, the same for equal `seed` and `part` ("training", "validation") on every rank.

    Features are independent with decaying deviations, in an order shuffled by the seed; the label is the sign of a
    linear function of them plus noise, so classes are balanced and nearly linear, as those of epsilon.
    """
    model = numpy_generator(seed, "epsilon", "model")
    deviations = model.permutation((1.0 + np.arange(features)) ** -_DECAY)
    weights = model.standard_normal(features)
    scale = float(np.linalg.norm(weights * deviations))
    matrix, labels = np.empty((rows, features), np.float32), np.empty(rows, np.float32)
    for start in range(0, rows, _BLOCK):
        stop = min(start + _BLOCK, rows)
        stream = numpy_generator(seed, "epsilon", part, start)
        block = stream.standard_normal((stop - start, features), np.float32) * deviations.astype(np.float32)
        score = block @ weights.astype(np.float32) / scale + _NOISE * stream.standard_normal(stop - start)
        matrix[start:stop] = block / np.linalg.norm(block, axis=1, keepdims=True)
        labels[start:stop] = score > 0
    return Dense(matrix, labels)


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch both text files if they are missing, and convert them into matrices that runs map, once for all of them."""
    try:
        find_files(str(folder))
    except EnvironmentUnfitError:
        fetch_published(EPSILON, folder, print)
    return read(find_files(str(folder)))[2]


def validation_arrays(folder: Path) -> tuple[Floats, Floats]:
    """Features [n, 2000] and labels [n], 0 or 1, of the validation set. Raises as `find_files`."""
    found = load(find_files(str(folder))[1], FEATURES)
    return found.rows, found.labels
