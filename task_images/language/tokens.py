"""Text and token files -> fixed windows, in an order that depends only on seed and step.

A split is one long sequence of tokens. Windows of `length` + 1 tokens overlap by one, so every token except the first
is a target once per epoch. Global batches are the same for any number of ranks, and the step number is the only state
for resuming.

Token files: `train.bin` and `val.bin`, raw little-endian numbers (uint16 or uint32, as written by nanoGPT), and
`tokens.json` with "dtype" and "vocabulary". They are memory-mapped.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.data import numpy_generator
from task_images.fetch import ProgressLines
from task_images.report import DataIdentity, digest_arrays, made_up

Tokens = npt.NDArray[Any]
Item = TypeVar("Item")
MAX_DIGESTED = 1 << 27
IGNORED = -100  # the ignore_index of cross_entropy
BYTES = 256
SPLITS = {"train": "train.bin", "valid": "val.bin"}
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Corpus:
    """Tokens of both splits.

    bytes_per_token   of the original text; None if unknown
    identity          the data's identity; None: derived from the tokens
    more              more sequences of training tokens; windows do not cross their boundaries
    """

    train: Tokens
    valid: Tokens
    vocabulary: int
    name: str
    synthetic: bool = False
    bytes_per_token: float | None = None
    identity: DataIdentity | None = None
    more: tuple[Tokens, ...] = ()

    @property
    def rows(self) -> tuple[Tokens, ...]:
        """All sequences of training tokens."""
        return (self.train, *self.more)

    def identify(self) -> DataIdentity:
        """The data's identity. Custom token files and texts are not official. Large files are not digested here,
        because that is slow."""
        if self.identity is not None:
            return self.identity
        counts = {"training tokens": len(self.train), "validation tokens": len(self.valid)}
        if self.synthetic:
            return made_up(counts)
        is_small = len(self.train) <= MAX_DIGESTED
        digest = digest_arrays(self.train, self.valid) if is_small else None
        return DataIdentity(counts, digest, None, "the data are not those specified for the task")


def python_text() -> Corpus:
    """The language reference included in Python (`pydoc_data.topics`, PSF license), as bytes.

    Documents are its paragraphs, terminated by a zero byte; one in ten goes to the validation split. The text varies
    slightly between versions of Python.
    """
    from pydoc_data.topics import topics

    splits = {"train": bytearray(), "valid": bytearray()}
    paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n") if part.strip()]
    for number, paragraph in enumerate(paragraphs):
        splits["valid" if number % 10 == 3 else "train"] += paragraph.encode() + b"\n\0"
    train, valid = (np.frombuffer(bytes(splits[name]), np.uint8) for name in ("train", "valid"))
    return Corpus(train, valid, BYTES, "Python language reference (pydoc_data.topics), bytes", bytes_per_token=1.0)


def synthetic_tokens(vocabulary: int, tokens: int, seed: int) -> Corpus:
    """Uniform random tokens, for throughput only: there is nothing to learn."""
    stream = numpy_generator(seed, "synthetic tokens")
    dtype = DTYPES["uint16" if vocabulary <= 65_536 else "uint32"]
    train, valid = (stream.integers(0, vocabulary, count).astype(dtype) for count in (tokens, max(2, tokens // 8)))
    return Corpus(train, valid, vocabulary, "uniform random tokens", synthetic=True)


def read_tokens(folder: Path, vocabulary: int) -> Corpus:
    """The token files in `folder`, memory-mapped. Raises EnvironmentUnfitError if one is missing or damaged, and
    TaskUsageError if they have tokens outside the model's vocabulary."""
    facts = _read_facts(folder / "tokens.json")
    if facts.vocabulary > vocabulary:
        raise TaskUsageError(
            f"{folder} has tokens of a vocabulary of {facts.vocabulary}, but the model's has {vocabulary}",
            f"--set vocabulary={facts.vocabulary}",
        )
    train, valid = (_map(folder / SPLITS[split], facts) for split in ("train", "valid"))
    return Corpus(train, valid, facts.vocabulary, facts.name, bytes_per_token=facts.bytes_per_token)


