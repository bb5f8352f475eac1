"""WordPiece at its bounds, vocabularies built by hand, and where BERT's texts and vocabularies are looked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from task_images.bert_pretraining import texts
from task_images.bert_pretraining.markup import plain_paragraphs
from task_images.bert_pretraining.texts import DUMP, TEXT, WIKITEXT, fetch_texts, read_text
from task_images.bert_pretraining.wordpiece import SPECIAL, WordPiece, build_vocabulary, split_words
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \n", []),
        ("It's 3.5", ["it", "'", "s", "3", ".", "5"]),
        ("a_b __", ["a", "_", "b", "_", "_"]),
        ("ÀÉÎõü", ["aeiou"]),  # without accents, lower case
        ("Straße", ["straße"]),
        ("e\u0301", ["e"]),  # a letter and an accent are two characters here
        ("you're (here)!", ["you", "'", "re", "(", "here", ")", "!"]),
    ],
)
def test_words_are_lower_case_without_accents_and_punctuation_stands_alone(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def encode(pieces: list[str], text: str) -> list[str]:
    known = WordPiece([*SPECIAL, *pieces])
    return [known.pieces[number] for number in known.encode(text)]


@pytest.mark.parametrize(
    ("pieces", "text", "found"),
    [
        (["un", "##able", "unable"], "unable", ["unable"]),
        (["un", "able"], "unable", ["[UNK]"]),  # a piece that begins a word does not continue one
        (["##un", "##able"], "unable", ["[UNK]"]),
        (["un", "##ab", "##a", "##ble"], "unable", ["[UNK]"]),  # greedy: after un and ab nothing fits "le"
        (["un", "##a", "##ble"], "unable", ["un", "##a", "##ble"]),
        (["a"], "a b a", ["a", "[UNK]", "a"]),
    ],
)
def test_the_longest_piece_is_taken_first(pieces: list[str], text: str, found: list[str]) -> None:
    """As Google's tokenizer does, which gives up a word whose rest has no piece."""
    assert encode(pieces, text) == found


@pytest.mark.parametrize(("letters", "is_known"), [(100, True), (101, False)])
def test_words_of_more_than_100_letters_are_unknown(letters: int, is_known: bool) -> None:
    assert encode(["a", "##a"], "a" * letters) == (["a", *["##a"] * (letters - 1)] if is_known else ["[UNK]"])


