"""Token shards in the format of llm.c and modded-nanogpt: the data set FineWeb-10B in GPT-2 tokens.

`NAME_val_000000.bin` and `NAME_train_000001.bin`, `NAME_train_000002.bin`, ...: 256 32-bit numbers (20240520, version
1, the number of tokens, zeros), then 16-bit tokens, all little-endian. The end-of-document token *precedes* each
document. Files are memory-mapped; only `data prepare` reads them completely, for their digests.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.fetch import ProgressLines
from task_images.language.tokens import Corpus, Tokens
from task_images.report import DataIdentity

MAGIC, VERSION, HEADER = 20240520, 1, 256
TOKEN = np.dtype("<u2")
END = 50_256  # GPT-2's end-of-text token
DIGESTS = "shards.json"
# FineWeb-10B as published: tokens per shard except the last one, number of files, name.
FULL_SHARD, PUBLISHED_FILES, PUBLISHED_NAME = 100_000_000, 103, "fineweb"
_NAME = re.compile(r"(.+)_(train|val)_(\d{6})\.bin")
_PIECE = 1 << 24


@dataclass(frozen=True)
class Shard:
    """One memory-mapped file."""

    path: Path
    name: str
    split: str
    number: int
    tokens: Tokens


def read_shards(folder: Path, vocabulary: int) -> Corpus:
    """The shards in `folder`, ordered by number. Raises EnvironmentUnfitError if one is missing or damaged, and
    TaskUsageError if they have tokens outside the model's vocabulary."""
    shards = [_map(path, found) for path, found in _list_files(folder)]
    train, valid = ([one for one in shards if one.split == split] for split in ("train", "val"))
    if not train or not valid:
        raise EnvironmentUnfitError(
            f"there are no shards NAME_train_000001.bin, ... and NAME_val_000000.bin in {folder}",
            "Download FineWeb-10B's GPT-2 tokens (docs: language models), or --set data=tokens, or --preset tiny.",
        )
    numbers = [one.number for one in train]
    if numbers != list(range(1, len(train) + 1)) or len({one.name for one in shards}) > 1 or len(valid) > 1:
        missing = sorted(set(range(1, max(numbers) + 1)) - set(numbers))[:5]
        raise EnvironmentUnfitError(
            f"the shards in {folder} are not one data set, numbered 1, 2, 3, ..."
            + (f": {', '.join(f'{number:06d}' for number in missing)} missing" if missing else ""),
            "Put each data set into a separate folder; training reads its files in order.",
        )
    edge = 1 << 20  # check only the beginning and the end: the whole file would take long
    highest = max(int(part.max(initial=0)) for one in shards for part in (one.tokens[:edge], one.tokens[-edge:]))
    if highest >= vocabulary:
        raise TaskUsageError(f"{folder} has the token {highest}, the model's vocabulary has {vocabulary}")
    identity = identify_shards(folder, shards)
    first, *more = (one.tokens for one in train)
    name = f"shards {train[0].name}"
    return Corpus(first, valid[0].tokens, vocabulary, name, identity=identity, more=tuple(more))


def identify_shards(folder: Path, shards: list[Shard]) -> DataIdentity:
    """Counts; the digest if `data prepare` has recorded it; and whether names, numbers, sizes and first tokens match
    FineWeb-10B or its first files. More is not known about the published files."""
    splits = {"train": "training tokens", "val": "validation tokens"}
    counts = {what: sum(len(one.tokens) for one in shards if one.split == split) for split, what in splits.items()}
    known = _read_digests(folder)
    lines = [(one.path.name, known.get(one.path.name)) for one in shards]
    digest = None
    if all(found is not None and found[0] == one.path.stat().st_size
           for (_, found), one in zip(lines, shards, strict=True)):  # fmt: skip
        text = "".join(f"{found[1]}  {name}\n" for name, found in lines if found)
        digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    reason = _find_difference(shards) or (None if digest else "their digests are not recorded: mlbench data prepare")
    return DataIdentity(counts, digest, reason is None, reason)


def _find_difference(shards: list[Shard]) -> str | None:
    """Describe how the files differ from the published ones; None if they do not."""
    if shards[0].name != PUBLISHED_NAME:
        return f"the shards are called {shards[0].name}, not {PUBLISHED_NAME}"
    train = [one for one in shards if one.split == "train"]
    if len(train) > PUBLISHED_FILES:
        return f"{len(train)} files instead of {PUBLISHED_FILES} at most"
    for one in shards:
        is_last = one.split == "train" and one.number == PUBLISHED_FILES
        if len(one.tokens) > FULL_SHARD if is_last else len(one.tokens) != FULL_SHARD:
            return f"{one.path.name} has {len(one.tokens)} tokens instead of {FULL_SHARD}"
    first = next(one for one in shards if one.split == "val")
    return None if int(first.tokens[0]) == END else f"the first token is {int(first.tokens[0])} instead of {END}"


def prepare_shards(folder: Path, say: Callable[[str], None] = print) -> DataIdentity:
    """Record the SHA-256 of each shard in `folder` that is new or has another size."""
    found = list(_list_files(folder))
    known = {name: entry for name, entry in _read_digests(folder).items() if (folder / name).exists()}
    progress = ProgressLines("digests", sum(path.stat().st_size for path, _ in found), say)
    for path, _ in found:
        size = path.stat().st_size
        if known.get(path.name, (0, ""))[0] == size:
            progress.add(size, is_old=True)
            continue
        sha = hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                sha.update(piece)
                progress.add(len(piece))
        known[path.name] = (size, sha.hexdigest())
        text = json.dumps({name: {"bytes": bytes_, "sha256": hex_} for name, (bytes_, hex_) in sorted(known.items())})
        (folder / f"{DIGESTS}.partial").write_text(text + "\n")
        (folder / f"{DIGESTS}.partial").replace(folder / DIGESTS)
    corpus = read_shards(folder, 1 << 16)
    assert corpus.identity is not None
    return corpus.identity


def has_shards(folder: Path) -> bool:
    """Whether there are shards of training tokens."""
    return any(match[2] == "train" for _, match in _list_files(folder))


def write_shard(path: Path, tokens: Tokens) -> None:
    """Write one shard, for tests and experiments."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, TOKEN).tobytes())


def _list_files(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.glob("*.bin")):
        if match := _NAME.fullmatch(path.name):
            yield path, match


def _map(path: Path, match: re.Match[str]) -> Shard:
    try:
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(4 * HEADER), "<i4")
        size = path.stat().st_size
        if len(header) < HEADER or tuple(header[:2]) != (MAGIC, VERSION):
            raise EnvironmentUnfitError(
                f"{path} is not a shard of GPT-2's tokens: it does not begin with {MAGIC}, {VERSION}",
                "Write it with llm.c's fineweb.py, or download it again.",
            )
        if size != 4 * HEADER + TOKEN.itemsize * int(header[2]):
            raise EnvironmentUnfitError(
                f"{path} has {size} bytes, and its header promises {int(header[2])} tokens", "Download it again."
            )
        tokens: Tokens = np.memmap(path, TOKEN, mode="r", offset=4 * HEADER)
    except OSError as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", "Download it again.") from None
    return Shard(path, match[1], match[2], int(match[3]), tokens)


def _read_digests(folder: Path) -> dict[str, tuple[int, str]]:
    """File name -> size in bytes and digest, as recorded by `data prepare`."""
    try:
        found: Mapping[str, Mapping[str, object]] = json.loads((folder / DIGESTS).read_text("utf-8"))
        return {name: (int(str(one["bytes"])), str(one["sha256"])) for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
