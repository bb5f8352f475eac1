"""Windows of tokens: every token once, the same global batches for all layouts, files mapped and checked."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.gpt_pretraining.task import prepare_data
from task_images.language.tokens import (
    IGNORED,
    Part,
    Windows,
    batches_of_update,
    python_text,
    read_tokens,
    synthetic_tokens,
    validation_batches,
    write_tokens,
)

ROW = np.arange(101, dtype=np.uint16)


def test_an_epoch_has_every_window_once_and_each_epoch_its_own_order() -> None:
    windows = Windows(ROW, 10, seed=1)
    assert windows.count == 10
    first, second = windows.numbers(0, 10), windows.numbers(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    inputs, targets = windows.take([3])
    assert inputs[0].tolist() == list(range(30, 40))
    assert targets[0].tolist() == list(range(31, 41))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (2, 4), (4, 1), (2, 1)])
def test_the_global_batch_is_the_same_whatever_cuts_it(ranks: int, micro_batch: int) -> None:
    windows = Windows(ROW, 4, seed=1)
    whole = next(batches_of_update(windows, 5, 8, Part(8, 0, 1)))
    parts = [
        batch for rank in range(ranks) for batch in batches_of_update(windows, 5, 8, Part(micro_batch, rank, ranks))
    ]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert {part.terms for part in parts} == {32.0}


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_validation_has_every_window_once_in_equally_many_passes(ranks: int) -> None:
    windows = Windows(ROW, 4, seed=1)
    rows = [list(validation_batches(windows, Part(2, rank, ranks))) for rank in range(ranks)]
    assert len({len(row) for row in rows}) == 1
    counted = torch.cat([batch.targets[batch.targets != IGNORED] for row in rows for batch in row])
    assert sorted(counted.tolist()) == list(range(1, 101))
    assert sum(batch.terms for row in rows for batch in row) == 100
    assert all(int(batch.inputs.min()) >= 0 for row in rows for batch in row)
    few = [batch for rank in range(ranks) for batch in validation_batches(windows, Part(2, rank, ranks), most=5)]
    assert sum(batch.terms for batch in few) == 20


def test_token_files_are_written_mapped_and_checked(tmp_path: Path) -> None:
    documents = {"train": [[1, 2, 3], [4, 5]], "valid": [[6, 7]]}
    write_tokens(tmp_path, documents, 10, "example", text_bytes=lambda: 14)
    corpus = read_tokens(tmp_path, 10)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.tolist() == [1, 2, 3, 4, 5]
    assert corpus.valid.tolist() == [6, 7]
    assert (corpus.name, corpus.bytes_per_token) == ("example", 2.0)
    with pytest.raises(TaskUsageError, match="vocabulary of 10, but the model's has 8") as caught:
        read_tokens(tmp_path, 8)
    assert "vocabulary=10" in str(caught.value.hint)


def test_damaged_token_files_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"no .*tokens\.json"):
        read_tokens(tmp_path, 10)
    (tmp_path / "tokens.json").write_text("[1]")
    with pytest.raises(EnvironmentUnfitError, match="dtype"):
        read_tokens(tmp_path, 10)
    (tmp_path / "tokens.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": 5}))
    with pytest.raises(EnvironmentUnfitError, match=r"no .*train\.bin"):
        read_tokens(tmp_path, 10)
    (tmp_path / "train.bin").write_bytes(b"\1\0\7\0")
    with pytest.raises(EnvironmentUnfitError, match="holds the token 7"):
        read_tokens(tmp_path, 10)
    (tmp_path / "train.bin").write_bytes(b"\1\0\2")
    with pytest.raises(EnvironmentUnfitError, match="3 bytes"):
        read_tokens(tmp_path, 10)
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(EnvironmentUnfitError, match="is empty"):
        read_tokens(tmp_path, 10)
    np.arange(9999, dtype="<u4").tofile(tmp_path / "train.bin")
    (tmp_path / "tokens.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": 10_000}))
    with pytest.raises(EnvironmentUnfitError, match="it holds uint32 and not uint16"):
        read_tokens(tmp_path, 10_000)
    (tmp_path / "train.bin").write_bytes(b"\1\0")
    (tmp_path / "val.bin").write_bytes(b"\1\0")
    with pytest.raises(EnvironmentUnfitError, match="1 tokens are too few"):
        Windows(read_tokens(tmp_path, 10_000).train, 4, 1)


def test_token_files_without_their_description_are_not_replaced_by_a_download(tmp_path: Path) -> None:
    """As nanoGPT writes them; FineWeb-10B would be 20 GB."""
    for name in ("train.bin", "val.bin"):
        np.arange(99, dtype="<u2").tofile(tmp_path / name)
    with pytest.raises(EnvironmentUnfitError, match=r"there is no .*tokens\.json") as refused:
        prepare_data(tmp_path, {"data": "shards"})
    assert f'echo \'{{"dtype": "uint16", "vocabulary": 50257}}\' > {tmp_path}/tokens.json' in str(refused.value.hint)
    with pytest.raises(EnvironmentUnfitError, match=r"there is no .*tokens\.json"):
        prepare_data(tmp_path / "empty", {"data": "tokens"})


def test_the_text_of_python_has_documents_and_two_splits() -> None:
    corpus = python_text()
    assert len(corpus.train) > 6 * len(corpus.valid) > 100_000
    assert corpus.train[-1] == 0
    assert not corpus.synthetic


def test_synthetic_tokens_are_repeatable() -> None:
    first, second = synthetic_tokens(100_000, 1000, 1), synthetic_tokens(100_000, 1000, 1)
    assert np.array_equal(first.train, second.train)
    assert int(first.train.max()) > 65_536
    assert first.synthetic


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "count"), [(11, 1), (20, 1), (21, 2)])
def test_a_window_needs_one_token_more_for_its_last_target(tokens: int, count: int) -> None:
    assert Windows(np.arange(tokens), 10, 1).count == count


@pytest.mark.parametrize(("most", "sizes"), [(0, 20), (1, 1), (19, 19), (20, 20), (100, 20)])
def test_validation_has_at_most_the_windows_that_there_are(most: int, sizes: int) -> None:
    batches = list(validation_batches(Windows(ROW, 5, 1), Part(3, 0, 1), most))
    assert len(batches) == math.ceil(sizes / 3)
    assert sum(batch.terms for batch in batches) == 5 * sizes