def write_tokens(
    folder: Path,
    splits: Mapping[str, Iterable[Sequence[int]]],
    vocabulary: int,
    name: str,
    text_bytes: Callable[[], int] | None = None,
) -> None:
    """Write documents (lists of tokens) of the splits "train" and "valid" as token files.
    `text_bytes` is called at the end for the length of the text."""
    dtype = "uint16" if vocabulary <= 65_536 else "uint32"
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for split, documents in splits.items():
        with open(folder / SPLITS[split], "wb") as file:
            for document in documents:
                row = np.asarray(document, DTYPES[dtype])
                count += len(row)
                file.write(row.tobytes())
    facts: dict[str, object] = {"dtype": dtype, "vocabulary": vocabulary, "name": name}
    if text_bytes is not None:
        facts["bytes_per_token"] = text_bytes() / max(1, count)
    (folder / "tokens.json").write_text(json.dumps(facts, indent=1) + "\n")


@dataclass(frozen=True)
class _Facts:
    dtype: str
    vocabulary: int
    name: str
    bytes_per_token: float | None


_EXAMPLE = '{"dtype": "uint16", "vocabulary": 50257}'


def _read_facts(path: Path) -> _Facts:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise EnvironmentUnfitError(
            f"there is no {path}, which says what the token files hold",
            f"For GPT-2's tokens: echo '{_EXAMPLE}' > {path}   (docs: language models); without files: "
            "--set data=synthetic",
        ) from None
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", "Write it again.") from None
    is_fit = isinstance(found, dict) and found.get("dtype") in DTYPES and type(found.get("vocabulary")) is int
    if not is_fit:
        raise EnvironmentUnfitError(
            f'{path} is not an object with "dtype" (uint16 or uint32) and "vocabulary" (a number)',
            f"For example: {_EXAMPLE}",
        )
    size = found.get("bytes_per_token")
    return _Facts(
        found["dtype"],
        found["vocabulary"],
        str(found.get("name", "token files")),
        float(size) if isinstance(size, int | float) else None,
    )


def _map(path: Path, facts: _Facts) -> Tokens:
    try:
        if (size := path.stat().st_size) % DTYPES[facts.dtype].itemsize:
            raise EnvironmentUnfitError(f"{path} has {size} bytes, no whole number of {facts.dtype}", "Write it again.")
        if not size:
            raise EnvironmentUnfitError(f"{path} is empty", "Write it again.")
        mapped: Tokens = np.memmap(path, DTYPES[facts.dtype], mode="r")
    except FileNotFoundError:
        raise EnvironmentUnfitError(f"there is no {path}", "The data type is that of tokens.json.") from None
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", "Write it again.") from None
    # Check only the beginning and the end: the whole file would take long.
    edge = 1 << 20
    highest = max(int(mapped[:edge].max(initial=0)), int(mapped[-edge:].max(initial=0)))
    if highest >= facts.vocabulary:
        raise EnvironmentUnfitError(
            f"{path} holds the token {highest}, but its vocabulary has {facts.vocabulary}",
            'Correct "vocabulary" or "dtype" in tokens.json.',
        )
    upper = mapped[1:edge:2]  # halves of numbers, if it holds uint32
    if facts.dtype == "uint16" and len(upper) > 1000 and upper.max() <= 1 < mapped[:edge:2].max():
        raise EnvironmentUnfitError(
            f"every second number of {path} is 0 or 1, so it holds uint32 and not uint16",
            'Correct "dtype" in tokens.json.',
        )
    return mapped


def has_tokens(folder: Path) -> bool:
    """Whether there are token files, or one of them."""
    return any((folder / name).exists() for name in ("tokens.json", *SPLITS.values()))


