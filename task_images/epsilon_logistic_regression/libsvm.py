"""LIBSVM's text format, read once into a memory-mapped matrix that all ranks of a machine share.

A line is `LABEL INDEX:VALUE INDEX:VALUE ...`, indices from 1 and ascending, what is missing is 0, `#` begins a comment.
https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html
"""

import bz2
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task_images.cache import cached_folder
from task_images.errors import EnvironmentUnfitError
from task_images.fetch import ProgressLines

Floats = npt.NDArray[np.float32]

FORMAT = 1
_LABELS = {-1.0: 0.0, 0.0: 0.0, 1.0: 1.0}
_LINE_LIMIT = 1 << 26
_BLOCK_BYTES = 1 << 24
_SHAPE = re.compile(rb"\s*[^\s:]+(\s+\d+:[^\s:]+)*\s*")
_TOKEN = re.compile(rb"\S+")


class Dense(NamedTuple):
    """rows [n, features], mapped read-only; labels [n], 0 or 1."""

    rows: Floats
    labels: Floats


def load(source: Path, features: int) -> Dense:
    """As `load_with_digest`, without the digest."""
    return load_with_digest(source, features)[0]


def load_with_digest(source: Path, features: int) -> tuple[Dense, str]:
    """The data set, and its digest, in the text file `source` (plain, or compressed if its name ends in .bz2).

    The first caller converts it into a cache entry beside it (float32, 4 x features bytes a row), or in mlbench's own
    folder if that place is read-only; other callers wait for it, later ones map it. A changed source is
    converted again. Needs memory for one block of rows and, for each million numbers, about 0.3 s, or 1.5 s from a
    compressed file. Raises EnvironmentUnfitError naming line and column of what is wrong with the text.
    """

    def build(place: Path) -> None:
        _convert(source, place, features)

    key = [FORMAT, features]
    entry = cached_folder(source.parent, source.name, key, lambda: [source], build, resumable=True)
    rows = np.memmap(entry.folder / "rows.f32", np.float32, "r").reshape(-1, features)
    return Dense(np.asarray(rows), np.fromfile(entry.folder / "labels.f32", np.float32)), entry.digest


def _convert(source: Path, place: Path, features: int) -> None:
    """Write rows and labels, behind those that an interrupted conversion left in `place`."""
    paths = place / "rows.f32", place / "labels.f32"
    sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
    count = min(sizes[0] // (4 * features), sizes[1] // 4)
    progress = ProgressLines(f"converting {source.name}", source.stat().st_size, print)
    with open(paths[0], "ab") as rows, open(paths[1], "ab") as labels:
        rows.truncate(4 * features * count)
        labels.truncate(4 * count)
        for block in read_blocks(source, features, count, progress.reach):
            block.rows.tofile(rows)
            block.labels.tofile(labels)
            count += len(block.labels)
    if not count:
        raise EnvironmentUnfitError(f"{source} holds no sample")


def read_blocks(
    source: Path, features: int, skipped: int = 0, reach: Callable[[int], None] = lambda place: None
) -> Iterator[Dense]:
    """The samples of `source` in its order but for the first `skipped`, in blocks of some megabytes. Errors as `load`.
    `reach` gets the number of bytes of the file that were read, after each block."""
    size = max(1, _BLOCK_BYTES // (4 * features))
    rows, labels, filled = np.zeros((size, features), np.float32), np.zeros(size, np.float32), 0
    with open(source, "rb") as raw, bz2.open(raw) if source.suffix == ".bz2" else nullcontext(raw) as file:
        for number, line in islice(_lines(source, file), skipped, None):
            labels[filled] = _parse(source, number, line, rows[filled])
            filled += 1
            if filled == size:
                yield Dense(rows, labels)
                reach(raw.tell())
                rows[:] = 0
                filled = 0
    if filled:
        yield Dense(rows[:filled], labels[:filled])


def _lines(source: Path, file: bz2.BZ2File | io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Line number and line, without comments and empty lines."""
    number = 0
    while True:
        try:
            line = file.readline(_LINE_LIMIT)
        except (EOFError, OSError) as error:
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
        raise EnvironmentUnfitError(_complaint(source, number, line, len(row)))
    places, values = numbers[1::2].astype(np.int64), numbers[2::2]
    in_order = len(places) == 0 or (places[0] >= 1 and places[-1] <= len(row) and bool((np.diff(places) > 0).all()))
    if not in_order or not np.isfinite(values).all():
        raise EnvironmentUnfitError(_complaint(source, number, line, len(row)))
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


def _complaint(source: Path, number: int, line: bytes, features: int) -> str:
    """What is wrong with a line that did not parse, with the column (from 1) where it begins."""
    last = 0
    for order, match in enumerate(_TOKEN.finditer(line)):
        text = match.group().decode("utf-8", "replace")
        where = f"{source}, line {number}, column {match.start() + 1}: "
        if order == 0:
            if _float(text) not in _LABELS:
                return where + f"the label is {_short(text)}, not -1, 0 or 1"
            continue
        index, colon, value = text.partition(":")
        if not colon or not index.isdecimal():
            return where + f"{_short(text)} is not of the form INDEX:VALUE"
        if not 1 <= int(index) <= features:
            return where + f"the index is {_short(index)}, not from 1 to {features}"
        if int(index) <= last:
            return where + f"the index {index} follows {last}; they must ascend"
        if not np.isfinite(_float(value)):
            return where + f"{_short(value)} is not a finite number"
        last = int(index)
    return f"{source}, line {number} cannot be read"


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
