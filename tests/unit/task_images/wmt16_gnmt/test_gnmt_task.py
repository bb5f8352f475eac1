"""GNMT's task: what its settings become, how WMT16 is read from text or from the prepacked file, and byte pairs."""

from pathlib import Path

import pytest

from task_images.wmt16_gnmt.data import Corpus, read_corpus
from task_images.wmt16_gnmt.prepare import TEST, TRAIN
from task_images.wmt16_gnmt.task import Rate, Settings, make_rate

WORDS = ["a", "b", "c", "d", "e@@"]  # numbers 4 to 8
TEXTS = {
    f"{TRAIN}.en": ["a b", "a b c d", "", "d"],
    f"{TRAIN}.de": ["b", "a", "a", "a e@@ c"],
    f"{TEST}.en": ["a", "a b c"],
    f"{TEST}.de": ["b e@@ b", "d"],
}


def write(folder: Path, **more: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.bpe.32000").write_text("".join(f"{word}\n" for word in WORDS))
    for name, lines in (TEXTS | more).items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


def read(folder: Path, longest: int = 5, longest_test: int = 0) -> Corpus:
    return read_corpus(folder, folder / "cache", longest, longest_test)


# --- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("longest", "kept"), [(0, [0, 1]), (5, [0, 1]), (4, [])])
def test_test_pairs_may_be_limited_with_their_references(tmp_path: Path, longest: int, kept: list[int]) -> None:
    """Both pairs have a side of three words and two marks."""
    corpus = read(write(tmp_path, **{"newstest2014.de": ["B", "D"]}), longest_test=longest)
    assert corpus.references == [["B", "D"][index] for index in kept]
    assert corpus.texts == [["b eb", "d"][index] for index in kept]
    assert len(corpus.test) == len(kept)
    assert corpus.read["test pairs"] == 2


# --- cleaning and byte pairs ----------------------------------------------------------------------------------------


# --- the task -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "start", "rates"),
    [
        (0, 0.0, [1.0, 1.0]),
        (4, 0.0, [0.0, (100**0.25 - 1) / 99, 9 / 99, (100**0.75 - 1) / 99, 1.0]),
        (4, 0.01, [0.01, 0.01**0.75, 0.1, 0.01**0.25, 1.0]),
        (2, 1.0, [1.0, 1.0, 1.0]),
    ],
)
def test_the_rate_grows_exponentially_from_nothing_or_from_a_share(
    warmup: int, start: float, rates: list[float]
) -> None:
    settings = Settings(learning_rate=1.0, warmup_updates=warmup, warmup_start=start)
    rate = make_rate(settings, 1000)
    assert [rate(update) for update in range(len(rates))] == pytest.approx(rates)


@pytest.mark.parametrize(("updates", "warmup"), [(10_000, 200), (100, 40), (500, 200), (499, 199)])
def test_a_short_training_warms_up_until_its_first_decay_at_most(updates: int, warmup: int) -> None:
    rate = make_rate(Settings(), updates)
    assert isinstance(rate, Rate)
    assert (rate.warmup, rate.steps.warmup, rate.steps.total) == (warmup, warmup, updates)
