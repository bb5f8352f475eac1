"""epsilon from files, or something of its shape made on the spot.

Files are in LIBSVM's text format, read once into a memory-mapped matrix that all ranks of a machine share. A line is
`LABEL INDEX:VALUE INDEX:VALUE ...`, indices from 1 and ascending, what is missing is 0, `#` begins a comment.
https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html
"""

import bz2
import hashlib
import io
import lzma
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError
from task_images.data import numpy_generator
from task_images.fetch import ProgressLines
from task_images.published import EPSILON, fetch_published
from task_images.report import DataIdentity, compare_data

Floats = npt.NDArray[np.float32]

FORMAT = 1
_LABELS = {-1.0: 0.0, 0.0: 0.0, 1.0: 1.0}
_LINE_LIMIT = 1 << 26
_BLOCK_BYTES = 1 << 24
_OPENERS: Mapping[str, Callable[..., Any]] = {".bz2": bz2.open, ".xz": lzma.open}  # both are published
_SHAPE = re.compile(rb"\s*[^\s:]+(\s+\d+:[^\s:]+)*\s*")


class Dense(NamedTuple):
    """rows [n, features], mapped read-only; labels [n], 0 or 1."""

    rows: Floats
    labels: Floats


def load(source: Path, features: int) -> Dense:
    """As `load_with_digest`, without the digest."""
    return load_with_digest(source, features)[0]


def load_with_digest(source: Path, features: int) -> tuple[Dense, str]:
    """The data set, and its digest, in the text file `source` (plain, or compressed if its name ends in .bz2 or .xz).

    The first caller converts it into a cache entry beside it (float32, 4 x features bytes a row), or in mlbench's own
    folder if that place is read-only; other callers wait for it, later ones map it. A changed source is
    converted again. Needs memory for one block of rows and, for each million numbers, about 0.3 s, or 1.5 s from a
    compressed file. Raises EnvironmentUnfitError naming the line that is wrong.
    """

    def build(place: Path) -> None:
        _convert(source, place, features)

    key = [FORMAT, features]
    entry = cached_folder(source.parent, source.name, key, lambda: [source], build)
    rows = np.memmap(entry.folder / "rows.f32", np.float32, "r").reshape(-1, features)
    return Dense(np.asarray(rows), np.fromfile(entry.folder / "labels.f32", np.float32)), entry.digest


def _convert(source: Path, place: Path, features: int) -> None:
    """Write rows and labels."""
    progress, count = ProgressLines(f"converting {source.name}", source.stat().st_size, print), 0
    with open(place / "rows.f32", "wb") as rows, open(place / "labels.f32", "wb") as labels:
        for block in read_blocks(source, features, progress.reach):
            block.rows.tofile(rows)
            block.labels.tofile(labels)
            count += len(block.labels)
    if not count:
        raise EnvironmentUnfitError(f"{source} holds no sample")


def read_blocks(source: Path, features: int, reach: Callable[[int], None] = lambda place: None) -> Iterator[Dense]:
    """The samples of `source` in its order, in blocks of some megabytes. Errors as `load`. `reach` gets the number of
    bytes of the file that were read, after each block."""
    size = max(1, _BLOCK_BYTES // (4 * features))
    rows, labels, filled = np.zeros((size, features), np.float32), np.zeros(size, np.float32), 0
    with open(source, "rb") as raw, _OPENERS.get(source.suffix, nullcontext)(raw) as file:
        for number, line in _lines(source, file):
            labels[filled] = _parse(source, number, line, rows[filled])
            filled += 1
            if filled == size:
                yield Dense(rows, labels)
                reach(raw.tell())
                rows[:] = 0
                filled = 0
    if filled:
        yield Dense(rows[:filled], labels[:filled])


def _lines(source: Path, file: bz2.BZ2File | lzma.LZMAFile | io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Line number and line, without comments and empty lines."""
    number = 0
    while True:
        try:
            line = file.readline(_LINE_LIMIT)
        except (EOFError, OSError, lzma.LZMAError) as error:
            raise EnvironmentUnfitError(f"{source} is damaged after line {number}: {error}") from None
        if not line:
            return
        number += 1
        if len(line) >= _LINE_LIMIT:
            raise EnvironmentUnfitError(f"{source}, line {number} is longer than {_LINE_LIMIT} bytes")
        if not line.endswith(b"\n"):
            raise EnvironmentUnfitError(
                f"{source} ends in line {number} without a line end: the file was cut off.",
                "Copy or unpack it again. If it is whole, end its last line with a line end.",
            )
        line = line.partition(b"#")[0]
        if line.strip():
            yield number, line


def _parse(source: Path, number: int, line: bytes, row: Floats) -> float:
    """Write the line's values into `row`, which is zero, and return its label (0 or 1)."""
    numbers = _numbers(line) if _SHAPE.fullmatch(line) else None
    # A text whose form is right has an odd count of numbers; one that is no number makes them fewer.
    if numbers is None or len(numbers) != 2 * line.count(b":") + 1 or numbers[0] not in _LABELS:
        raise _make_error(source, number, line, len(row))
    places, values = numbers[1::2].astype(np.int64), numbers[2::2]
    in_order = len(places) == 0 or (places[0] >= 1 and places[-1] <= len(row) and bool((np.diff(places) > 0).all()))
    if not in_order or not np.isfinite(values).all():
        raise _make_error(source, number, line, len(row))
    row[places - 1] = values
    return _LABELS[float(numbers[0])]


def _numbers(line: bytes) -> npt.NDArray[np.float64] | None:
    """All numbers of the line; None, or too few, if something is not a number."""
    with warnings.catch_warnings():
        # Before 2.3 numpy only warns of text that is no number, and returns the numbers in front of it.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(line.replace(b":", b" ").decode("ascii"), np.float64, sep=" ")
        except (ValueError, DeprecationWarning):
            return None


def _make_error(source: Path, number: int, line: bytes, features: int) -> EnvironmentUnfitError:
    """The error for a line that is not of the form."""
    text = line.decode("utf-8", "replace").strip()
    return EnvironmentUnfitError(
        f"{source}, line {number} is {text[:80]!r}{'...' * (len(text) > 80)}, not LABEL INDEX:VALUE INDEX:VALUE ...: a"
        f" label -1, 0 or 1, indices from 1 to {features}, ascending, and finite numbers",
        "Mend the line, or download the file again.",
    )


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
    """Training and validation file, plain, .bz2 or .xz, in the data folder or its sub-folder `epsilon`.

    Raises EnvironmentUnfitError that names the files wanted and the way without them.
    """
    folders = [Path(data_dir), Path(data_dir, "epsilon")] if data_dir else []
    found = [
        next(
            (path for folder in folders for end in ("", *_OPENERS) if (path := folder / (name + end)).is_file()),
            None,
        )
        for name in (TRAINING, VALIDATION)
    ]
    training, validation = found
    if training is None or validation is None:
        place = f"in {data_dir}" if data_dir else "because the run has no data folder"
        missing = " and ".join(name for name, path in zip((TRAINING, VALIDATION), found, strict=True) if path is None)
        raise EnvironmentUnfitError(
            f"the data set epsilon is missing: {missing} (or the same with .bz2 or .xz) is missing {place}",
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
