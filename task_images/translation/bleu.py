"""BLEU of a whole test set by sacrebleu."""

from collections.abc import Sequence
from typing import NamedTuple


class Bleu(NamedTuple):
    """`score` from 0 to 100, and sacrebleu's signature, which identifies all settings."""

    score: float
    signature: str


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """Corpus BLEU with the tokenizer 13a, as in publications: cased, sacrebleu's default, or lowercased, as in the
    original benchmark's goals."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(lowercase=lowercase)
    return Bleu(float(metric.corpus_score(list(hypotheses), [list(references)]).score), str(metric.get_signature()))
