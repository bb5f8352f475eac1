"""AWD-LSTM: size, layers against the plain formulas, dropout, data, averaging, rate."""

import math
import statistics
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.contract import Contract, EnvironmentUnfitError
from task_images.report import Reporter
from task_images.train import Precision, count_parameters
from task_images.wikitext2_awd_lstm.data import read_corpus, sequence_lengths, streams, write_sample
from task_images.wikitext2_awd_lstm.task import (
    Average,
    AwdLstm,
    Evaluation,
    Settings,
    Streams,
    WeightDroppedLstm,
    drop_locked,
    drop_words,
    regularization,
    should_switch,
)
from task_images.world import World
from tests.unit.task_images.threads import ThreadWorld, run_ranks

NAMES = ("dropout_embedding", "dropout_input", "dropout_hidden", "dropout_output", "weight_drop")
NO_DROPOUT: dict[str, Any] = dict.fromkeys(NAMES, 0.0)


def test_the_model_has_exactly_the_specified_number_of_parameters() -> None:
    with torch.device("meta"):
        model = AwdLstm(33_278, Settings())
    assert count_parameters(model.parameters()) == 33_556_078


def test_initial_parameters() -> None:
    model = AwdLstm(200, Settings(embedding=16, hidden=24))
    weights = model.embedding.detach()
    assert weights.abs().max() <= 0.1
    assert float(weights.std()) == pytest.approx(0.1 / math.sqrt(3), rel=0.05)
    assert not model.bias.any()


def naive_lstm(layer: WeightDroppedLstm, x: Tensor, hidden: Tensor, cell: Tensor, recurrent: Tensor) -> Tensor:
    """The textbook's formulas, step by step."""
    outputs = []
    for step in x:
        gates = step @ layer.weight_ih_l0.T + layer.bias_ih_l0 + hidden @ recurrent.T + layer.bias_hh_l0
        i, f, g, o = gates.chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        outputs.append(hidden)
    return torch.stack(outputs)


def test_a_weight_dropped_layer_is_an_lstm_with_one_mask_on_its_recurrent_matrix() -> None:
    layer = WeightDroppedLstm(5, 7, 0.5)
    x, zero = torch.randn(6, 3, 5), torch.zeros(3, 7)
    torch.manual_seed(1)
    found, _ = layer(x, (zero[None], zero[None]))
    torch.manual_seed(1)
    recurrent = layer.get_parameter("weight_hh_l0")
    dropped = F.dropout(recurrent, 0.5)
    torch.testing.assert_close(found, naive_lstm(layer, x, zero, zero, dropped))
    assert float((dropped == 0).float().mean()) == pytest.approx(0.5, abs=0.12)
    layer.eval()
    whole, _ = layer(x, (zero[None], zero[None]))
    torch.testing.assert_close(whole, naive_lstm(layer, x, zero, zero, recurrent))


def test_gradients_reach_the_undropped_recurrent_weights_only() -> None:
    layer = WeightDroppedLstm(4, 4, 0.5)
    zero = torch.zeros(1, 2, 4)
    torch.manual_seed(3)
    layer(torch.randn(5, 2, 4), (zero, zero))[0].sum().backward()
    torch.manual_seed(3)
    torch.randn(5, 2, 4)
    kept = F.dropout(torch.ones(16, 4), 0.5) > 0
    gradient = layer.get_parameter("weight_hh_l0").grad
    assert gradient is not None
    assert torch.equal(gradient != 0, kept)


def test_locked_dropout_has_one_mask_for_all_steps() -> None:
    dropped = drop_locked(torch.ones(9, 4, 500), 0.65, training=True)
    assert (dropped == dropped[:1]).all()
    assert not (dropped[0, 0] == dropped[0, 1]).all()
    assert sorted(torch.unique(dropped).tolist()) == pytest.approx([0.0, 1 / 0.35])
    assert float((dropped == 0).float().mean()) == pytest.approx(0.65, abs=0.04)
    assert drop_locked(dropped, 0.65, training=False) is dropped


