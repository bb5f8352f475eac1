"""The texts that BERT can train on, encoded once per machine: WikiText-103, or one's own.

wikitext-103   wikitext-103-raw-v1.zip and BERT's own vocabulary, both known by their SHA-256: the data that the task
               prescribes. Without headings; the marks of split numbers and hyphens (" @-@ ") are taken back
text           train.txt, valid.txt and vocab.txt
"""

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from task_images.cache import cached_folder
from task_images.contract import EnvironmentUnfitError, TaskUsageError, need
from task_images.fetch import ProgressLines, check_archive
from task_images.language.tokens import SPLITS as TOKEN_FILES
from task_images.language.tokens import Corpus, read_tokens, write_tokens
from task_images.published import WIKITEXT103, fetch_published
from task_images.report import DataIdentity, compare_data
from task_images.text import read_lines

PADDING, UNKNOWN, BEGIN, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PADDING, UNKNOWN, BEGIN, END, MASK)
_LINES = 2_000  # encoded at once, on all cores


def encode_lines(lines: Iterable[str], pieces: Sequence[str]) -> Iterator[list[int]]:
    """The numbers of each line's pieces, as BERT's uncased tokenizer cuts it: words in lower case without accents,
    then the longest known pieces. A word with a part that no piece fits, or of over 100 letters, is unknown."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rest = iter(lines)
    while some := list(islice(rest, _LINES)):
        yield from (found.ids for found in tokenizer.encode_batch_fast(some, add_special_tokens=False))


# --- the texts --------------------------------------------------------------------------------------------------------


WIKITEXT, TEXT = "wikitext-103", "text"
SPLITS = {"train": "train.txt", "valid": "valid.txt"}
VOCABULARY = "vocab.txt"
OFFICIAL = {"training lines": 1_801_350, "validation lines": 3_760}  # as torchtext counts them
FORM = 1
_MEMBERS = {"train": "wikitext-103-raw/wiki.train.raw", "valid": "wikitext-103-raw/wiki.valid.raw"}
_HEADING = re.compile(r"^ =.*= *$")
_SPLIT_MARK = re.compile(r" @([-,.])@ ")
_FACTS = "facts.json"

Lines = Callable[[str], Iterator[str]]


def fetch_texts(folder: Path, source: str) -> None:
    """Fetch what `source` needs and `folder` lacks. Raises EnvironmentUnfitError for texts of one's own."""
    if source == WIKITEXT:
        fetch_published(WIKITEXT103, folder, print)


def read_text(folder: Path, source: str, vocabulary: int) -> tuple[Corpus, list[str]]:
    """Tokens of the text, mapped, and the pieces of its vocabulary, at most `vocabulary`, by number.

    Raises EnvironmentUnfitError if a file is missing or wrong, TaskUsageError if the vocabulary is too large.
    """
    names = [WIKITEXT103.archives[0].name] if source == WIKITEXT else list(SPLITS.values())
    files = [path for path in (folder / name for name in [*names, VOCABULARY]) if path.is_file()]

    def build(place: Path) -> None:
        _encode(folder, source, vocabulary, place)

    entry = cached_folder(folder, f"bert-{source}", [FORM, vocabulary], lambda: files, build)
    pieces = _read_vocabulary(entry.folder / VOCABULARY, vocabulary)
    facts = json.loads((entry.folder / _FACTS).read_text("utf-8"))
    corpus = read_tokens(entry.folder, vocabulary)
    counts = {
        **facts["counts"],
        "training tokens": len(corpus.train),
        "validation tokens": len(corpus.valid),
        "pieces": len(pieces),
    }
    return replace(corpus, identity=_identify(source, counts, entry.digest)), pieces


def _identify(source: str, counts: Mapping[str, int], digest: str) -> DataIdentity:
    if source == WIKITEXT:  # the archive's own digest was compared before it was read
        return compare_data(counts, OFFICIAL, digest)
    return DataIdentity(counts, digest, None, "the data are not those specified for the task")


