"""What AWD-LSTM's settings become in a training, which text it reads, and what a checkpoint of its average holds."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from task_images.contract import Contract
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.identity import DataIdentity
from task_images.harness.loop import Plan
from task_images.harness.published import WIKITEXT2
from task_images.harness.settings import Protocol
from task_images.wikitext2_awd_lstm import data, task
from task_images.wikitext2_awd_lstm.averaging import Average, RunningAverage, should_switch
from task_images.wikitext2_awd_lstm.data import Corpus, prepare_data, read_corpus, streams, validation_arrays
from task_images.wikitext2_awd_lstm.model import AwdLstm, Dropout
from task_images.wikitext2_awd_lstm.settings import Settings
from tests.unit.task_images.harness.test_images import one_of

TRAIN, VALID, TEST = (torch.arange(60, dtype=torch.int32) % 3 for _ in range(3))
TEXT = Corpus(["a", "b", "c"], TRAIN, VALID, TEST, digest="sha256:x")


def train(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """What the training loop is given."""
    given: dict[str, Any] = {}

    def make(*words: Any, **options: Any) -> Any:
        given.update(options, words=words)
        return SimpleNamespace(run=lambda: given.update(ran=True))

    monkeypatch.setattr(task, "Trainer", make)
    monkeypatch.setattr(task, "prepare_strategy", lambda world, make: make())
    small = {"embedding": 4, "hidden": 6, "layers": 2, "batch_size": 3, "accumulation": 2, "validation_streams": 2}
    world = one_of(0, 1)
    world.contract = Contract({"MLBENCH_SEED": "8", "MLBENCH_GOAL": "light"})
    given["model returned"] = task.train(world, "report", Settings(**{**small, **settings}), TEXT)  # type: ignore[arg-type]
    return given


def test_settings_become_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    given = train(
        monkeypatch, epochs=7, budget_seconds=5.0, report_every=9, checkpoint_every=4, resume="c", blocks=2,
        blocks_after=1, block_updates=3, clip=0.5, weight_decay=0.25,
    )  # fmt: skip
    _, report, streams_of_rank, schedule, plan = given["words"]
    assert (report, given["ran"], given["work"]) == ("report", True, streams_of_rank)
    assert given["model"] is given["model returned"]
    assert schedule.rate(1000) == 1.0  # batches have the rate
    assert plan == Plan(7, 5.0, loss_every=9, checkpoint_every=4, resume="c", protocol=Protocol(1, 2, 3))
    parameters = sum(one.numel() for one in given["model"].parameters())
    assert given["details"] == {"parameters": parameters, "vocabulary": 3, "words_per_epoch": 9 * 6}
    # 60 words in six streams of ten.
    assert given["identity"] == {"vocabulary": 3, "network": [4, 6, 2], "global_batch": 6, "seed": 8}
    assert (given["name"], given["unit"].name, given["clip"]) == ("wikitext2_awd_lstm", "words", 0.5)
    monkeypatch.setattr(torch.optim, "SGD", lambda parameters, **options: (list(parameters), options))
    learned, options = given["make_optimizer"](given["model"])
    assert options == {"lr": 0.0, "weight_decay": 0.25, "fused": True}
    assert len(learned) == len(list(given["model"].parameters()))
    assert set(given["states"]) == {"average", "streams"}
    average = given["states"]["average"]
    assert given["after_update"] == average.mean.update
    assert given["after_validation"] == average.observe


def test_every_dropout_has_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    given = train(
        monkeypatch, dropout_embedding=0.11, dropout_input=0.12, dropout_hidden=0.13, dropout_output=0.14,
        weight_drop=0.15,
    )  # fmt: skip
    assert given["model"].dropout == Dropout(embedding=0.11, input=0.12, hidden=0.13, output=0.14, weight=0.15)
    assert {layer.share for layer in given["model"].layers} == {0.15}


def test_a_result_has_the_perplexity_of_the_test_text_and_when_averaging_began(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def evaluate(ids: torch.Tensor) -> dict[str, float]:
        seen.append(ids)
        return {"loss": 1.0, "Perplexity": 2.5}

    monkeypatch.setattr(task, "Evaluation", lambda *words: evaluate)
    given = train(monkeypatch)
    assert given["closing"]() == {"test_perplexity": 2.5, "averaged_from_epoch": None}
    given["states"]["average"].switched = 6
    assert given["closing"]()["averaged_from_epoch"] == 6
    assert given["validate"](1) == {"loss": 1.0, "Perplexity": 2.5}
    assert [ids is text for ids, text in zip(seen, (TEXT.test, TEXT.test, TEXT.valid), strict=True)] == [True] * 3


def test_a_validation_that_diverged_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "Evaluation", lambda *words: lambda ids: {"loss": float("nan"), "Perplexity": 1.0})
    validate = train(monkeypatch)["validate"]
    with pytest.raises(Exception, match="epoch 3"):
        validate(3)


@pytest.mark.parametrize(("perplexity", "is_met"), [(80.0, True), (80.5, False)])
def test_the_goal_is_a_perplexity_at_most(monkeypatch: pytest.MonkeyPatch, perplexity: float, is_met: bool) -> None:
    goal = train(monkeypatch, goal_full=70.0, goal_light=80.0)["goal"]
    assert (goal.metric, goal.threshold) == ("Perplexity", 80.0)
    tracker: Any = SimpleNamespace(snapshot=lambda: None)
    assert goal.observe(perplexity, 1, tracker) is is_met


# --- which text -----------------------------------------------------------------------------------------------------


def write_texts(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(texts.get(split, " a b \n"))


def test_a_text_of_ones_own_is_in_the_data_folder(tmp_path: Path) -> None:
    write_texts(tmp_path)
    assert len(task.load(Settings(), Contract({"MLBENCH_DATA_DIR": str(tmp_path)})).train) == 3
    with pytest.raises(EnvironmentUnfitError, match="no folder with WikiText-2 was given") as caught:
        task.load(Settings(), Contract({}))
    assert "preset tiny" in str(caught.value.hint)


def test_the_text_that_python_brings_is_written_and_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "write_sample", lambda folder: write_texts(folder, valid=" c d \n"))
    corpus = task.load(Settings(data="python-topics"), Contract({"MLBENCH_DATA_DIR": "/nowhere"}))
    assert [corpus.words[number] for number in corpus.valid] == ["c", "d", "<eos>"]


@pytest.mark.parametrize("own", [False, True])
def test_the_text_that_python_brings_is_never_official(
    own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    corpus = SimpleNamespace(identify=lambda: DataIdentity({"train words": 3}, "sha256:x", True, None))

    @contextmanager
    def session(contract: Contract, name: str) -> Iterator[Any]:
        seen.append(name)
        yield "world", SimpleNamespace(data_identity=seen.append)

    monkeypatch.setattr(task, "training_session", session)
    monkeypatch.setattr(task, "load", lambda parameters, contract: corpus)
    monkeypatch.setattr(task, "seed_all", seen.append)
    monkeypatch.setattr(task, "train", lambda world, report, parameters, text: seen.append((parameters.data, text)))
    kind = "python-topics" if own else "wikitext-2"
    task.main(Contract({"MLBENCH_SEED": "4", "MLBENCH_PARAMETERS": json.dumps({"data": kind})}))
    name = "Python language reference (pydoc_data.topics)"
    identity = DataIdentity({"train words": 3}, "sha256:x", not own, f"another text: {name}" if own else None)
    assert seen == [name if own else "WikiText-2", identity, 4, (kind, corpus)]


def test_the_published_words_are_official() -> None:
    counts = {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    train, valid, test = (torch.zeros(1, dtype=torch.int32).expand(count) for count in counts.values())
    words = [""] * 33_278
    assert Corpus(words, train, valid, test, "sha256:x").identify() == DataIdentity(
        {**{f"{split} words": count for split, count in counts.items()}, "vocabulary": 33_278}, "sha256:x", True, None
    )
    assert Corpus([*words, ""], train, valid, test).identify().official is False
    assert Corpus(words, train, valid, test[1:]).identify().official is False


def test_files_beside_the_archive_are_read_and_one_missing_file_takes_the_archive(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / data.ARCHIVE).write_bytes(b"")
    assert [path.name for path in data._sources(tmp_path)] == [f"wiki.{split}.tokens" for split in data.SPLITS]
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wiki.valid.tokens").rename(tmp_path / "wikitext-2" / "wiki.valid.tokens")
    assert len(data._sources(tmp_path)) == 3
    (tmp_path / "wikitext-2" / "wiki.valid.tokens").unlink()
    assert [path.name for path in data._sources(tmp_path)] == [
        "wiki.train.tokens", "wiki.test.tokens", data.ARCHIVE,
    ]  # fmt: skip


def test_only_an_empty_folder_is_filled_from_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []

    def fetch(published: Any, folder: Path, say: Any) -> None:
        fetched.append(published)
        write_texts(folder)

    monkeypatch.setattr(data, "fetch_published", fetch)
    found = prepare_data(tmp_path, {})
    assert fetched == [WIKITEXT2]
    assert found.counts == {"train words": 3, "valid words": 3, "test words": 3, "vocabulary": 3}
    assert prepare_data(tmp_path, {}) == found
    assert len(fetched) == 1


def test_each_word_of_the_validation_text_predicts_the_next(tmp_path: Path) -> None:
    write_texts(tmp_path, valid=" a c b \n")
    words, following = validation_arrays(tmp_path)
    numbers = {word: number for number, word in enumerate(read_corpus(tmp_path).words)}
    assert words.tolist() == [numbers[word] for word in ("a", "c", "b")]
    assert following.tolist() == [numbers[word] for word in ("c", "b", "<eos>")]


def test_two_words_of_each_stream_are_the_least() -> None:
    assert streams(torch.arange(4), 2).tolist() == [[0, 2], [1, 3]]
    with pytest.raises(EnvironmentUnfitError, match="3 words are too few for 2 streams") as caught:
        streams(torch.arange(3), 2)
    assert caught.value.hint == "Use a smaller batch_size, or fewer workers."


# --- averaging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "patience", "rule", "expected"),
    [
        ([2.0, 1.0], 2, "stalled", False),  # nothing is earlier than the last two
        ([2.0, 2.0, 2.0], 2, "stalled", True),  # as good as before is no new minimum
        ([2.0, 3.0, 1.999], 2, "stalled", False),
        ([1.0, 2.0], 1, "non_monotone", True),
        ([1.0, 1.0], 1, "non_monotone", False),  # only above the minimum
        ([3.0, 1.0, 2.0, 2.5], 2, "non_monotone", True),
        ([3.0, 1.0, 2.0, 2.5], 3, "non_monotone", False),
    ],
)
def test_when_plain_sgd_ends(losses: list[float], patience: int, rule: str, expected: bool) -> None:
    """Merity et al. 2017, algorithm 1: the loss is above the minimum of all but the last n."""
    assert should_switch(losses, patience, rule) is expected


def test_parameters_are_themselves_until_averaging_begins_and_again_when_it_is_read() -> None:
    parameter = torch.tensor([1.0, 2.0])
    average = RunningAverage([parameter])
    average.update()
    assert (average.active, average.count, average.means) == (False, 0, [])
    with average.use_average():
        assert parameter.tolist() == [1.0, 2.0]
    average.start()
    parameter += 1
    with average.use_average():
        assert parameter.tolist() == [1.0, 2.0]  # those it began with, until an update
    average.update()
    parameter += 2
    average.update()
    with contextlib.suppress(RuntimeError), average.use_average():
        assert parameter.tolist() == [3.0, 4.0]  # the mean of 2 and 4, of 3 and 5
        raise RuntimeError("an evaluation that fails gives the parameters back, too")
    assert parameter.tolist() == [4.0, 5.0]
    assert average.means[0].tolist() == [3.0, 4.0]
    average.start()
    assert (average.count, average.means[0].tolist()) == (0, [4.0, 5.0])


@pytest.mark.parametrize("state", [{"means": None, "count": 1}, {"means": [], "count": None}])
def test_another_state_is_no_running_average(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the state of a running average"):
        RunningAverage([torch.zeros(1)]).load_state_dict(state)


def test_an_average_goes_on_from_a_checkpoint() -> None:
    said: list[str] = []
    report: Any = SimpleNamespace(say=said.append)

    def make() -> Average:
        torch.manual_seed(1)
        return Average(AwdLstm(3, 2, 2, 1), 1, "non_monotone", report)

    first = make()
    first.observe(1, {"loss": 1.0})
    second = make()
    second.load_state_dict(first.state_dict())
    second.observe(2, {"loss": 2.0})
    assert (second.switched, second.mean.active) == (2, True)
    assert said == ["epoch 2: the validation loss no longer falls; switching to averaged SGD"]
    second.mean.update()
    third = make()
    third.load_state_dict(second.state_dict())
    third.observe(3, {"loss": 3.0})
    assert (third.switched, third.mean.count, len(said)) == (2, 1, 1)
    assert third.state_dict()["losses"] == [1.0, 2.0, 3.0]
    assert second.state_dict()["losses"] == [1.0, 2.0]  # a list of its own


def test_bf16_is_refused_where_lstms_do_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(precision: str, device: torch.device) -> None:
        raise TaskUsageError(f"no {precision} on {device}")

    monkeypatch.setattr(task, "refuse_bf16_lstm", refuse)
    with pytest.raises(TaskUsageError, match="no bf16 on cpu"):
        train(monkeypatch, precision="bf16")
