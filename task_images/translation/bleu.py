"""BLEU of a whole test set by sacrebleu, and, for comparison, the original's mean of small batches' BLEU."""

import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple


class Bleu(NamedTuple):
    """`score` from 0 to 100, and sacrebleu's signature, which identifies all settings."""

    score: float
    signature: str


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """Corpus BLEU with the tokenizer 13a, as in publications: cased, sacrebleu's default, or lowercased, as in the
    original benchmark's goals."""
    metric = _metric(lowercase=lowercase)
    return Bleu(float(metric.corpus_score(list(hypotheses), [list(references)]).score), str(metric.get_signature()))


def international_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Lowercased BLEU with the tokenizer `intl`: one batch's BLEU in the original GNMT."""
    metric = _metric(lowercase=True, tokenize="intl")
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[str], floor: float = 0.0) -> float:
    """BLEU of tokenized sentences, with `floor` for n-gram orders without a match: one batch's BLEU in the original
    Transformer.

    sacrebleu's floor was 0 up to version 1.4, which the original's images contain, and has been 0.1 since 1.5.
    """
    metric = _metric(tokenize="none", smooth_method="floor", smooth_value=floor, effective_order=True, force=True)
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)


def mean_of_batches(
    score: Callable[[Sequence[str], Sequence[str]], float],
    hypotheses: Sequence[str],
    references: Sequence[str],
    batch: int,
) -> float:
    """The mean of `score` over batches of `batch` sentences, weighted by their number. Depends on the batch size."""
    total = 0.0
    for start in range(0, len(hypotheses), batch):
        part = slice(start, start + batch)
        total += score(hypotheses[part], references[part]) * len(hypotheses[part])
    return total / len(hypotheses)


def split_punctuation(text: str) -> str:
    """`text` with spaces around symbols, and around punctuation that is not between digits, like mteval-v14."""
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
