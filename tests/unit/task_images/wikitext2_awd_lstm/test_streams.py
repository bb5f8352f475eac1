"""Streams of words: what a rank reads in which order, rates, hidden states in checkpoints, averaging and evaluation."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from task_images.contract import Contract
from task_images.harness.distributed import World
from task_images.harness.precision import Precision
from task_images.wikitext2_awd_lstm import streams as module
from task_images.wikitext2_awd_lstm.averaging import Average, RunningAverage
from task_images.wikitext2_awd_lstm.settings import Settings
from task_images.wikitext2_awd_lstm.streams import Evaluation, Streams
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

TEXT = torch.arange(24 * 11 + 5, dtype=torch.int32)
BASE = replace(
    Settings(), batch_size=2, accumulation=2, sequence_length=4, layers=2, learning_rate=8.0, warmup_epochs_per_rank=0.5
)


class Model:
    """Counts words in its state; its loss is the mean of the targets."""

    is_training = True

    def initial_state(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(1, count, 1), torch.zeros(1, count, 2)) for _ in range(2)]

    def __call__(self, words: Tensor, state: Any) -> Any:
        grown = [(hidden + len(words), cell + words.sum(0)[None, :, None]) for hidden, cell in state]
        return words.float(), words.float(), grown

    def eval(self) -> None:
        self.is_training = False

    def score(self, output: Tensor, targets: Tensor) -> Tensor:
        return targets.float().mean()


class NoAverage:
    mean = RunningAverage([])


def make_world(rank: int = 0, size: int = 1) -> World:
    return World(Contract({"RANK": str(rank), "WORLD_SIZE": str(size)}), torch.device("cpu"), 1, grouped=False)


def make(rank: int, size: int, monkeypatch: pytest.MonkeyPatch | None = None, **changes: Any) -> Streams:
    if monkeypatch is not None:
        monkeypatch.setattr(module, "sequence_lengths", lambda steps, *more: [4, 2, steps - 7])
    model: Any = Model()
    average: Any = NoAverage()
    return Streams(make_world(rank, size), replace(BASE, **changes), model, TEXT, average)


def test_ranks_read_neighboring_streams_which_go_on_from_update_to_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve streams of 22 words, four of each rank."""
    read: dict[int, list[int]] = {}
    for rank in range(3):
        made = make(rank, 3, monkeypatch)
        assert (made.number, made.words_per_epoch, made.count(1)) == (12, 21 * 12, 3)
        for update in made.updates(1):
            assert (update.count, update.first, update.total, update.weight) == (2, 2 * rank, 6, 1.0)
            assert update.samples == len(update.passes[0].words) * 12  # type: ignore[index]
            for part in update.passes:
                assert torch.equal(part.targets, part.words + 1)
                for column in range(2):
                    stream = 4 * rank + 2 * part.group + column
                    read.setdefault(stream, []).extend(part.words[:, column].tolist())
    assert read == {stream: list(range(22 * stream, 22 * stream + 21)) for stream in range(12)}


