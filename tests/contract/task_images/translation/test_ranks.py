"""The same training on one rank, with accumulation, and on two: step by step, through a checkpoint, to the end."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.translation.sample import write_sample
from task_images.wmt16_gnmt.data import prepare
from task_images.wmt17_transformer.data import write_dictionary
from tests.contract.task_images.ranks import Ended, Parameters, RankServer

pytestmark = pytest.mark.slow

STREAMS = 8  # of AWD-LSTM, all ranks together
COMMON: Parameters = {"report_every": 1, "epochs": 2, "goal_full": 100.0, "goal_light": 100.0}


def write_words(folder: Path) -> None:
    """Nothing can be learned from this, so the validation loss rises and averaging begins."""
    chance = random.Random(1)
    for split, count in (("train", 1200), ("valid", 200), ("test", 200)):
        words = " ".join(f"word{chance.randrange(50)}" for _ in range(count))
        (folder / f"wiki.{split}.tokens").write_text(f" {words} \n")


def write_pairs(folder: Path) -> None:
    write_sample(folder, train=200, test=6, seed=1)
    write_dictionary(folder, 200)


def write_prepared_pairs(folder: Path) -> None:
    write_sample(folder, train=200, test=6, seed=1)
    for language in ("en", "de"):
        (folder / f"test.{language}").rename(folder / f"newstest2014.{language}")
    prepare(folder, folder / "wmt16", merges=100)


@dataclass(frozen=True)
class Case:
    """A small training; `every`: updates between checkpoints, the last of which is within an epoch."""

    task: str
    write: Callable[[Path], None]
    every: int
    changes: Mapping[str, object]


SMALL = {"longest_translation": 20, "validation_share": 1.0, "evaluation_batch": 4, "width": 16, "warmup_updates": 3}
CASES = {
    "awd_lstm": Case("wikitext2_awd_lstm", write_words, 6, {
        "data": "wikitext-2", "epochs": 4, "goal_full": 1.0, "goal_light": 1.0, "batch_size": 2, "sequence_length": 20,
        "embedding": 12, "hidden": 16, "learning_rate": 5.0, "switch_patience": 1, "warmup_epochs_per_rank": 0.25,
        "validation_streams": 3,
    }),
    "gnmt": Case("wmt16_gnmt", write_prepared_pairs, 5, {
        **SMALL, "data": "wmt16", "global_batch": 32, "largest_pass": 8, "layers": 3, "initial_range": 0.4,
        "learning_rate": 5e-3,
    }),
    "transformer": Case("wmt17_transformer", write_pairs, 5, {
        **SMALL, "data": "wmt17", "vocabulary": 208, "global_batch": 1024, "largest_pass": 256, "inner": 32,
        "layers": 2, "heads": 2, "learning_rate": 1e-3,
    }),
}  # fmt: skip


def train(ranks: RankServer, case: Case, size: int, folder: Path, data: Path, **more: object) -> Ended:
    """Rank 0 of the training."""
    folder.mkdir()
    passes = {"accumulation": STREAMS // 2 // size} if case.task == "wikitext2_awd_lstm" else {}
    parameters = load_task(case.task).resolve("tiny", {**COMMON, **case.changes, **passes, **more})
    ended = ranks.run(f"task_images.run {case.task}", size, folder, parameters, MLBENCH_DATA_DIR=str(data))
    assert [one.code for one in ended] == [0] * size, [one.stderr[-3000:] for one in ended]
    return ended[0]


@dataclass
class Runs:
    name: str
    alone: Ended
    together: Ended
    resumed: Ended


# By day, the Transformer alone.
PARAMS = {name: pytest.param(name, marks=pytest.mark.nightly) for name in ("awd_lstm", "gnmt")}
PARAMS["transformer"] = pytest.param("transformer")


@pytest.fixture(scope="module", params=PARAMS.values())
def runs(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    data = folder / "data"
    data.mkdir()
    case.write(data)
    alone = train(ranks, case, 1, folder / "alone", data, checkpoint_every=case.every)
    [kept] = (folder / "alone" / "output-0" / "checkpoints").iterdir()
    together = train(ranks, case, 2, folder / "together", data)
    return Runs(request.param, alone, together, train(ranks, case, 2, folder / "resumed", data, resume=str(kept)))


def of(*names: str) -> pytest.MarkDecorator:
    """Of these tasks only."""
    return pytest.mark.parametrize("runs", [PARAMS[name] for name in names], indirect=True)


def losses(ended: Ended) -> dict[int, float]:
    """By update."""
    return {event["step"]: event["value"] for event in ended.events("metric") if event["name"] == "train_loss"}


def test_two_ranks_train_as_one_with_accumulation_does_dropout_included(runs: Runs) -> None:
    alone, together = losses(runs.alone), losses(runs.together)
    assert len(alone) >= 10
    assert together == pytest.approx(alone, rel=2e-4)
    validated = [ended.metric("val_global_loss") for ended in (runs.together, runs.alone)]
    assert validated[0] == pytest.approx(validated[1], rel=2e-4)
    assert runs.together.result["samples"] == runs.alone.result["samples"]


def test_training_changes_the_model(runs: Runs) -> None:
    found = list(losses(runs.alone).values())
    assert len(set(found)) == len(found)
    if runs.name != "awd_lstm":  # whose text is random words
        assert sum(found[-3:]) < sum(found[:3]) - 0.05
        assert runs.alone.result["details"]["updates_skipped"] == 0


@pytest.mark.nightly
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(runs: Runs) -> None:
    """The checkpoint is one rank's, from the middle of an epoch; those that go on are two."""
    whole, resumed = runs.together, runs.resumed
    at = resumed.result["details"]["resumed"]["updates"]
    steps = len(losses(whole)) // len(whole.metric("val_global_loss"))
    assert at % steps != 0, "the checkpoint is from the end of an epoch"
    expected = {step: loss for step, loss in losses(whole).items() if step > at}
    assert losses(resumed) == pytest.approx(expected, rel=2e-4)
    # The clock goes on, and so do the counts: a resumed run takes no less than what it resumes had taken.
    assert resumed.result["updates"] == whole.result["updates"]
    assert resumed.result["samples"] == whole.result["samples"]


@of("awd_lstm")
def test_averaged_sgd_survives_a_checkpoint(runs: Runs) -> None:
    whole, resumed = runs.together, runs.resumed
    assert whole.result["details"]["averaged_from_epoch"] == resumed.result["details"]["averaged_from_epoch"] <= 3
    assert resumed.metric("val_global_loss")[-1] == pytest.approx(whole.metric("val_global_loss")[-1], rel=1e-4)


@of("gnmt", "transformer")
def test_bleu_is_of_the_whole_test_set(runs: Runs) -> None:
    for ended in (runs.alone, runs.together):
        details = ended.result["details"]
        assert details["bleu_signature"].startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2")
        assert details["bleu_cased"] <= details["bleu_lowercased"]
        assert details["test_pairs"] == 6
        assert details["reference"].endswith(".de")
        assert len(details["samples"]) == 5
    scores = [ended.metric("val_global_BLEU-Score") for ended in (runs.together, runs.alone)]
    assert scores[0] == pytest.approx(scores[1], abs=5.0)
