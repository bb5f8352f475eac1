"""`mlbench data prepare gpt_pretraining`: digests of shards; token files are only checked."""

import sys
from collections.abc import Mapping
from pathlib import Path

from task_images.language.shards import has_shards, prepare_shards, read_shards
from task_images.language.tokens import Tokens, read_tokens
from task_images.published import FINEWEB, fetch_published, is_begun
from task_images.report import DataIdentity


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Digest shards, or check token files. A folder without either gets FineWeb-10B, 20 GB."""
    is_empty = not has_shards(folder) and not (folder / "tokens.json").exists()
    if is_empty or is_begun(folder):
        fetch_published(FINEWEB, folder, print)
    if has_shards(folder):
        return prepare_shards(folder)
    return read_tokens(folder, sys.maxsize).identify()


def validation_arrays(folder: Path) -> tuple[Tokens, Tokens]:
    """The validation tokens [n - 1], and those that follow them, mapped. Raises as reading the data."""
    corpus = read_shards(folder, 1 << 16) if has_shards(folder) else read_tokens(folder, sys.maxsize)
    return corpus.valid[:-1], corpus.valid[1:]
