"""GNMT and Transformer: sizes, formulas, and a search that sees what training sees."""

import math

import pytest
import torch
from torch import Tensor

from task_images.train import count_parameters
from task_images.translation.beam import Search, beam_search
from task_images.translation.training import TranslationModel
from task_images.wmt16_gnmt.task import Attention, Gnmt, make_rate
from task_images.wmt16_gnmt.task import Settings as GnmtSettings
from task_images.wmt17_transformer.task import Settings, Transformer, sinusoids

PADDING, END = 1, 2
SMALL = Settings(
    vocabulary=20, width=16, inner=32, layers=2, heads=4, dropout=0.3, attention_dropout=0.3, inner_dropout=0.3
)


def test_the_models_have_exactly_the_specified_numbers_of_parameters() -> None:
    with torch.device("meta"):
        gnmt, transformer = Gnmt(32_320, GnmtSettings()), Transformer(Settings())
    assert count_parameters(gnmt.parameters()) == 160_671_297
    assert count_parameters(transformer.parameters()) == 210_808_832


def make_gnmt() -> Gnmt:
    torch.manual_seed(0)
    return Gnmt(20, GnmtSettings(width=16, layers=3, dropout=0.3, initial_range=0.8), padding=PADDING)


def make_transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL, padding=PADDING)


MAKERS = pytest.mark.parametrize("make", [make_gnmt, make_transformer])
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 1, 1], [3, 2, 1, 1, 1]])
LENGTHS = torch.tensor([5, 3, 2])
TARGET = torch.tensor([[2, 7, 8, 9], [2, 4, 1, 1], [2, 5, 6, 1]])


@MAKERS
def test_padding_changes_nothing(make: type[TranslationModel]) -> None:
    model = make().eval()
    together = model(SOURCE, LENGTHS, TARGET)
    for row, (source, target) in enumerate([(5, 4), (3, 2), (2, 3)]):
        alone = model(SOURCE[row : row + 1, :source], LENGTHS[row : row + 1], TARGET[row : row + 1, :target])
        torch.testing.assert_close(alone[0], together[row, :target])


@MAKERS
def test_a_word_depends_on_earlier_words_only(make: type[TranslationModel]) -> None:
    model = make().eval()
    before, changed = model(SOURCE, LENGTHS, TARGET), TARGET.clone()
    changed[0, 2] = 11
    after = model(SOURCE, LENGTHS, changed)
    torch.testing.assert_close(before[0, :2], after[0, :2])
    assert (before[0, 2:] - after[0, 2:]).abs().max() > 1e-4
    torch.testing.assert_close(before[1:], after[1:])


@MAKERS
def test_stepping_with_a_cache_gives_the_scores_of_training(make: type[TranslationModel]) -> None:
    model = make().eval()
    with torch.no_grad():
        expected = model.scores(model(SOURCE, LENGTHS, TARGET))
        state = model.begin(SOURCE, LENGTHS)
        for place in range(TARGET.shape[1]):
            scores, attention = model.step(TARGET[:, place : place + 1], state)
            real = TARGET[:, place] != PADDING
            torch.testing.assert_close(scores[real, 0], expected[real, place])
            if attention is not None:
                torch.testing.assert_close(attention.sum(2), torch.ones(3, 1))
                assert not attention[2, 0, 2:].any()


@MAKERS
@pytest.mark.parametrize("coverage", [0.0, 0.3])
def test_the_search_finds_the_score_that_the_model_gives_its_words(
    make: type[TranslationModel], coverage: float
) -> None:
    model = make().eval()
    search = Search(3, END, END, 0.6, coverage, never=(PADDING,))
    limits = torch.tensor([9, 6, 8])
    found = beam_search(model, SOURCE, LENGTHS, limits, search)
    alone = [
        beam_search(model, SOURCE[i : i + 1, : LENGTHS[i]], LENGTHS[i : i + 1], limits[i : i + 1], search)
        for i in range(3)
    ]
    for row, hypothesis in enumerate(found):
        assert hypothesis.words == alone[row][0].words
        assert 1 <= len(hypothesis.words) < limits[row]
        words = torch.tensor([[END, *hypothesis.words, END]])
        source, lengths = SOURCE[row : row + 1], LENGTHS[row : row + 1]
        with torch.no_grad():
            logs = model.scores(model(source, lengths, words[:, :-1])).clone()
            # The search never considers padding, nor an end as the first word; the softmax is over all words.
            total = logs.log_softmax(2)[0].gather(1, words[0, 1:, None]).sum()
            covered = attention_sums(model, source, lengths, words[:, :-1])
        score = float(total) / ((5 + words.shape[1] - 1) / 6) ** 0.6
        if covered is not None:
            score += coverage * float(covered[: lengths[0]].clamp(max=1).log().sum())
        assert hypothesis.score == pytest.approx(score, abs=1e-4)


