"""The Transformer's task: what its settings become, and how WMT17 is read from text or from the encoded form."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from task_images.contract import Contract
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.precision import LossScale
from task_images.harness.translation.batches import TokenBatches
from task_images.harness.translation.beam import Search
from task_images.harness.translation.pairs import IndexedWriter
from task_images.harness.translation.program import Source
from task_images.wmt17_transformer import data, task
from task_images.wmt17_transformer.data import OFFICIAL, Corpus, read_corpus, validation_arrays, write_dictionary
from task_images.wmt17_transformer.model import Size
from task_images.wmt17_transformer.settings import Settings
from task_images.wmt17_transformer.subtokens import Subtokens, make_dictionary, read_dictionary
from tests.unit.task_images.harness.test_images import one_of

# Whole words a to e; each is one subtoken, so that lengths are easy to see: words and one end mark.
WORDS = make_dictionary(["a b c d e"], 60)
ROOM = 64


def write(folder: Path, **texts: list[str]) -> Path:
    """Files by name, with the language behind two underscores, and the dictionary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dict.en.txt").write_text("".join(f"'{word}'\n" for word in WORDS))
    for name, lines in texts.items():
        (folder / name.replace("__", ".")).write_text("".join(f"{line}\n" for line in lines))
    return folder


TEXTS = {
    "train__en": ["a b", "a b c d", "", "e"],
    "train__de": ["b", "a", "a", "a b c"],
    "test__en": ["a", "a b c"],
    "test__de": ["b b", "d"],
}


def read(folder: Path, longest: int = 4, longest_test: int = 0) -> Corpus:
    return read_corpus(folder, folder / "cache", ROOM, longest, longest_test)


# --- data -----------------------------------------------------------------------------------------------------------


def test_long_and_empty_training_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    corpus = read(write(tmp_path, **TEXTS))
    assert (len(corpus.train), corpus.train.left_out) == (2, {"too long": 1, "empty": 1})
    decode = corpus.subtokens.decode
    assert [decode(corpus.train.source.sentence(index)) for index in range(2)] == ["a b", "e"]
    assert [decode(corpus.train.target.sentence(index)) for index in range(2)] == ["b", "a b c"]
    assert corpus.read == {"training pairs": 4, "test pairs": 2}
    assert (corpus.references, corpus.reference) == (["b b", "d"], "test.de")
    # Five with its end is one too many, four is not.
    assert len(read(tmp_path, longest=5).train) == 3


@pytest.mark.parametrize(("longest", "references"), [(0, ["b b", "d"]), (4, ["b b", "d"]), (3, ["b b"]), (2, [])])
def test_test_pairs_may_be_limited_with_their_references(tmp_path: Path, longest: int, references: list[str]) -> None:
    corpus = read(write(tmp_path, **TEXTS), longest_test=longest)
    assert corpus.references == references
    assert len(corpus.test) == len(references)
    assert corpus.read["test pairs"] == 2  # before any was left out


def test_only_as_many_pairs_as_were_published_are_official(tmp_path: Path) -> None:
    corpus = read(write(tmp_path, **TEXTS))
    found = corpus.identify()
    assert (found.counts, found.official) == ({"training pairs": 4, "test pairs": 2}, False)
    assert str(found.digest).startswith("sha256:")
    whole = Corpus(corpus.subtokens, corpus.train, corpus.test, [], "", OFFICIAL).identify()
    assert (whole.official, whole.digest) == (True, found.digest)
    assert OFFICIAL == {"training pairs": 4_590_101, "test pairs": 3003}


def write_encoded(folder: Path, name: str, *languages: list[list[int]]) -> None:
    with ExitStack() as stack:
        for language, sentences in zip(("en", "de"), languages, strict=True):
            writer = IndexedWriter(folder / f"{name}.en-de.{language}", ROOM, stack)
            for sentence in sentences:
                writer.add(sentence)
            writer.finish()


