"""Parallel data as word numbers on disk, and the corpora of the WMT conferences: text from archives (concatenated
training parts, test sets extracted from SGML), and what a task reads of it.

Sentences are concatenated in a memory-mapped file of fixed-width integers; their starts and lengths are in memory.
The official form of WMT17, which is also that of cached text, has a pair of files per language: NAME.bin (the numbers)
and NAME.idx (TorchNet's index: magic, type, starts, lengths).
"""

import hashlib
import json
import re
import struct
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import IO, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError
from task_images.fetch import ProgressLines
from task_images.published import Published, fetch_published
from task_images.report import DataIdentity, compare_data
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


# --- corpora of the WMT conferences -----------------------------------------------------------------------------------


LANGUAGES = ("en", "de")
_SEGMENT = re.compile(rb"<seg[^>]*>(.*?)</seg>")


class Words(Protocol):
    """What cuts texts into numbered words. `size` may count unused numbers, too."""

    @property
    def size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, numbers: Iterable[int]) -> str: ...


W = TypeVar("W", bound=Words)


@dataclass(frozen=True)
class Corpus(Generic[W]):
    """Pairs with their words.

    references   of the test pairs: as written in a file, which `reference` names, or else their targets, decoded
    read         numbers of pairs before any was left out for its length; official: those that were published
    """

    words: W
    train: Pairs
    test: Pairs
    references: list[str]
    reference: str
    read: Mapping[str, int]
    official: Mapping[str, int]

    def identify(self) -> DataIdentity:
        """Whether these are as many pairs as were published."""
        return compare_data(self.read, self.official, digest_pairs(self.train, self.test))


def read_corpus(
    place: Path,
    words: W,
    read_pairs: Callable[[str, int], Pairs],
    reference: str,
    official: Mapping[str, int],
    longest: int,
    longest_test: int,
) -> Corpus[W]:
    """The corpus in `place`; training pairs with more than `longest` numbers on a side are left out, and test pairs
    with more than `longest_test`, unless it is 0. `read_pairs` reads those of "train" or "test" with that limit; the
    file `reference` has the references. Raises EnvironmentUnfitError naming the file that is wrong."""
    train, test = read_pairs("train", longest).within(longest), read_pairs("test", 0)
    read = {"training pairs": len(train) + sum(train.left_out.values()), "test pairs": len(test)}
    if (place / reference).is_file():
        references, source = list(lines(place / reference)), reference
        if len(references) != len(test):
            raise EnvironmentUnfitError(
                f"{reference} has {len(references)} lines, but there are {len(test)} test pairs"
            )
    else:
        references = [words.decode(test.target.sentence(index)) for index in range(len(test))]
        source = "decoded from the test pairs"
    if longest_test:
        kept = [max(pair) <= longest_test for pair in zip(test.source.lengths, test.target.lengths, strict=True)]
        references = [one for one, keep in zip(references, kept, strict=True) if keep]
        test = test.within(longest_test)
    train.check(words.size, f"the training data in {place}")
    test.check(words.size, f"the test data in {place}")
    return Corpus(words, train, test, references, source, read, official)


def find_folder(folder: Path, name: str) -> Path:
    """The sub-folder `name` if there is one, else the folder itself."""
    return folder / name if (folder / name).is_dir() else folder


def encode_once(
    cache: Path, task: str, name: str, key: object, place: Path, dictionary: Path, words: Words, longest: int
) -> Pairs:
    """The pairs of the texts NAME.en and NAME.de in `place`, encoded by the first caller and kept in `cache`.

    Raises EnvironmentUnfitError that names the one that is missing, and what `encode_text` raises."""
    texts = (place / f"{name}.{LANGUAGES[0]}", place / f"{name}.{LANGUAGES[1]}")
    missing = [text for text in texts if not text.is_file()]
    if missing:
        packed = missing[0].with_name(f"{missing[0].name}.gz")
        raise EnvironmentUnfitError(
            f"there is no {missing[0].name} in {place}",
            f"gunzip -k {packed}"
            if packed.is_file()
            else f"Put it there. In a folder without {dictionary.name}, mlbench data prepare {task} fetches and makes "
            "all files; the preset tiny generates data.",
        )

    def build(place: Path) -> None:
        encode_text(texts, words.encode, place, words.size, longest)

    entry = f"{task.partition('_')[0]}-{name}-{longest}"
    return read_encoded(cached_folder(cache, entry, key, lambda: [*texts, dictionary], build).folder)


