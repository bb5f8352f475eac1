"""WordPiece at its bounds, with vocabularies built by hand."""

import pytest

from task_images.bert_pretraining.texts import SPECIAL, WordPiece, split_words


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
