"""Words and their numbers, and the way back from numbers to a sentence as people write it."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from task_images.errors import EnvironmentUnfitError
from task_images.translation.pairs import lines
from task_images.wmt16_gnmt.bpe import undo

MARKS = ("<pad>", "<unk>", "<s>", "</s>")
PADDING, UNKNOWN, START, END = range(4)
MULTIPLE = 8  # the vocabulary's size, for the sake of tensor cores


class Vocabulary:
    """The subwords of a vocabulary file, one a line, behind four marks. `size` is rounded up to a multiple of 8."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [*MARKS, *words]
        self._numbers = {word: number for number, word in enumerate(self._words)}
        if len(self._numbers) != len(self._words):
            raise EnvironmentUnfitError("the vocabulary contains a word twice", "Prepare the data again.")
        self.size = -(-len(self._words) // MULTIPLE) * MULTIPLE

    def encode(self, line: str) -> list[int]:
        """The numbers of subwords parted by blanks, between START and END."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in line.split()), END]

    def text(self, numbers: Iterable[int]) -> str:
        """The sentence of `numbers`: subwords joined, punctuation back in its place; marks count as nothing."""
        words = (self._words[number] for number in numbers if number < len(self._words) and number not in (0, 2, 3))
        text: str = self._detokenizer.detokenize(undo(" ".join(words)).split())
        return text

    @cached_property
    def _detokenizer(self) -> Any:
        from sacremoses import MosesDetokenizer

        return MosesDetokenizer("de")


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in `path`. Raises EnvironmentUnfitError if a line is not exactly one word."""
    words = list(lines(path))
    for number, word in enumerate(words, start=1):
        if len(word.split()) != 1:
            raise EnvironmentUnfitError(
                f"line {number} of {path} is not one word: {word[:40]!r}", "Prepare the data again."
            )
    return Vocabulary(words)
