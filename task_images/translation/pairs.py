"""Parallel data as word numbers on disk: reading the official binary formats, and creating them from two text files.

Sentences are concatenated in a memory-mapped file of fixed-width integers; their starts and lengths are in memory.
There are two official formats:

    indexed    NAME.bin (the numbers) and NAME.idx (TorchNet's index: magic, type, starts, lengths), one pair of files
               per language; used by WMT17, and for cached text corpora
    prepacked  one file: count, vocabulary size, shortest and longest length, source and target lengths, offset (all
               int64), then fixed-width rows of source and target; used by WMT16
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.contract import EnvironmentUnfitError
from task_images.fetch import ProgressLines
from task_images.text import read_lines

Integers = npt.NDArray[np.integer]
Encode = Callable[[str], list[int]]

_SIDES = ("source", "target")
_LEFT_OUT = "left_out.json"
_DIGEST_BLOCK = 100_000  # sentences
_MAGIC = b"TNTIDX\x00\x00"
_TYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64}


@dataclass(frozen=True)
class Side:
    """One language: sentence i is numbers[starts[i] : starts[i] + lengths[i]]."""

    numbers: Integers
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, indices: npt.NDArray[np.int64], width: int, fill: int) -> npt.NDArray[np.int64]:
        """The sentences `indices`, [len(indices), width], padded with `fill` on the right."""
        columns = np.arange(width)
        inside = columns < self.lengths[indices, None]
        places = np.where(inside, self.starts[indices, None] + columns, 0)
        return np.where(inside, self.numbers[places], fill).astype(np.int64)

    def sentence(self, index: int) -> list[int]:
        """The word numbers of a sentence."""
        start = self.starts[index]
        found: list[int] = self.numbers[start : start + self.lengths[index]].tolist()
        return found

    def without_first(self) -> "Side":
        """All sentences without their first number, the start mark."""
        return Side(self.numbers, self.starts + 1, self.lengths - 1)

    def cut(self, keep: npt.NDArray[np.bool_]) -> "Side":
        """The sentences where `keep` is true."""
        return Side(self.numbers, self.starts[keep], self.lengths[keep])


@dataclass(frozen=True)
class Pairs:
    """Source and target sentences. `left_out` has the number of pairs of the files that were excluded, by reason."""

    source: Side
    target: Side
    left_out: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise EnvironmentUnfitError(
                f"the data are not parallel: {len(self.source)} source sentences, {len(self.target)} target sentences",
                "Both files must come from the same preparation.",
            )

    def __len__(self) -> int:
        return len(self.source)

    def check(self, vocabulary: int, name: str) -> None:
        """Raises EnvironmentUnfitError if there are no pairs, or word numbers outside range(vocabulary)."""
        if not len(self):
            raise EnvironmentUnfitError(f"{name} holds no usable pair of sentences", f"Left out: {self.left_out}.")
        greatest = max(int(side.numbers.max(initial=0)) for side in (self.source, self.target))
        if greatest >= vocabulary:
            raise EnvironmentUnfitError(
                f"{name} has the word number {greatest}, but the vocabulary holds {vocabulary} words only",
                "Data and vocabulary must come from the same preparation.",
            )

    def within(self, longest: int) -> "Pairs":
        """The pairs whose longer side has at most `longest` numbers."""
        keep = np.maximum(self.source.lengths, self.target.lengths) <= longest
        left_out = {**self.left_out, "too long": self.left_out.get("too long", 0) + int((~keep).sum())}
        return Pairs(self.source.cut(keep), self.target.cut(keep), left_out)


def digest_pairs(*parts: Pairs) -> str:
    """ "sha256:HEX" of the lengths and numbers of all sentences, independent of the file format."""
    sha = hashlib.sha256()
    for side in (side for pairs in parts for side in (pairs.source, pairs.target)):
        sha.update(side.lengths.astype("<i8").tobytes())
        for start in range(0, len(side), _DIGEST_BLOCK):
            lengths = side.lengths[start : start + _DIGEST_BLOCK]
            firsts = side.starts[start : start + _DIGEST_BLOCK]
            # Position of every number: its sentence's start plus its index in the sentence.
            places = np.arange(lengths.sum()) + np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths)
            sha.update(side.numbers[places].astype("<i4").tobytes())
    return f"sha256:{sha.hexdigest()}"


def read_indexed(prefix: Path) -> Side:
    """The language in `prefix`.bin and `prefix`.idx. Raises EnvironmentUnfitError if they are missing or damaged."""
    index = prefix.with_name(f"{prefix.name}.idx")
    data = prefix.with_name(f"{prefix.name}.bin")
    try:
        raw = index.read_bytes()
        size = data.stat().st_size
    except OSError as error:
        raise EnvironmentUnfitError(f"{error.filename} cannot be read: {error.strerror}") from None
    try:
        if raw[:8] != _MAGIC:
            raise ValueError("it does not begin as one")
        version, code, _, count, sizes = struct.unpack_from("<5Q", raw, 8)
        if version != 1 or code not in _TYPES or sizes != count:
            raise ValueError(f"version {version}, type {code}, {count} sentences, {sizes} sizes")
        tables = np.frombuffer(raw, "<i8", offset=48, count=2 * (count + 1) + sizes)
    except (ValueError, struct.error) as error:
        raise EnvironmentUnfitError(
            f"{index} is not an index of this form: {error}", "Prepare the data again."
        ) from None
    starts, lengths = tables[count + 1 : 2 * count + 1], tables[2 * (count + 1) :]
    kind = np.dtype(_TYPES[code])
    total = int(tables[2 * count + 1])
    if size < total * kind.itemsize or (len(lengths) and int((starts + lengths).max()) > total):
        raise EnvironmentUnfitError(f"{data} is shorter than its index says", "Prepare the data again.")
    numbers = np.memmap(data, kind, "r", shape=(total,)) if total else np.zeros(0, kind)
    return Side(numbers, starts.astype(np.int64), lengths.astype(np.int64))


def read_prepacked(path: Path, vocabulary: int) -> Pairs:
    """The pairs in a prepacked file, with start and end marks on both sides.

    Raises EnvironmentUnfitError if the file is damaged or has a vocabulary of another size.
    """
    try:
        with path.open("rb") as file:
            count, words, _, width = np.fromfile(file, "<i8", 4).tolist()
            source, target = np.fromfile(file, "<i8", count), np.fromfile(file, "<i8", count)
            (offset,) = np.fromfile(file, "<i8", 1).tolist()
        kind = np.dtype("<i2" if words <= np.iinfo(np.int16).max else "<i4")
        numbers = np.memmap(path, kind, "r", offset=offset, shape=(count * 2 * width,))
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(f"{path} is not a prepacked corpus: {error}", "Prepare the data again.") from None
    if words != vocabulary:
        raise EnvironmentUnfitError(
            f"{path} was made with {words} words, the vocabulary holds {vocabulary}",
            "Data and vocabulary must come from the same preparation.",
        )
    if count and (min(source.min(), target.min()) < 1 or max(source.max(), target.max()) > width):
        raise EnvironmentUnfitError(f"{path} has lengths outside of 1 ... {width}", "Prepare the data again.")
    rows = np.arange(count, dtype=np.int64) * (2 * width)
    return Pairs(Side(numbers, rows, source), Side(numbers, rows + width, target))


class IndexedWriter:
    """Writes one language in the indexed format, sentence by sentence."""

    def __init__(self, prefix: Path, vocabulary: int, stack: ExitStack) -> None:
        self._prefix, self._lengths = prefix, array("q")
        self._code = 3 if vocabulary <= np.iinfo(np.int16).max else 4
        self._file = stack.enter_context(prefix.with_name(f"{prefix.name}.bin").open("wb"))

    def add(self, numbers: list[int]) -> None:
        """Append a sentence."""
        self._lengths.append(len(numbers))
        self._file.write(np.asarray(numbers, _TYPES[self._code]).tobytes())

    def finish(self) -> None:
        """Write the index, without which the data cannot be read."""
        count, lengths = len(self._lengths), np.array(self._lengths, "<i8")
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        width = np.dtype(_TYPES[self._code]).itemsize
        with self._prefix.with_name(f"{self._prefix.name}.idx").open("wb") as index:
            index.write(_MAGIC + struct.pack("<5Q", 1, self._code, width, count, count))
            index.write(np.arange(count + 1, dtype="<i8").tobytes() + starts.tobytes() + lengths.tobytes())


def encode_text(texts: tuple[Path, Path], encode: Encode, folder: Path, vocabulary: int, longest: int) -> None:
    """Encode two parallel text files into `folder` (see `read_encoded`), in one pass, one pair of lines in memory.

    `longest` > 0: for training; pairs with more numbers on a side, and pairs with an empty side, are excluded and
    counted. `longest` = 0: for evaluation, nothing is excluded. Raises EnvironmentUnfitError if a file is missing, is
    not UTF-8, or has more lines than the other.
    """
    left_out = {"too long": 0, "empty": 0}
    progress = ProgressLines(f"encoding {texts[0].name}", sum(map(file_size, texts)), print)
    with ExitStack() as stack:
        writers = [IndexedWriter(folder / name, vocabulary, stack) for name in _SIDES]
        for pair in parallel_lines(*texts):
            progress.add(sum(map(len, pair)) + 2)  # approximate: a character may have several bytes
            sentences = _encode_pair(pair, encode, longest)
            if isinstance(sentences, str):
                left_out[sentences] += 1
                continue
            for writer, sentence in zip(writers, sentences, strict=True):
                writer.add(sentence)
        for writer in writers:
            writer.finish()
    (folder / _LEFT_OUT).write_text(json.dumps(left_out), encoding="utf-8")


def _encode_pair(pair: tuple[str, str], encode: Encode, longest: int) -> list[list[int]] | str:
    """The numbers of both sides, or the reason for excluding the pair."""
    if longest and not all(pair):
        return "empty"
    sentences = [encode(line) for line in pair]
    return "too long" if longest and max(map(len, sentences)) > longest else sentences


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if it is missing, which is reported when it is read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_encoded(folder: Path) -> Pairs:
    """The pairs that `encode_text` wrote into `folder`."""
    left_out = json.loads((folder / _LEFT_OUT).read_text(encoding="utf-8"))
    return Pairs(read_indexed(folder / _SIDES[0]), read_indexed(folder / _SIDES[1]), left_out)


def parallel_lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """The lines of two files in pairs, stripped."""
    missing = object()
    for number, (left, right) in enumerate(zip_longest(lines(source), lines(target), fillvalue=missing), start=1):
        if not isinstance(left, str) or not isinstance(right, str):
            shorter, longer = (source, target) if left is missing else (target, source)
            raise EnvironmentUnfitError(
                f"{shorter} ends after {number - 1} lines, {longer} does not: the files are not parallel",
                "Both must come from the same preparation.",
            )
        yield left, right


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text, stripped. Raises EnvironmentUnfitError saying what is wrong."""
    for line in read_lines(path, "Convert the file, or take that line out of both languages."):
        yield line.strip()
