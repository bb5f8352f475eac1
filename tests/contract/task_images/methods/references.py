"""What the papers say, in NumPy: one process, float64, nothing of mlbench. Tests compare every method with this.

A reference takes the gradients of all ranks update by update and gives the weights of every rank. Gradients are lists
of tensors, one per parameter; `rate` is the learning rate of the update. Sources are cited with the number of the
algorithm. Random choices are given to it (`Random`): what they are is no part of an algorithm.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tensors = list[Array]


@dataclass(frozen=True)
class Setting:
    """How the weights are updated. `decay` is coupled to the gradient in SGD, and decoupled in AdamW."""

    momentum: float = 0.0
    decay: float = 0.0
    adam: bool = False
    clip: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


class Random(Protocol):
    """The random choices of an update, counted from 1, in a message of all parameters."""

    def coins(self, update: int, count: int) -> NDArray[np.bool_]:
        """Which ties are negative."""

    def rounding(self, update: int, rank: int, count: int) -> Array:
        """Uniform numbers of [0, 1) by which magnitudes are rounded."""

    def factor(self, name: int, columns: int, rank: int) -> Array:
        """The right factor that a matrix begins with, (columns, rank)."""


class Optimizer:
    """SGD with Polyak's momentum, or AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    def __init__(self, setting: Setting, weights: Tensors) -> None:
        self.setting, self.steps = setting, 0
        self.first = [np.zeros_like(weight) for weight in weights]
        self.second = [np.zeros_like(weight) for weight in weights]

    def step(self, weights: Tensors, gradients: Tensors, rate: float) -> None:
        """Update `weights` in place."""
        own, self.steps = self.setting, self.steps + 1
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if own.adam:
                one, two = own.betas
                self.first[index] = one * self.first[index] + (1 - one) * gradient
                self.second[index] = two * self.second[index] + (1 - two) * gradient**2
                mean = self.first[index] / (1 - one**self.steps)
                square = self.second[index] / (1 - two**self.steps)
                weight -= rate * own.decay * weight
                weight -= rate * mean / (np.sqrt(square) + own.eps)
            else:
                total = gradient + own.decay * weight
                self.first[index] = own.momentum * self.first[index] + total
                weight -= rate * self.first[index]


def clip(gradients: Tensors, limit: float | None) -> Tensors:
    """Gradients scaled so that the norm of all together is at most `limit`."""
    if limit is None:
        return gradients
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    return [gradient * min(1.0, limit / (norm + 1e-6)) for gradient in gradients]


def add(parts: Iterable[Array]) -> Array:
    """The sum of arrays."""
    return functools.reduce(np.add, parts)


def is_finite(gradients: Tensors) -> bool:
    return all(bool(np.isfinite(gradient).all()) for gradient in gradients)


def top(flat: Array, density: float) -> NDArray[np.int64]:
    """Places of the max(1, floor(density n)) entries of greatest magnitude."""
    count = max(1, int(density * flat.size))
    return np.argsort(-np.abs(flat), kind="stable")[:count]


# --- gradients are combined, then all ranks make the same update -------------------------------------------------


class Combine(Protocol):
    """From all ranks' gradients to the one that all update with."""

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors: ...


def mean(update: int, gradients: Sequence[Tensors]) -> Tensors:
    """Synchronous SGD (Chen et al. 2016, algorithm 3, without backup workers)."""
    return [add(parts) / len(gradients) for parts in zip(*gradients, strict=True)]


@dataclass
class Rounded:
    """The mean of gradients in another format, in which they are `scale` times as large."""

    cast: Callable[[Array], Array]

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors:
        return [add(self.cast(part / len(gradients)) for part in parts) for parts in zip(*gradients, strict=True)]


Compress = Callable[[int, int, Tensors], Tensors]  # update, rank, what a rank has -> what it sends


@dataclass
class ErrorFeedback:
    """Each rank adds what it did not send to its next gradient (Karimireddy et al. 2019, algorithm 1; Stich et al.
    2018, algorithm 1), here in units of gradients: the papers' memory has the learning rate of its update in it."""

    compress: Compress
    keep: bool = True
    memory: dict[int, Tensors] = field(default_factory=dict)

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors:
        sent = []
        for rank, own in enumerate(gradients):
            total = [part / len(gradients) for part in own]
            if self.keep and rank in self.memory:
                total = [part + kept for part, kept in zip(total, self.memory[rank], strict=True)]
            sent.append(self.compress(update, rank, total))
            self.memory[rank] = [part - other for part, other in zip(total, sent[-1], strict=True)]
        return [add(parts) for parts in zip(*sent, strict=True)]


