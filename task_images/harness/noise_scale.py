"""The gradient noise scale, measured during training (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).

B_simple = tr(S) / |G|^2, with G the true gradient and S the covariance of a sample's gradient. Both follow from
gradients at two batch sizes, because the expected squared norm at batch size B is |G|^2 + tr(S) / B:

    |G|^2 = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)
    tr(S) = (|g_small|^2 - |g_big|^2) / (1 / B_small - 1 / B_big)

With several ranks, a rank's gradient before the exchange is the small batch, and the mean after it the big one. With
one rank, or a method whose gradients are not a plain mean, the small batch is a rank's first pass and the big one its
whole update, if that has several passes. Both are averaged over updates before dividing, because estimates of single
updates are noisy and often negative.

Norms are computed in few updates, so that they take about `SHARE` of the training time. Ranks exchange them before a
validation, where they synchronize anyway.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.base import Strategy
from task_images.comm.ddp import DdpAllReduce
from task_images.comm.reducer import Reducer
from task_images.harness.distributed import World
from task_images.harness.updates import Update

SHARE = 0.008  # of the training time; in all other updates, the hooks cost a little more
WARM_UP = 2  # updates, which are slow because kernels are selected
FIRST_LOOK = 4  # measured updates before their interval is chosen
MAX_EVERY = 1000
WINDOW = 100  # measured updates over which the live figure is smoothed
DRAWS, BLOCKS = 1000, 12  # of the block bootstrap; blocks, because norms of neighboring updates are correlated


class Norms(NamedTuple):
    """Squared gradient norms in one update: the mean over ranks at the small batch, and at the big one."""

    update: int
    small: float
    big: float


class NoiseScalePoint(TypedDict):
    """The estimate from the updates since the previous point; `update` is the last of them."""

    update: int
    norms: int
    gradient_squared: float
    trace: float
    samples: float | None


class NoiseScaleDocument(TypedDict):
    """The entry of the result. `samples`: B_simple over all measured updates, None if |G|^2 is indistinguishable from
    0; `low` and `high`: 10th and 90th percentile of a block bootstrap; `share_of_time`: its share of the training
    time."""

    samples: float | None
    low: float | None
    high: float | None
    small_batch: float
    big_batch: float
    between: str
    updates: int
    share_of_time: float
    points: list[NoiseScalePoint]


def estimate(norms: Sequence[Norms], small: float, big: float) -> tuple[float, float, float | None]:
    """|G|^2, tr(S) and their ratio (in samples), from norms at the batch sizes `small` and `big`."""
    at_small = math.fsum(norm.small for norm in norms) / len(norms)
    at_big = math.fsum(norm.big for norm in norms) / len(norms)
    squared = (big * at_big - small * at_small) / (big - small)
    trace = (at_small - at_big) / (1 / small - 1 / big)
    return squared, trace, trace / squared if squared > 0 and trace >= 0 else None


def bootstrap(norms: Sequence[Norms], small: float, big: float) -> tuple[float, float] | None:
    """10th and 90th percentile of the ratio over draws of blocks of updates; None if a tenth of the draws have no
    ratio."""
    if len(norms) < BLOCKS:
        return None
    size = len(norms) // BLOCKS
    blocks = [norms[start : start + size] for start in range(0, size * BLOCKS, size)]
    source = random.Random(0)
    ratios = []
    for _ in range(DRAWS):
        drawn = [norm for block in source.choices(blocks, k=BLOCKS) for norm in block]
        ratio = estimate(drawn, small, big)[2]
        ratios.append(math.inf if ratio is None else ratio)
    ratios.sort()
    low, high = ratios[DRAWS // 10], ratios[-1 - DRAWS // 10]
    return None if math.isinf(high) else (low, high)


def averages_exactly(strategy: Strategy) -> bool:
    """Whether gradients after the exchange are the plain mean over ranks, complete before the update."""
    if isinstance(strategy, Reducer):
        method = strategy.method
        return (
            strategy.traits.barrier
            and strategy.traits.identical
            and method.codec in ("none", "fp16", "bf16")
            and method.sync == "every"
            and method.staleness == "sync"
            and method.momentum == "none"
        )
    return type(strategy) in (GradientAllReduce, DdpAllReduce)


class NoiseScale:
    """Measures norms of a training's gradients. Create it before the strategy attaches, so that its hooks run first.

    In a measured update, hooks compute the norms of this rank's gradients in its last pass, and in its first one if
    that is the small batch; the strategy's `on_mean` passes the mean over ranks.
    """

    def __init__(self, world: World, model: nn.Module, strategy: Strategy) -> None:
        self._world, self._is_across = world, world.size > 1 and averages_exactly(strategy)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_possible = not any(hasattr(parameter, "placements") for parameter in parameters)  # shards
        self._is_armed = self._is_measured = False
        self._lengths: list[Tensor] = []  # norms of gradients in the current pass
        self._taken: list[tuple[int, Tensor, Tensor]] = []  # update, squared norms at the small and the big batch
        self._small = torch.zeros(())
        self._norms: list[Norms] = []
        self._points: list[NoiseScalePoint] = []
        self._batches: tuple[float, float] | None = None
        self._every = 1
        # Seconds of the clock and of the CPUs: in norms, and when the updates began.
        self._spent, self._computed = 0.0, 0.0
        self._begun, self._computing = 0.0, 0.0
        self._update = self._measured = self._passes = self._number = 0
        self._share = self._scale = 1.0
        if self._is_possible:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            strategy.on_mean = self._on_mean if self._is_across else None

    def begin(self, update: Update[Any], scale: float) -> None:
        """Call before an update; `scale` is its loss scale. Updates of another size than the first are skipped."""
        self._update += 1
        self._passes, self._scale, self._number = update.count, scale, 0
        self._share = update.weight / update.total * self._world.size
        self._is_measured = False
        if self._update <= WARM_UP:
            self._begun, self._computing = time.perf_counter(), time.process_time()
        elif self._is_possible and update.count > (0 if self._is_across else 1):
            batch = update.samples / self._world.size
            pair = (batch, float(update.samples)) if self._is_across else (batch / update.count, batch)
            self._batches = self._batches or pair
            self._is_measured = pair == self._batches and self._update % self._every == 0

    def begin_pass(self) -> None:
        """Call before the forward pass of each pass."""
        self._number += 1
        is_first_wanted = self._number == 1 and not self._is_across
        self._is_armed = self._is_measured and (is_first_wanted or self._number == self._passes)

    def end_pass(self) -> None:
        """Call after the backward pass of each pass: adds up the norms from the hooks."""
        if not self._is_armed:
            return
        self._is_armed = False
        begun = time.perf_counter(), time.thread_time()
        is_last = self._number == self._passes
        factor = self._share / self._scale * (1 if is_last else self._passes)
        squares = torch.stack(self._lengths).double().square().sum() * factor**2
        self._lengths.clear()
        if not is_last or self._is_across:
            self._small = squares
        else:
            self._add(squares)
        self._charge(begun)

    def end(self) -> None:
        """Call after an update. Early in the training, this chooses the measuring interval once. Collective."""
        if self._every == 1 and self._measured == FIRST_LOOK:
            self.collect()

    def collect(self) -> NoiseScalePoint | None:
        """The estimate from the updates since the last call; None without any. Collective."""
        if not self._taken or self._batches is None:
            return None
        small = torch.stack([row[1] for row in self._taken]).tolist()
        big = torch.stack([row[2] for row in self._taken]).tolist()
        # Other programs make updates longer, but not what they compute.
        shares = (
            self._spent / (time.perf_counter() - self._begun),
            self._computed / max(1e-9, time.process_time() - self._computing),
        )
        cost = max(shares) * (self._update - WARM_UP) / self._measured
        if self._is_across:
            *small, cost = (value / self._world.size for value in self._world.sum([*small, cost]))
        self._every = max(self._every, min(MAX_EVERY, math.ceil(cost / SHARE)))
        fresh = [Norms(row[0], *pair) for row, pair in zip(self._taken, zip(small, big, strict=True), strict=True)]
        fresh = [norms for norms in fresh if math.isfinite(norms.small) and math.isfinite(norms.big)]
        self._taken.clear()
        if not fresh:
            return None
        self._norms += fresh
        squared, trace, ratio = estimate(fresh, *self._batches)
        point: NoiseScalePoint = {
            "update": fresh[-1].update,
            "norms": len(fresh),
            "gradient_squared": squared,
            "trace": trace,
            "samples": ratio,
        }
        self._points.append(point)
        return point

    @property
    def smoothed(self) -> float | None:
        """The ratio over the last WINDOW measured updates."""
        return estimate(self._norms[-WINDOW:], *self._batches)[2] if self._norms and self._batches else None

    def to_dict(self) -> NoiseScaleDocument | None:
        """For the result's details, after the last `collect`; None if nothing was measured."""
        if not self._norms or self._batches is None:
            return None
        low, high = bootstrap(self._norms, *self._batches) or (None, None)
        return {
            "samples": estimate(self._norms, *self._batches)[2],
            "low": low,
            "high": high,
            "small_batch": self._batches[0],
            "big_batch": self._batches[1],
            "between": "ranks" if self._is_across else "passes",
            "updates": len(self._norms),
            "share_of_time": self._spent / (time.perf_counter() - self._begun),
            "points": self._points,
        }

    def _charge(self, begun: tuple[float, float]) -> None:
        """Count what this thread has done since both clocks were at `begun`."""
        self._spent += time.perf_counter() - begun[0]
        self._computed += time.thread_time() - begun[1]

    def _add(self, big: Tensor) -> None:
        self._taken.append((self._update, self._small, big))
        self._measured += 1

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._is_armed and parameter.grad is not None:
            begun = time.perf_counter(), time.thread_time()
            dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
            self._lengths.append(torch.linalg.vector_norm(parameter.grad, dtype=dtype))
            self._charge(begun)

    def _on_mean(self, gradients: Sequence[Tensor]) -> None:
        if self._is_measured:
            begun = time.perf_counter(), time.thread_time()
            norms = torch._foreach_norm(list(gradients))
            self._add((torch.stack(norms).double() / self._scale).square().sum())
            self._charge(begun)