def fetch_text(published: Published, place: Path, out: Path, parts: "Mapping[str, Sequence[Part]]") -> None:
    """Write out/NAME.en and out/NAME.de for each of `parts`, from archives that are fetched into `place`, unless all
    are there."""
    if all((out / f"{name}.{language}").is_file() for name in parts for language in LANGUAGES):
        return
    fetch_published(published, place, print)
    for name, some in parts.items():
        join_parts(place, some, out, name, print)


def read_sentences(place: Path, name: str) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """The sentences of NAME.en and NAME.de [n], as text: for `corpus_bleu`."""
    source, target = (np.array(list(lines(place / f"{name}.{language}"))) for language in LANGUAGES)
    return source, target


class Part(NamedTuple):
    """A file of an archive in both languages, by base name; .sgm files contain text in segments."""

    archive: str
    names: tuple[str, str]  # English, German


def join_parts(folder: Path, parts: Sequence[Part], out: Path, name: str, say: Callable[[str], None]) -> None:
    """Write out/NAME.en and out/NAME.de: the concatenated parts. Both appear only when complete.

    Raises EnvironmentUnfitError for an archive that is damaged, lacks a file, or whose sides differ in length.
    """
    out.mkdir(parents=True, exist_ok=True)
    targets = [out / f"{name}.{language}" for language in LANGUAGES]
    if all(target.is_file() for target in targets):
        return
    copies = [target.with_name(f".{target.name}.part") for target in targets]
    with ExitStack() as stack:
        files = [stack.enter_context(open(copy, "wb")) for copy in copies]
        for part in parts:
            counts = _add(folder / part.archive, part.names, files)
            if len(set(counts)) > 1 or not counts[0]:
                raise EnvironmentUnfitError(
                    f"{part.archive}: {part.names[0]} has {counts[0]} lines and {part.names[1]} has {counts[1]}",
                    f"Delete {folder / part.archive} and prepare the data again.",
                )
            say(f"{name}: {counts[0]} pairs of {part.names[0]}")
    for copy, target in zip(copies, targets, strict=True):
        copy.replace(target)


def _add(archive: Path, names: tuple[str, str], files: Sequence[IO[bytes]]) -> list[int]:
    """Append the two files of an archive; returns the number of lines of each."""
    counts: dict[str, int] = {}
    try:
        with tarfile.open(archive, "r:*") as packed:
            for member in packed:
                base = Path(member.name).name
                if base in names and base not in counts and member.isfile():
                    source = packed.extractfile(member)
                    assert source is not None
                    counts[base] = _copy(source, base, files[names.index(base)])
    except (tarfile.TarError, EOFError, OSError) as error:
        raise EnvironmentUnfitError(
            f"{archive} cannot be read: {error}", "Delete the file and prepare the data again."
        ) from None
    missing = [name for name in names if name not in counts]
    if missing:
        raise EnvironmentUnfitError(f"{archive} has no {missing[0]}", "Delete the file and prepare the data again.")
    return [counts[name] for name in names]


def _copy(source: IO[bytes], name: str, target: IO[bytes]) -> int:
    count = 0
    for line in _segments(source) if name.endswith(".sgm") else source:
        target.write(line.rstrip(b"\r\n") + b"\n")
        count += 1
    return count


def _segments(source: IO[bytes]) -> Iterator[bytes]:
    for line in source:
        if match := _SEGMENT.search(line):
            yield match[1].strip()
