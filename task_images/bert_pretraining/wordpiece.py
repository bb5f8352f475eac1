"""WordPiece: words into the longest known pieces of a vocabulary (vocab.txt).

A piece that continues a word begins with "##". Text is lowercased and stripped of accents; punctuation stands alone,
as in BERT's uncased vocabulary.
"""

import unicodedata
from collections.abc import Callable, Iterator, Sequence

PADDING, UNKNOWN, BEGIN, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PADDING, UNKNOWN, BEGIN, END, MASK)
# CJK ideographs, as https://github.com/google-research/bert counts them (tokenization.py).
IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
_MAX_LETTERS = 100  # longer words are unknown


def split_words(text: str) -> list[str]:
    """Lower-case words and single punctuation marks, as BERT's own tokenizer splits them: control characters vanish,
    and every ideograph is a word."""
    plain = unicodedata.normalize("NFD", text.translate(_CLEAN).lower())
    return plain.translate(_SPLIT).split()


class _Letters(dict[int, str]):
    """What each character becomes, computed when it is first met."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def __missing__(self, code: int) -> str:
        found = self[code] = self._change(chr(code))
        return found


def _clean(letter: str) -> str:
    """Control and format characters are left out, and ideographs stand alone."""
    if (letter.isspace() and letter in "\t\n\r") or unicodedata.category(letter) == "Zs":
        return " "
    if letter == "\ufffd" or unicodedata.category(letter)[0] == "C":
        return ""
    code = ord(letter)
    return f" {letter} " if any(first <= code <= last for first, last in IDEOGRAPHS) else letter


def _split(letter: str) -> str:
    """Accents are left out, and punctuation stands alone. All symbols of ASCII count as punctuation."""
    category = unicodedata.category(letter)
    if category == "Mn":
        return ""
    is_symbol = letter.isascii() and letter.isprintable() and not letter.isalnum() and letter != " "
    return f" {letter} " if is_symbol or category[0] == "P" else letter


_CLEAN, _SPLIT = _Letters(_clean), _Letters(_split)


class WordPiece:
    """A vocabulary in its order. Raises ValueError if one of the special pieces is missing."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        for piece in SPECIAL:
            if piece not in self.numbers:
                raise ValueError(f"the vocabulary has no {piece}")
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The numbers of a text's pieces."""
        return [number for word in split_words(text) for number in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        found = self._known.get(word)
        if found is None:
            found = self._known[word] = list(self._cut(word)) or [self.numbers[UNKNOWN]]
        return found

    def _cut(self, word: str) -> Iterator[int]:
        """Greedy: the longest piece first. Nothing if some part of the word has no piece."""
        numbers, start = [], 0
        while start < len(word) <= _MAX_LETTERS:
            for stop in range(len(word), start, -1):
                number = self.numbers.get(("##" if start else "") + word[start:stop])
                if number is not None:
                    break
            else:
                return
            numbers.append(number)
            start = stop
        yield from numbers
