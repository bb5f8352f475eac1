"""The rule of races to a loss (modded-nanogpt): the mean of several runs is below the goal, at p < 0.01.

One run below the goal may be luck. So the runs' final losses are held against the goal by a one-sided t-test, as
scipy.stats.ttest_1samp(losses, goal, alternative="less") does. Runs that stop as soon as they are below it do not
count, since their last loss was chosen.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.results.analysis.statistics import incomplete_beta
from mlbench_cli.util.text import counted

LEVEL = 0.01
MOST_RUNS = 10_000


@dataclass(frozen=True)
class RaceVerdict:
    """p: chance of losses at least as low as these if their mean were the goal; None for a single run.

    more   further runs that would decide it if they had this mean and spread; None: no number of them
    """

    runs: int
    mean: float
    deviation: float | None
    p: float | None
    more: int | None

    @property
    def holds(self) -> bool:
        """Whether the mean is shown to be below the goal."""
        return self.p is not None and self.p < LEVEL

    def __str__(self) -> str:
        mean = f"mean {self.mean:.4f} of {counted(self.runs, 'run')}"
        if self.holds:
            return f"{mean}: below the goal (p = {self.p:.2g})"
        more = f"{counted(self.more or 0, 'more run')} needed"
        needed = "more such runs would not show it" if self.more is None else more
        chance = "" if self.p is None else f" (p = {self.p:.2g})"
        return f"{mean}: not shown to be below the goal{chance}; {needed}"


def judge_race(losses: Sequence[float], goal: float) -> RaceVerdict:
    """Compare final losses with the goal. Raises ValueError without any."""
    count, mean = len(losses), statistics.fmean(losses)
    if count < 2:
        return RaceVerdict(count, mean, None, None, 1 if mean < goal else None)
    deviation = statistics.stdev(losses)
    p = _find_p(count, mean, deviation, goal)
    more: int | None = 0
    if p >= LEVEL:
        enough = (n for n in range(count + 1, MOST_RUNS) if _find_p(n, mean, deviation, goal) < LEVEL)
        found = next(enough, None) if mean < goal else None
        more = None if found is None else found - count
    return RaceVerdict(count, mean, deviation, p, more)


def _find_p(count: int, mean: float, deviation: float, goal: float) -> float:
    """P(T <= t) for Student's T with count - 1 degrees of freedom, t = (mean - goal) / (deviation / sqrt(count))."""
    if not deviation:
        return 0.0 if mean < goal else 1.0
    t, freedom = (mean - goal) / (deviation / math.sqrt(count)), count - 1
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return tail if t < 0 else 1 - tail
