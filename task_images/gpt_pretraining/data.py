"""`mlbench data prepare gpt_pretraining`: digests of shards, or texts into token files, once.

A folder with shards (language.shards) gets their digests. Otherwise:
The folder holds train.txt and perhaps valid.txt (else one document in a hundred becomes validation). A line
`<|endoftext|>` ends a document. With GPT-2's vocab.json and merges.txt beside them the tokens are its byte pairs, and
bytes otherwise. Token files that exist are only checked.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from task_images.contract import EnvironmentUnfitError
from task_images.fetch import ProgressLines
from task_images.gpt_pretraining.bpe import END, BytePairs, read_byte_pairs
from task_images.language.shards import has_shards, prepare_shards, read_shards
from task_images.language.tokens import BYTES, Tokens, read_tokens, write_tokens
from task_images.published import FINEWEB, fetch_published, is_begun
from task_images.report import DataIdentity

TRAIN, VALID = "train.txt", "valid.txt"
VALIDATION_EVERY = 100

Encode = Callable[[str], Sequence[int]]


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Digest shards, or write train.bin, val.bin and tokens.json unless they are there.

    A folder without shards, token files and text gets FineWeb-10B, 20 GB.
    """
    is_empty = not has_shards(folder) and not any((folder / name).exists() for name in ("tokens.json", TRAIN))
    if is_empty or is_begun(folder):
        fetch_published(FINEWEB, folder, print)
    if has_shards(folder):
        return prepare_shards(folder)
    if not (folder / "tokens.json").exists():
        write_token_files(folder)
    return read_tokens(folder, sys.maxsize).identify()


def write_token_files(folder: Path) -> None:
    """Encode the texts in `folder`. tokens.json comes last, so that an interrupted work is done again."""
    train, valid = folder / TRAIN, folder / VALID
    if not train.is_file():
        raise EnvironmentUnfitError(
            f"there is neither tokens.json nor {TRAIN} in {folder}",
            f"Put a text there, or name it: mlbench data prepare gpt_pretraining --data-dir {folder} --import {TRAIN}",
        )
    pairs = read_byte_pairs(folder)
    encode, vocabulary, end = _choose_encoding(pairs)
    has_own = valid.is_file()
    total = train.stat().st_size + (valid.stat().st_size if has_own else 0)
    name = "text, GPT-2's byte pairs" if pairs else "text, bytes"
    print(f"{folder}: {total / 1e6:.1f} MB of {name}, vocabulary {vocabulary}", flush=True)

    def read(split: str) -> Iterator[Sequence[int]]:
        path = valid if has_own and split == "valid" else train
        progress = ProgressLines(split, path.stat().st_size, print)
        for number, document in enumerate(read_documents(path)):
            progress.add(len(document))  # about: a letter may have several bytes
            is_valid = number % VALIDATION_EVERY == VALIDATION_EVERY - 1
            if has_own or is_valid == (split == "valid"):
                yield encode(document)

    if not has_own and not any(True for _ in read("valid")):
        raise EnvironmentUnfitError(
            f"{train} has fewer than {VALIDATION_EVERY} documents, too few to set some aside for validation",
            f"Add {VALID}, or end documents with a line {END}.",
        )
    splits = {split: read(split) for split in ("train", "valid")}
    write_tokens(folder, splits, vocabulary, end, name, text_bytes=lambda: total)


def _choose_encoding(pairs: BytePairs | None) -> tuple[Encode, int, int]:
    """The encoding, the size of its vocabulary, and the token that ends a document."""
    if pairs is None:
        return lambda text: text.encode(), BYTES + 1, BYTES
    return lambda text: list(pairs.encode(text)), pairs.size, pairs.end


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a text, one at a time; the whole text if no line ends one."""
    lines: list[str] = []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for line in file:
                if line.strip() == END:
                    yield "".join(lines)
                    lines = []
                else:
                    lines.append(line)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentUnfitError(f"{os.fspath(path)} cannot be read: {error}", "It must be UTF-8.") from None
    if any(line.strip() for line in lines):
        yield "".join(lines)


def validation_arrays(folder: Path) -> tuple[Tokens, Tokens]:
    """The validation tokens [n - 1], and those that follow them, mapped. Raises as reading the data."""
    corpus = read_shards(folder, 1 << 16) if has_shards(folder) else read_tokens(folder, sys.maxsize)
    return corpus.valid[:-1], corpus.valid[1:]
