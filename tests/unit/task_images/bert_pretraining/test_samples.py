"""BERT's samples against a generator in plain Python, at their bounds, and texts out of the published archives."""

import bz2
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task_images.bert_pretraining import texts
from task_images.bert_pretraining.data import (
    Samples,
    Specials,
    _mix,
    legacy_batch,
    load_bytes,
    load_synthetic,
    prepare_data,
    training_batches,
    validation_batches,
)
from task_images.bert_pretraining.texts import DUMP, TEXT, WIKITEXT, _extract_articles, _extract_wikitext, _identify
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.tokens import Corpus, Part

SPECIALS = Specials(padding=0, begin=1, end=2, mask=3, low=10, high=1000)
ROW = np.arange(10, 1000, dtype=np.uint32)
CORPUS = Corpus(ROW, ROW[:200], 1000, None, "numbers")
WORD = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15


def mix(bits: int) -> int:
    """splitmix64's finalizer (Steele et al. 2014), with Python's integers."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & WORD
    return bits ^ (bits >> 31)


def make_samples(length: int = 43, seed: int = 1, split: str = "train") -> Samples:
    return Samples(CORPUS, split, length, SPECIALS, seed)


def test_draws_are_those_of_splitmix64() -> None:
    # The first numbers of the published generator with seed 0.
    numbers = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix(ODD * place & WORD) for place in (1, 2, 3)] == numbers
    assert _mix(np.array([ODD * place & WORD for place in (1, 2, 3)], np.uint64)).tolist() == numbers
    samples = make_samples()
    key = int(samples._key)
    found = samples._draw(np.array([0, 3]), np.array([7, 2]), 4)
    for row, (epoch, number) in zip(found, ((0, 7), (3, 2)), strict=True):
        own = mix((mix((key + epoch * ODD) & WORD) + number * ODD) & WORD)
        assert row.tolist() == [(mix((own + place * ODD) & WORD) >> 11) / 2**53 for place in range(1, 5)]


def test_samples_depend_on_the_seed() -> None:
    epochs, numbers = np.zeros(5, np.int64), np.arange(5)
    one, same, other = (make_samples(seed=seed).make(epochs, numbers)["tokens"] for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(("length", "count", "asked"), [(43, 24, 6), (498, 2, 75), (13, 99, 2), (10, 141, 2)])
def test_a_text_has_as_many_samples_as_fit_and_15_percent_are_asked_for(length: int, count: int, asked: int) -> None:
    samples = make_samples(length)
    assert (samples.count, samples.asked, samples.length) == (count, asked, length)


def test_two_samples_are_the_least() -> None:
    make_samples(498)
    with pytest.raises(EnvironmentUnfitError, match="990 tokens are too few for samples of 499"):
        make_samples(499)
    with pytest.raises(EnvironmentUnfitError, match="200 tokens are too few for samples of 104"):
        make_samples(104, split="valid")


def test_every_epoch_has_every_sample_once_in_its_own_order() -> None:
    samples = make_samples()
    epochs, numbers = samples.numbers(20, 40)  # the rest of epoch 0, epoch 1, and the beginning of epoch 2
    assert epochs.tolist() == [0] * 4 + [1] * 24 + [2] * 12
    assert sorted(numbers[4:28]) == list(range(24))
    again = samples.numbers(24, 24)[1]
    assert again.tolist() == numbers[4:28].tolist()
    assert samples.numbers(0, 24)[1].tolist() != again.tolist()
    assert sorted([*samples.numbers(0, 20)[1], *numbers[:4]]) == list(range(24))


def test_a_tenth_of_the_samples_is_shorter_but_never_too_short() -> None:
    samples = make_samples()
    epochs, numbers = (grid.ravel() for grid in np.meshgrid(np.arange(400), np.arange(24)))
    sizes = samples.sizes(epochs, numbers)
    assert set(sizes.tolist()) <= set(range(20, 41))  # half of 40 tokens of text at least
    assert (sizes < 40).mean() == pytest.approx(0.1 * 20 / 21, abs=0.01)
    assert sizes.min() == 20
    assert np.bincount(sizes)[20:40].min() > 25  # all lengths are about equally likely: 46 of each
    short = make_samples(13)  # two positions are asked for, so four tokens of text would do; half of ten are more
    assert short.sizes(epochs, numbers % short.count).min() == 5


def test_another_text_is_any_other_sample() -> None:
    samples = make_samples()
    epochs, numbers = (grid.ravel() for grid in np.meshgrid(np.arange(300), np.array([0, 23])))
    found = samples.make(epochs, numbers)
    rows = found["tokens"].copy()
    np.put_along_axis(rows, found["positions"], found["labels"], axis=1)
    border = np.argmax(found["types"], axis=1)
    second = np.take_along_axis(rows, border[:, None], axis=1)[:, 0]
    sample = (second - 10) // 40  # the text of sample n begins with token 10 + 40 n
    for number in (0, 23):
        chosen = (numbers == number) & (found["follows"] == 1)
        assert set(sample[chosen].tolist()) == set(range(24)) - {number}
        assert set(sample[(numbers == number) & (found["follows"] == 0)].tolist()) == {number}


def test_shown_tokens_are_masks_random_ones_or_the_same_and_specials_are_never_asked_for() -> None:
    samples = make_samples()
    epochs, numbers = (grid.ravel() for grid in np.meshgrid(np.arange(100), np.arange(24)))
    found = samples.make(epochs, numbers)
    shown = np.take_along_axis(found["tokens"], found["positions"], axis=1)
    labels = found["labels"]
    assert labels.min() >= 10
    kinds = (shown == SPECIALS.mask).mean(), (shown == labels).mean()
    assert kinds == pytest.approx((0.8, 0.1), abs=0.01)
    others = shown[(shown != SPECIALS.mask) & (shown != labels)]
    assert others.min() >= 10
    assert others.max() < 1000
    assert others.max() - others.min() > 970
    assert (np.diff(found["positions"], axis=1) > 0).all()


def test_short_samples_come_last_and_only_their_passes_have_a_mask() -> None:
    samples = make_samples()
    batches = list(training_batches(samples, 1, 24, Part(4, 0, 1)))
    sizes = [int((batch.tokens != SPECIALS.padding).sum(1).min()) for batch in batches]
    assert sizes == sorted(sizes, reverse=True)
    assert [batch.mask is None for batch in batches] == [size == 43 for size in sizes]
    assert {batch.terms for batch in batches} == {24.0 * 6}
    assert all(batch.weights.tolist() == [1.0] * 4 for batch in batches)


@pytest.mark.parametrize(("most", "micro", "ranks"), [(10, 3, 2), (24, 8, 3), (100, 5, 1), (1, 4, 2)])
def test_validation_has_the_first_samples_of_epoch_0_once(most: int, micro: int, ranks: int) -> None:
    samples = make_samples()
    count = min(most, 24)
    wanted = samples.make(np.zeros(count, np.int64), np.arange(count))["tokens"]
    rows: dict[int, Any] = {}
    passes = set()
    for rank in range(ranks):
        batches = list(validation_batches(samples, most, Part(micro, rank, ranks)))
        passes.add(len(batches))
        for number, batch in enumerate(batches):
            assert batch.terms == float(batch.weights.sum())
            for place, (row, weight) in enumerate(zip(batch.tokens, batch.weights, strict=True)):
                at = (number * ranks + rank) * micro + place
                assert bool(weight) is (at < count)
                rows[at] = row.tolist()
    assert passes == {-(-count // (micro * ranks))}
    assert [rows[at] for at in range(count)] == wanted.tolist()


def test_a_batch_moves_with_all_its_tensors() -> None:
    batch = next(training_batches(make_samples(), 0, 4, Part(4, 0, 1))).to(torch.device("meta"))
    assert {value.device.type for value in vars(batch).values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_made_up_tokens_keep_the_special_ones_apart() -> None:
    corpus, specials = load_synthetic(500, 2048, 1)
    assert specials == Specials(0, 2, 3, 4, 5, 500)
    assert (corpus.synthetic, len(corpus.train)) == (True, 2048)
    assert load_bytes()[1] == Specials(256, 257, 258, 259, 1, 256)


def test_the_batch_of_2020_asks_for_every_position_of_random_tokens() -> None:
    batch = legacy_batch(50, 6, 3, 1, 18.0)
    assert batch.positions.tolist() == [list(range(6))] * 3
    assert (batch.weights.tolist(), batch.terms, batch.follows.tolist()) == ([1.0] * 3, 18.0, [0, 0, 0])
    assert batch.tokens.max() < 50
    assert torch.equal(batch.tokens, legacy_batch(50, 6, 3, 1, 18.0).tokens)
    assert not torch.equal(batch.tokens, legacy_batch(50, 6, 3, 2, 18.0).tokens)


# --- texts ----------------------------------------------------------------------------------------------------------

RAW = """\n = Title = \n\n A word @-@ like thing , 1 @,@ 000 and 2 @.@ 5 . \n = = Section = = \n a = b \n\n"""


def test_paragraphs_of_wikitext_lose_headings_and_the_marks_of_split_numbers(tmp_path: Path) -> None:
    archive = tmp_path / "wikitext.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("wikitext-103-raw/wiki.train.raw", RAW)
        packed.writestr("wikitext-103-raw/wiki.valid.raw", " One line \n")
    places = {split: tmp_path / split for split in ("train", "valid")}
    assert _extract_wikitext(archive, places) == {"training lines": 7, "validation lines": 1}
    assert places["train"].read_text() == "A word-like thing , 1,000 and 2.5 .\na = b\n"
    assert places["valid"].read_text() == "One line\n"


def test_an_archive_that_is_missing_or_broken_says_what_to_do(tmp_path: Path) -> None:
    places = {split: tmp_path / split for split in ("train", "valid")}
    with pytest.raises(EnvironmentUnfitError, match=r"there is no wikitext\.zip in") as caught:
        _extract_wikitext(tmp_path / "wikitext.zip", places)
    assert str(caught.value.hint).startswith("mlbench data prepare bert_pretraining --data-dir")
    with zipfile.ZipFile(tmp_path / "wikitext.zip", "w") as packed:
        packed.writestr("other", "")
    with pytest.raises(EnvironmentUnfitError, match="cannot be read") as caught:
        _extract_wikitext(tmp_path / "wikitext.zip", places)
    assert caught.value.hint == "Delete the file and prepare the data again."


def test_every_200th_article_of_a_dump_validates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = tmp_path / "enwiki-1-pages-articles.xml.bz2"
    dump.write_bytes(bz2.compress(b"x"))
    articles = ([f"article {number}", "second"] for number in range(1, 402))
    monkeypatch.setattr(texts, "read_articles", lambda path, reach: articles)
    places = {split: tmp_path / split for split in ("train", "valid")}
    assert _extract_articles(dump, places) == {"training articles": 399, "validation articles": 2}
    assert places["valid"].read_text() == "article 200\nsecond\n\narticle 400\nsecond\n\n"
    assert places["train"].read_text().startswith("article 1\nsecond\n\narticle 2\n")


def test_only_the_prescribed_text_can_be_official() -> None:
    counts = {"training lines": 1_801_350, "validation lines": 3_760, "pieces": 5}
    assert _identify(WIKITEXT, counts, "sha256:a", None).official is True
    assert _identify(WIKITEXT, {**counts, "validation lines": 3_761}, "sha256:a", None).official is False
    dump = _identify(DUMP, counts, "sha256:a", "abc")
    assert (dump.official, dump.digest) == (None, "sha256:a")
    assert str(dump.reason).endswith("a dump with SHA-256 abc")
    assert _identify(TEXT, counts, "sha256:a", None).reason == "the data are not those specified for the task"


def test_generated_data_need_no_files(tmp_path: Path) -> None:
    with pytest.raises(TaskUsageError, match="data=synthetic needs no files"):
        prepare_data(tmp_path, {"data": "synthetic"})


def test_the_newest_dump_is_read(tmp_path: Path) -> None:
    assert texts._find_dump(tmp_path) is None
    for day in ("20240101", "20250101", "20241201"):
        (tmp_path / f"enwiki-{day}-pages-articles-multistream.xml.bz2").touch()
    (tmp_path / "dewiki-20260101-pages-articles.xml.bz2").touch()
    found = texts._find_dump(tmp_path)
    assert found is not None
    assert "20250101" in found.name
