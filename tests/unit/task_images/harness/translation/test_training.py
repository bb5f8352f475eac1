"""Translation with a model whose scores are given: updates, losses, shares of ranks, and where data come from."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from task_images.contract import Contract
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.identity import DataIdentity
from task_images.harness.precision import LossScale, Precision
from task_images.harness.settings import Protocol, TranslationSettings
from task_images.harness.translation import training as module
from task_images.harness.translation.batches import SentenceBatches, TokenBatches, fill_batches
from task_images.harness.translation.beam import Search
from task_images.harness.translation.pairs import Pairs, Side
from task_images.harness.translation.program import Source
from task_images.harness.translation.training import (
    PairBatches,
    TranslationValidator,
    TranslationWork,
    collate,
    gather_sentences,
    make_plan,
    sum_loss,
)
from task_images.harness.updates import Passes
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

PADDING, END, WORDS = 1, 2, 12


def make_side(*sentences: list[int]) -> Side:
    lengths = np.array([len(one) for one in sentences])
    return Side(np.concatenate(sentences), np.cumsum(lengths) - lengths, lengths)


SOURCES = [[5, 6, END], [7, END], [8, 9, 10, END], [4, END], [6, 5, 4, 3, END]]
PAIRS = Pairs(make_side(*SOURCES), make_side(*([number + 1 for number in one[:-1]] + [END] for one in SOURCES)))


class Copying(nn.Module):
    """Translates by adding one to each word: certain of what it says, and of the end after the last word."""

    def __init__(self, certainty: float = 9.0) -> None:
        super().__init__()
        self.certainty = certainty

    def _expect(self, source: Tensor, place: int) -> Tensor:
        words = source[:, place] if place < source.shape[1] else torch.full((len(source),), END)
        wanted = torch.where((words == END) | (words == PADDING), END, words + 1)
        return self.certainty * nn.functional.one_hot(wanted, WORDS).float()

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        return torch.stack([self._expect(source, place) for place in range(target.shape[1])], 1)

    def scores(self, features: Tensor) -> Tensor:
        return features

    def begin(self, source: Tensor, lengths: Tensor) -> dict[str, Any]:
        return {"source": source, "place": 0}

    def step(self, words: Tensor, state: dict[str, Any]) -> tuple[Tensor, None]:
        found = self._expect(state["source"], state["place"])[:, None].expand(-1, words.shape[1], -1).clone()
        state["place"] += 1
        return found, None

    def select(self, state: dict[str, Any], sentences: Tensor, beams: Tensor) -> dict[str, Any]:
        return {"source": state["source"][sentences], "place": state["place"]}


def make_task(divide_by: str = "tokens", ranks: int = 1, rank: int = 0, **settings: Any) -> Any:
    made = replace(TranslationSettings(), **{"evaluation_batch": 2, "label_smoothing": 0.1, **settings})
    return SimpleNamespace(
        settings=made,
        model=Copying(),
        train=PAIRS,
        test=PAIRS,
        batches=SentenceBatches(PAIRS, Passes(1, 2), ranks, rank, seed=1),
        padding=PADDING,
        search=Search(2, END, END, never=(PADDING,)),
        divide_by=divide_by,
        limit=lambda lengths: lengths + 3,
        text=lambda words: " ".join(f"w{word}" for word in words),
        references=[" ".join(f"w{word + 1}" for word in one[:-1]) for one in SOURCES],
        legacy_bleu=lambda found: 12.0 + len(found),
    )


def alone() -> World:
    return World(Contract({}), torch.device("cpu"), 1, grouped=False)


# --- updates and losses ---------------------------------------------------------------------------------------------


def test_a_loss_is_divided_by_what_the_task_says() -> None:
    totals = {}
    for divide_by in ("tokens", "sentences", "own_sentences"):
        task = make_task(divide_by, ranks=2, rank=1)
        batches = PairBatches(task)
        assert batches.count(1) == 2
        found = [
            (update.total, update.samples, update.count, update.first, update.weight) for update in batches.updates(1)
        ]
        totals[divide_by] = [total for total, *_ in found]
        # Five pairs in passes of two: four in the first update, two of them here, and one in the last, which is not.
        assert [rest for _, *rest in found] == [[4, 1, 1, 1.0], [1, 0, 1, 1.0]]
    assert totals["sentences"] == [4, 1]
    assert totals["own_sentences"] == [2, 1]
    assert sum(totals["tokens"]) == int(PAIRS.target.lengths.sum())
    [first, *_] = PairBatches(make_task()).updates(1)
    [batch] = first.passes
    assert batch.target[:, 0].tolist() == [END] * 2
    assert len(list(PairBatches(make_task()).updates(1, begin=2))) == 1


def test_the_loss_is_the_smoothed_cross_entropy_of_words_without_padding() -> None:
    task, world = make_task(label_smoothing=0.25), alone()
    batch = collate(PAIRS, np.array([0, 4]), PADDING, END)
    work = TranslationWork(world, task)
    outputs = work.forward(task.model, work.prepare(batch))
    logs = outputs.log_softmax(-1)
    total = 0.0
    for row, index in enumerate((0, 4)):
        for place, word in enumerate(PAIRS.target.sentence(index)):
            total -= 0.75 * float(logs[row, place, word]) + 0.25 * float(logs[row, place].mean())
    loss = work.loss(outputs, batch)
    assert float(loss.value) == pytest.approx(total, rel=1e-5)
    assert loss.weight == batch.words == 8
    assert float(loss.mean) == pytest.approx(total / 8, rel=1e-5)
    assert float(sum_loss(task, outputs, batch, 0.0)) < total


def test_validations_come_several_times_an_epoch() -> None:
    settings = replace(
        TranslationSettings(), epochs=3, budget_seconds=9.0, validation_share=0.25, report_every=7, checkpoint_every=11,
        resume="c", blocks_after=1, blocks=2, block_updates=3,
    )  # fmt: skip
    plan = make_plan(settings, 101)
    assert (plan.epochs, plan.budget, plan.validate_every, plan.loss_every) == (3, 9.0, 25, 7)
    assert (plan.checkpoint_every, plan.resume, plan.protocol) == (11, "c", Protocol(1, 2, 3))
    assert make_plan(replace(settings, validation_share=0.01), 20).validate_every == 1


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_translate_their_shares_and_score_them_together(size: int) -> None:
    certain = torch.zeros(WORDS)
    certain[0] = 9.0
    expected = -float(certain.log_softmax(0)[0])

    def body(world: ThreadWorld) -> Any:
        validator = TranslationValidator(world, make_task(), Precision("fp32", world.device))
        return validator(1), dict(validator.facts())

    for rank, (values, facts) in enumerate(run_ranks(size, body)):
        assert values == pytest.approx(
            {"loss": expected, "BLEU-Score": 100.0, "bleu_cased": 100.0, "bleu_lowercased": 100.0, "legacy_bleu": 17.0},
            rel=1e-4,
        )
        if rank:
            assert facts == {}
            continue
        assert facts["samples"] == [{"translation": text, "reference": text} for text in make_task().references]
        assert (facts["bleu_cased"], facts["legacy_bleu"]) == (pytest.approx(100.0), 17.0)


def test_sentences_of_all_ranks_come_back_by_number() -> None:
    own = [{0: [5, 6], 3: []}, {1: [7]}, {2: [8, 9, 10]}]

    def body(world: ThreadWorld) -> list[list[int]]:
        return gather_sentences(world, own[world.rank], 4)

    assert run_ranks(3, body) == [[[5, 6], [7], [8, 9, 10], []]] * 3
    assert gather_sentences(alone(), {}, 0) == []


@pytest.mark.parametrize(("device", "wire"), [("cpu", "fp32"), ("cuda", "fp16")])
def test_a_training_is_described_in_its_result(device: str, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 is computed and sent on GPUs only; the norm is measured even without a limit."""
    made: list[Any] = []
    world: Any = World(Contract({"MLBENCH_SEED": "9"}), torch.device(device), 1, grouped=False)

    def make(*words: Any, **options: Any) -> Any:
        made.append((words, options))
        return SimpleNamespace(run=lambda: made.append("run"))

    monkeypatch.setattr(module, "Trainer", make)
    monkeypatch.setattr(module, "prepare_strategy", lambda world, make: make())
    for clip in (None, 5.0):
        task = make_task(goal_bleu="cased", global_batch=64)
        task.name, task.make_optimizer, task.learning_rate = "a_task", None, lambda update: 0.5
        task.reference, task.identity, task.clip, task.loss_scale = "test.de", {"vocabulary": 12}, clip, LossScale(8.0)
        task.model.weight = nn.Parameter(torch.zeros(7))
        made.clear()
        goal: Any = "the goal"
        module.train_translation(world, "report", task, goal)  # type: ignore[arg-type]
        (words, options), run = made
        assert run == "run"
        assert words[0] is world
        assert isinstance(words[2], PairBatches)
        assert words[3].rate(3) == 0.5
        assert words[4] == make_plan(task.settings, 3)
        assert options["details"] == {
            "parameters": 7,
            "pairs": 5,
            "left_out": {},
            "test_pairs": 5,
            "test_left_out": {},
            "updates_per_epoch": 3,
            "padding_share": task.batches.padding(1),
            "reference": "test.de",
            "goal_bleu": "cased",
            "wire": wire,
        }
        assert options["identity"] == {"vocabulary": 12, "global_batch": 64, "seed": 9}
        assert (options["name"], options["goal"], options["unit"].name) == ("a_task", "the goal", "sentences")
        assert options["clip"] == (math.inf if clip is None else 5.0)
        assert options["precision"].factor == (8.0 if device == "cuda" else 1.0)
        assert options["closing"] == options["validate"].facts


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "budget", "sizes"),
    [
        ([1, 1, 1, 1], 32, [4]),  # up to four sentences count eight positions each
        ([1, 1, 1, 1], 31, [3, 1]),
        ([1] * 5, 10, [1] * 5),
        ([3] * 16, 64, [16]),  # 16 x 4
        ([3] * 16, 63, [12, 4]),
        ([8] * 8, 64, [8]),
        ([9] * 8, 64, [4, 4]),
        ([40, 2, 2], 32, [1, 2]),
        ([], 32, []),
    ],
)
def test_runs_have_as_many_sentences_as_fit(lengths: list[int], budget: int, sizes: list[int]) -> None:
    runs = fill_batches(np.arange(len(lengths)), np.array(lengths, np.int64), budget)
    assert [len(run) for run in runs] == sizes
    assert [int(number) for run in runs for number in run] == list(range(len(lengths)))


