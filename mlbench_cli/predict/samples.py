"""Samples to a goal over the global batch size: E(B) = E_min (1 + B / B_crit).

From McCandlish et al. 2018, arXiv:1812.06162. E_min is the number of samples for small batches, B_crit the batch size
that needs twice as many. Both belong to a task with its goal, optimizer and schedule, and are fitted to runs at
several
batch sizes; else B_crit comes from a published table for the task, or from the gradient noise scale of one run.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import is_finite_number

FITTED_ERROR = 0.15  # of a prediction within twice the range of measured batch sizes
PUBLISHED_ERROR = 0.20  # the fits of the tables are 1 to 9 % off, and the task's recipe differs
NO_GROWTH = 1e-6  # relative growth of samples at the largest batch that is none
NOISE_FACTOR = 3.0  # the noise scale is within this factor of B_crit; arXiv:1812.06162 finds more for some tasks
_Z90 = 1.2816  # standard deviations from the median to the 10th or 90th percentile
_FILE = "published_samples.csv"
_SOURCE = "mlcommons/logging, rcp_checker, reference convergence points"


class Basis(StrEnum):
    """The basis of a figure."""

    MEASURED = "measured"
    PUBLISHED = "published"
    GUESSED = "guessed"


@dataclass(frozen=True)
class GoalPoint:
    """One run that reached a goal: `samples` at the global batch size `batch`, with `method`."""

    batch: int
    samples: float
    method: str = ""
    source: str = ""


@dataclass(frozen=True)
class CriticalBatch:
    """E(B) = minimum (1 + B / critical). `critical` is infinite if larger batches did not need more samples.

    error   relative error of the fit, root mean square
    """

    minimum: float
    critical: float
    error: float = 0.0

    def samples(self, batch: float) -> float:
        """Samples to the goal at a global batch size."""
        return self.minimum * (1 + batch / self.critical)


@dataclass(frozen=True)
class SamplesToGoal:
    """Samples to a goal at any batch size, relative to the `known` number at batch size `at`.

    spread   standard deviation of the logarithm of a prediction far from `at`; 0 at `at` itself
    basis    source of B_crit; None: other batch sizes are unknown
    note     the same as a sentence
    """

    known: float
    at: float
    critical: float | None
    spread: float
    basis: Basis | None
    note: str
    reach: tuple[float, float] = (0.0, math.inf)  # range of batch sizes that supports the figure
    critical_factor: float = 1.0  # by which `critical` may be too large or too small

    def samples(self, batch: float) -> float | None:
        """Samples to the goal at a global batch size; None if unsupported."""
        if same_batch(batch, self.at):
            return self.known
        if self.critical is None:
            return None
        return self.known * self._growth(batch, self.critical)

    def kept(self, batch: float) -> float | None:
        """Sample efficiency at this batch size relative to the known one: 0.5 means twice as many samples."""
        samples = self.samples(batch)
        return None if samples is None else self.known / samples

    def log_error(self, batch: float) -> float:
        """Standard deviation of the logarithm of `samples`."""
        if same_batch(batch, self.at) or self.critical is None:
            return self.spread if self.basis is Basis.MEASURED else 0.0
        ends = [self._growth(batch, self.critical * by) for by in (1 / self.critical_factor, self.critical_factor)]
        from_critical = abs(math.log(ends[0] / ends[1])) / (2 * _Z90)
        low, high = self.reach
        outside = max(1.0, low / batch if batch < low else batch / high)
        return math.hypot(self.spread * math.sqrt(outside), from_critical)

    def _growth(self, batch: float, critical: float) -> float:
        return (1 + batch / critical) / (1 + self.at / critical)


def same_batch(batch: float, other: float) -> bool:
    """Whether two batch sizes are equal up to rounding."""
    return abs(batch - other) <= 0.01 * other


def fit(points: Sequence[GoalPoint]) -> CriticalBatch:
    """Fit E_min and B_crit (at least 0) by least squares of relative errors. Raises ValueError for a single batch size.

    (E_min + slope B) / samples is to be 1, which is linear in E_min and slope = E_min / B_crit.
    """
    if len({point.batch for point in points}) < 2:
        raise ValueError("all points have the same batch size")
    rows = [(1 / point.samples, point.batch / point.samples) for point in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    minimum, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if slope <= NO_GROWTH * a / aa / max(point.batch for point in points):
        minimum, slope = a / aa, 0.0
    elif minimum <= 0:  # proportional to the batch size: the same number of updates everywhere
        minimum, slope = 0.0, b / bb
    residuals = [minimum * row[0] + slope * row[1] - 1 for row in rows]
    error = math.sqrt(sum(value * value for value in residuals) / len(rows))
    if not minimum:
        smallest = min(point.batch for point in points)
        minimum = slope * smallest * 1e-3  # far above B_crit everywhere
    return CriticalBatch(minimum, minimum / slope if slope else math.inf, error)


@cache
def load_published() -> Mapping[str, tuple[tuple[GoalPoint, ...], str, str]]:
    """The published tables by name: points, the task of mlbench that they are for (or ""), and the round."""
    found: dict[str, tuple[list[GoalPoint], str, str]] = {}
    with resources.files(__package__).joinpath(_FILE).open("r", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points = found.setdefault(row["table"], ([], row["task"], row["round"]))[0]
            points.append(GoalPoint(int(row["batch"]), float(row["samples"])))
    return {name: (tuple(points), task, edition) for name, (points, task, edition) in found.items()}


def read_point(run: Mapping[str, Any], result: Mapping[str, Any], goal: str | None = None) -> GoalPoint:
    """What an archive says of samples to the goal `goal` (full or light; None: the run's own).

    Raises UsageError if the run did not reach it, or does not say its batch size.
    """
    name, own = run["name"], (result.get("goal") or {}).get("kind") or run["spec"].get("goal") or "full"
    kind = goal or own
    samples = ((result["details"].get("goals") or {}).get(kind) or {}).get("samples")
    if samples is None and kind == own and result["outcome"] == "goal_reached":
        samples = result.get("samples")
    if not is_finite_number(samples) or samples <= 0:
        raise UsageError(
            f'The run "{name}" has not reached the {kind} goal of {run["spec"]["task"]}, '
            "so it is unknown how many samples that takes.",
            hint="Let a run reach it with more epochs, or plan for the light goal.",
        )
    batch = read_batch(run, result)
    if batch is None:
        raise UsageError(f'The result of "{name}" does not tell its global batch size.', hint="Another run with --from")
    method = run["spec"].get("method") or ""
    return GoalPoint(batch, float(samples), _method_name(method), str(name))


def read_batch(run: Mapping[str, Any], result: Mapping[str, Any]) -> int | None:
    """The global batch size of a run, in samples; None if it is not known."""
    parameters = run["spec"]["parameters"]
    found = result["details"].get("global_batch", parameters.get("global_batch"))
    if found is None and is_finite_number(parameters.get("batch_size")):
        found = parameters["batch_size"] * result["world_size"]
    return int(found) if is_finite_number(found) and found >= 1 else None


def _method_name(method: Any) -> str:
    return str(method.get("name", "")) if isinstance(method, Mapping) else str(method)


def read_noise_scale(result: Mapping[str, Any]) -> float | None:
    """The gradient noise scale that a run has measured, in samples; None if it has not, or could not tell."""
    found = (result["details"].get("noise_scale") or {}).get("samples")
    return float(found) if is_finite_number(found) and found > 0 else None


def choose_model(task: str, points: Sequence[GoalPoint], noise_scale: float | None) -> SamplesToGoal:
    """Samples to the goal from runs that reached it, the first of which is the one to start from.

    With runs at several batch sizes B_crit is fitted; else it is that of the task's published table; else the noise
    scale, within a factor of 3. With none of them other batch sizes have no figure.
    """
    batches = sorted({point.batch for point in points})
    first = points[0]
    if len(batches) > 1:
        fitted = fit(points)
        spread = max(FITTED_ERROR / _Z90, fitted.error)
        known = fitted.samples(first.batch)
        note = (
            f"samples to goal: measured, {len(points)} runs at batches {_list(batches)}: "
            f"B_crit {_show(fitted.critical)}, fit {100 * fitted.error:.0f} % off"
        )
        reach = (batches[0] / 2, batches[-1] * 2)
        return SamplesToGoal(known, first.batch, fitted.critical, spread, Basis.MEASURED, note, reach)
    mean = math.exp(sum(math.log(point.samples) for point in points) / len(points))
    for name, (published, own_task, edition) in load_published().items():
        if own_task == task:
            fitted = fit(published)
            spread = max(PUBLISHED_ERROR / _Z90, fitted.error)
            note = f"samples to goal: published ({name}, {edition}; {_SOURCE}): B_crit {_show(fitted.critical)}"
            reach = (min(point.batch for point in published) / 2, max(point.batch for point in published) * 2)
            return SamplesToGoal(mean, first.batch, fitted.critical, spread, Basis.PUBLISHED, note, reach)
    if noise_scale is not None:
        note = (
            f"samples to goal: guessed from the gradient noise scale, {_show(noise_scale)} samples, "
            f"within a factor of {NOISE_FACTOR:g}"
        )
        return SamplesToGoal(mean, first.batch, noise_scale, 0.0, Basis.GUESSED, note, critical_factor=NOISE_FACTOR)
    note = (
        f"samples to goal: known at batch {first.batch} only. A run at another batch size (--from RUN), "
        "or one with --calibrate and two workers, would show the rest"
    )
    return SamplesToGoal(mean, first.batch, None, 0.0, None, note)


def _list(batches: Sequence[int]) -> str:
    return ", ".join(str(batch) for batch in batches)


def _show(critical: float) -> str:
    return "above all of them" if math.isinf(critical) else f"{critical:,.0f}"