def test_the_encoded_form_comes_before_text_and_is_decoded_for_references(tmp_path: Path) -> None:
    write(tmp_path, **TEXTS)
    (tmp_path / "test.de").unlink()
    subtokens = read_dictionary(tmp_path / "dict.en.txt", ROOM)
    for name, length in (("train", 1), ("test", 2)):
        sentences = [subtokens.encode("c " * number + "c") for number in range(length)]
        write_encoded(tmp_path, name, sentences, sentences)
    corpus = read(tmp_path)
    assert (len(corpus.train), len(corpus.test)) == (1, 2)
    assert (corpus.references, corpus.reference) == (["c", "c c"], "decoded from the test pairs")
    (tmp_path / "test.de").write_text("one\n")
    with pytest.raises(EnvironmentUnfitError, match=r"test\.de has 1 lines, but there are 2 test pairs"):
        read(tmp_path)
    (tmp_path / "test.de").write_text("one\ntwo\n")
    assert (read(tmp_path).references, read(tmp_path).reference) == (["one", "two"], "test.de")


@pytest.mark.parametrize("name", ["train", "test"])
def test_numbers_beyond_the_vocabulary_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, **TEXTS)
    write_encoded(tmp_path, name, [[3, ROOM - 1, 2]], [[ROOM, 2]])
    words = {"train": "the training data in", "test": "the test data in"}[name]
    with pytest.raises(EnvironmentUnfitError, match=f"{words} .* has the word number 64, but the vocabulary holds 64"):
        read(tmp_path)


def test_encoded_sides_are_english_and_german(tmp_path: Path) -> None:
    write(tmp_path, **TEXTS)
    write_encoded(tmp_path, "train", [[5, 2]], [[6, 7, 2]])
    corpus = read(tmp_path)
    assert (corpus.train.source.sentence(0), corpus.train.target.sentence(0)) == ([5, 2], [6, 7, 2])


def test_a_sub_folder_comes_before_the_folder_itself(tmp_path: Path) -> None:
    write(tmp_path, **TEXTS)
    write(tmp_path / "wmt17", **{**TEXTS, "test__en": ["a"], "test__de": ["e"]})
    assert read(tmp_path).references == ["e"]
    assert [part.tolist() for part in validation_arrays(tmp_path)] == [["a"], ["e"]]
    assert [part.tolist() for part in validation_arrays(tmp_path / "wmt17")] == [["a"], ["e"]]


@pytest.mark.parametrize("name", ["train", "test"])
def test_missing_text_is_named_with_both_forms(tmp_path: Path, name: str) -> None:
    write(tmp_path, **TEXTS)
    (tmp_path / f"{name}.en").unlink()
    with pytest.raises(EnvironmentUnfitError, match=rf"neither {name}\.en-de\.en\.idx nor {name}\.en in") as caught:
        read(tmp_path)
    assert str(caught.value.hint).startswith("mlbench data prepare wmt17_transformer fetches")


def test_a_dictionary_is_made_of_both_languages(tmp_path: Path) -> None:
    write(tmp_path, train__en=["x x"], train__de=["y"])
    write_dictionary(tmp_path, 40)
    lines = (tmp_path / "dict.en.txt").read_text().splitlines()
    assert lines[:2] == ["'<pad>_'", "'<EOS>_'"]
    assert {"'x'", "'y'", "'x_'", "'y_'"} <= set(lines)
    assert lines.index("'x_'") < lines.index("'y_'")  # the more frequent first
    assert len(lines) <= 40


def test_a_sub_folder_is_prepared_where_it_is(tmp_path: Path) -> None:
    write(tmp_path / "wmt17", **TEXTS)
    (tmp_path / "wmt17" / "dict.en.txt").unlink()
    found = data.prepare_data(tmp_path, {"vocabulary": ROOM, "longest": 4, "longest_test": 0})
    assert found.counts == {"training pairs": 4, "test pairs": 2}
    assert (tmp_path / "wmt17" / "dict.en.txt").is_file()