def scaled_sign(update: int, rank: int, tensors: Tensors) -> Tensors:
    """Karimireddy et al. 2019, section 6.1: sign times the mean magnitude, layer by layer."""
    return [np.abs(part).mean() * np.where(part < 0, -1.0, 1.0) for part in tensors]


def sparse(density: float) -> Compress:
    """The greatest entries of each tensor (Aji and Heafield 2017, section 3; Stich et al. 2018, definition 2.1)."""

    def compress(update: int, rank: int, tensors: Tensors) -> Tensors:
        found = []
        for part in tensors:
            sent = np.zeros(part.size)
            chosen = top(part.ravel(), density)
            sent[chosen] = part.ravel()[chosen]
            found.append(sent.reshape(part.shape))
        return found

    return compress


def quantized(levels: int, random: Random, bucket: int = 512) -> Compress:
    """Alistarh et al. 2017, section 3.1, in buckets of a message (section 4)."""

    def compress(update: int, rank: int, tensors: Tensors) -> Tensors:
        flat = np.concatenate([part.ravel() for part in tensors])
        noise, sent = random.rounding(update, rank, flat.size), np.zeros_like(flat)
        for start in range(0, flat.size, bucket):
            part = flat[start : start + bucket]
            norm = float(np.float32(np.linalg.norm(part)))
            steps = np.floor(np.abs(part) * levels / norm + noise[start : start + bucket])
            sent[start : start + bucket] = norm * np.sign(part) * np.minimum(steps, levels) / levels
        return split(flat=sent, like=tensors)

    return compress


def split(flat: Array, like: Tensors) -> Tensors:
    ends = np.cumsum([part.size for part in like])[:-1]
    return [part.reshape(other.shape) for part, other in zip(np.split(flat, ends), like, strict=True)]


@dataclass
class MajorityVote:
    """Bernstein et al. 2019, algorithm 1: the sign of the sum of signs; what decides ties is left open there."""

    random: Random

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors:
        flats = [np.concatenate([part.ravel() for part in own]) for own in gradients]
        votes = sum(np.where(flat < 0, -1, 1) for flat in flats)
        coins = self.random.coins(update, flats[0].size)
        signs = np.where((votes < 0) | ((votes == 0) & coins), -1.0, 1.0)
        return split(signs, gradients[0])


@dataclass
class DeepGradientCompression:
    """Lin et al. 2018, momentum correction and factor masking (section 3.1, 3.2); the sum is clipped, not the ranks'
    gradients."""

    density: float
    momentum: float
    velocity: dict[int, Tensors] = field(default_factory=dict)
    memory: dict[int, Tensors] = field(default_factory=dict)

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors:
        count, sent = len(gradients), []
        for rank, own in enumerate(gradients):
            zeros = [np.zeros_like(part) for part in own]
            speed, kept = self.velocity.get(rank, zeros), self.memory.get(rank, zeros)
            speed = [self.momentum * part + gradient / count for part, gradient in zip(speed, own, strict=True)]
            kept = [part + other for part, other in zip(kept, speed, strict=True)]
            chosen = sparse(self.density)(update, rank, kept)
            masks = [part == 0 for part in chosen]
            sent.append(chosen)
            self.velocity[rank] = [part * mask for part, mask in zip(speed, masks, strict=True)]
            self.memory[rank] = [part * mask for part, mask in zip(kept, masks, strict=True)]
        return [add(parts) for parts in zip(*sent, strict=True)]


@dataclass
class GlobalTopK:
    """Shi et al. 2019, algorithm 3 (gTopKAllReduce over a tree), with another memory than its algorithm 4: what a merge
    drops stays with the rank that merged, so that no rank's gradient is lost for more than two ranks."""

    density: float
    memory: dict[int, Array] = field(default_factory=dict)

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors:
        count, sparse_of = len(gradients), []
        for rank, own in enumerate(gradients):
            flat = np.concatenate([part.ravel() for part in own]) / count + self.memory.get(rank, 0.0)
            chosen = top(flat, self.density)
            sent = np.zeros_like(flat)
            sent[chosen] = flat[chosen]
            self.memory[rank] = flat - sent
            sparse_of.append(sent)
        entries = max(1, int(self.density * sparse_of[0].size))
        distance = 1
        while distance < count:
            for rank in range(0, count - distance, 2 * distance):
                total = sparse_of[rank] + sparse_of[rank + distance]
                kept = np.zeros_like(total)
                chosen = np.argsort(-np.abs(total), kind="stable")[:entries]
                kept[chosen] = total[chosen]
                self.memory[rank] = self.memory[rank] + total - kept
                sparse_of[rank] = kept
            distance *= 2
        return split(sparse_of[0], gradients[0])


