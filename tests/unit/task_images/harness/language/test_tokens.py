"""Windows of tokens: every token once, the same global batches for all layouts, files mapped and checked."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language import tokens as tokens_module
from task_images.harness.language.tokens import (
    IGNORED,
    Batch,
    Part,
    Windows,
    batches_of_update,
    map_tensors,
    python_text,
    read_tokens,
    separate_documents,
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
    inputs, targets, places, mask = windows.take([3])
    assert inputs[0].tolist() == list(range(30, 40))
    assert targets[0].tolist() == list(range(31, 41))
    assert places is None
    assert mask is None


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


def test_documents_kept_apart_count_the_same_terms_on_every_rank() -> None:
    tokens = np.tile(np.array([3, 4, 0], np.uint16), 40)
    windows = Windows(tokens, 6, seed=1, end=0, separate=True)
    parts = [next(batches_of_update(windows, 0, 4, Part(2, rank, 2))) for rank in range(2)]
    valid = sum(int((part.targets != IGNORED).sum()) for part in parts)
    assert {part.terms for part in parts} == {float(valid)}
    assert valid == 4 * 4


def test_token_files_are_written_mapped_and_checked(tmp_path: Path) -> None:
    documents = {"train": [[1, 2, 3], [4, 5]], "valid": [[6, 7]]}
    write_tokens(tmp_path, documents, 10, 9, "example", text_bytes=lambda: 20)
    corpus = read_tokens(tmp_path, 10)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.tolist() == [1, 2, 3, 9, 4, 5, 9]
    assert corpus.valid.tolist() == [6, 7, 9]
    assert (corpus.end, corpus.name, corpus.bytes_per_token) == (9, "example", 2.0)
    with pytest.raises(TaskUsageError, match="vocabulary of 10, but the model's has 8") as caught:
        read_tokens(tmp_path, 8)
    assert "vocabulary=10" in str(caught.value.hint)


def test_damaged_token_files_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"no .*tokens\.json"):
        read_tokens(tmp_path, 10)
    (tmp_path / "tokens.json").write_text("[1]")
    with pytest.raises(EnvironmentUnfitError, match="dtype"):
        read_tokens(tmp_path, 10)
    (tmp_path / "tokens.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": 5, "end": None}))
    with pytest.raises(EnvironmentUnfitError, match=r"no .*train\.bin"):
        read_tokens(tmp_path, 10)
    (tmp_path / "train.bin").write_bytes(b"\1\0\7\0")
    with pytest.raises(EnvironmentUnfitError, match="holds the token 7"):
        read_tokens(tmp_path, 10)
    (tmp_path / "train.bin").write_bytes(b"\1\0\2")
    with pytest.raises(EnvironmentUnfitError, match="3 bytes"):
        read_tokens(tmp_path, 10)


def test_the_text_of_python_has_documents_and_two_splits() -> None:
    corpus = python_text()
    assert len(corpus.train) > 6 * len(corpus.valid) > 100_000
    assert corpus.train[-1] == corpus.end == 0
    assert not corpus.synthetic


def test_synthetic_tokens_are_repeatable() -> None:
    first, second = synthetic_tokens(100_000, 1000, 1), synthetic_tokens(100_000, 1000, 1)
    assert np.array_equal(first.train, second.train)
    assert int(first.train.max()) > 65_536
    assert first.synthetic


# --- token files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "size"), [(65_535, "uint16", 2), (65_536, "uint16", 2), (65_537, "uint32", 4)]
)
def test_two_bytes_hold_a_vocabulary_of_65536(tmp_path: Path, vocabulary: int, dtype: str, size: int) -> None:
    write_tokens(tmp_path, {"train": [[vocabulary - 1, 1]], "valid": [[2]]}, vocabulary, None, "example")
    assert json.loads((tmp_path / "tokens.json").read_text()) == {
        "dtype": dtype,
        "vocabulary": vocabulary,
        "end": None,
        "name": "example",
    }
    assert (tmp_path / "train.bin").read_bytes() == (vocabulary - 1).to_bytes(size, "little") + b"\1".ljust(size, b"\0")
    assert (tmp_path / "val.bin").read_bytes() == b"\2".ljust(size, b"\0")
    corpus = read_tokens(tmp_path, vocabulary)
    assert corpus.train.tolist() == [vocabulary - 1, 1]
    assert (corpus.vocabulary, corpus.end, corpus.bytes_per_token) == (vocabulary, None, None)
    assert synthetic_tokens(vocabulary, 64, 1).train.dtype == np.dtype(dtype)


def test_bytes_per_token_count_the_ends_of_documents_and_no_tokens_at_all_divide_by_one(tmp_path: Path) -> None:
    write_tokens(tmp_path, {"train": [[1, 2], [3]], "valid": [[4]]}, 10, 9, "example", text_bytes=lambda: 21)
    assert json.loads((tmp_path / "tokens.json").read_text())["bytes_per_token"] == 3.0
    write_tokens(tmp_path / "new" / "empty", {"train": [], "valid": []}, 10, None, "empty", text_bytes=lambda: 7)
    assert json.loads((tmp_path / "new" / "empty" / "tokens.json").read_text())["bytes_per_token"] == 7.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8", "vocabulary": 5, "end": None},
        {"dtype": "uint16", "vocabulary": "5", "end": None},
        {"dtype": "uint16", "vocabulary": 5, "end": "4"},
        {"vocabulary": 5, "end": None},
        {"dtype": "uint16", "end": None},
        [],
    ],
)
def test_a_description_of_tokens_with_a_wrong_entry_is_refused(tmp_path: Path, wrong: object) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(wrong))
    with pytest.raises(EnvironmentUnfitError, match='not an object with "dtype"') as caught:
        read_tokens(tmp_path, 10)
    assert '"vocabulary": 50257' in str(caught.value.hint)


def test_token_files_of_others_may_lack_a_name_and_the_length_of_their_text(tmp_path: Path) -> None:
    """As written by nanoGPT, with a description by hand."""
    (tmp_path / "tokens.json").write_text('{"dtype": "uint32", "vocabulary": 5, "end": 4, "bytes_per_token": "many"}')
    (tmp_path / "train.bin").write_bytes(np.array([0, 4], "<u4").tobytes())
    (tmp_path / "val.bin").write_bytes(np.array([3, 4], "<u4").tobytes())
    corpus = read_tokens(tmp_path, 7)
    assert (corpus.name, corpus.end, corpus.vocabulary, corpus.bytes_per_token) == ("token files", 4, 5, None)
    assert not corpus.synthetic
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(EnvironmentUnfitError, match=r"tokens\.json cannot be read"):
        read_tokens(tmp_path, 7)


@pytest.mark.parametrize(
    ("place", "is_found"), [(0, True), ((1 << 20) - 1, True), ((1 << 20) + 1, False), ((1 << 20) + 4, True), (-1, True)]
)
def test_tokens_outside_the_vocabulary_are_looked_for_at_both_ends_of_a_large_file(
    tmp_path: Path, place: int, is_found: bool
) -> None:
    tokens = np.zeros((1 << 21) + 4, "<u2")
    tokens[place] = 5
    (tmp_path / "tokens.json").write_text('{"dtype": "uint16", "vocabulary": 5, "end": null}')
    tokens.tofile(tmp_path / "train.bin")
    tokens[:2].tofile(tmp_path / "val.bin")
    if not is_found:  # reading all of it would take long
        assert read_tokens(tmp_path, 5).train[place] == 5
        return
    with pytest.raises(EnvironmentUnfitError, match="the token 5, but its vocabulary has 5") as caught:
        read_tokens(tmp_path, 5)
    assert "tokens.json" in str(caught.value.hint)


def test_an_empty_token_file_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text('{"dtype": "uint16", "vocabulary": 5, "end": null}')
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(EnvironmentUnfitError, match=r"train\.bin cannot be read"):
        read_tokens(tmp_path, 5)


def test_made_up_and_custom_tokens_are_not_official(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"training tokens": 64, "validation tokens": 8}
    made = synthetic_tokens(10, 64, 1)
    assert (made.end, made.name) == (None, "uniform random tokens")
    found = made.identify()
    assert (found.counts, found.official) == (counts, False)
    custom = replace(made, synthetic=False)
    small = custom.identify()
    assert small.counts == counts
    assert (small.official, small.reason) == (None, "the data are not those specified for the task")
    assert str(small.digest).startswith("sha256:")
    monkeypatch.setattr(tokens_module, "MAX_DIGESTED", 64)
    assert custom.identify() == small
    monkeypatch.setattr(tokens_module, "MAX_DIGESTED", 63)
    assert custom.identify().digest is None
    assert replace(made, identity=small).identify() is small


def test_random_tokens_have_an_eighth_for_validation_and_at_least_two() -> None:
    assert [len(synthetic_tokens(10, count, 1).valid) for count in (1, 8, 16, 24, 30)] == [2, 2, 2, 3, 3]
    corpus = synthetic_tokens(4, 4000, 1)
    assert sorted(set(corpus.train.tolist())) == [0, 1, 2, 3]
    assert not np.array_equal(synthetic_tokens(4, 4000, 2).train, corpus.train)
    assert (corpus.more, corpus.rows) == ((), (corpus.train,))


def test_every_tenth_paragraph_of_python_validates_and_paragraphs_end_with_a_zero() -> None:
    from pydoc_data.topics import topics

    paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n") if part.strip()]
    corpus = python_text()
    texts = [bytes(tokens).decode().split("\n\0") for tokens in (corpus.train, corpus.valid)]
    assert texts[1] == [*paragraphs[3::10], ""]
    assert texts[0] == [*(part for number, part in enumerate(paragraphs) if number % 10 != 3), ""]
    assert (corpus.vocabulary, corpus.bytes_per_token) == (256, 1.0)


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "count"), [(11, 1), (20, 1), (21, 2)])
def test_a_window_needs_one_token_more_for_its_last_target(tokens: int, count: int) -> None:
    assert Windows(np.arange(tokens), 10, 1).count == count


@pytest.mark.parametrize(
    ("rows", "block", "words", "hint"),
    [
        (np.arange(10), 0, "10 tokens are too few for a sequence of 10 and", "sequence_length, or"),
        ((np.arange(10), np.arange(3)), 0, "13 tokens are too few for a sequence of 10 and", "sequence_length, or"),
        (np.arange(40), 4, "40 tokens are too few for an update of 4 sequences of 10 and", "global_batch, or more"),
    ],
)
def test_too_few_tokens_are_counted(rows: Any, block: int, words: str, hint: str) -> None:
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        Windows(rows, 10, 1, block=block)
    assert hint in str(caught.value.hint)


def test_windows_do_not_cross_from_one_sequence_to_the_next() -> None:
    rows = (np.arange(0, 9), np.arange(100, 103), np.arange(200, 214))  # two windows of 4, none, three
    windows = Windows(rows, 4, 1)
    assert windows.count == 5
    inputs, targets, _, _ = windows.take([4, 0, 2, 1])
    assert inputs[:, 0].tolist() == [208, 0, 200, 4]
    assert targets.tolist() == [list(range(first, first + 4)) for first in (209, 1, 201, 5)]
    assert inputs.dtype == targets.dtype == torch.int64


def test_blocks_skip_the_incomplete_end_of_each_sequence_and_come_again_in_order() -> None:
    rows = (np.arange(0, 13), np.arange(100, 120))  # three windows of 4, of which two make a block; four
    windows = Windows(rows, 4, 1, block=2)
    assert windows.count == 6
    assert windows.numbers(4, 5).tolist() == [4, 5, 0, 1, 2]
    assert windows.take(windows.numbers(0, 6))[0][:, 0].tolist() == [0, 4, 100, 104, 108, 112]


def test_the_order_of_an_epoch_depends_on_the_seed_alone() -> None:
    first, again, other = (Windows(ROW, 5, seed).numbers(0, 20).tolist() for seed in (1, 1, 2))
    assert first == again != other
    stream = Windows(ROW, 5, 1)
    assert stream.numbers(13, 20).tolist() == [*first, *stream.numbers(20, 20).tolist()][13:33]


@pytest.mark.parametrize("separate", [False, True])
def test_ends_of_documents_matter_only_where_documents_are_separated(separate: bool) -> None:
    tokens = np.array([5, 6, 0, 7, 8, 0, 0, 9, 5], np.uint16)
    windows = Windows(tokens, 4, 1, end=0, separate=separate)
    assert windows.separates is separate
    assert windows.count_targets(np.array([0, 1])) == (5.0 if separate else 8.0)
    assert not Windows(tokens, 4, 1, separate=True).separates


def test_separated_documents_see_themselves_alone_and_begin_at_position_0() -> None:
    """The mask is compared with a loop over all pairs, positions and targets with those by hand."""
    inputs = torch.tensor([[5, 6, 0, 7, 8, 0, 0, 9]])
    targets = torch.tensor([[6, 0, 7, 8, 0, 0, 9, 4]])
    same, wanted, places, mask = separate_documents(inputs, targets, 0)
    assert same is inputs
    assert wanted.tolist() == [[6, 0, IGNORED, 8, 0, IGNORED, IGNORED, 4]]
    assert places.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    documents = [0, 0, 0, 1, 1, 1, 2, 3]
    assert mask.shape == (1, 1, 8, 8)
    assert mask[0, 0].tolist() == [
        [seen <= by and documents[seen] == documents[by] for seen in range(8)] for by in range(8)
    ]


def test_an_update_takes_its_own_part_of_the_endless_stream() -> None:
    windows = Windows(ROW, 5, 1)
    batches = list(batches_of_update(windows, 3, 6, Part(2, 1, 2)))
    wanted = windows.take(windows.numbers(18, 6)[3:])[0]
    assert [len(batch.inputs) for batch in batches] == [2, 1]
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), wanted)
    assert {batch.terms for batch in batches} == {30.0}


@pytest.mark.parametrize(("most", "sizes"), [(0, 20), (1, 1), (19, 19), (20, 20), (100, 20)])
def test_validation_has_at_most_the_windows_that_there_are(most: int, sizes: int) -> None:
    batches = list(validation_batches(Windows(ROW, 5, 1), Part(3, 0, 1), most))
    assert len(batches) == math.ceil(sizes / 3)
    assert sum(batch.terms for batch in batches) == 5 * sizes


def test_passes_without_a_window_of_their_own_repeat_the_last_one_and_count_nothing() -> None:
    windows = Windows(ROW, 5, 1)
    [first], [second] = (list(validation_batches(windows, Part(2, rank, 2), 3)) for rank in range(2))
    assert first.inputs[:, 0].tolist() == [0, 5]
    assert second.inputs[:, 0].tolist() == [10, 10]
    assert (first.terms, second.terms) == (10.0, 5.0)
    assert second.targets[1].tolist() == [IGNORED] * 5


def test_a_moved_batch_keeps_its_numbers() -> None:
    batch = Batch(torch.ones(2, 3), torch.zeros(2, 3), None, None, 6.0)
    moved = batch.to(torch.device("meta"))
    assert (moved.inputs.device.type, moved.targets.device.type) == ("meta", "meta")
    assert (moved.places, moved.mask, moved.terms) == (None, None, 6.0)
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert float(doubled.inputs.sum()) == 12
    assert float(batch.inputs.sum()) == 6