@pytest.mark.parametrize("missing", SPECIAL)
def test_every_special_piece_is_needed(missing: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        WordPiece([piece for piece in SPECIAL if piece != missing])
    assert str(caught.value) == f"the vocabulary has no {missing}"


def test_a_vocabulary_grows_by_the_most_frequent_neighbors() -> None:
    """ab 3 times, abc twice: a+b is merged first (5), then ab+c (2); the letters come before, in their order."""
    text = ["ab ab ab", "abc abc d"]
    letters = ["##b", "##c", "a", "d"]
    assert build_vocabulary(text, 100) == [*SPECIAL, *letters, "ab", "abc"]
    assert build_vocabulary(text, 10) == [*SPECIAL, *letters, "ab"]
    assert build_vocabulary(text, 9) == [*SPECIAL, *letters]
    assert build_vocabulary(text, 7) == [*SPECIAL, *letters[:2]]


def test_of_equally_frequent_neighbors_the_last_in_the_alphabet_are_merged() -> None:
    assert build_vocabulary(["ab cd"], 10)[-1] == "cd"


def test_words_that_are_too_long_do_not_make_pieces() -> None:
    assert build_vocabulary(["ab " + "x" * 101], 50) == [*SPECIAL, "##b", "a", "ab"]


# --- where texts are looked for -------------------------------------------------------------------------------------


def test_only_published_texts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr(texts, "fetch_published", lambda published, folder, say, *names: fetched.append(names))
    fetch_texts(tmp_path, TEXT)
    assert fetched == []
    fetch_texts(tmp_path, WIKITEXT)
    dump, vocabulary = (archive.name for archive in texts.WIKIPEDIA.archives)  # type: ignore[attr-defined]
    fetch_texts(tmp_path, DUMP)
    (tmp_path / "enwiki-20250101-pages-articles.xml.bz2").touch()
    fetch_texts(tmp_path, DUMP)  # a dump of any day will do
    (tmp_path / f"{dump}.part").touch()
    fetch_texts(tmp_path, DUMP)  # but one that was begun is finished
    assert fetched == [(), ([dump, vocabulary],), ([vocabulary],), ([dump, vocabulary],)]


def test_a_text_of_ones_own_is_encoded_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("ab ab\nab c\n")
    (tmp_path / "valid.txt").write_text("c ab d\n")
    corpus, pieces = read_text(tmp_path, TEXT, 50)
    assert pieces.pieces == [*SPECIAL, "##b", "a", "c", "ab"]
    numbers = pieces.numbers
    assert corpus.train.tolist() == [numbers["ab"]] * 3 + [numbers["c"]]
    assert corpus.valid.tolist() == [numbers["c"], numbers["ab"], numbers["[UNK]"]]
    assert corpus.name == "text, WordPiece"
    identity = corpus.identify()
    assert identity.counts == {"training tokens": 4, "validation tokens": 3, "pieces": 9}
    assert (identity.official, identity.reason) == (None, "the data are not those specified for the task")
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert json.loads((folder / "facts.json").read_text()) == {"counts": {}}
    assert (folder / "vocab.txt").read_text().split() == pieces.pieces


def test_a_vocabulary_may_be_as_large_as_the_models(tmp_path: Path) -> None:
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("a b\n")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a", "b", "c"]))
    assert len(read_text(tmp_path, TEXT, 8)[1].pieces) == 8
    with pytest.raises(TaskUsageError, match="has 8 pieces, the model's vocabulary 7") as caught:
        read_text(tmp_path, TEXT, 7)
    assert caught.value.hint == "--set vocabulary=8"


@pytest.mark.parametrize(
    ("source", "words", "hint"),
    [
        (TEXT, "there is no .*train.txt", "--preset own --import train.txt --import valid.txt"),
        (WIKITEXT, "there is no wikitext-103-raw-v1.zip in", "fetches it."),
        (DUMP, "there is no enwiki-", "--preset wikipedia fetches it."),
    ],
)
def test_a_missing_text_is_named_with_the_command_that_gets_it(
    tmp_path: Path, source: str, words: str, hint: str
) -> None:
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        read_text(tmp_path, source, 50)
    assert str(caught.value.hint).startswith(f"mlbench data prepare bert_pretraining --data-dir {tmp_path}")
    assert hint in str(caught.value.hint)


# --- wikitext -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markup", "paragraphs"),
    [
        ("a {{x|{{y}}}} b", ["a b"]),
        ("see [[a|b|c]] and [[:d]]", ["see c and d"]),
        ("x [[File:a.png|thumb|c]] y", ["x y"]),
        ("[[Star Wars: A]] is", ["Star Wars: A is"]),
        ("it is [[Star Wars: A]]", ["it is Star Wars: A"]),  # a blank after the colon: a title
        ("at [https://x.org the site] or [//y.org]", ["at the site or "]),
        ("'''Bold''' and ''italic'' &amp; more", ["Bold and italic & more"]),
        ("a (; ) b (,) c ( )", ["a b c "]),
        ("a<ref>x</ref> b<ref name=c/> c", ["a b c"]),
        ("a <b>b</b><br /> c", ["a b c"]),
        ("__TOC__ a", ["a"]),
        ("one\n\ntwo\n* item\n# item\n: x\n; y\n| z\n! w\n== H ==\nthree", ["one", "two", "three"]),
        ("{|\n| a\n|}\ntext", ["text"]),
    ],
)
def test_a_reader_sees_the_text_alone(markup: str, paragraphs: list[str]) -> None:
    assert [line.strip() for line in plain_paragraphs(markup)] == [line.strip() for line in paragraphs]
