"""WMT16 English-German as GNMT wants it, in the data folder or in its sub-folder wmt16:

    vocab.bpe.32000                      the joint vocabulary
    train.tok.clean.bpe.32000.{en,de}    training pairs, tokenised and cut into subwords; or the prepacked file of them,
                                         train.tok.clean.bpe.32000.bin
    newstest2014.tok.bpe.32000.{en,de}   test pairs, likewise
    newstest2014.de                      the references as written, if there; otherwise put together from the test pairs

`prepare.py` makes them from raw text. Text is encoded once and kept in the cache.
"""

from dataclasses import dataclass
from pathlib import Path

from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.translation.cache import Cache
from task_images.harness.translation.pairs import Pairs, encode_text, lines, read_encoded, read_prepacked
from task_images.wmt16_gnmt.prepare import LANGUAGES, REFERENCE, TEST, TRAIN, VOCABULARY
from task_images.wmt16_gnmt.text import Vocabulary, read_vocabulary

FOLDER = "wmt16"


@dataclass(frozen=True)
class Corpus:
    """Sources have start and end marks, targets the end mark only. `texts` are the test targets put together."""

    vocabulary: Vocabulary
    train: Pairs
    test: Pairs
    texts: list[str]
    references: list[str]
    reference: str


def read_corpus(folder: Path, cache: Cache, longest: int, longest_test: int) -> Corpus:
    """The corpus in `folder`; training pairs with more than `longest` numbers on a side, marks included, are left out.

    `longest_test` does the same to the test pairs; 0 leaves none out. Raises EnvironmentUnfitError naming the file that
    is missing or wrong.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    vocabulary = read_vocabulary(folder / VOCABULARY)
    train = _read_pairs(folder, cache, TRAIN, vocabulary, longest).within(longest)
    train.check(vocabulary.size, f"the training data in {folder}")
    test = _read_pairs(folder, cache, TEST, vocabulary, 0)
    test.check(vocabulary.size, f"the test data in {folder}")
    texts = [vocabulary.text(test.target.sentence(index)) for index in range(len(test))]
    references, reference = texts, "put together from the test pairs"
    if (folder / REFERENCE).is_file():
        references, reference = list(lines(folder / REFERENCE)), REFERENCE
        if len(references) != len(test):
            raise EnvironmentUnfitError(
                f"{REFERENCE} has {len(references)} lines, but there are {len(test)} test pairs"
            )
    if longest_test:
        kept = [max(pair) <= longest_test for pair in zip(test.source.lengths, test.target.lengths, strict=True)]
        texts = [text for text, keep in zip(texts, kept, strict=True) if keep]
        references = [text for text, keep in zip(references, kept, strict=True) if keep]
        test = test.within(longest_test)
    return Corpus(vocabulary, _without_starts(train), _without_starts(test), texts, references, reference)


def _read_pairs(folder: Path, cache: Cache, name: str, vocabulary: Vocabulary, longest: int) -> Pairs:
    if (folder / f"{name}.bin").is_file():
        return read_prepacked(folder / f"{name}.bin", vocabulary.size)
    texts = (folder / f"{name}.{LANGUAGES[0]}", folder / f"{name}.{LANGUAGES[1]}")
    if not texts[0].is_file():
        raise EnvironmentUnfitError(
            f"there is neither {name}.bin nor {texts[0].name} in {folder}",
            "Put WMT16 English-German there (task_images.wmt16_gnmt.prepare makes it from raw text), "
            "or choose the preset tiny, which makes its own data.",
        )

    def build(place: Path) -> None:
        encode_text(texts, (vocabulary.encode, vocabulary.encode), place, vocabulary.size, longest)

    return read_encoded(cache.folder(f"wmt16-{name}", [*texts, folder / VOCABULARY], longest, build))


def _without_starts(pairs: Pairs) -> Pairs:
    return Pairs(pairs.source, pairs.target.without_first(), pairs.left_out)