def test_shorter_sequences_learn_more_slowly_and_the_rate_grows_to_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six shares of a batch: to 8 sqrt(6) within three epochs."""
    made = make(0, 3, monkeypatch)
    top = 8.0 * math.sqrt(6)
    warm = [8 + (top - 8) * epochs / 3 for epochs in (1.0, 1 + 1 / 3, 1 + 2 / 3)]
    lengths = [1.0, 0.5, 15 / 4]
    found = [update.rate_factor for update in made.updates(2)]
    assert found == pytest.approx([rate * length for rate, length in zip(warm, lengths, strict=True)])
    assert [update.rate_factor for update in made.updates(2, begin=2)] == pytest.approx(found[2:])
    assert [update.rate_factor for update in made.updates(9)][:2] == pytest.approx([top, top / 2])


def test_averaging_may_have_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    for averaged, rate in ((0.0, 8.0), (3.0, 3.0)):
        made = make(0, 1, monkeypatch, accumulation=1, averaged_learning_rate=averaged)
        made._average = SimpleNamespace(mean=SimpleNamespace(active=True))  # type: ignore[assignment]
        assert next(made.updates(9)).rate_factor == pytest.approx(rate)
        made._average = SimpleNamespace(mean=SimpleNamespace(active=False))  # type: ignore[assignment]
        assert next(made.updates(9)).rate_factor == pytest.approx(8.0)


def read_some(made: Streams, updates: int) -> None:
    model: Any = Model()
    for _, update in zip(range(updates), made.updates(1), strict=False):
        for part in update.passes:
            made.forward(model, part)


def test_hidden_states_of_all_streams_fit_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sequence_lengths", lambda steps, *more: [4, 2, steps - 7])

    def body(world: ThreadWorld) -> dict[str, Any]:
        model: Any = Model()
        average: Any = NoAverage()
        made = Streams(world, BASE, model, TEXT, average)
        read_some(made, 2)
        return made.state_dict()

    states = run_ranks(3, body)
    cells = states[0]["cells"]
    assert [tuple(cell.shape) for cell in cells] == [(1, 12, 1), (1, 12, 2)] * 2
    assert all(torch.equal(one, other) for one, other in zip(cells, states[2]["cells"], strict=True))
    assert cells[0].flatten().tolist() == [6.0] * 12
    assert cells[1][0, :, 0].tolist() == [float(sum(range(22 * stream, 22 * stream + 6))) for stream in range(12)]
    # The same streams on one rank with six passes, the last of them.
    other = make(0, 1, accumulation=6)
    other.load_state_dict(states[0])
    assert other._states[5][1][1][0, :, 0].tolist() == cells[3][0, 10:, 0].tolist()
    assert [len(state) for state in other._states] == [2] * 6


def test_an_epoch_begins_with_new_states_and_a_resumed_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(0, 1, monkeypatch)
    read_some(made, 2)
    assert float(made._states[0][0][0].max()) == 6.0
    next(made.updates(2, begin=1))
    assert float(made._states[0][0][0].max()) == 6.0
    next(made.updates(2))
    assert float(made._states[0][0][0].max()) == 0.0


def test_penalties_are_trained_on_and_not_reported() -> None:
    made = make(0, 1, activation_penalty=2.0, temporal_penalty=1.0)
    raw = torch.tensor([[[1.0], [1.0]], [[3.0], [1.0]]], requires_grad=True)
    dropped = torch.full((2, 2, 1), 0.5, requires_grad=True)
    part: Any = SimpleNamespace(targets=torch.full((2, 2), 4), words=torch.zeros(2, 2))
    loss = made.loss((raw, dropped), part)
    # Merity et al. 2017, section 4.4: 2 x mean of squares of dropped activations + mean of squared steps of raw ones.
    assert loss.value.item() == pytest.approx(4.0 + 2 * 0.25 + 1 * (4.0 + 0.0) / 2)
    assert (float(loss.mean), loss.weight) == (4.0, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_text_is_evaluated_once_by_all_ranks_together(size: int) -> None:
    """Four streams of 11 words, whose targets are all words but the first of each."""
    text = torch.arange(46, dtype=torch.int32)
    settings = replace(BASE, validation_streams=4)
    targets = [11 * stream + place for stream in range(4) for place in range(1, 11)]
    mean = sum(targets) / len(targets)

    def body(world: ThreadWorld) -> Any:
        model: Any = Model()
        average: Any = NoAverage()
        found = Evaluation(world, settings, model, Precision("fp32", world.device), average)(text)
        assert not model.is_training
        return found

    for found in run_ranks(size, body):
        assert found == pytest.approx({"loss": mean, "Perplexity": math.exp(mean)})


# --- averaging ------------------------------------------------------------------------------------------------------


def make_average(patience: int = 2) -> tuple[Average, Any, list[str]]:
    model: Any = torch.nn.Linear(1, 1, bias=False)
    said: list[str] = []
    report: Any = SimpleNamespace(say=said.append)
    return Average(model, patience, "stalled", report), model, said


def test_averaging_begins_once_and_says_so() -> None:
    average, model, said = make_average()
    for epoch, loss in enumerate((5.0, 4.0, 4.5, 4.2, 9.0), 1):
        average.observe(epoch, {"loss": loss})
    assert (average.switched, average.mean.active) == (4, True)
    assert said == ["epoch 4: the validation loss no longer falls; switching to averaged SGD"]
    with torch.no_grad():
        for value in (1.0, 3.0, 8.0):
            model.weight.fill_(value)
            average.mean.update()
    with average.mean.use_average():
        assert model.weight.item() == pytest.approx(4.0)
    assert model.weight.item() == 8.0
    state = average.state_dict()
    assert (state["switched"], state["losses"]) == (4, [5.0, 4.0, 4.5, 4.2, 9.0])
    other, twin, _ = make_average()
    other.load_state_dict(state)
    with torch.no_grad():
        twin.weight.fill_(0.0)
        other.mean.update()
    with other.mean.use_average():
        assert twin.weight.item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="not the state of a running average"):
        other.mean.load_state_dict({"means": 3, "count": 1})
