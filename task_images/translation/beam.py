"""Batched beam search, for any decoder that generates word by word.

Shapes: B unfinished sentences, K hypotheses of each, V words, S source positions.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Decoder(Protocol):
    """The interface of models for the search. The state is opaque; the search only selects hypotheses."""

    def begin(self, source: Tensor, lengths: Tensor) -> Any:
        """The state before the first word, with one hypothesis per sentence; source [B, S], lengths [B]."""
        ...

    def step(self, words: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        """Last words [B, K] -> scores of the next word [B, K, V] before softmax, and attention [B, K, S] or None.
        Advances the state in place."""
        ...

    def select(self, state: Any, sentences: Tensor, beams: Tensor) -> Any:
        """The state whose hypothesis k of sentence b is the former hypothesis beams[b, k] of sentence sentences[b]."""
        ...


@dataclass(frozen=True)
class Search:
    """Score of a finished hypothesis of n words, its end included, with log-probability p and attention sums a: p / ((5
    + n) / 6)^length_power + coverage * sum over source words of log(min(1, a)).

    early_stop   stop a sentence when `beam` hypotheses are finished, even if an unfinished one could still be better
    """

    beam: int
    start: int
    end: int
    length_power: float = 0.6
    coverage: float = 0.0
    early_stop: bool = False
    never: tuple[int, ...] = ()  # words that are never generated, such as padding

    def length_penalty(self, words: int | Tensor) -> Any:
        """The divisor of a hypothesis' log-probability."""
        return ((5.0 + words) / 6.0) ** self.length_power


@dataclass(frozen=True)
class Hypothesis:
    """A finished hypothesis; words without start and end."""

    words: list[int]
    score: float


@torch.inference_mode()
def beam_search(decoder: Decoder, source: Tensor, lengths: Tensor, limits: Tensor, search: Search) -> list[Hypothesis]:
    """The best finished hypothesis of every sentence; source [B, S], lengths [B], limits [B]: most words, including the
    end.

    A hypothesis has at least one word before its end, unless its limit is 1.
    """
    live = _Live(decoder, source, lengths, limits.to(source.device), search)
    while live.alive:
        live.advance()
    return live.best()


class _Live:
    """The search in progress: tensors of unfinished sentences, and the finished hypotheses of all sentences."""

    def __init__(self, decoder: Decoder, source: Tensor, lengths: Tensor, limits: Tensor, search: Search) -> None:
        self.decoder, self.search = decoder, search
        count, device = len(source), source.device
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.places = torch.arange(count, device=device)  # index of the sentence in the result, [B]
        self.limits = limits
        self.longest = limits.tolist()
        self.state = decoder.begin(source, lengths)
        self.words = torch.full((count, 1, 1), search.start, device=device)  # [B, K, words so far]
        self.totals = torch.zeros(count, 1, device=device)  # log-probabilities [B, K]
        self.padded = torch.arange(source.shape[1], device=device) >= lengths.to(device)[:, None]  # (B, S)
        self.attended: Tensor | None = None  # sums of attention [B, K, S]

    @property
    def alive(self) -> bool:
        return len(self.places) > 0

    def advance(self) -> None:
        """Extend every hypothesis by one word."""
        scores, attention = self.decoder.step(self.words[:, :, -1], self.state)
        if self.search.coverage and attention is not None:
            self.attended = attention.float() if self.attended is None else self.attended + attention
        length = self.words.shape[2]  # of a hypothesis that ends with this word, counting its end but not its start
        totals = self.totals[:, :, None] + self._mask_forbidden(torch.log_softmax(scores.float(), 2), length)
        vocabulary = totals.shape[2]
        # Each hypothesis can end in one way, so twice the beam includes enough that continue.
        values, places = totals.flatten(1).topk(min(2 * self.search.beam, totals[0].numel()), 1)
        beams, words = places // vocabulary, places % vocabulary
        ends = (words == self.search.end) & values.isfinite()
        self._finish(values, beams, ends, length)
        self._go_on(values.masked_fill(ends, -torch.inf), beams, words, length)

    def _mask_forbidden(self, logs: Tensor, length: int) -> Tensor:
        """Log-probabilities [B, K, V] with -inf for words that are not allowed now."""
        for word in self.search.never:
            logs[:, :, word] = -torch.inf
        must_end = (self.limits <= length)[:, None]
        if length == 1:
            logs[:, :, self.search.end].masked_fill_(~must_end, -torch.inf)
        ending = logs[:, :, self.search.end].clone()
        logs.masked_fill_(must_end[:, :, None], -torch.inf)
        logs[:, :, self.search.end] = ending
        return logs

    def _finish(self, values: Tensor, beams: Tensor, ends: Tensor, length: int) -> None:
        """Store the hypotheses that end now, if they are among the best `beam` candidates."""
        rows, columns = ends[:, : self.search.beam].nonzero(as_tuple=True)
        if not len(rows):
            return
        chosen = beams[rows, columns]
        scores = values[rows, columns] / self.search.length_penalty(length)
        if self.attended is not None:
            covered = self.attended[rows, chosen].clamp(1e-10, 1.0).log().masked_fill(self.padded[rows], 0.0)
            scores = scores + self.search.coverage * covered.sum(1)
        found = self.words[rows, chosen, 1:]
        for place, score, words in zip(self.places[rows].tolist(), scores.tolist(), found.tolist(), strict=True):
            self.finished[place].append(Hypothesis(words, score))

    def _go_on(self, values: Tensor, beams: Tensor, words: Tensor, length: int) -> None:
        """Continue with the best `beam` hypotheses of each unfinished sentence."""
        values, order = values.topk(min(self.search.beam, values.shape[1]), 1)
        beams, words = beams.gather(1, order), words.gather(1, order)
        best = values[:, 0].tolist()
        keep = [
            row
            for row, (place, value) in enumerate(zip(self.places.tolist(), best, strict=True))
            if not self._is_over(place, value)
        ]
        rows = torch.tensor(keep, device=words.device, dtype=torch.int64)
        beams, words = beams[rows], words[rows]
        self.totals = values[rows]
        self.places, self.limits, self.padded = self.places[rows], self.limits[rows], self.padded[rows]
        self.words = torch.cat([self.words[rows[:, None], beams], words[:, :, None]], 2)
        if self.attended is not None:
            self.attended = self.attended[rows[:, None], beams]
        if keep:
            self.state = self.decoder.select(self.state, rows, beams)

    def _is_over(self, place: int, value: float) -> bool:
        """Whether a sentence is finished: its best unfinished hypothesis, with log-probability `value`, cannot win or
        need not continue."""
        finished = self.finished[place]
        if not math.isfinite(value):
            return True
        if self.search.early_stop and len(finished) >= self.search.beam:
            return True
        # Log-probabilities only decrease and coverage is at most 0, so this is an upper bound of its score.
        bound = value / self.search.length_penalty(self.longest[place])
        return any(bound <= hypothesis.score for hypothesis in finished)

    def best(self) -> list[Hypothesis]:
        """The best hypothesis per sentence; empty if scores were NaN and nothing could finish."""
        nothing = Hypothesis([], -math.inf)
        return [max(found, key=lambda hypothesis: hypothesis.score, default=nothing) for found in self.finished]
