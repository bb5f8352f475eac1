"""The metrics that a program reports, each as three figures: its last, best and mean value.

Metrics are those of rank 0; values that are not finite count only as the last one.
"""

import math
import re
from collections.abc import Iterator

from msgspec import Struct

from mlbench_cli.model.goals import BEST, MAX_METRICS, MEAN, Goal
from mlbench_cli.results.analysis.numbers import unit_of
from mlbench_cli.results.analysis.stats import MAX_FIGURE
from mlbench_cli.util.text import one_line

MAX_UNIT = 20  # characters
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_RATE = re.compile(r"(per_?(second|sec|s)|/s(ec)?|throughput|flops|mfu|bandwidth)$", re.IGNORECASE)
_LOWER = frozenset(
    {
        *(
            "loss",
            "nll",
            "bpb",
            "bpc",
            "error",
            "errors",
            "err",
            "mse",
            "rmse",
            "mae",
            "perplexity",
            "ppl",
            "wer",
            "cer",
        ),
        *("cer", "fid", "seconds", "time", "duration", "latency", "joules", "energy"),
    }
)
# Of a quantity, and not the quantity itself: loss_scale, learning_rate, acc_stderr, accuracy_drop, energy_efficiency;
# neg_log_loss has the other sign.
_OTHER = frozenset(
    {
        *("learning", "neg", "negative", "rate", "scale", "std", "stddev", "stderr", "var", "variance", "weight"),
        *("change", "delta", "diff", "drop", "efficiency", "gain", "gap", "improvement", "reduction", "saved"),
    }
)
_HIGHER = frozenset(
    {
        *("accuracy", "acc", "prec", "precision", "recall", "f", "auc", "auroc", "bleu", "rouge", "map", "iou", "dice"),
        *("psnr", "ssim", "reward", "score", "throughput", "goodput"),
    }
)


class MetricSummary(Struct, frozen=True):
    """The figures of one metric. `last` may be "nan", "inf" or "-inf"; `mean` is None if no value was finite, or if
    they have several units.

    `unit` is that which the program reports, else the usual one of such names; empty if unknown.

    `best` is None if it is unknown whether lower or higher is better.
    """

    count: int
    unit: str
    last: float | str
    mean: float | None
    best: float | None
    higher_is_better: bool | None

    def to_dict(self) -> dict[str, float | str | bool | None]:
        """The figures as JSON documents have them."""
        return {"last": self.last, "best": self.best, "mean": self.mean, "count": self.count, "unit": self.unit}

    def figures(self, name: str) -> Iterator[tuple[str, float]]:
        """The finite ones up to MAX_FIGURE, by their names, for the metric `name`."""
        for end, value in (("", self.last), (BEST, self.best), (MEAN, self.mean)):
            if value is not None and not isinstance(value, str) and abs(value) <= MAX_FIGURE:
                yield name + end, value

    @property
    def diverged(self) -> str:
        """The last value if it is no figure: "nan", "inf", "above 1e+100"; else empty."""
        if isinstance(self.last, str) or abs(self.last) <= MAX_FIGURE:
            return self.last if isinstance(self.last, str) else ""
        return f"above {MAX_FIGURE:g}" if self.last > 0 else f"below {-MAX_FIGURE:g}"


class MetricTally:
    """Summarizes metrics value by value."""

    def __init__(self) -> None:
        self._seen: dict[str, _Tally] = {}

    def take(self, name: str, value: float | str, unit: object = None) -> None:
        """Record the next value of a metric of rank 0."""
        name = one_line(name, 100)
        if name not in self._seen and len(self._seen) >= MAX_METRICS:
            return
        tally = self._seen.setdefault(name, _Tally())
        tally.take(value)
        if isinstance(unit, str) and unit.strip():
            unit = one_line(unit, MAX_UNIT)
            tally.has_units = tally.has_units or tally.unit not in ("", unit)
            tally.unit = unit

    def summarize(self, goal: Goal | None) -> dict[str, MetricSummary]:
        """The figures of every metric, in the order in which the names appeared."""
        return {name: tally.summarize(name, find_direction(name, goal)) for name, tally in self._seen.items()}


class _Tally:
    def __init__(self) -> None:
        self.unit = ""
        self.has_units = False  # several, such as MB and GB, whose values cannot be averaged
        self.count = self._finite = 0
        self._mean = 0.0
        self._low, self._high = math.inf, -math.inf
        self._last: float | str = "nan"

    def take(self, value: float | str) -> None:
        self.count += 1
        self._last = value
        if isinstance(value, str):
            return
        self._finite += 1
        self._mean += value / self._finite - self._mean / self._finite  # a sum of values could overflow
        self._low, self._high = min(self._low, value), max(self._high, value)

    def summarize(self, name: str, higher_is_better: bool | None) -> MetricSummary:
        unit = self.unit or unit_of(name)
        if not self._finite or self.has_units:
            return MetricSummary(self.count, unit, self._last, None, None, higher_is_better)
        mean = min(max(self._mean, self._low), self._high)  # of equal values exactly that value
        best = None if higher_is_better is None else self._high if higher_is_better else self._low
        return MetricSummary(self.count, unit, self._last, mean, best, higher_is_better)


def find_direction(name: str, goal: Goal | None = None) -> bool | None:
    """Whether a higher value of a metric is better: as its goal says, else as such names usually mean it; else None."""
    if goal is not None and name in goal.metric_names:
        return goal.comparison == ">="
    if _RATE.search(name):
        return True
    words = {word.lower() for word in _WORD.findall(name)}
    if words & _OTHER:
        return None
    if words & _LOWER:
        return False
    return True if words & _HIGHER else None