def attention_sums(model: TranslationModel, source: Tensor, lengths: Tensor, words: Tensor) -> Tensor | None:
    state, total = model.begin(source, lengths), None
    for place in range(words.shape[1]):
        _, attention = model.step(words[:, place : place + 1], state)
        if attention is not None:
            total = attention[0, 0] + (0 if total is None else total)
    return total


def test_normalized_attention_is_the_published_formula() -> None:
    attention = Attention(6)
    torch.nn.init.normal_(attention.bias)
    x, memory, mask = torch.randn(2, 3, 6), torch.randn(2, 4, 6), torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    found = attention(x, memory, attention.keys(memory), mask[:, None])
    direction = attention.scale * attention.direction / attention.direction.norm()
    for row in range(2):
        for step in range(3):
            real = memory[row][mask[row]]
            hidden = torch.tanh(attention.query.weight @ x[row, step] + real @ attention.key.weight.T + attention.bias)
            weights = torch.softmax(hidden @ direction, 0)
            torch.testing.assert_close(found[row, step], weights @ real)


def test_attention_in_parts_has_the_same_gradients() -> None:
    model = make_gnmt().eval()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(SOURCE, LENGTHS, TARGET).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    whole = gradients()
    model.attention.at_once = 3 * 5 * 16
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_initial_parameters_of_gnmt() -> None:
    model = Gnmt(50, GnmtSettings(width=32))
    for name, parameter in model.named_parameters():
        if "bias_hh" in name or name == "attention.bias":
            assert not parameter.any(), name
        elif name == "attention.scale":
            assert parameter.item() == pytest.approx(1 / math.sqrt(32))
        else:
            assert 0.05 < parameter.abs().max() <= 0.1, name


def test_initial_parameters_of_the_transformer() -> None:
    model = make_transformer()
    assert not model.embedding[PADDING].any()
    assert float(model.embedding.detach().std()) == pytest.approx(16**-0.5, rel=0.15)
    packed = dict(model.named_parameters())["encoder.0.own.packed"].detach()
    assert 0.9 * math.sqrt(6 / (4 * 16)) < float(packed.abs().max()) <= math.sqrt(6 / (4 * 16))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name


def test_positions_count_from_behind_the_padding_number() -> None:
    marks = sinusoids(range(3), 8, PADDING + 1, torch.device("cpu"))
    rate = 10_000.0 ** -(1 / 3)
    expected = [math.sin(2), math.sin(2 * rate), math.cos(2), math.cos(2 * rate)]
    assert marks[0, [0, 1, 4, 5]].tolist() == pytest.approx(expected)
    torch.testing.assert_close(marks[2:], sinusoids(range(2, 3), 8, PADDING + 1, torch.device("cpu")))


def test_the_rate_of_gnmt() -> None:
    legacy = make_rate(GnmtSettings(warmup_start=0.01), 10_000)
    assert legacy(0) == pytest.approx(2e-5)
    assert legacy(100) == pytest.approx(2e-4)
    spec = make_rate(GnmtSettings(), 10_000)
    assert spec(0) == 0.0
    assert 0 < spec(100) < spec(150) < 2e-3
    for rate in (legacy, spec):
        assert [rate(t) for t in (200, 3999)] == [2e-3, 2e-3]
        assert [rate(t) for t in (4000, 4499, 4500, 5000, 5500, 9999)] == pytest.approx(
            [1e-3, 1e-3, 5e-4, 2.5e-4, 1.25e-4, 1.25e-4]
        )
