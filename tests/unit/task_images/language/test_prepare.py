"""Texts into token files: GPT-2's byte pairs against transformers, documents, bytes, what is missing."""

import json
from pathlib import Path

import numpy as np
import pytest

from task_images.contract import EnvironmentUnfitError
from task_images.gpt_pretraining.bpe import END, BytePairs, byte_letters, read_byte_pairs
from task_images.gpt_pretraining.data import prepare_data, read_documents
from task_images.language.tokens import read_tokens
from tests.needs import needs

MERGES = [("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("h", "e"), ("1", "2"), ("Ã", "¼"), ("Ġ", "Ġ"), ("'", "s"), ("l", "l")]
TEXT = "The the  then it's we'll 1212 ²³ Grüße, naïve\n\n  x\t— 漢字 🙂 the the'S <|endoftext|> "


def write_encoding(folder: Path) -> BytePairs:
    pieces = [*byte_letters(), *dict.fromkeys("".join(pair) for pair in MERGES), END]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in MERGES))
    found = read_byte_pairs(folder)
    assert found is not None
    return found


def decode(pairs: BytePairs, numbers: list[int]) -> str:
    pieces = {number: piece for piece, number in pairs.numbers.items()}
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    return bytes(letters[letter] for number in numbers for letter in pieces[number]).decode()


def test_every_text_decodes_to_itself(tmp_path: Path) -> None:
    pairs = write_encoding(tmp_path)
    numbers = list(pairs.encode(TEXT))
    assert decode(pairs, numbers) == TEXT
    assert pairs.numbers["Ġthe"] in numbers
    assert pairs.end not in numbers  # special pieces in a text are ordinary text


@pytest.mark.xdist_group("transformers")
def test_the_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = needs("transformers")
    pairs = write_encoding(tmp_path)
    theirs = transformers.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in (TEXT.replace(END, ""), "a  b", "\n\n\n", " 's", "x" * 300, "½ ٣ ⅷ"):
        assert list(pairs.encode(text)) == theirs.encode(text), text


def test_texts_become_token_files_once(tmp_path: Path) -> None:
    pairs = write_encoding(tmp_path)
    (tmp_path / "train.txt").write_text(f"the one\n{END}\nthe two\n")
    (tmp_path / "valid.txt").write_text("the three")
    identity = prepare_data(tmp_path, {})
    corpus = read_tokens(tmp_path, pairs.size)
    assert (corpus.end, corpus.vocabulary) == (pairs.end, pairs.size)
    expected = [*pairs.encode("the one\n"), pairs.end, *pairs.encode("the two\n"), pairs.end]
    assert corpus.train.tolist() == expected
    assert identity.counts == {"training tokens": len(expected), "validation tokens": len(corpus.valid)}
    before = (tmp_path / "train.bin").stat().st_mtime_ns
    prepare_data(tmp_path, {})
    assert (tmp_path / "train.bin").stat().st_mtime_ns == before


def test_without_an_encoding_tokens_are_bytes_and_some_documents_validate(tmp_path: Path) -> None:
    documents = [f"document {number} ü\n" for number in range(200)]
    (tmp_path / "train.txt").write_text(f"{END}\n".join(documents))
    prepare_data(tmp_path, {})
    corpus = read_tokens(tmp_path, 257)
    assert corpus.end == 256
    assert np.count_nonzero(corpus.train == 256) == 198
    assert bytes(corpus.valid[corpus.valid < 256].astype(np.uint8)).decode() == documents[99] + documents[199]


def test_documents_end_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(f"one\ntwo\n{END}\n\n{END}\nthree")
    assert list(read_documents(path)) == ["one\ntwo\n", "\n", "three"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.txt": "a few words"}, "too few to set some aside for validation"),
        ({"train.txt": "x", "valid.txt": b"\xff\xfe"}, "cannot be read"),
        ({"train.txt": "x", "valid.txt": "y", "merges.txt": "a b\n"}, "are not an encoding"),
        ({"train.txt": "x", "vocab.json": "{}", "merges.txt": ""}, "are not an encoding"),
        ({"train.txt": "x", "vocab.json": f'{{"{END}": 0}}', "merges.txt": "a b\n"}, "lacks 257 pieces"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, files: dict[str, str | bytes], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        prepare_data(tmp_path, {})
    assert caught.value.hint
