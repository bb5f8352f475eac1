"""WMT17 English-German as the Transformer wants it: the official binary form, or plain text beside the dictionary.

In the data folder, or in its sub-folder wmt17:

    dict.en.txt                                 the reference dictionary (of both languages)
    train.en-de.en.{bin,idx}, train.en-de.de.*  the training pairs, encoded; or train.en and train.de, plain text
    test.en-de.en.*, test.en-de.de.*            the test pairs, encoded; or test.en and test.de, plain text
    test.de                                     the references as text, if there; otherwise decoded from the test pairs

Plain text is encoded once and kept in the cache.
"""

from dataclasses import dataclass
from pathlib import Path

from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.translation.cache import Cache
from task_images.harness.translation.pairs import Pairs, encode_text, lines, read_encoded, read_indexed
from task_images.wmt17_transformer.subtokens import Subtokens, make_dictionary, read_dictionary

SOURCE, TARGET = "en", "de"
FOLDER = "wmt17"


@dataclass(frozen=True)
class Corpus:
    subtokens: Subtokens
    train: Pairs
    test: Pairs
    references: list[str]
    reference: str


def read_corpus(folder: Path, cache: Cache, vocabulary: int, longest: int, longest_test: int) -> Corpus:
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
    return Corpus(subtokens, train, test, texts, reference)


def _read_pairs(folder: Path, cache: Cache, name: str, subtokens: Subtokens, longest: int) -> Pairs:
    prefixes = [folder / f"{name}.{SOURCE}-{TARGET}.{language}" for language in (SOURCE, TARGET)]
    if prefixes[0].with_name(f"{prefixes[0].name}.idx").is_file():
        return Pairs(read_indexed(prefixes[0]), read_indexed(prefixes[1]))
    texts = (folder / f"{name}.{SOURCE}", folder / f"{name}.{TARGET}")
    if not texts[0].is_file():
        raise EnvironmentUnfitError(
            f"there is neither {prefixes[0].name}.idx nor {texts[0].name} in {folder}",
            "Put WMT17 English-German there, or choose the preset tiny, which makes its own data.",
        )

    def build(place: Path) -> None:
        encode_text(texts, (subtokens.encode, subtokens.encode), place, subtokens.size, longest)

    inputs = [*texts, folder / f"dict.{SOURCE}.txt"]
    return read_encoded(cache.folder(f"wmt17-{name}", inputs, (subtokens.size, longest), build))


def write_dictionary(folder: Path, size: int) -> None:
    """Make dict.en.txt for the plain text in `folder`, for corpora that the official dictionary was not made for."""
    texts = [text for language in (SOURCE, TARGET) for text in lines(folder / f"train.{language}")]
    subtokens = make_dictionary(texts, size)
    (folder / f"dict.{SOURCE}.txt").write_text("".join(f"'{subtoken}'\n" for subtoken in subtokens), encoding="utf-8")
