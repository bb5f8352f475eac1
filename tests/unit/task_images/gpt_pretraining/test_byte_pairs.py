"""GPT-2's byte pairs by hand, and how documents become training and validation tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_images.gpt_pretraining import data
from task_images.gpt_pretraining.bpe import BytePairs, byte_letters, read_byte_pairs
from task_images.gpt_pretraining.data import prepare_data, read_documents, validation_arrays, write_token_files
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.language.tokens import write_tokens

LETTERS = byte_letters()
END = "<|endoftext|>"


def make_numbers(*merged: str) -> dict[str, int]:
    return {piece: number for number, piece in enumerate([*LETTERS, *merged, END])}


def test_every_byte_has_a_letter_of_its_own_that_can_be_seen() -> None:
    """As in GPT-2's encoder.py: printable bytes of Latin-1 are themselves, the other 68 come from U+0100 on."""
    assert len(set(LETTERS)) == 256
    assert (LETTERS[ord("!")], LETTERS[ord("~")], LETTERS[ord("A")], LETTERS[0xFF]) == ("!", "~", "A", "ÿ")
    assert (LETTERS[0], LETTERS[ord("\n")], LETTERS[ord(" ")]) == ("Ā", "Ċ", "Ġ")  # as in vocab.json
    assert (LETTERS[0x7F], LETTERS[0xA0], LETTERS[0xAD]) == ("ġ", "ł", "Ń")
    assert sum(ord(letter) > 255 for letter in LETTERS) == 68
    assert max(map(ord, LETTERS)) == 256 + 67


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", ["a", " b"]),
        ("a  b", ["a", " ", " b"]),  # the last blank belongs to the word
        ("a\n\nb", ["a", "\n", "\n", "b"]),
        ("a  ", ["a", "  "]),
        ("it's we'll", ["it", "'s", " we", "'ll"]),
        ("I'd I'VE", ["I", "'d", " I", "'", "VE"]),
        ("x12 3.5", ["x", "12", " 3", ".", "5"]),
        ("a!? b", ["a", "!?", " b"]),
        ("Ünï", ["Ünï"]),
    ],
)
def test_texts_are_cut_into_words_with_the_blank_before_them(text: str, words: list[str]) -> None:
    """GPT-2's pattern: contractions, letters, digits, and the rest are apart."""
    pairs = BytePairs(make_numbers(), [])
    list(pairs.encode(text))
    assert list(pairs._known) == [*dict.fromkeys(words)]


def test_neighbors_are_merged_in_the_order_of_the_list() -> None:
    numbers = make_numbers("bc", "ab", "abc", "Ġa")
    pieces = {number: piece for piece, number in numbers.items()}

    def cut(text: str, *merges: tuple[str, str]) -> list[str]:
        return [pieces[number] for number in BytePairs(numbers, merges).encode(text)]

    assert cut("abc", ("b", "c"), ("a", "b")) == ["a", "bc"]
    assert cut("abc", ("a", "b"), ("b", "c")) == ["ab", "c"]
    assert cut("abc", ("a", "b"), ("ab", "c")) == ["abc"]
    assert cut("a a", ("Ġ", "a")) == ["a", "Ġa"]
    assert cut("é", ("a", "b")) == ["Ã", "©"]  # two bytes
    assert cut(END, ("a", "b"))[:2] == ["<", "|"]  # in a text it is ordinary
    pairs = BytePairs(numbers, [])
    assert (pairs.size, pairs.end) == (261, 260)


def write_encoding(folder: Path, numbers: Any, merges: str) -> None:
    (folder / "vocab.json").write_text(numbers if isinstance(numbers, str) else json.dumps(numbers))
    (folder / "merges.txt").write_text(merges)


def test_an_encoding_is_read_from_both_files(tmp_path: Path) -> None:
    assert read_byte_pairs(tmp_path) is None
    write_encoding(tmp_path, make_numbers("ab"), "#version: 0.2\na b\n\n")
    found = read_byte_pairs(tmp_path)
    assert found is not None
    assert list(found.encode("ab")) == [256]
    write_encoding(tmp_path, make_numbers("ab"), "a b\nab c\nc d\n")
    with pytest.raises(EnvironmentUnfitError, match=r"lacks 2 pieces of .*, for example 'abc'") as caught:
        read_byte_pairs(tmp_path)
    assert caught.value.hint == "Use both files of the same model."