def test_embedding_dropout_takes_every_occurrence_of_a_word() -> None:
    words = torch.randint(0, 50, (40, 20))
    dropped = drop_words(torch.ones(40, 20, 3), words, 50, 0.1, training=True)
    for word in range(50):
        assert len(torch.unique(dropped[words == word])) == 1
    assert sorted(torch.unique(dropped).tolist()) == pytest.approx([0.0, 1 / 0.9])


def test_activation_and_temporal_penalty() -> None:
    raw, dropped = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    expected = 2.0 * (dropped**2).mean() + 1.0 * ((raw[1:] - raw[:-1]) ** 2).mean()
    torch.testing.assert_close(regularization(raw, dropped, 2.0, 1.0), expected)
    assert torch.isfinite(regularization(raw[:1], dropped[:1], 2.0, 1.0))


def test_a_sequence_in_two_parts_gives_what_it_gives_in_one() -> None:
    model = AwdLstm(30, Settings(embedding=8, hidden=12, **NO_DROPOUT))
    words = torch.randint(0, 30, (10, 3))
    _, whole, _ = model(words, model.initial_state(3))
    _, first, state = model(words[:4], model.initial_state(3))
    _, second, _ = model(words[4:], state)
    torch.testing.assert_close(whole, torch.cat([first, second]))
    assert not any(part.requires_grad for pair in state for part in pair)


def test_sequence_lengths_cover_the_text_and_follow_the_formula() -> None:
    lengths = sequence_lengths(400_001, 70, 5, 0.05, seed=1, epoch=1)
    assert sum(lengths) == 400_000
    assert min(lengths[:-1]) >= 5
    short = [length for length in lengths if length < 52]
    assert len(short) / len(lengths) == pytest.approx(0.05, abs=0.01)
    assert statistics.mean(short) == pytest.approx(34.5, abs=1)
    usual = [length for length in lengths if length >= 52]
    assert statistics.mean(usual) == pytest.approx(69.5, abs=0.5)
    assert statistics.stdev(usual) == pytest.approx(5, abs=0.4)
    assert sequence_lengths(5000, 70, 5, 0.05, 1, 1) == sequence_lengths(5000, 70, 5, 0.05, 1, 1)
    assert sequence_lengths(5000, 70, 5, 0.05, 1, 1) != sequence_lengths(5000, 70, 5, 0.05, 1, 2)


