"""BLEU of a whole test set by sacrebleu, and beside it the original's mean of small batches' BLEU."""

import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple


class Bleu(NamedTuple):
    """`score` from 0 to 100, and sacrebleu's signature, which says all that the score depends on."""

    score: float
    signature: str


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """Corpus BLEU, tokenised 13a, as published figures are given: with case as sacrebleu does by default, or without,
    as the original benchmark's goals were set."""
    metric = _metric(lowercase=lowercase)
    return Bleu(float(metric.corpus_score(list(hypotheses), [list(references)]).score), str(metric.get_signature()))


def international_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Lower-cased, tokenised `intl`: one batch's BLEU in the original GNMT."""
    metric = _metric(lowercase=True, tokenize="intl")
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[str], floor: float = 0.0) -> float:
    """Of sentences already tokenised, `floor` for orders without a match: one batch's BLEU in the original Transformer.

    sacrebleu had the floor 0 up to 1.4, which the original's images hold, and has 0.1 since 1.5.
    """
    metric = _metric(tokenize="none", smooth_method="floor", smooth_value=floor, effective_order=True, force=True)
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)


def mean_of_batches(
    score: Callable[[Sequence[str], Sequence[str]], float],
    hypotheses: Sequence[str],
    references: Sequence[str],
    batch: int,
) -> float:
    """`score` of every `batch` sentences, averaged with their number as weight. Depends on the batch size."""
    total = 0.0
    for start in range(0, len(hypotheses), batch):
        part = slice(start, start + batch)
        total += score(hypotheses[part], references[part]) * len(hypotheses[part])
    return total / len(hypotheses)


def split_punctuation(text: str) -> str:
    """`text` with blanks around symbols, and around punctuation that is not between digits, as mteval-v14 does."""
    before, after, symbols = _punctuation()
    return symbols.sub(r" \1 ", after.sub(r" \1 \2", before.sub(r"\1 \2 ", text)))


def _metric(**options: Any) -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(**options)


@cache
def _punctuation() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    kinds: dict[str, list[str]] = {"P": [], "S": []}
    for character in map(chr, range(sys.maxunicode + 1)):
        kinds.get(unicodedata.category(character)[0], []).append(character)
    punctuation, symbols = (f"[{re.escape(''.join(kinds[kind]))}]" for kind in "PS")
    return (
        re.compile(rf"([^\d])({punctuation})"),
        re.compile(rf"({punctuation})([^\d])"),
        re.compile(f"({symbols})"),
    )