@pytest.mark.parametrize(
    ("numbers", "merges"),
    [
        ("{", "a b\n"),
        ("[]", "a b\n"),
        ({letter: number for number, letter in enumerate(LETTERS)}, ""),  # without an end
        (make_numbers("ab"), "a b c\n"),
        (make_numbers("ab"), "ab\n"),
    ],
)
def test_files_that_are_no_encoding_are_named(tmp_path: Path, numbers: Any, merges: str) -> None:
    write_encoding(tmp_path, numbers, merges)
    with pytest.raises(EnvironmentUnfitError, match="are not an encoding") as caught:
        read_byte_pairs(tmp_path)
    assert END in str(caught.value.hint)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_one_file_alone_is_no_encoding(tmp_path: Path, missing: str) -> None:
    write_encoding(tmp_path, make_numbers(), "")
    (tmp_path / missing).unlink()
    with pytest.raises(EnvironmentUnfitError, match="are not an encoding: FileNotFoundError"):
        read_byte_pairs(tmp_path)


# --- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("", []),
        (" \n\n", []),
        ("a\nb", ["a\nb"]),
        (f"a\n{END}\nb\n", ["a\n", "b\n"]),
        (f"a\n  {END} \n", ["a\n"]),
        (f"{END}\na", ["", "a"]),
        (f"a {END}\nb", [f"a {END}\nb"]),  # only a line of its own ends a document
        ("a\r\nb\r\n", ["a\r\nb\r\n"]),
    ],
)
def test_a_line_ends_a_document(tmp_path: Path, text: str, documents: list[str]) -> None:
    (tmp_path / "x").write_bytes(text.encode())
    assert list(read_documents(tmp_path / "x")) == documents


@pytest.mark.parametrize(("count", "is_enough"), [(99, False), (100, True), (200, True)])
def test_one_document_in_a_hundred_validates(tmp_path: Path, count: int, is_enough: bool) -> None:
    (tmp_path / "train.txt").write_text("".join(f"{number}\n{END}\n" for number in range(count)))
    if not is_enough:
        with pytest.raises(EnvironmentUnfitError, match="has fewer than 100 documents"):
            write_token_files(tmp_path)
        return
    write_token_files(tmp_path)
    words, following = validation_arrays(tmp_path)
    whole = [*words.tolist(), int(following[-1])]
    assert words[1:].tolist() == following[:-1].tolist()
    documents = bytes(np.array(whole, np.uint16)[np.array(whole) < 256].astype(np.uint8)).decode().split()
    assert documents == [str(number) for number in range(99, count, 100)]


def test_a_text_of_ones_own_validates_whole(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "valid.txt").write_text("bcd")
    found = prepare_data(tmp_path, {})
    words, following = validation_arrays(tmp_path)
    assert (words.tolist(), following.tolist()) == ([98, 99, 100], [99, 100, 256])  # 256 ends a document
    assert found.counts == {"training tokens": 2, "validation tokens": 4}


@pytest.mark.parametrize("present", ["nothing", "tokens.json", "train.txt"])
def test_only_an_empty_folder_gets_the_published_shards(
    tmp_path: Path, present: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []

    def fetch(published: Any, folder: Path, say: Any) -> None:
        fetched.append(folder)
        write_tokens(folder, {"train": [[1, 2, 3]], "valid": [[4, 5]]}, 10, None, "mine")

    if present == "tokens.json":
        write_tokens(tmp_path, {"train": [[1, 2, 3]], "valid": [[4, 5]]}, 10, None, "mine")
    elif present == "train.txt":
        (tmp_path / "train.txt").write_text("a")
        (tmp_path / "valid.txt").write_text("b")
    monkeypatch.setattr(data, "fetch_published", fetch)
    prepare_data(tmp_path, {})
    assert fetched == ([tmp_path] if present == "nothing" else [])
