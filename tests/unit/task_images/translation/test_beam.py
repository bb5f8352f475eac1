"""Beam search against trying everything, and against the rules it promises."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from task_images.translation.beam import Hypothesis, Search, beam_search

END, START, VOCABULARY, SOURCE = 0, 4, 5, 3


class Toy:
    """Next-word scores and attention are random tables of the source's number and the last two words."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (6, VOCABULARY, VOCABULARY)
        self.scores = 2 * torch.randn(*shape, VOCABULARY, generator=generator)
        self.attention = torch.rand(*shape, SOURCE, generator=generator)
        self.calls = 0

    def begin(self, source: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        return {"number": source[:, 0], "before": torch.full((len(source), 1), START)}

    def step(self, words: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        place = (state["number"][:, None].expand_as(words), state["before"], words)
        state["before"] = words
        return self.scores[place].clone(), self.attention[place]

    def select(self, state: dict[str, Tensor], sentences: Tensor, beams: Tensor) -> dict[str, Tensor]:
        return {"number": state["number"][sentences], "before": state["before"][sentences[:, None], beams]}


class Found(NamedTuple):
    words: list[int]
    score: float


def everything(toy: Toy, number: int, limit: int, length: int, search: Search) -> list[Found]:
    """All hypotheses of up to `limit` words with their scores, best first."""
    found = []
    words = [word for word in range(VOCABULARY) if word != END and word not in search.never]
    for size in range(0 if limit == 1 else 1, limit):
        for body in itertools.product(words, repeat=size):
            total, covered = 0.0, torch.zeros(SOURCE)
            before, last = START, START
            for word in (*body, END):
                logs = toy.scores[number, before, last].log_softmax(0)
                covered += toy.attention[number, before, last]
                total += float(logs[word])
                before, last = last, word
            score = total / ((5 + size + 1) / 6) ** search.length_power
            score += search.coverage * sum(math.log(min(1.0, float(part))) for part in covered[:length])
            found.append(Found(list(body), score))
    return sorted(found, key=lambda one: -one.score)


@pytest.mark.parametrize("coverage", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("power", [0.0, 0.6, 3.0])
def test_a_wide_beam_finds_what_trying_everything_finds(power: float, coverage: float) -> None:
    toy = Toy(seed=7)
    source = torch.arange(6)[:, None].expand(6, SOURCE)
    lengths, limits = torch.tensor([3, 3, 2, 1, 3, 2]), torch.tensor([4, 3, 4, 2, 1, 4])
    search = Search(500, START, END, power, coverage, never=(START,))
    for number, hypothesis in enumerate(beam_search(toy, source, lengths, limits, search)):
        best = everything(toy, number, int(limits[number]), int(lengths[number]), search)[0]
        assert hypothesis.words == best.words
        assert hypothesis.score == pytest.approx(best.score, abs=1e-5)


def narrow(toy: Toy, number: int, limit: int, search: Search) -> Hypothesis:
    """A beam search of one sentence in plain Python."""
    live: list[tuple[tuple[int, ...], float]] = [((START, START), 0.0)]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        candidates: list[tuple[float, tuple[int, ...]]] = []
        for words, total in live:
            logs = toy.scores[number, words[-2], words[-1]].log_softmax(0)
            for word in range(VOCABULARY):
                allowed = word == END if length == limit else not (length == 1 and word == END)
                if allowed and word not in search.never:
                    candidates.append((total + float(logs[word]), (*words, word)))
        candidates.sort(reverse=True)
        for place, (total, words) in enumerate(candidates):
            if words[-1] == END and place < search.beam:
                score = total / ((5 + length) / 6) ** search.length_power
                finished.append(Hypothesis(list(words[2:-1]), score))
        live = [(words, total) for total, words in candidates if words[-1] != END][: search.beam]
        if search.early_stop and len(finished) >= search.beam:
            break
    return max(finished, key=lambda hypothesis: hypothesis.score)


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_a_narrow_beam_is_the_textbooks_whatever_else_is_in_the_batch(beam: int, early_stop: bool) -> None:
    for seed in range(20):
        toy = Toy(seed)
        source = torch.arange(6)[:, None].expand(6, SOURCE)
        limits = torch.tensor([9, 3, 12, 5, 2, 9])
        search = Search(beam, START, END, 0.6, early_stop=early_stop, never=(START,))
        for number, found in enumerate(beam_search(toy, source, torch.full((6,), SOURCE), limits, search)):
            expected = narrow(toy, number, int(limits[number]), search)
            assert found.words == expected.words
            assert found.score == pytest.approx(expected.score, abs=1e-5)


def test_the_search_ends_as_soon_as_nothing_can_get_better() -> None:
    toy = Toy(seed=1)
    toy.scores[..., END] = 8.0
    source = torch.arange(6)[:, None].expand(6, SOURCE)
    beam_search(toy, source, torch.full((6,), SOURCE), torch.full((6,), 1000), Search(2, START, END))
    assert toy.calls < 50


def test_nan_scores_end_the_search() -> None:
    toy = Toy(seed=1)
    toy.scores[:] = math.nan
    source = torch.zeros(2, SOURCE, dtype=torch.int64)
    found = beam_search(toy, source, torch.full((2,), SOURCE), torch.full((2,), 50), Search(2, START, END))
    assert [hypothesis.words for hypothesis in found] == [[], []]
