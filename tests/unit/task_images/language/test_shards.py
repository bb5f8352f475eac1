"""llm.c's shards: read in their order as modded-nanogpt's loader reads them, digested, and what is wrong is named."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.language import tokens as module
from task_images.language.tokens import (
    END,
    Part,
    Windows,
    batches_of_update,
    prepare_shards,
    read_shards,
    validation_batches,
)
from tests.unit.task_images.language.shards import write_shard

LENGTH, BATCH = 8, 4  # a batch has 32 tokens and one more


def make_folder(folder: Path, name: str = "fineweb", sizes: tuple[int, ...] = (100, 97, 65), valid: int = 90) -> Path:
    begin = 0
    for number, size in enumerate((valid, *sizes)):
        split = "train" if number else "val"
        tokens = np.arange(begin, begin + size) % 50_000
        tokens[0] = END
        write_shard(folder / f"{name}_{split}_{number:06d}.bin", tokens)
        begin += size
    return folder


def load_as_there(folder: Path, steps: int, rank: int, ranks: int) -> list[tuple[list[int], list[int]]]:
    """DistributedDataLoader of modded-nanogpt's records, with struct instead of numpy: batches of one rank."""
    rows = []
    for path in sorted(folder.glob("fineweb_train_*.bin")):
        data = path.read_bytes()
        magic, version, count = struct.unpack("<3i", data[:12])
        assert (magic, version) == (20240520, 1)
        rows.append(struct.unpack(f"<{count}H", data[1024:]))
    own = BATCH * LENGTH // ranks
    shard, position, found = 0, rank * own, []
    for _ in range(steps):
        tokens = rows[shard][position : position + own + 1]
        found.append((list(tokens[:-1]), list(tokens[1:])))
        position += own * ranks
        # The end of a shard that does not fill a step of all ranks is dropped.
        if position - rank * own + own * ranks + 1 > len(rows[shard]):
            shard, position = (shard + 1) % len(rows), rank * own
    return found


@pytest.mark.parametrize("size", [0, 1023, 1024])
def test_a_shard_that_is_cut_off_is_named(tmp_path: Path, size: int) -> None:
    path = make_folder(tmp_path) / "fineweb_train_000002.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(EnvironmentUnfitError, match="fineweb_train_000002"):
        read_shards(tmp_path, 50_257)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_the_batches_of_the_published_loader(tmp_path: Path, ranks: int) -> None:
    corpus = read_shards(make_folder(tmp_path), 50_257)
    windows = Windows(corpus.rows, LENGTH, 1, block=BATCH)
    assert windows.count == BATCH * (3 + 3 + 2)
    for rank in range(ranks):
        wanted = load_as_there(tmp_path, 20, rank, ranks)  # two epochs and a half
        part = Part(BATCH // ranks, rank, ranks)
        for step, (inputs, targets) in enumerate(wanted):
            [batch] = batches_of_update(windows, step, BATCH, part)
            assert batch.inputs.flatten().tolist() == inputs
            assert batch.targets.flatten().tolist() == targets
            assert batch.terms == BATCH * LENGTH


def test_validation_has_exactly_the_first_targets_of_the_validation_file(tmp_path: Path) -> None:
    corpus = read_shards(make_folder(tmp_path), 50_257)
    windows = Windows(corpus.valid, LENGTH, 1)
    batches = list(validation_batches(windows, Part(3, 0, 1), most=9))
    targets = [int(target) for batch in batches for target in batch.targets.flatten()]
    assert targets == corpus.valid[1 : 9 * LENGTH + 1].tolist()
    assert sum(batch.terms for batch in batches) == 9 * LENGTH


def test_digests_are_those_of_sha256sum_and_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    assert read_shards(tmp_path, 50_257).identify().digest is None
    identity = prepare_shards(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.bin"))
    ordered = [name for name in names if "train" in name] + [name for name in names if "val" in name]
    lines = "".join(f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n" for name in ordered)
    assert identity.digest == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    assert identity == read_shards(tmp_path, 50_257).identify()
    assert identity.counts == {"training tokens": 262, "validation tokens": 90}
    monkeypatch.setattr(hashlib, "sha256", None)  # files that are known are not read again
    with pytest.raises(TypeError):
        prepare_shards(tmp_path)  # the digest of the list needs it, but no file was opened for it
    monkeypatch.undo()
    write_shard(tmp_path / "fineweb_train_000003.bin", np.arange(66))
    assert read_shards(tmp_path, 50_257).identify().digest is None


def test_the_published_files_are_known_by_names_numbers_sizes_and_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FULL_SHARD", 100)
    folder = make_folder(tmp_path, sizes=(100, 100), valid=100)
    assert read_shards(folder, 50_257).identify().official is False  # no digests yet
    identity = prepare_shards(folder)
    assert (identity.official, identity.reason) == (True, None)  # the first files of the data set are enough
    write_shard(folder / "fineweb_train_000003.bin", np.arange(60))
    assert "has 60 tokens instead of 100" in str(prepare_shards(folder).reason)
    monkeypatch.setattr(module, "PUBLISHED_FILES", 3)  # the last file is shorter
    assert prepare_shards(folder).official is True
    monkeypatch.setattr(module, "PUBLISHED_FILES", 2)
    assert "3 files instead of 2" in str(prepare_shards(folder).reason)
    other = tmp_path / "other"
    other.mkdir()
    make_folder(other, name="mine", sizes=(100,), valid=100)
    assert "called mine, not fineweb" in str(prepare_shards(other).reason)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="no shards"):
        read_shards(tmp_path, 50_257)
    make_folder(tmp_path)
    (tmp_path / "fineweb_train_000002.bin").unlink()
    with pytest.raises(EnvironmentUnfitError, match="000002 missing"):
        read_shards(tmp_path, 50_257)
    make_folder(tmp_path)
    with pytest.raises(TaskUsageError, match="token 50256"):
        read_shards(tmp_path, 50_000)
    path = tmp_path / "fineweb_train_000002.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(EnvironmentUnfitError, match="promises 97 tokens"):
        read_shards(tmp_path, 50_257)
    path.write_bytes(struct.pack("<3i", 20240801, 7, 10) + bytes(1012 + 40))  # Llama 3's form
    with pytest.raises(EnvironmentUnfitError, match="not a shard of GPT-2's tokens"):
        read_shards(tmp_path, 50_257)


def test_too_few_tokens_for_an_update_are_refused(tmp_path: Path) -> None:
    corpus = read_shards(make_folder(tmp_path, sizes=(30,)), 50_257)
    with pytest.raises(EnvironmentUnfitError, match="an update of 4 sequences of 8"):
        Windows(corpus.rows, LENGTH, 1, block=BATCH)
