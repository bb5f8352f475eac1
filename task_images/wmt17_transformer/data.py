"""WMT17 English-German as the Transformer wants it: the official binary form, or plain text beside the dictionary.

In the data folder, or in its sub-folder wmt17:

    dict.en.txt                                 the reference dictionary (of both languages)
    train.en-de.en.{bin,idx}, train.en-de.de.*  the training pairs, encoded; or train.en and train.de, plain text
    test.en-de.en.*, test.en-de.de.*            the test pairs, encoded; or test.en and test.de, plain text
    test.de                                     the references as text, if there; otherwise decoded from the test pairs

Plain text is encoded once and kept in the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError
from task_images.published import WMT17, fetch_published
from task_images.report import DataIdentity, compare_data
from task_images.translation.corpora import Part, join_parts
from task_images.translation.pairs import Pairs, digest_pairs, encode_text, lines, read_encoded, read_indexed
from task_images.wmt17_transformer.subtokens import Subtokens, make_dictionary, read_dictionary

SOURCE, TARGET = "en", "de"
FOLDER = "wmt17"
FORM = 1
# Europarl 7, Common Crawl and News Commentary 12 together, as the benchmark of 2020 reports them; newstest2014, whole.
OFFICIAL = {"training pairs": 4_590_101, "test pairs": 3003}


@dataclass(frozen=True)
class Corpus:
    """Subtokens, training pairs and test pairs."""

    subtokens: Subtokens
    train: Pairs
    test: Pairs
    references: list[str]
    reference: str
    read: Mapping[str, int]  # pairs before any was left out for its length

    def identify(self) -> DataIdentity:
        """Whether these are as many pairs as were published."""
        return compare_data(self.read, OFFICIAL, digest_pairs(self.train, self.test))


def read_corpus(folder: Path, cache: Path, vocabulary: int, longest: int, longest_test: int) -> Corpus:
    """The corpus in `folder`; pairs with more than `longest` subtokens on a side are left out of training.

    `longest_test` does the same to the test pairs; 0 leaves none out. Raises EnvironmentUnfitError naming the file that
    is missing or wrong.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    subtokens = read_dictionary(folder / f"dict.{SOURCE}.txt", vocabulary)
    train = _read_pairs(folder, cache, "train", subtokens, longest).within(longest)
    train.check(vocabulary, f"the training data in {folder}")
    test = _read_pairs(folder, cache, "test", subtokens, 0)
    test.check(vocabulary, f"the test data in {folder}")
    read = {"training pairs": len(train) + sum(train.left_out.values()), "test pairs": len(test)}
    decoded = [subtokens.decode(test.target.sentence(index)) for index in range(len(test))]
    texts, reference = decoded, "decoded from the test pairs"
    if (folder / f"test.{TARGET}").is_file():
        texts, reference = list(lines(folder / f"test.{TARGET}")), f"test.{TARGET}"
        if len(texts) != len(test):
            raise EnvironmentUnfitError(f"test.{TARGET} has {len(texts)} lines, but there are {len(test)} test pairs")
    if longest_test:
        kept = [max(pair) <= longest_test for pair in zip(test.source.lengths, test.target.lengths, strict=True)]
        texts = [text for text, keep in zip(texts, kept, strict=True) if keep]
        test = test.within(longest_test)
    return Corpus(subtokens, train, test, texts, reference, read)


def _read_pairs(folder: Path, cache: Path, name: str, subtokens: Subtokens, longest: int) -> Pairs:
    prefixes = [folder / f"{name}.{SOURCE}-{TARGET}.{language}" for language in (SOURCE, TARGET)]
    if prefixes[0].with_name(f"{prefixes[0].name}.idx").is_file():
        return Pairs(read_indexed(prefixes[0]), read_indexed(prefixes[1]))
    texts = (folder / f"{name}.{SOURCE}", folder / f"{name}.{TARGET}")
    if not texts[0].is_file():
        raise EnvironmentUnfitError(
            f"there is neither {prefixes[0].name}.idx nor {texts[0].name} in {folder}",
            "mlbench data prepare wmt17_transformer fetches WMT17 English-German; the preset tiny generates data.",
        )

    def build(place: Path) -> None:
        encode_text(texts, subtokens.encode, place, subtokens.size, longest)

    inputs = [*texts, folder / f"dict.{SOURCE}.txt"]
    key = [FORM, subtokens.size]
    entry = cached_folder(cache, f"wmt17-{name}-{longest}", key, lambda: inputs, build)
    return read_encoded(entry.folder)


def write_dictionary(folder: Path, size: int) -> None:
    """Make dict.en.txt for the plain text in `folder`, for corpora that the official dictionary was not made for."""
    texts = [text for language in (SOURCE, TARGET) for text in lines(folder / f"train.{language}")]
    subtokens = make_dictionary(texts, size)
    (folder / f"dict.{SOURCE}.txt").write_text("".join(f"'{subtoken}'\n" for subtoken in subtokens), encoding="utf-8")


PARTS = (
    Part("training-parallel-nc-v12.tgz", ("news-commentary-v12.de-en.en", "news-commentary-v12.de-en.de")),
    Part("training-parallel-commoncrawl.tgz", ("commoncrawl.de-en.en", "commoncrawl.de-en.de")),
    Part("training-parallel-europarl-v7.tgz", ("europarl-v7.de-en.en", "europarl-v7.de-en.de")),
)
TEST_PART = Part("test-full.tgz", ("newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm"))


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the text and make the dictionary if the folder has neither, and encode the pairs, once for all runs with
    the same dictionary and limit of length."""
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not (place / f"dict.{SOURCE}.txt").is_file():
        if not all(
            (place / f"{name}.{language}").is_file() for name in ("train", "test") for language in (SOURCE, TARGET)
        ):
            fetch_published(WMT17, place, print)
            join_parts(place, PARTS, place, "train", print)
            join_parts(place, [TEST_PART], place, "test", print)
        print(f"{place}: making a dictionary of about {parameters['vocabulary']} subtokens", flush=True)
        write_dictionary(place, int(str(parameters["vocabulary"])))
    vocabulary, longest, longest_test = (
        int(str(parameters[name])) for name in ("vocabulary", "longest", "longest_test")
    )
    return read_corpus(folder, folder, vocabulary, longest, longest_test).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Sentences [3003] of newstest2014 in English, and their German references, as text: for `corpus_bleu`."""
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    source, target = (np.array(list(lines(place / f"test.{language}"))) for language in (SOURCE, TARGET))
    return source, target
