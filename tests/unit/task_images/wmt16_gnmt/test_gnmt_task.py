"""GNMT's task: what its settings become, how WMT16 is read from text or from the prepacked file, and byte pairs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task_images.contract import Contract
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.precision import LossScale
from task_images.harness.translation.batches import SentenceBatches
from task_images.harness.translation.beam import Search
from task_images.harness.translation.program import Source
from task_images.wmt16_gnmt import data, prepare, task
from task_images.wmt16_gnmt.bpe import BytePairs, learn, read_codes, undo, write_codes
from task_images.wmt16_gnmt.data import OFFICIAL, Corpus, read_corpus, validation_arrays
from task_images.wmt16_gnmt.model import Size
from task_images.wmt16_gnmt.prepare import LONGEST, TEST, TRAIN
from task_images.wmt16_gnmt.settings import Settings
from task_images.wmt16_gnmt.task import Rate, make_rate
from tests.unit.task_images.harness.test_images import one_of

START, END = 2, 3
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


def test_limits_count_both_marks_and_targets_lose_their_start(tmp_path: Path) -> None:
    corpus = read(write(tmp_path))
    assert (len(corpus.train), corpus.train.left_out) == (2, {"too long": 1, "empty": 1})
    assert corpus.train.source.sentence(0) == [START, 4, 5, END]
    assert corpus.train.target.sentence(0) == [5, END]
    assert corpus.train.target.sentence(1) == [4, 8, 6, END]
    assert corpus.test.target.sentence(1) == [7, END]
    assert corpus.read == {"training pairs": 4, "test pairs": 2}
    assert corpus.vocabulary.size == 16  # nine words and marks, to a multiple of eight
    assert not corpus.is_prepacked
    assert len(read(tmp_path, longest=6).train) == 3


def test_references_are_as_written_or_put_together(tmp_path: Path) -> None:
    corpus = read(write(tmp_path))
    assert corpus.references == corpus.texts == ["b eb", "d"]
    assert corpus.reference == "put together from the test pairs"
    (tmp_path / "newstest2014.de").write_text("B, eb!\nD.\n")
    written = read(tmp_path)
    assert (written.texts, written.references) == (["b eb", "d"], ["B, eb!", "D."])
    assert written.reference == "newstest2014.de"
    (tmp_path / "newstest2014.de").write_text("D.\n")
    with pytest.raises(EnvironmentUnfitError, match=r"newstest2014\.de has 1 lines, but there are 2 test pairs"):
        read(tmp_path)


@pytest.mark.parametrize(("longest", "kept"), [(0, [0, 1]), (5, [0, 1]), (4, [])])
def test_test_pairs_may_be_limited_with_their_references(tmp_path: Path, longest: int, kept: list[int]) -> None:
    """Both pairs have a side of three words and two marks."""
    corpus = read(write(tmp_path, **{"newstest2014.de": ["B", "D"]}), longest_test=longest)
    assert corpus.references == [["B", "D"][index] for index in kept]
    assert corpus.texts == [["b eb", "d"][index] for index in kept]
    assert len(corpus.test) == len(kept)
    assert corpus.read["test pairs"] == 2


def write_prepacked(path: Path, pairs: list[tuple[list[int], list[int]]], words: int, width: int = 6) -> None:
    """Header, lengths, offset, and rows of source and target side by side."""
    numbers = np.zeros((len(pairs), 2, width), "<i2")
    for row, pair in zip(numbers, pairs, strict=True):
        for side, sentence in zip(row, pair, strict=True):
            side[: len(sentence)] = sentence
    lengths = [np.array([len(pair[side]) for pair in pairs], "<i8") for side in (0, 1)]
    offset = 8 * (5 + 2 * len(pairs))
    header = np.array([len(pairs), words, 0, width], "<i8")
    path.write_bytes(header.tobytes() + b"".join(one.tobytes() for one in lengths) + offset.to_bytes(8, "little"))
    with path.open("ab") as file:
        file.write(numbers.tobytes())


def test_a_prepacked_file_comes_before_text_and_cannot_be_known_as_official(tmp_path: Path) -> None:
    write(tmp_path)
    write_prepacked(tmp_path / f"{TRAIN}.bin", [([2, 4, 3], [2, 5, 3])], 16)
    corpus = read(tmp_path)
    assert (len(corpus.train), corpus.is_prepacked) == (1, True)
    assert corpus.train.target.sentence(0) == [5, END]
    assert corpus.identify().official is False  # two test pairs are not those of newstest2014
    whole = Corpus(
        corpus.vocabulary, corpus.train, corpus.test, [], [], "", {**corpus.read, "test pairs": 3003}, is_prepacked=True
    ).identify()
    assert (whole.official, whole.reason) == (None, "a prepacked file does not say what was left out of it")
    text = Corpus(corpus.vocabulary, corpus.train, corpus.test, [], [], "", OFFICIAL, is_prepacked=False).identify()
    assert (text.official, text.reason) == (True, None)


@pytest.mark.parametrize(("name", "words"), [(TRAIN, "the training data in"), (TEST, "the test data in")])
def test_numbers_beyond_the_vocabulary_are_refused(tmp_path: Path, name: str, words: str) -> None:
    write(tmp_path)
    write_prepacked(tmp_path / f"{name}.bin", [([2, 15, 3], [2, 16, 3])], 16)
    with pytest.raises(EnvironmentUnfitError, match=f"{words} .* has the word number 16, but the vocabulary holds 16"):
        read(tmp_path)


def test_a_sub_folder_is_prepared_where_it_is(tmp_path: Path) -> None:
    write(tmp_path / "wmt16")
    found = data.prepare_data(tmp_path, {"longest": 5, "longest_test": 0})
    assert found.counts == {"training pairs": 4, "test pairs": 2}


def test_a_sub_folder_comes_before_the_folder_itself(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path / "wmt16", **{f"{TEST}.en": ["a"], f"{TEST}.de": ["c"]})
    assert read(tmp_path).texts == ["c"]
    for language, line in (("en", "One."), ("de", "Eins.")):
        (tmp_path / "wmt16" / "raw").mkdir(exist_ok=True)
        (tmp_path / "wmt16" / "raw" / f"newstest2014.{language}").write_text(f"{line}\n")
    assert [part.tolist() for part in validation_arrays(tmp_path)] == [["One."], ["Eins."]]
    assert [part.tolist() for part in validation_arrays(tmp_path / "wmt16")] == [["One."], ["Eins."]]


@pytest.mark.parametrize("name", [TRAIN, TEST])
def test_missing_text_is_named_with_both_forms(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / f"{name}.en").unlink()
    with pytest.raises(EnvironmentUnfitError, match=f"there is neither {name}.bin nor {name}.en in") as caught:
        read(tmp_path)
    assert str(caught.value.hint).startswith("mlbench data prepare wmt16_gnmt fetches and makes it")


@pytest.mark.parametrize("present", ["subwords", "raw", "nothing", "half"])
def test_what_is_there_is_neither_fetched_nor_cut_again(
    tmp_path: Path, present: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    if present == "subwords":
        write(tmp_path)
    for name in {"raw": ("train", "newstest2014"), "half": ("train",)}.get(present, ()):
        for language in ("en", "de"):
            (tmp_path / "raw").mkdir(exist_ok=True)
            (tmp_path / "raw" / f"{name}.{language}").write_text("a\n")

    def cut(raw: Path, out: Path, merges: int) -> None:
        done.append((raw, merges))
        write(out)

    monkeypatch.setattr(data, "fetch_published", lambda published, folder, say: done.append("fetched"))
    monkeypatch.setattr(data, "join_parts", lambda folder, parts, out, name, say: done.append((name, len(parts), out)))
    monkeypatch.setattr(data, "prepare_text", cut)
    found = data.prepare_data(tmp_path, {"longest": 5, "longest_test": 0})
    assert found.counts == {"training pairs": 4, "test pairs": 2}
    raw = tmp_path / "raw"
    fetched = ["fetched", ("train", 3, raw), ("newstest2014", 1, raw)]
    cut_once = [(raw, 32_000)]
    assert (
        done
        == {
            "subwords": [],
            "raw": cut_once,
            "nothing": [*fetched, *cut_once],
            "half": [*fetched, *cut_once],
        }[present]
    )


# --- cleaning and byte pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_clean"),
    [
        ("", False),
        ("a", True),
        ("word " * LONGEST, True),
        ("word " * (LONGEST + 1), False),
        ("ÿ", True),  # the last of latin-1
        ("Ā", False),
    ],
)
def test_clean_sentences_have_some_words_of_latin_letters(text: str, is_clean: bool) -> None:
    assert prepare._is_clean(text) is is_clean


def test_merges_stop_before_pairs_that_are_too_rare() -> None:
    counts = Counter({"ab": 3, "cd": 2, "ef": 1})
    assert learn(counts, 10) == [("a", "b</w>"), ("c", "d</w>")]
    assert learn(counts, 10, least=3) == [("a", "b</w>")]
    assert learn(counts, 10, least=1) == [("a", "b</w>"), ("c", "d</w>"), ("e", "f</w>")]
    assert learn(counts, 1) == [("a", "b</w>")]
    assert learn(counts, 0) == []
    assert learn({}, 5) == []


def test_of_equally_frequent_pairs_the_greatest_is_merged_first() -> None:
    assert learn({"ab": 2, "cd": 2, "ce": 2}, 3) == [("c", "e</w>"), ("c", "d</w>"), ("a", "b</w>")]


def test_merging_changes_the_counts_of_neighbors() -> None:
    """After x y the pair y z is no more; x y z, twice, is the next."""
    assert learn({"xyz": 2, "xyw": 2, "yz": 1}, 5) == [
        *(("x", "y"), ("xy", "z</w>"), ("xy", "w</w>")),
    ]


def test_a_merge_listed_twice_has_its_first_rank() -> None:
    pairs = BytePairs([("b", "c</w>"), ("a", "b"), ("b", "c</w>")])
    assert pairs.apply("abc") == "a@@ bc"
    assert BytePairs([("a", "b"), ("b", "c</w>")]).apply("abc") == "ab@@ c"
    assert BytePairs([]).apply(" ab  c ") == "a@@ b c"


def test_only_separators_before_a_blank_are_undone() -> None:
    assert undo("lo@@ w e@@ st") == "low est"
    assert undo("lo@@") == "lo"
    assert undo("a@@b c") == "a@@b c"


def test_codes_have_two_symbols_a_line(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    path.write_text("#version: 0.2\na b</w>\n")
    assert read_codes(path).apply("ab") == "ab"
    write_codes(path, [("c", "d"), ("cd", "e</w>")])
    assert path.read_text() == "#version: 0.2\nc d\ncd e</w>\n"
    path.write_text("#version: 0.1\na b</w>\n")
    with pytest.raises(EnvironmentUnfitError, match=r"does not begin with '#version: 0\.2'"):
        read_codes(path)
    path.write_text("#version: 0.2\na b</w>\nab\n")
    with pytest.raises(EnvironmentUnfitError, match=r"line 3 of .* is not a merge of two symbols: 'ab'"):
        read_codes(path)


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


def make_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, **options: (list(parameters), options))
    world = one_of(1, 2)
    world.contract = Contract({"WORLD_SIZE": "2", "RANK": "1", "MLBENCH_SEED": "3"})
    made = {"width": 8, "layers": 2, "global_batch": 4, "largest_pass": 1}
    return task.make_task(Settings(**{**made, **settings}), world, read(write(tmp_path)))


def test_settings_become_a_model_and_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_task(
        tmp_path, monkeypatch, dropout=0.3, initial_range=0.2, beam=3, length_power=0.7, coverage=0.2, clip=2.0,
        loss_scale=64.0, loss_scale_window=9, largest_loss_scale=512.0, epochs=50, longest_translation=7,
    )  # fmt: skip
    assert made.name == "wmt16_gnmt"
    assert (made.model.size, made.model.padding, made.padding) == (Size(8, 2, 0.3, 0.2), 0, 0)
    assert len(made.model.embedding.weight) == 16
    learned, options = made.make_optimizer(made.model)
    assert options == {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True}
    assert len(learned) == len(list(made.model.parameters()))
    assert made.search == Search(3, START, END, 0.7, 0.2, never=(0, START))
    assert made.clip == 2.0
    assert made.loss_scale == LossScale(64.0, window=9, largest=512.0)
    assert made.identity == {"vocabulary": 16, "network": [8, 2]}
    assert isinstance(made.batches, SentenceBatches)
    assert made.batches.steps == 1  # two pairs in an update of four
    assert made.learning_rate.steps.total == 50  # of one update in each of 50 epochs
    assert made.limit(torch.tensor([3, 90])).tolist() == [7, 7]
    assert made.text([5, 8, 6, END]) == "b ec"
    assert made.references == ["b eb", "d"]


@pytest.mark.parametrize(("mean", "divide_by"), [("global", "sentences"), ("local", "own_sentences")])
def test_gradients_are_means_over_all_sentences_or_those_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: str, divide_by: str
) -> None:
    assert make_task(tmp_path, monkeypatch, gradient_mean=mean).divide_by == divide_by


def test_the_originals_score_is_the_mean_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def score(hypotheses: list[str], references: list[str]) -> float:
        seen.append((hypotheses, references))
        return 100.0 if hypotheses == references else 0.0

    monkeypatch.setattr(task, "international_bleu", score)
    made = make_task(tmp_path, monkeypatch, evaluation_batch=1)
    assert made.legacy_bleu([[5, 8, 5, END], [4, END]]) == 50.0
    assert seen == [(["b eb"], ["b eb"]), (["a"], ["d"])]


def test_a_run_reads_its_corpus_by_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(task, "train", lambda *words: given.extend(words))
    monkeypatch.setattr(task, "need", lambda *names: given.append(names))
    monkeypatch.setattr(task, "read_corpus", lambda *words: words)
    contract = Contract({"MLBENCH_PARAMETERS": json.dumps({"longest": 7, "longest_test": 5})})
    task.main(contract)
    packages, same, settings, source, make = given
    assert (packages, same, make) == (("sacrebleu", "sacremoses"), contract, task.make_task)
    assert (settings.longest, settings.longest_test) == (7, 5)
    assert isinstance(source, Source)
    assert (source.name, source.write_sample, source.identify) == (
        *("WMT16", task.write_prepared_sample, Corpus.identify),
    )
    assert source.read(tmp_path, tmp_path / "cache") == (tmp_path, tmp_path / "cache", 7, 5)


def test_generated_sentences_are_prepared_as_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def write_sample(folder: Path, **options: int) -> None:
        done.append(options)
        for name in ("train.en", "train.de", "test.en", "test.de"):
            (folder / name).touch()

    monkeypatch.setattr(task, "write_sample", write_sample)
    monkeypatch.setattr(task, "prepare", lambda *words: done.append(words))
    assert task.write_prepared_sample(tmp_path, 4) == tmp_path / "prepared"
    assert done == [{"train": 4000, "test": 100, "seed": 4}, (tmp_path, tmp_path / "prepared", 600)]
    assert {path.name for path in tmp_path.iterdir()} == {"train.en", "train.de", "newstest2014.en", "newstest2014.de"}