def _encode(folder: Path, source: str, size: int, place: Path) -> None:
    facts: dict[str, object] = {}
    texts = {split: folder / name for split, name in SPLITS.items()}
    if source != TEXT:
        for archive in WIKITEXT103.archives:
            if (folder / archive.name).is_file():
                check_archive(archive, folder / archive.name)
        texts = {split: place / f".{name}" for split, name in SPLITS.items()}
    if source == WIKITEXT:
        facts["counts"] = _extract_wikitext(folder / WIKITEXT103.archives[0].name, texts)
    else:
        facts["counts"] = {}
    for path in (*texts.values(), folder / VOCABULARY):
        if not path.is_file():
            raise EnvironmentUnfitError(f"there is no {path}", _hint(folder, source))
    pieces = _read_vocabulary(folder / VOCABULARY, size)
    need("tokenizers")
    bytes_read = 0

    def read(split: str) -> Iterator[str]:
        nonlocal bytes_read
        progress = ProgressLines(f"encoding {texts[split].name.lstrip('.')}", texts[split].stat().st_size, print)
        for line in read_lines(texts[split], "It must be UTF-8."):
            bytes_read += len(line.encode())
            progress.add(len(line.encode()))
            yield line

    name = "WikiText-103, WordPiece" if source == WIKITEXT else "text, WordPiece"
    splits = {split: encode_lines(read(split), pieces) for split in SPLITS}
    write_tokens(place, splits, len(pieces), name, text_bytes=lambda: bytes_read)
    for split, written in TOKEN_FILES.items():
        if not (place / written).stat().st_size:
            raise EnvironmentUnfitError(f"{folder / SPLITS[split]} holds no words", "One paragraph a line, in UTF-8.")
    (place / VOCABULARY).write_text("".join(f"{piece}\n" for piece in pieces), "utf-8")
    (place / _FACTS).write_text(json.dumps(facts), "utf-8")
    if source != TEXT:
        for path in texts.values():
            path.unlink()


def _extract_wikitext(archive: Path, texts: Mapping[str, Path]) -> dict[str, int]:
    """Write the paragraphs of WikiText-103; the number of lines in each split of the archive, headings included."""
    counts = {"train": 0, "valid": 0}
    try:
        with zipfile.ZipFile(archive) as packed:
            for split, member in _MEMBERS.items():
                with packed.open(member) as source, open(texts[split], "w", encoding="utf-8") as target:
                    for raw in source:
                        line = raw.decode("utf-8")
                        counts[split] += 1
                        if line.strip() and not _HEADING.match(line):
                            target.write(_SPLIT_MARK.sub(r"\1", line).strip() + "\n")
    except FileNotFoundError:
        raise EnvironmentUnfitError(
            f"there is no {archive.name} in {archive.parent}", _hint(archive.parent, WIKITEXT)
        ) from None
    except (zipfile.BadZipFile, KeyError, zlib.error, UnicodeDecodeError, EOFError) as error:
        raise EnvironmentUnfitError(
            f"{archive} cannot be read: {error}", "Delete the file and prepare the data again."
        ) from None
    return {"training lines": counts["train"], "validation lines": counts["valid"]}


def _read_vocabulary(path: Path, size: int) -> list[str]:
    pieces = list(read_lines(path, "It must be UTF-8."))
    for piece in SPECIAL:
        if piece not in pieces:
            raise EnvironmentUnfitError(
                f"{path}: the vocabulary has no {piece}", "One piece per line, as in BERT's vocab.txt."
            )
    if len(pieces) > size:
        raise TaskUsageError(
            f"{path} has {len(pieces)} pieces, the model's vocabulary {size}",
            f"--set vocabulary={-(-len(pieces) // 8) * 8}",
        )
    return pieces


def _hint(folder: Path, source: str) -> str:
    command = f"mlbench data prepare bert_pretraining --data-dir {folder}"
    if source == TEXT:
        return (
            f"{command} --preset own --import train.txt --import valid.txt --import vocab.txt; without --preset own it"
            " fetches WikiText-103. Or train without files: --preset tiny, or --set data=synthetic."
        )
    return f"{command} fetches it."
