"""WordPiece at its bounds, vocabularies built by hand, and where BERT's texts and vocabularies are looked for."""

import pytest

from task_images.bert_pretraining.markup import plain_paragraphs
from task_images.bert_pretraining.wordpiece import SPECIAL, WordPiece, split_words


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


@pytest.mark.parametrize("missing", SPECIAL)
def test_every_special_piece_is_needed(missing: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        WordPiece([piece for piece in SPECIAL if piece != missing])
    assert str(caught.value) == f"the vocabulary has no {missing}"


# --- where texts are looked for -------------------------------------------------------------------------------------


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