@pytest.mark.parametrize("missing", ["train.en", "train.de", "test.en", "test.de", None])
def test_text_is_fetched_only_if_some_of_it_is_missing(
    tmp_path: Path, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with all four texts and without a dictionary gets one; a folder with a dictionary is only encoded."""
    done: list[Any] = []
    write(tmp_path, **TEXTS)
    (tmp_path / "dict.en.txt").unlink()
    if missing:
        (tmp_path / missing).unlink()

    def join(folder: Path, parts: Any, out: Path, name: str, say: Any) -> None:
        done.append((name, len(parts)))
        write(tmp_path, **TEXTS)
        (tmp_path / "dict.en.txt").unlink()

    monkeypatch.setattr(data, "fetch_published", lambda published, folder, say: done.append(published.name))
    monkeypatch.setattr(data, "join_parts", join)
    parameters = {"vocabulary": ROOM, "longest": 4, "longest_test": 0}
    found = data.prepare_data(tmp_path, parameters)
    assert found.counts == {"training pairs": 4, "test pairs": 2}
    assert done[1:] == ([("train", 3), ("test", 1)] if missing else [])
    done.clear()
    assert data.prepare_data(tmp_path, parameters) == found
    assert done == []


# --- subtokens ------------------------------------------------------------------------------------------------------

SUBTOKENS = Subtokens(make_dictionary(["ab cd, e"], 40), 64)


@pytest.mark.parametrize(
    "text",
    [" ab", "ab ", " ab cd ", "ab  cd", " ", "  ", "ab,cd", "ab, cd", "½ ab", "\\u", "a_b", "\\", "_", "\\9;", "é"],
)
def test_blanks_and_escapes_survive(text: str) -> None:
    assert SUBTOKENS.decode(SUBTOKENS.encode(text)) == text


def numbers_of(*pieces: str) -> list[int]:
    known = ["", *make_dictionary(["ab cd, e"], 40)]
    return [known.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("\\97;", "a"),
        ("\\1114111;", chr(0x10FFFF)),  # the last of Unicode
        ("\\1114112;", "〓"),
        ("\\12345678;", "〓"),
        ("\\u", "_"),
        ("\\\\", "\\"),
        ("\\x", "\\x"),
    ],
)
def test_codes_beyond_unicode_become_a_mark(written: str, text: str) -> None:
    """As in Tensor2Tensor, which shows them as a geta mark."""
    known = Subtokens(["<pad>_", "<EOS>_", *"\\_u;0123456789x"], 32)
    numbers = [["", "<pad>_", "<EOS>_", *"\\_u;0123456789x"].index(letter) for letter in written]
    assert known.decode(numbers) == text


def test_numbers_without_a_subtoken_count_as_nothing() -> None:
    [word] = numbers_of("ab_")
    assert SUBTOKENS.decode([0, 1, 2, word, 63, 2]) == "ab"
    assert SUBTOKENS.decode_as_original([0, 1, 2, word, 63, 2]) == "ab"
    assert SUBTOKENS.decode([word, word]) == "ab ab"  # the blank between words is implied


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        ("well , yes .", "well, yes."),
        ("now ! why ?", "now! why?"),
        ("it ' s", "it's"),
        ("well - known", "well-known"),
        ("a ; b", "a ; b"),
    ],
)
def test_the_original_puts_only_some_punctuation_back(text: str, decoded: str) -> None:
    known = Subtokens(make_dictionary(text.split(), 80), 80)
    numbers = [known.encode(word)[0] for word in text.split()]
    assert known.decode_as_original(numbers) == decoded


@pytest.mark.parametrize(("room", "is_enough"), [(41, True), (40, False)])
def test_a_dictionary_may_fill_the_models_room_but_for_the_unused_zero(room: int, is_enough: bool) -> None:
    words = ["<pad>_", "<EOS>_", *(f"w{number}_" for number in range(38))]
    if is_enough:
        assert Subtokens(words, room).size == room
        return
    with pytest.raises(EnvironmentUnfitError, match="holds 40 subtokens, the model has room for 39") as caught:
        Subtokens(words, room)
    assert caught.value.hint == "Run with --set vocabulary=48."


def test_a_made_dictionary_has_all_characters_before_frequent_words_and_keeps_to_its_size() -> None:
    made = make_dictionary(["ab ab cd, (", "a_b"], 100)
    letters = sorted({*"abcd,( ", *"\\_u;0123456789"})
    # No "__": an end mark inside a subtoken would be read as an end.
    assert made == ["<pad>_", "<EOS>_", *letters, "ab_", "cd_", "a_", "b_"]
    assert make_dictionary(["ab ab cd, (", "a_b"], 10) == made[:10]


def test_subtokens_have_at_least_one_letter_between_their_quotes(tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_text("'<pad>_'\n'<EOS>_'\n'a'\n'_'\n")
    assert read_dictionary(path, 20).encode("a") == [3, 4, 2]
    for line in ("''", "a'", "'a", "'"):
        path.write_text(f"'<pad>_'\n'<EOS>_'\n{line}\n")
        with pytest.raises(EnvironmentUnfitError, match=r"line 3 of .* is not a subtoken in single quotes"):
            read_dictionary(path, 16)


# --- the task -------------------------------------------------------------------------------------------------------


def make_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, **options: (list(parameters), options))
    made = {
        "vocabulary": ROOM, "width": 8, "inner": 12, "layers": 1, "heads": 2, "global_batch": 64, "largest_pass": 16,
    }  # fmt: skip
    world = one_of(1, 2)
    world.contract = Contract({"WORLD_SIZE": "2", "RANK": "1", "MLBENCH_SEED": "3"})
    return task.make_task(Settings(**{**made, **settings}), world, read(write(tmp_path, **TEXTS)))


def test_settings_become_a_model_and_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_task(
        tmp_path, monkeypatch, dropout=0.1, attention_dropout=0.2, inner_dropout=0.3, beam=3, length_power=0.7,
        learning_rate=0.5, warmup_updates=100, loss_scale=64.0, loss_scale_window=9,
    )  # fmt: skip
    assert made.name == "wmt17_transformer"
    assert made.model.size == Size(8, 12, 1, 2, 0.1, 0.2, 0.3)
    assert (made.model.padding, made.padding, len(made.model.embedding)) == (1, 1, ROOM)
    # Vaswani et al. 2017, section 5.3.
    learned, options = made.make_optimizer(made.model)
    assert options == {"lr": 0.0, "betas": (0.9, 0.98), "eps": 1e-9, "fused": True}
    assert len(learned) == len(list(made.model.parameters()))
    assert [made.learning_rate(update) for update in (0, 50, 100, 400)] == pytest.approx([0.0, 0.25, 0.5, 0.25])
    assert made.search == Search(3, 2, 2, 0.7, early_stop=True, never=(0, 1))
    assert (made.divide_by, made.clip) == ("tokens", None)
    assert made.loss_scale == LossScale(64.0, window=9)
    assert made.identity == {"vocabulary": ROOM, "network": [8, 12, 1, 2]}
    assert isinstance(made.batches, TokenBatches)
    assert made.batches.steps == -(-made.batches.count_passes() // 4)  # 64 positions in passes of 16
    assert (made.references, made.reference) == (["b b", "d"], "test.de")
    assert made.text(made.test.target.sentence(0)) == "b b"


@pytest.mark.parametrize(("most", "limits"), [(0, [53, 60]), (55, [53, 55]), (3, [3, 3])])
def test_a_translation_may_be_longer_than_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, limits: list[int]
) -> None:
    made = make_task(tmp_path, monkeypatch, translation_extra=50, longest_translation=most)
    assert made.limit(torch.tensor([3, 10])).tolist() == limits


def test_the_originals_score_is_of_lower_case_text_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def score(hypotheses: list[str], references: list[str]) -> float:
        seen.append((hypotheses, references))
        return 100.0 if hypotheses == references else 0.0

    monkeypatch.setattr(task, "tokenized_bleu", score)
    monkeypatch.setattr(task, "split_punctuation", lambda text: f"<{text}>")
    made = make_task(tmp_path, monkeypatch, evaluation_batch=1)
    right, other = (made.test.target.sentence(index) for index in range(2))
    assert made.legacy_bleu([right, right]) == 50.0
    assert seen == [(["<b b>"], ["<b b>"]), (["<b b>"], ["<d>"])]
    assert made.legacy_bleu([right, other]) == 100.0


def test_a_run_reads_its_corpus_by_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(task, "train", lambda *words: given.extend(words))
    monkeypatch.setattr(task, "need", given.append)
    monkeypatch.setattr(task, "read_corpus", lambda *words: words)
    sample: list[Any] = []
    monkeypatch.setattr(task, "write_sample", lambda folder, **options: sample.append((folder, options)))
    monkeypatch.setattr(task, "write_dictionary", lambda folder, size: sample.append((folder, size)))
    contract = Contract({"MLBENCH_PARAMETERS": json.dumps({"vocabulary": 99, "longest": 7, "longest_test": 5})})
    task.main(contract)
    package, same, settings, source, make = given
    assert (package, same, settings.vocabulary, make) == ("sacrebleu", contract, 99, task.make_task)
    assert isinstance(source, Source)
    assert (source.name, source.identify) == ("WMT17", Corpus.identify)
    assert source.read(tmp_path, tmp_path / "cache") == (tmp_path, tmp_path / "cache", 99, 7, 5)
    assert source.write_sample(tmp_path, 4) == tmp_path
    assert sample == [(tmp_path, {"train": 4000, "test": 100, "seed": 4}), (tmp_path, 98)]  # 0 is unused
