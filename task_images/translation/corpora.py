"""Corpora of the WMT conferences: parallel text from archives (concatenated training parts, test sets extracted from
SGML), and what a task reads of it."""

import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError
from task_images.published import Published, fetch_published
from task_images.report import DataIdentity, compare_data
from task_images.translation.pairs import Pairs, digest_pairs, encode_text, lines, read_encoded

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

    texts        the test targets, decoded; references: as written, if there is such a file, which `reference` names
    read         numbers of pairs before any was left out for its length; official: those that were published
    is_partial   the training pairs do not tell how many were left out when they were made
    """

    words: W
    train: Pairs
    test: Pairs
    texts: list[str]
    references: list[str]
    reference: str
    read: Mapping[str, int]
    official: Mapping[str, int]
    is_partial: bool = False

    def identify(self) -> DataIdentity:
        """Whether these are as many pairs as were published."""
        known = {"test pairs": self.official["test pairs"]} if self.is_partial else self.official
        found = compare_data(self.read, known, digest_pairs(self.train, self.test))
        if self.is_partial and found.official:
            return replace(found, official=None, reason="a prepacked file does not say what was left out of it")
        return found


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
    train.check(words.size, f"the training data in {place}")
    test.check(words.size, f"the test data in {place}")
    read = {"training pairs": len(train) + sum(train.left_out.values()), "test pairs": len(test)}
    texts = [words.decode(test.target.sentence(index)) for index in range(len(test))]
    references, source = texts, "decoded from the test pairs"
    if (place / reference).is_file():
        references, source = list(lines(place / reference)), reference
        if len(references) != len(test):
            raise EnvironmentUnfitError(
                f"{reference} has {len(references)} lines, but there are {len(test)} test pairs"
            )
    if longest_test:
        kept = [max(pair) <= longest_test for pair in zip(test.source.lengths, test.target.lengths, strict=True)]
        texts, references = (
            [one for one, keep in zip(some, kept, strict=True) if keep] for some in (texts, references)
        )
        test = test.within(longest_test)
    return Corpus(words, train, test, texts, references, source, read, official)


def find_folder(folder: Path, name: str) -> Path:
    """The sub-folder `name` if there is one, else the folder itself."""
    return folder / name if (folder / name).is_dir() else folder


def encode_once(
    cache: Path, name: str, key: object, texts: tuple[Path, Path], dictionary: Path, words: Words, longest: int
) -> Pairs:
    """The pairs of two texts, encoded by the first caller and kept in `cache`."""

    def build(place: Path) -> None:
        encode_text(texts, words.encode, place, words.size, longest)

    return read_encoded(cached_folder(cache, f"{name}-{longest}", key, lambda: [*texts, dictionary], build).folder)


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
