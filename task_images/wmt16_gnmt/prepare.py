"""From raw parallel text to what the task reads: Moses tokenization, cleaning, joint byte pair encoding, vocabulary.

The raw folder has train.en, train.de, newstest2014.en, newstest2014.de: one sentence a line on both sides. Made are
train.tok.clean.bpe.32000.{en,de}, newstest2014.tok.bpe.32000.{en,de}, newstest2014.de, bpe.32000 and
vocab.bpe.32000. Nothing but counts of words and the line at hand is in memory.
"""

import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from task_images.contract import need
from task_images.translation.corpora import LANGUAGES
from task_images.translation.pairs import lines, parallel_lines
from task_images.wmt16_gnmt.bpe import BytePairs, learn, write_codes

TRAIN, TEST = "train.tok.clean.bpe.32000", "newstest2014.tok.bpe.32000"
CODES, VOCABULARY, REFERENCE = "bpe.32000", "vocab.bpe.32000", "newstest2014.de"
LONGEST = 80  # words of a training sentence, before they are cut into subwords


def prepare(raw: Path, out: Path, merges: int) -> dict[str, int]:
    """Make the files in `out` from those in `raw`; returns how many training pairs were kept and left out.

    A training pair is left out if a side is empty, has more than 80 words, or holds a character beyond latin-1. The
    test set keeps every line.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as name:
        work = Path(name)
        kept = _tokenize(raw, "train", work, clean=True)
        test = _tokenize(raw, "newstest2014", work, clean=False)
        counts = Counter(
            word for language in LANGUAGES for line in lines(work / f"train.{language}") for word in line.split()
        )
        learned = learn(counts, merges)
        write_codes(out / CODES, learned)
        pairs = BytePairs(learned)
        vocabulary: Counter[str] = Counter()
        for language in LANGUAGES:
            vocabulary.update(_encode(pairs, work / f"train.{language}", out / f"{TRAIN}.{language}"))
            _encode(pairs, work / f"newstest2014.{language}", out / f"{TEST}.{language}")
    words = sorted(vocabulary, key=lambda word: (-vocabulary[word], word))
    (out / VOCABULARY).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    (out / REFERENCE).write_text("".join(f"{line}\n" for line in lines(raw / REFERENCE)), encoding="utf-8")
    return {**kept, "test pairs": test["kept"], "vocabulary": len(words)}


def _tokenize(raw: Path, name: str, work: Path, clean: bool) -> dict[str, int]:
    need("sacremoses")
    from sacremoses import MosesTokenizer

    tokenizers = [MosesTokenizer(language) for language in LANGUAGES]
    counts = {"kept": 0, "left out": 0}
    with ExitStack() as stack:
        files = [
            stack.enter_context((work / f"{name}.{language}").open("w", encoding="utf-8")) for language in LANGUAGES
        ]
        for pair in parallel_lines(*(raw / f"{name}.{language}" for language in LANGUAGES)):
            texts = [
                tokenizer.tokenize(line, return_str=True) for tokenizer, line in zip(tokenizers, pair, strict=True)
            ]
            if clean and not all(_is_clean(text) for text in texts):
                counts["left out"] += 1
                continue
            counts["kept"] += 1
            for file, text in zip(files, texts, strict=True):
                file.write(f"{text}\n")
    return counts


def _is_clean(text: str) -> bool:
    return 1 <= len(text.split()) <= LONGEST and all(ord(char) < 256 for char in text)


def _encode(pairs: BytePairs, source: Path, target: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    with target.open("w", encoding="utf-8") as file:
        for line in lines(source):
            encoded = pairs.apply(line)
            counts.update(encoded.split())
            file.write(f"{encoded}\n")
    return counts
