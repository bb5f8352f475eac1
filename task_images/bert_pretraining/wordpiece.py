"""WordPiece: words into the longest known pieces; the vocabulary is imported (vocab.txt) or built from a text.

A piece that continues a word begins with "##". Text is lowercased and stripped of accents; punctuation stands alone,
as in BERT's uncased vocabulary.
"""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from task_images.text import join_pair

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


def build_vocabulary(texts: Iterable[str], size: int) -> list[str]:
    """At most `size` pieces: the special ones, all letters, then the most frequent merges of neighbors."""
    counts = Counter(word for text in texts for word in split_words(text) if len(word) <= _MAX_LETTERS)
    words = {word: [word[0], *(f"##{letter}" for letter in word[1:])] for word in counts}
    letters = Counter(piece for word, pieces in words.items() for piece in pieces for _ in range(1))
    pieces = [*SPECIAL, *sorted(letters)][:size]
    known = set(pieces)
    while len(pieces) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in words.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += counts[word]
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        merged = left + right.removeprefix("##")
        if merged not in known:
            known.add(merged)
            pieces.append(merged)
        for word, parts in words.items():
            if left in parts:
                words[word] = join_pair(parts, (left, right), merged)
    return pieces