# --- windows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Windows of one pass. inputs, targets [B, T] int64.

    terms   number of counted targets in the whole update, over all ranks and passes
    """

    inputs: Tensor
    targets: Tensor
    terms: float


def map_tensors(item: Item, change: Callable[[Tensor], Tensor]) -> Item:
    """The dataclass `item` with `change` applied to its tensors."""
    tensors = {name: value for name, value in vars(item).items() if isinstance(value, Tensor)}
    return replace(item, **{name: change(value) for name, value in tensors.items()})  # type: ignore[type-var]


class Windows:
    """Fixed windows of one split, of one or several sequences of tokens, whose boundaries they do not cross.

    block      0: reshuffled every epoch. Otherwise in the order of the tokens, in blocks of this many windows; an
               incomplete block at the end of a sequence is skipped, as in the loaders of llm.c and modded-nanogpt
    """

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        length: int,
        seed: int,
        block: int = 0,
    ):
        self._rows = (tokens,) if isinstance(tokens, np.ndarray) else tokens
        counts = [max(0, len(row) - 1) // length for row in self._rows]
        self._last = np.cumsum([count // block * block if block else count for count in counts])
        self.count = int(self._last[-1])
        if self.count < 1:
            raise EnvironmentUnfitError(
                f"{sum(len(row) for row in self._rows)} tokens are too few for "
                + (f"an update of {block} sequences of {length}" if block else f"a sequence of {length}")
                + " and their last target",
                "Use a smaller sequence_length" + (" or global_batch" if block else "") + ", or more data.",
            )
        self.length, self._seed, self._block = length, seed, block
        self._order = lru_cache(2)(self._permute)

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        return numpy_generator(self._seed, "windows", epoch).permutation(self.count)

    def numbers(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Indices of the windows `first` to `first` + `count` (exclusive) in the endless stream of epochs."""
        places = np.arange(first, first + count)
        epochs, inside = np.divmod(places, self.count)
        if self._block:
            return inside
        return np.array([self._order(int(epoch))[at] for epoch, at in zip(epochs, inside, strict=True)], np.int64)

    def take(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the given windows, on the CPU."""
        whole = torch.from_numpy(self._read(np.fromiter(numbers, np.int64), self.length + 1).astype(np.int64))
        return whole[:, :-1].clone(), whole[:, 1:].clone()  # separate memory

    def _read(self, numbers: npt.NDArray[np.int64], length: int) -> Tokens:
        """The tokens of the windows, [windows, length], in the file's data type."""
        of_row = np.searchsorted(self._last, numbers, side="right")
        first = np.concatenate(([0], self._last))[of_row]
        starts = ((numbers - first) * self.length)[:, None] + np.arange(length)
        if len(self._rows) == 1:
            taken: Tokens = self._rows[0][starts]
            return taken
        found = np.empty(starts.shape, self._rows[0].dtype)
        for row in np.unique(of_row):
            found[of_row == row] = self._rows[row][starts[of_row == row]]
        return found


@dataclass(frozen=True)
class Part:
    """A rank's part of every global batch: part `rank` of `ranks`, in passes of `micro_batch` windows."""

    micro_batch: int
    rank: int
    ranks: int


def batches_of_update(windows: Windows, step: int, global_batch: int, part: Part) -> Iterator[Batch]:
    """This rank's passes of update `step` (from 0): a contiguous part of the global batch, which does not depend on the
    number of ranks."""
    numbers = windows.numbers(step * global_batch, global_batch)
    share = global_batch // part.ranks
    own = numbers[part.rank * share : (part.rank + 1) * share]
    terms = float(global_batch * windows.length)
    for first in range(0, len(own), part.micro_batch):
        yield Batch(*windows.take(own[first : first + part.micro_batch]), terms)


def validation_batches(windows: Windows, part: Part, most: int = 0) -> Iterator[Batch]:
    """The first `most` windows (0: all), each once, in the same number of passes on every rank.

    Sharded models communicate in each pass, so the last passes are padded with windows whose targets are ignored.
    """
    count = min(most, windows.count) if most else windows.count
    passes = -(-count // (part.micro_batch * part.ranks))
    for number in range(passes):
        first = (number * part.ranks + part.rank) * part.micro_batch
        wanted = list(range(first, first + part.micro_batch))
        inputs, targets = windows.take(min(at, count - 1) for at in wanted)
        extra = torch.tensor([at >= count for at in wanted])
        targets[extra] = IGNORED
        yield Batch(inputs, targets, float((targets != IGNORED).sum()))


# --- token shards of llm.c and modded-nanogpt: FineWeb-10B in GPT-2 tokens -------------------------------------------
# `NAME_val_000000.bin` and `NAME_train_000001.bin`, `NAME_train_000002.bin`, ...: 256 32-bit numbers (20240520, version
# 1, the number of tokens, zeros), then 16-bit tokens, all little-endian. The end-of-document token *precedes* each
# document. Files are memory-mapped; only `data prepare` reads them completely, for their digests.


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
    shards = [_map_shard(path, found) for path, found in _list_files(folder)]
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


def _list_files(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.glob("*.bin")):
        if match := _NAME.fullmatch(path.name):
            yield path, match


def _map_shard(path: Path, match: re.Match[str]) -> Shard:
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
    except (OSError, ValueError) as error:  # ValueError: it is cut off within a number, or has no token
        raise EnvironmentUnfitError(f"{path} cannot be read: {error}", "Download it again.") from None
    return Shard(path, match[1], match[2], int(match[3]), tokens)


def _read_digests(folder: Path) -> dict[str, tuple[int, str]]:
    """File name -> size in bytes and digest, as recorded by `data prepare`."""
    try:
        found: Mapping[str, Mapping[str, object]] = json.loads((folder / DIGESTS).read_text("utf-8"))
        return {name: (int(str(one["bytes"])), str(one["sha256"])) for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
