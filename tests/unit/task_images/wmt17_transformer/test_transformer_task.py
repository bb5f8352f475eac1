"""The Transformer's task: what its settings become, and how WMT17 is read from text or from the encoded form."""

from pathlib import Path

import pytest

from task_images.wmt17_transformer.data import Corpus, read_corpus
from task_images.wmt17_transformer.subtokens import Subtokens, make_dictionary

# Whole words a to e; each is one subtoken, so that lengths are easy to see: words and one end mark.
WORDS = make_dictionary(["a b c d e"], 60)
ROOM = 64


def write(folder: Path, **texts: list[str]) -> Path:
    """Files by name, with the language behind two underscores, and the dictionary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dict.en.txt").write_text("".join(f"'{word}'\n" for word in WORDS))
    for name, lines in texts.items():
        (folder / name.replace("__", ".")).write_text("".join(f"{line}\n" for line in lines))
    return folder


TEXTS = {
    "train__en": ["a b", "a b c d", "", "e"],
    "train__de": ["b", "a", "a", "a b c"],
    "test__en": ["a", "a b c"],
    "test__de": ["b b", "d"],
}


def read(folder: Path, longest: int = 4, longest_test: int = 0) -> Corpus:
    return read_corpus(folder, folder / "cache", ROOM, longest, longest_test)


# --- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("longest", "references"), [(0, ["b b", "d"]), (4, ["b b", "d"]), (3, ["b b"]), (2, [])])
def test_test_pairs_may_be_limited_with_their_references(tmp_path: Path, longest: int, references: list[str]) -> None:
    corpus = read(write(tmp_path, **TEXTS), longest_test=longest)
    assert corpus.references == references
    assert len(corpus.test) == len(references)
    assert corpus.read["test pairs"] == 2  # before any was left out


# --- subtokens ------------------------------------------------------------------------------------------------------

SUBTOKENS = Subtokens(make_dictionary(["ab cd, e"], 40), 64)


@pytest.mark.parametrize(
    "text",
    [" ab", "ab ", " ab cd ", "ab  cd", " ", "  ", "ab,cd", "ab, cd", "½ ab", "\\u", "a_b", "\\", "_", "\\9;", "é"],
)
def test_blanks_and_escapes_survive(text: str) -> None:
    assert SUBTOKENS.decode(SUBTOKENS.encode(text)) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("\\97;", "a"),
        ("\\1114111;", chr(0x10FFFF)),  # the last of Unicode
        ("\\1114112;", "〓"),
        ("\\12345678;", "〓"),
        ("\\u", "_"),
        ("\\\\", "\\"),
        ("\\x", "\\x"),
    ],
)
def test_codes_beyond_unicode_become_a_mark(written: str, text: str) -> None:
    """As in Tensor2Tensor, which shows them as a geta mark."""
    known = Subtokens(["<pad>_", "<EOS>_", *"\\_u;0123456789x"], 32)
    numbers = [["", "<pad>_", "<EOS>_", *"\\_u;0123456789x"].index(letter) for letter in written]
    assert known.decode(numbers) == text


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        ("well , yes .", "well, yes."),
        ("now ! why ?", "now! why?"),
        ("it ' s", "it's"),
        ("well - known", "well-known"),
        ("a ; b", "a ; b"),
    ],
)
def test_the_original_puts_only_some_punctuation_back(text: str, decoded: str) -> None:
    known = Subtokens(make_dictionary(text.split(), 80), 80)
    numbers = [known.encode(word)[0] for word in text.split()]
    assert known.decode_as_original(numbers) == decoded


# --- the task -------------------------------------------------------------------------------------------------------
