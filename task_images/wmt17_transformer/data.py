"""WMT17 English-German as the Transformer wants it: the official binary form, or plain text beside the dictionary.

In the data folder, or in its sub-folder wmt17:

    dict.en.txt                                 the reference dictionary (of both languages)
    train.en-de.en.{bin,idx}, train.en-de.de.*  the training pairs, encoded; or train.en and train.de, plain text
    test.en-de.en.*, test.en-de.de.*            the test pairs, encoded; or test.en and test.de, plain text
    test.de                                     the references as text, if there; otherwise decoded from the test pairs

Plain text is encoded once and kept in the cache.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.contract import EnvironmentUnfitError
from task_images.published import WMT17
from task_images.report import DataIdentity
from task_images.translation import corpora
from task_images.translation.corpora import LANGUAGES, Part, encode_once, fetch_text, find_folder, read_sentences
from task_images.translation.pairs import Pairs, lines, read_indexed
from task_images.wmt17_transformer.subtokens import Subtokens, make_dictionary, read_dictionary

DICTIONARY = "dict.en.txt"
FOLDER = "wmt17"
FORM = 1
# Europarl 7, Common Crawl and News Commentary 12 together, as the benchmark of 2020 reports them; newstest2014, whole.
OFFICIAL = {"training pairs": 4_590_101, "test pairs": 3003}


Corpus = corpora.Corpus[Subtokens]


def read_corpus(folder: Path, cache: Path, vocabulary: int, longest: int, longest_test: int) -> Corpus:
    """The corpus in `folder`; pairs with more than `longest` subtokens on a side are left out of training.

    `longest_test` does the same to the test pairs; 0 leaves none out. Raises EnvironmentUnfitError naming the file that
    is missing or wrong.
    """
    place = find_folder(folder, FOLDER)
    subtokens = read_dictionary(place / DICTIONARY, vocabulary)

    def read_pairs(name: str, longest: int) -> Pairs:
        prefixes = [place / f"{name}.en-de.{language}" for language in LANGUAGES]
        if prefixes[0].with_name(f"{prefixes[0].name}.idx").is_file():
            return Pairs(read_indexed(prefixes[0]), read_indexed(prefixes[1]))
        texts = (place / f"{name}.{LANGUAGES[0]}", place / f"{name}.{LANGUAGES[1]}")
        if not texts[0].is_file():
            raise EnvironmentUnfitError(
                f"there is neither {prefixes[0].name}.idx nor {texts[0].name} in {place}",
                "mlbench data prepare wmt17_transformer fetches WMT17 English-German; the preset tiny generates data.",
            )
        key = [FORM, subtokens.size]
        return encode_once(cache, f"wmt17-{name}", key, texts, place / DICTIONARY, subtokens, longest)

    return corpora.read_corpus(place, subtokens, read_pairs, "test.de", OFFICIAL, longest, longest_test)


def write_dictionary(folder: Path, size: int) -> None:
    """Make dict.en.txt for the plain text in `folder`, for corpora that the official dictionary was not made for."""
    texts = [text for language in LANGUAGES for text in lines(folder / f"train.{language}")]
    subtokens = make_dictionary(texts, size)
    (folder / DICTIONARY).write_text("".join(f"'{subtoken}'\n" for subtoken in subtokens), encoding="utf-8")


PARTS = (
    Part("training-parallel-nc-v12.tgz", ("news-commentary-v12.de-en.en", "news-commentary-v12.de-en.de")),
    Part("training-parallel-commoncrawl.tgz", ("commoncrawl.de-en.en", "commoncrawl.de-en.de")),
    Part("training-parallel-europarl-v7.tgz", ("europarl-v7.de-en.en", "europarl-v7.de-en.de")),
)
TEST_PART = Part("test-full.tgz", ("newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm"))


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch the text and make the dictionary if the folder has neither, and encode the pairs, once for all runs with
    the same dictionary and limit of length."""
    place = find_folder(folder, FOLDER)
    if not (place / DICTIONARY).is_file():
        fetch_text(WMT17, place, place, {"train": PARTS, "test": [TEST_PART]})
        print(f"{place}: making a dictionary of about {parameters['vocabulary']} subtokens", flush=True)
        write_dictionary(place, int(str(parameters["vocabulary"])))
    vocabulary, longest, longest_test = (
        int(str(parameters[name])) for name in ("vocabulary", "longest", "longest_test")
    )
    return read_corpus(folder, folder, vocabulary, longest, longest_test).identify()


def validation_arrays(folder: Path) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Sentences [3003] of newstest2014 in English, and their German references, as text: for `corpus_bleu`."""
    return read_sentences(find_folder(folder, FOLDER), "test")