def test_padding_is_the_share_of_positions_without_a_word() -> None:
    batches = SentenceBatches(PAIRS, Passes(1, 5), 1, 0, seed=1)
    # All five together: 16 words of 25 positions on each side.
    assert batches.padding(1) == pytest.approx(1 - 16 / 25)
    assert SentenceBatches(PAIRS, Passes(1, 1), 1, 0, seed=1).padding(1) == 0.0


def test_sentences_of_one_length_share_a_pass() -> None:
    """Sorted by source, then by target: 2, 2, 3, 4, 5 words."""
    batches = TokenBatches(PAIRS, Passes(1, 16), 1, 0, seed=1)
    passes = sorted(sorted(PAIRS.source.lengths[list(members)].tolist()) for members in batches.list_passes(1))
    assert passes == [[2, 2], [3, 4], [5]]


# --- where data come from -------------------------------------------------------------------------------------------


def make_source(read: list[Any]) -> Source[str]:
    def write_sample(folder: Path, seed: int) -> Path:
        (folder / "made").mkdir()
        read.append(("made", folder.is_dir(), seed))
        return folder / "made"

    def load(files: Path, cache: Path) -> str:
        read.append((files, cache, files.is_dir()))
        return "corpus"

    return Source("WMT99", write_sample, load, lambda corpus: DataIdentity())


def test_generated_sentences_are_read_from_a_folder_that_does_not_stay() -> None:
    read: list[Any] = []
    assert make_source(read).load(True, Contract({"MLBENCH_SEED": "9"})) == "corpus"
    made, (files, cache, is_there) = read
    assert made == ("made", True, 9)
    assert (files.parent, is_there) == (cache, True)
    assert not cache.exists()


def test_a_corpus_is_in_the_data_folder(tmp_path: Path) -> None:
    read: list[Any] = []
    source = make_source(read)
    assert source.load(False, Contract({"MLBENCH_DATA_DIR": str(tmp_path)})) == "corpus"
    assert read == [(tmp_path, tmp_path, True)]
    with pytest.raises(EnvironmentUnfitError, match="no folder with WMT99 was given"):
        source.load(False, Contract({}))