def test_streams_are_contiguous_and_cut_to_equal_length() -> None:
    assert streams(torch.arange(11), 3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    with pytest.raises(EnvironmentUnfitError, match="too few for 6 streams"):
        streams(torch.arange(11), 6)


TEXTS = {"train": " a b c \n\n d a \n", "valid": " a e \n", "test": " b \n"}


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in TEXTS.items():
        (folder / f"wiki.{split}.tokens").write_text(text)


def test_every_line_ends_in_eos_and_the_vocabulary_spans_all_splits(tmp_path: Path) -> None:
    write_texts(tmp_path)
    corpus = read_corpus(tmp_path)
    assert [corpus.words[number] for number in corpus.train] == ["a", "b", "c", "<eos>", "<eos>", "d", "a", "<eos>"]
    assert corpus.words == ["a", "b", "c", "<eos>", "d", "e"]
    assert [corpus.words[number] for number in corpus.test] == ["b", "<eos>"]


def test_the_official_zip_and_a_sub_folder_are_read_alike(tmp_path: Path) -> None:
    write_texts(tmp_path / "wikitext-2")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        for split, text in TEXTS.items():
            packed.writestr(f"wikitext-2/wiki.{split}.tokens", text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "packed.zip").rename(elsewhere / "wikitext-2-v1.zip")
    one, other = read_corpus(tmp_path), read_corpus(elsewhere)
    assert one.words == other.words
    assert torch.equal(one.train, other.train)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither wiki.train.tokens nor wikitext-2-v1.zip"),
        (b" a \n b \xff\n", "line 2 of wiki.train.tokens is not UTF-8"),
        (b"", "holds no words"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    write_texts(tmp_path)
    (tmp_path / "wiki.train.tokens").unlink()
    if content is not None:
        (tmp_path / "wiki.train.tokens").write_bytes(content)
    with pytest.raises(EnvironmentUnfitError, match=message):
        read_corpus(tmp_path)


def test_a_broken_zip_is_named(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2-v1.zip").write_bytes(b"PK no zip")
    with pytest.raises(EnvironmentUnfitError, match="is not the WikiText-2 archive"):
        read_corpus(tmp_path)


def test_the_own_text_is_real_and_in_the_official_form(tmp_path: Path) -> None:
    write_sample(tmp_path)
    corpus = read_corpus(tmp_path)
    assert len(corpus.train) > 50_000
    assert 1000 < len(corpus.words) < 5000
    assert {"<unk>", "<eos>", "the", "statement"} <= set(corpus.words)


@pytest.mark.parametrize(
    ("losses", "rule", "expected"),
    [
        ([5, 4, 3, 2, 1, 1], "stalled", False),
        ([5, 1, 2, 2, 2, 2, 2], "stalled", True),
        ([5, 1, 2, 2, 2, 2], "stalled", False),
        ([5, 1, 2, 2, 2, 2, 0.9], "stalled", False),
        ([5, 4, 3, 2, 1], "non_monotone", False),
        ([5, 4, 3, 2, 1, 6], "non_monotone", True),  # above the minimum of all but the last five, which is 5
        ([5, 4, 3, 2, 1, 4.5], "non_monotone", False),
    ],
)
def test_when_to_switch(losses: list[float], rule: str, expected: bool) -> None:
    assert should_switch(losses, 5, rule) is expected


def test_the_average_is_the_mean_since_the_switch_and_leaves_the_parameters_alone() -> None:
    model = nn.Linear(3, 1, bias=False)
    average, again = (Average(model, 1, "stalled", cast("Reporter", Mock())) for _ in range(2))
    with torch.no_grad():
        model.weight.fill_(100)
        average.update()
        average.observe(1, {"loss": 1.0})
        assert average.best is model
        average.observe(2, {"loss": 1.0})
        for value in (1.0, 2.0, 6.0):
            model.weight.fill_(value)
            average.update()
    assert average.switched == 2
    again.load_state_dict(average.state_dict())
    for one in (average, again):
        assert one.best.weight.tolist() == [[3.0] * 3]
    assert model.weight.tolist() == [[6.0] * 3]


def test_a_resumed_run_switches_when_one_that_was_not_stopped_does() -> None:
    whole, first, rest = (Average(nn.Linear(3, 1), 2, "stalled", cast("Reporter", Mock())) for _ in range(3))
    for epoch, loss in enumerate((5.0, 4.0, 4.0, 4.0, 4.0), 1):
        whole.observe(epoch, {"loss": loss})
        (first if epoch < 3 else rest).observe(epoch, {"loss": loss})
        if epoch == 2:
            rest.load_state_dict(first.state_dict())
    assert rest.switched == whole.switched == 4


SMALL = Settings(embedding=4, hidden=6, layers=2, batch_size=2, sequence_length=5, validation_streams=3, **NO_DROPOUT)


def test_each_rank_goes_on_with_the_hidden_states_of_its_own_streams() -> None:
    text = torch.arange(400) % 20
    model = AwdLstm(20, SMALL)
    saved = {"cells": [torch.randn(1, 6, 5) for _ in range(4)]}

    def resume(world: ThreadWorld) -> dict[str, Any]:
        streams = Streams(world, SMALL, model, text, cast("Average", None))
        streams.load_state_dict(saved)
        return streams.state_dict()

    for state in run_ranks(3, resume):
        for one, other in zip(state["cells"], saved["cells"], strict=True):
            assert torch.equal(one, other)


def test_a_text_that_is_evaluated_in_pieces_is_one_text() -> None:
    device = torch.device("cpu")
    world = World(Contract({}), device, 1, grouped=False)
    torch.manual_seed(1)
    average = Average(AwdLstm(20, SMALL), 5, "stalled", cast("Reporter", Mock()))
    found = [
        Evaluation(world, replace(SMALL, sequence_length=length), Precision("fp32", device), average)(
            torch.randint(20, (60,), generator=torch.Generator().manual_seed(2))
        )
        for length in (4, 1000)
    ]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert found[0]["Perplexity"] == pytest.approx(math.exp(found[1]["loss"]), rel=1e-6)