@dataclass
class PowerSgd:
    """Vogels et al. 2019, algorithms 1 and 2: one step of subspace iteration from the last factor, local error
    feedback; vectors, and matrices that it would not halve, uncompressed. From update `warmup` + 1 on."""

    rank: int
    random: Random
    warmup: int = 0
    factors: dict[int, Array] = field(default_factory=dict)
    memory: dict[int, Tensors] = field(default_factory=dict)

    def __call__(self, update: int, gradients: Sequence[Tensors]) -> Tensors:
        count = len(gradients)
        totals = []
        for rank, own in enumerate(gradients):
            kept = self.memory.get(rank) or [np.zeros_like(part) for part in own]
            totals.append([part / count + other for part, other in zip(own, kept, strict=True)])
        sums: Tensors = []
        for index, part in enumerate(gradients[0]):
            matrices = [total[index].reshape(part.shape[0], -1) for total in totals]
            rows, columns = matrices[0].shape
            width = min(self.rank, rows, columns)
            if update <= self.warmup or part.ndim < 2 or 2 * (rows + columns) * width >= rows * columns:
                sums.append(add(total[index] for total in totals))
                for total in totals:
                    total[index] = np.zeros_like(part)
                continue
            start = self.factors.get(index)
            start = self.random.factor(index, columns, width) if start is None else start
            basis = np.linalg.qr(add(matrix @ start for matrix in matrices))[0]
            factors = [matrix.T @ basis for matrix in matrices]
            self.factors[index] = add(factors)
            sums.append((basis @ self.factors[index].T).reshape(part.shape))
            for total, matrix, factor in zip(totals, matrices, factors, strict=True):
                total[index] = (matrix - basis @ factor.T).reshape(part.shape)
        self.memory = dict(enumerate(totals))
        return sums


@dataclass
class Synchronous:
    """All ranks update with what `combine` makes of their gradients; if one rank's is not finite, none does."""

    combine: Combine

    def run(self, setting: Setting, weights: Tensors, gradients: "Gradients", rates: Sequence[float]) -> list[Tensors]:
        """Weights of every rank after an update at each of `rates`."""
        weights = [part.copy() for part in weights]
        optimizer = Optimizer(setting, weights)
        for update, rate in enumerate(rates, 1):
            all_ranks = gradients(update)
            if all(is_finite(own) for own in all_ranks):
                found = self.combine(update, all_ranks)
                optimizer.step(weights, clip(found, setting.clip), rate)
        return [weights] * len(gradients(1))


Gradients = Callable[[int], list[Tensors]]  # of an update, by rank


# --- every rank updates by itself --------------------------------------------------------------------------------

Exchange = Callable[[int, list[Tensors], float], None]  # update, weights by rank, rate: in place


@dataclass
class Local:
    """Each rank updates with its own gradient, then `exchange` changes the weights of all. A rank whose gradient is not
    finite makes no step. `before`: weights are exchanged as they were before the step, which is added to the result."""

    exchange: Exchange
    before: bool = False

    def run(self, setting: Setting, weights: Tensors, gradients: Gradients, rates: Sequence[float]) -> list[Tensors]:
        """Weights of every rank after an update at each of `rates`."""
        count = len(gradients(1))
        everyone = [[part.copy() for part in weights] for _ in range(count)]
        optimizers = [Optimizer(setting, weights) for _ in range(count)]
        for update, rate in enumerate(rates, 1):
            old = [[part.copy() for part in own] for own in everyone]
            for own, optimizer, gradient in zip(everyone, optimizers, gradients(update), strict=True):
                if is_finite(gradient):
                    optimizer.step(own, clip(gradient, setting.clip), rate)
            if not self.before:
                self.exchange(update, everyone, rate)
                continue
            steps = [[new - part for new, part in zip(*pair, strict=True)] for pair in zip(everyone, old, strict=True)]
            self.exchange(update, old, rate)
            everyone = [
                [part + step for part, step in zip(own, change, strict=True)]
                for own, change in zip(old, steps, strict=True)
            ]
        return everyone


def average(every: int) -> Exchange:
    """Local SGD (Stich 2019, algorithm 1; with momentum, Lin et al. 2020, algorithm 1)."""

    def exchange(update: int, weights: list[Tensors], rate: float) -> None:
        if update % every == 0:
            for index in range(len(weights[0])):
                middle = add(own[index] for own in weights) / len(weights)
                for own in weights:
                    own[index] = middle.copy()

    return exchange


def ring(size: int) -> Array:
    """The mixing matrix of a ring: each rank with its neighbors, all counting the same."""
    matrix = np.zeros((size, size))
    for rank in range(size):
        near = sorted({rank, (rank - 1) % size, (rank + 1) % size})
        matrix[rank, near] = 1 / len(near)
    return matrix


