"""Stragglers: a step that all ranks end together takes as long as the slowest of them computes.

A rank's computing time in a step is its median times a factor with a log-normal distribution, drawn for each rank and
step independently; `spread` is the standard deviation of the factor's logarithm. Machines that are always slow, and
ones that hang, are not in it.
"""

import math
from statistics import NormalDist

from mlbench_cli.errors import UsageError
from mlbench_cli.simulator.calibration import Calibration
from task_images.comm.door import read_options
from task_images.comm.methods import Method
from task_images.comm.presets import find_registered

MEASURED = "measured"
MAX_SPREAD = 2.0
_P90 = NormalDist().inv_cdf(0.9)


def measure_spread(calibration: Calibration) -> float:
    """The spread of a calibrated run: its steps without communication, from the 10th to the 90th percentile."""
    low, high = calibration.low.seconds, calibration.high.seconds
    return math.log(high / low) / (2 * _P90) if 0 < low < high else 0.0


def parse_spread(text: str | None, calibration: Calibration) -> float:
    """A spread as it is asked for: "0.1", "10%", "measured"; 0 for None. Raises UsageError."""
    if text is None:
        return 0.0
    if text == MEASURED:
        return measure_spread(calibration)
    try:
        spread = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        spread = math.nan
    if not 0 <= spread <= MAX_SPREAD:
        raise UsageError(
            f'--stragglers "{text[:60]}" is not a spread from 0 to {MAX_SPREAD:g}.',
            hint=f"--stragglers 10%, or: --stragglers {MEASURED}",
        )
    return spread


def find_slowest(ranks: int, spread: float) -> float:
    """The median of the largest of `ranks` factors."""
    return math.exp(spread * NormalDist().inv_cdf(0.5 ** (1 / ranks))) if spread and ranks > 1 else 1.0


def find_slowdown(method: Method, ranks: int, spread: float) -> float:
    """By which stragglers slow a method's computation: 1 if nobody waits for anybody.

    Ranks that meet every H steps wait for the slowest sum of H draws, whose relative spread is smaller by sqrt(H).
    """
    if method.engine == "registered":
        every = min(each.every for each in find_registered(method).rounds(1, read_options(method.options)))
        return find_slowest(ranks, spread / math.sqrt(every))
    word, _, argument = method.sync.partition(":")
    if method.transport == "noop" or method.staleness == "async":
        return 1.0
    if word != "every":
        return find_slowest(ranks, spread / math.sqrt(int(argument.split(",")[-1])))
    return find_slowest(2 if method.transport == "gossip" else ranks, spread)
