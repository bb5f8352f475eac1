"""WikiText-2: reading its files, the vocabulary, streams, random sequence lengths; and a sample for tests.

The official form is `wiki.{train,valid,test}.tokens`, one paragraph a line, words parted by blanks, or the zip file
`wikitext-2-v1.zip` that holds the three. Every line, blank ones too, ends with one more word, <eos>.

The sample is a real text that every Python brings along: `pydoc_data.topics` holds some 80 chapters of The Python
Language Reference (PSF license), about 80,000 words. Its wording differs a little between Python versions, so the
preset's goal leaves room for that.
"""

import random
import re
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.cache import Arrays, cached_arrays
from task_images.contract import EnvironmentUnfitError
from task_images.published import WIKITEXT2, fetch_published
from task_images.report import DataIdentity, compare_data
from task_images.text import decode_line

SPLITS = ("train", "valid", "test")
END = "<eos>"
ARCHIVE = "wikitext-2-v1.zip"
FORM = 1
OFFICIAL = {"train words": 2_088_628, "valid words": 217_646, "test words": 245_569, "vocabulary": 33_278}


@dataclass(frozen=True)
class Corpus:
    """Word numbers of every split, 1-D int32, and the words they stand for, in order of first appearance."""

    words: list[str]
    train: Tensor
    valid: Tensor
    test: Tensor
    digest: str = ""

    def identify(self) -> DataIdentity:
        """Whether these are the published words: each line's end counts as one."""
        counts = {f"{split} words": len(getattr(self, split)) for split in SPLITS}
        return compare_data({**counts, "vocabulary": len(self.words)}, OFFICIAL, self.digest)


def read_corpus(folder: Path) -> Corpus:
    """The corpus in `folder`, as files, in `folder`/wikitext-2, or as the official zip; tokenized once per machine.

    Raises EnvironmentUnfitError if a file is missing, is not UTF-8 or holds no words.
    """

    def build() -> Arrays:
        numbers: dict[str, int] = {}
        arrays: Arrays = {split: _encode(_lines(folder, split), numbers, split) for split in SPLITS}
        return {**arrays, "words": np.frombuffer("\n".join(numbers).encode(), np.uint8)}

    arrays, entry = cached_arrays(folder, "wikitext2", FORM, lambda: _sources(folder), build)
    words = arrays["words"].tobytes().decode().split("\n")
    train, valid, test = (torch.from_numpy(arrays[split].astype(np.int32)) for split in SPLITS)
    return Corpus(words, train, valid, test, entry.digest)


def _sources(folder: Path) -> list[Path]:
    """The files that the words come from, as far as they exist."""
    files = [path for split in SPLITS if (path := _find(folder, f"wiki.{split}.tokens")) is not None]
    return files if len(files) == len(SPLITS) else [*files, *filter(Path.is_file, [folder / ARCHIVE])]


def _find(folder: Path, name: str) -> Path | None:
    """The file in `folder` or in that of the archive, which some tools unpack into a folder of its name."""
    places = ("", "wikitext-2/", "wikitext-2-v1/", "wikitext-2-v1/wikitext-2/")
    return next((path for place in places if (path := folder / f"{place}{name}").is_file()), None)


def _lines(folder: Path, split: str) -> Iterator[bytes]:
    name, archive = f"wiki.{split}.tokens", folder / ARCHIVE
    if (path := _find(folder, name)) is not None:
        with path.open("rb") as file:
            yield from file
        return
    try:
        with zipfile.ZipFile(archive) as packed, packed.open(f"wikitext-2/{name}") as member:
            yield from member
    except FileNotFoundError:
        raise EnvironmentUnfitError(
            f"There is neither {name} nor {ARCHIVE} in {folder}.",
            hint="mlbench data prepare wikitext2_awd_lstm fetches it into an empty folder; the preset tiny includes a "
            "text. The raw texts (wiki.train.raw) are others: their rare words are not <unk>.",
        ) from None
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise EnvironmentUnfitError(
            f"{archive} is not the WikiText-2 archive: {error}", hint="Download it again."
        ) from None


def _encode(lines: Iterable[bytes], numbers: dict[str, int], split: str) -> npt.NDArray[np.int32]:
    ids = array("i")
    for count, line in enumerate(lines, start=1):
        words = decode_line(line, count, f"wiki.{split}.tokens", "Download the file again.").split()
        ids.extend(numbers.setdefault(word, len(numbers)) for word in (*words, END))
    if len(ids) < 2:
        raise EnvironmentUnfitError(f"wiki.{split}.tokens holds no words.", hint="Download the file again.")
    return np.array(ids, np.int32)


def streams(ids: Tensor, count: int) -> Tensor:
    """ids (N) -> (N // count, count): `count` contiguous streams as columns; the remainder is dropped."""
    steps = len(ids) // count
    if steps < 2:
        raise EnvironmentUnfitError(
            f"{len(ids)} words are too few for {count} streams.", hint="Use a smaller batch_size, or fewer workers."
        )
    return ids[: steps * count].view(count, steps).t().contiguous()


def sequence_lengths(steps: int, base: int, least: int, short_share: float, seed: int, epoch: int) -> list[int]:
    """Lengths of the epoch's batches; they sum up to steps - 1, as the last word is nobody's input.

    Each is max(least, int(Normal(base / (1 + X), 5))) with X ~ Bernoulli(short_share), the last one cut to fit. The
    same on every rank, as it depends on seed and epoch alone.
    """
    generator = random.Random(f"sequence lengths {seed} {epoch}")
    lengths = []
    left = steps - 1
    while left > 0:
        mean = base / 2 if generator.random() < short_share else base
        lengths.append(min(left, max(least, int(generator.gauss(mean, 5)))))
        left -= lengths[-1]
    return lengths


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the archive if there are neither it nor its texts, and tokenize these, once for all runs."""
    if len(_sources(folder)) == 0:
        fetch_published(WIKITEXT2, folder, print)
    return read_corpus(folder).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Numbers of the validation text's words [n - 1], and of the words that follow them. Raises as `read_corpus`."""
    words = read_corpus(folder).valid.numpy()
    return words[:-1], words[1:]


WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|[0-9]+|[^\sA-Za-z0-9]")
LEAST_COUNT = 3  # rarer words become <unk>, as in WikiText-2


def write_sample(folder: Path) -> None:
    """Write wiki.{train,valid,test}.tokens; in every ten paragraphs one goes to valid and one to test."""
    paragraphs = _paragraphs()
    counts = Counter(word for paragraph in paragraphs for word in paragraph)
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for number, paragraph in enumerate(paragraphs):
        split = {3: "valid", 7: "test"}.get(number % 10, "train")
        words = (word if counts[word] >= LEAST_COUNT else "<unk>" for word in paragraph)
        splits[split].append(f" {' '.join(words)} \n")
    for split, lines in splits.items():
        (folder / f"wiki.{split}.tokens").write_text("".join(lines), encoding="utf-8")


def _paragraphs() -> list[list[str]]:
    from pydoc_data.topics import topics

    texts = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return [words for text in texts if len(words := WORD.findall(text.lower())) > 3]