def mix(update: int, weights: list[Tensors], rate: float) -> None:
    """One multiplication by the mixing matrix (Lian et al. 2017, algorithm 1, line 5)."""
    matrix = ring(len(weights))
    for index in range(len(weights[0])):
        old = [own[index] for own in weights]
        for rank, own in enumerate(weights):
            own[index] = add(matrix[rank, other] * old[other] for other in range(len(weights)))


@dataclass
class ChocoGossip:
    """Koloskova et al. 2019, algorithm 2: what neighbors believe of a rank comes nearer by compressed differences."""

    density: float
    step: float
    believed: list[Tensors]

    def __call__(self, update: int, weights: list[Tensors], rate: float) -> None:
        matrix, compress = ring(len(weights)), sparse(self.density)
        for own, other in zip(weights, self.believed, strict=True):
            sent = compress(update, 0, [part - known for part, known in zip(own, other, strict=True)])
            other[:] = [known + part for known, part in zip(other, sent, strict=True)]
        for rank, own in enumerate(weights):
            for index, part in enumerate(own):
                pull = add(
                    matrix[rank, peer] * (self.believed[peer][index] - self.believed[rank][index])
                    for peer in range(len(weights))
                )
                own[index] = part + self.step * pull


# --- outer steps --------------------------------------------------------------------------------------------------


@dataclass
class SlowMo:
    """Wang et al. 2020, algorithm 1: an exchange for `Local`."""

    every: int
    beta: float
    alpha: float
    anchor: Tensors
    momentum: Tensors = field(default_factory=list)

    def __call__(self, update: int, weights: list[Tensors], rate: float) -> None:
        if update % self.every:
            return
        self.momentum = self.momentum or [np.zeros_like(part) for part in self.anchor]
        for index, start in enumerate(self.anchor):
            middle = add(own[index] for own in weights) / len(weights)
            self.momentum[index] = self.beta * self.momentum[index] + (start - middle) / rate
            self.anchor[index] = start - self.alpha * rate * self.momentum[index]
            for own in weights:
                own[index] = self.anchor[index].copy()


@dataclass
class DiLoCo:
    """Douillard et al. 2023, algorithm 1, with the outer Nesterov momentum of its section 3 (that of PyTorch's SGD)."""

    every: int
    rate: float
    factor: float
    anchor: Tensors
    momentum: Tensors = field(default_factory=list)

    def __call__(self, update: int, weights: list[Tensors], rate: float) -> None:
        if update % self.every:
            return
        self.momentum = self.momentum or [np.zeros_like(part) for part in self.anchor]
        for index, start in enumerate(self.anchor):
            change = add(start - own[index] for own in weights) / len(weights)
            self.momentum[index] = self.factor * self.momentum[index] + change
            self.anchor[index] = start - self.rate * (change + self.factor * self.momentum[index])
            for own in weights:
                own[index] = self.anchor[index].copy()


@dataclass
class OneBitAdam:
    """Tang et al. 2021, algorithm 1, for workers that get all others' compressed momenta: AdamW on mean gradients for
    `warmup` updates; then the variance, bias-corrected as it was last, divides the mean of compressed momenta."""

    warmup: int

    def run(self, setting: Setting, weights: Tensors, gradients: Gradients, rates: Sequence[float]) -> list[Tensors]:
        """Weights of every rank after an update at each of `rates`."""
        count, (one, two) = len(gradients(1)), setting.betas
        weights = [part.copy() for part in weights]
        adam = Optimizer(setting, weights)
        errors = [[np.zeros_like(part) for part in weights] for _ in range(count)]
        for update, rate in enumerate(rates, 1):
            all_ranks = gradients(update)
            if not all(is_finite(own) for own in all_ranks):
                continue
            if update <= self.warmup:
                adam.step(weights, clip(mean(update, all_ranks), setting.clip), rate)
                continue
            sent = []
            for rank, own in enumerate(all_ranks):
                total = [
                    one * speed + (1 - one) * part + error
                    for speed, part, error in zip(adam.first, clip(own, setting.clip), errors[rank], strict=True)
                ]
                sent.append(scaled_sign(update, rank, total))
                errors[rank] = [part - other for part, other in zip(total, sent[-1], strict=True)]
            adam.first = [add(parts) / count for parts in zip(*sent, strict=True)]
            for weight, speed, square in zip(weights, adam.first, adam.second, strict=True):
                weight -= rate * setting.decay * weight
                weight -= rate * speed / (np.sqrt(square / (1 - two**adam.steps)) + setting.eps)
        return [weights] * count
