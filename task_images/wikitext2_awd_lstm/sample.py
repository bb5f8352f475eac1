"""A real text that every Python brings along, in WikiText-2's form: the language reference behind `help()`.

`pydoc_data.topics` holds some 80 chapters of The Python Language Reference (PSF license), about 80 000 words. Its
wording differs a little between Python versions, so the preset's goal leaves room for that.
"""

import re
from collections import Counter
from pathlib import Path

WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|[0-9]+|[^\sA-Za-z0-9]")
LEAST_COUNT = 3  # rarer words become <unk>, as in WikiText-2


def write_sample(folder: Path) -> None:
    """Write wiki.{train,valid,test}.tokens; in every ten paragraphs one goes to valid and one to test."""
    paragraphs = _paragraphs()
    counts = Counter(word for paragraph in paragraphs for word in paragraph)
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for number, paragraph in enumerate(paragraphs):
        split = {3: "valid", 7: "test"}.get(number % 10, "train")
        words = (word if counts[word] >= LEAST_COUNT else "<unk>" for word in paragraph)
        splits[split].append(f" {' '.join(words)} \n")
    for split, lines in splits.items():
        (folder / f"wiki.{split}.tokens").write_text("".join(lines), encoding="utf-8")


def _paragraphs() -> list[list[str]]:
    from pydoc_data.topics import topics

    texts = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return [words for text in texts if len(words := WORD.findall(text.lower())) > 3]
