"""Tests with their margins, the screen and the confirmation. Standard library only: rank 0 and the judge call the same.

screen     The median of a unit's logarithms is 0.7 of the fail margin or more below the fleet's median, and at
           least 3 robust deviations. Whoever passes is not looked at again.
confirm    A suspect and healthy peers are measured again at the same moments. A sign test counts the moments at
           which the suspect is below the median of its peers by more than the fail margin: for a suspect whose true
           shortfall is just the margin, each is a coin's toss at most.
error      Looks after 12, 16 and 20 moments, at the level ERROR / (3 S) for S suspects: at most ERROR of clusters
           get a wrong name, whatever the distribution of the noise, if moments are independent.
span       A disturbance that lasts makes moments dependent. If it ends after a mean time L, one that is under way
           at the screen still lasts after L ln(S / ERROR) in one of S cases with the probability ERROR. Moments
           get rarer: a suspect that has recovered is soon dropped, and one that has not waits for the span.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PREFIX = "certify "  # of a log line with one JSON object
ERROR = 0.02
LOOKS = (12, 16, 20)
LEAST_DIP = 300.0  # seconds: mean length of disturbances that every level outlasts
PEERS = 3
SCREEN_SHARE, SCREEN_DEVIATIONS, LEAST_SCALE = 0.7, 3.0, 0.005
LEAST_FLEET = 4  # with fewer nodes nobody can say which of them is the odd one
_ALMOST = 0.999  # clocks are rounded
CROWD = 0.25  # share of the units above which suspects are a group, and no outliers
_SCREEN_QUANTILE, _LOOK_QUANTILE = 1.645, 1.55  # 95 %: of one normal number, and of each of about 16 of 20

Unit = tuple[int, ...]  # a rank; of the network two nodes


class Test(NamedTuple):
    """A test of a node or of its devices; more is better. `warn` and `fail`: shortfalls from the fleet's median."""

    reason: str
    title: str
    unit: str
    warn: float
    fail: float
    source: str  # of the margins


# Healthy nodes of one fleet differ by 1.2 % (matmul), 0.6 % (memory) and 1.3 % (local collectives): Primus #712, 16
# nodes with MI300X. Azure's guide warns at 3.5 % of a matmul and replaces at 7 %.
_AZURE = "ai-infrastructure-on-azure, 2026-06: warn 742, replace 715 of 769 TFLOP/s"
_PRIMUS = "Primus #712: four times the spread of 16 healthy nodes"
TESTS = {
    "matmul.burst": Test("matmul_slow", "matmul, burst", "GFLOP/s", 0.035, 0.07, _AZURE),
    "matmul.sustained": Test("sustained_slow", "matmul, sustained", "GFLOP/s", 0.035, 0.07, _AZURE),
    "memory": Test("memory_slow", "memory", "GB/s", 0.03, 0.05, _PRIMUS),
    "copy.to_device": Test("copy_slow", "copy to device", "GB/s", 0.05, 0.10, "chosen: twice the margin of memory"),
    "copy.from_device": Test("copy_slow", "copy from device", "GB/s", 0.05, 0.10, "chosen: twice the margin of memory"),
    "local_all_reduce": Test("local_collective_slow", "all-reduce in the node", "GB/s", 0.03, 0.07, _PRIMUS),
    "disk.write": Test("disk_slow", "disk, write", "MB/s", 0.20, 0.30, "chosen: shared disks scatter by 10 to 20 %"),
    "network": Test(
        "node_network_slow", "network of the node", "GB/s", 0.05, 0.10, "Azure: 450, warn 400, replace 300"
    ),
}
DIGEST = "09118cd4326c9764"  # of the integer product that every node computes (`measure.digest`)


class Screen(NamedTuple):
    """What the screen of one test found. Logarithms; `suspects` worst first."""

    median: float
    scale: float
    levels: dict[Unit, float]  # the median of each unit
    suspects: list[Unit]
    noise: float  # deviation of repeats

    @property
    def is_crowd(self) -> bool:
        """Whether the suspects are too many to be outliers: they are a group."""
        return len(self.suspects) > CROWD * len(self.levels)

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks closest to the median that are no suspects."""
        others = (unit for unit in self.levels if unit not in self.suspects)
        return tuple(unit[0] for unit in sorted(others, key=lambda unit: abs(self.short(unit)))[:PEERS])

    def short(self, unit: Unit) -> float:
        """How far a unit is below the fleet."""
        return self.median - self.levels[unit]


def screen(rates: Mapping[Unit, Sequence[float]], fail: float) -> Screen | None:
    """The screen of one test; None if fewer than LEAST_FLEET units have rates."""
    levels = {unit: statistics.median(map(math.log, some)) for unit, some in rates.items()}
    if len(levels) < LEAST_FLEET:
        return None
    median = statistics.median(levels.values())
    scale = spread(level - median for level in levels.values())
    limit = max(SCREEN_SHARE * logarithm(fail), SCREEN_DEVIATIONS * scale)
    suspects = sorted((unit for unit in levels if median - levels[unit] >= limit), key=lambda unit: levels[unit])
    rest = [abs(math.log(rate) - levels[unit]) for unit, some in rates.items() for rate in some]
    repeats = len(rest) / len(levels)
    noise = 1.4826 * statistics.median(rest) * math.sqrt(repeats / max(1.0, repeats - 1))
    return Screen(median, scale, levels, suspects, noise)


def spread(differences: Iterable[float]) -> float:
    """A robust deviation of differences from their median."""
    return max(1.4826 * statistics.median(map(abs, differences)), LEAST_SCALE)


def logarithm(shortfall: float) -> float:
    """A shortfall of a rate as the distance of logarithms."""
    return -math.log1p(-shortfall)


def smallest_shortfall(fail: float, scale: float, noise: float, repeats: float = 3.0) -> float:
    """The shortfall of one unit that is found 95 times in 100, with this scale of the fleet and noise of repeats: it
    must pass the screen, and be slow at each of about 16 of 20 moments."""
    at_screen = max(SCREEN_SHARE * logarithm(fail), SCREEN_DEVIATIONS * scale)
    at_screen += _SCREEN_QUANTILE * noise * math.sqrt(math.pi / 2 / max(1.0, repeats))
    at_looks = logarithm(fail) + _LOOK_QUANTILE * noise * math.sqrt(1 + math.pi / 2 / PEERS)
    return -math.expm1(-max(at_screen, at_looks))


def span_needed(longest_dip: float, suspects: int) -> float:
    """Seconds from the screen to the first moment that counts."""
    return longest_dip * math.log(max(1, suspects) / ERROR)


def need(moments: int, level: float) -> int:
    """The least number of `moments` that a fair coin reaches with a probability of at most `level`; more than
    `moments` if there is none."""
    tail = 0.0
    for heads in range(moments, -1, -1):
        tail += math.comb(moments, heads) / 2**moments
        if tail > level:
            return heads + 1
    return 0


class Confirmation(NamedTuple):
    """The sign test of one suspect. `is_named` is None while no look has decided and more moments could."""

    is_named: bool | None
    slow: int
    of: int
    level: float
    seconds: float = 0.0  # from the screen to the last moment that counts


def confirm(moments: Sequence[tuple[float, bool]], suspects: int, needed: float) -> Confirmation:
    """The sign test over `moments` in their order: seconds since the screen, and whether slow. Each look has the level
    ERROR / (looks x suspects), and none before `needed` seconds, or at a moment that is not slow, names anybody. A
    suspect that no look can name any more is dropped at once."""
    level, slow, count, since = ERROR / (len(LOOKS) * max(1, suspects)), 0, 0, 0.0
    most = need(max(LOOKS), level)
    for count, (since, is_slow) in enumerate(moments[: max(LOOKS)], 1):
        slow += is_slow
        if count in LOOKS and is_slow and slow >= need(count, level) and since >= needed * _ALMOST:
            return Confirmation(True, slow, count, level, since)
        if slow + max(LOOKS) - count < most:
            return Confirmation(False, slow, count, level, since)
    return Confirmation(None, slow, count, level, since)


def moment_due(number: int, needed: float) -> float:
    """Seconds since the screen at which moment `number`, from 0, is due: quadratic up to the first look, which falls
    on `needed`, and then regular."""
    first, done = LOOKS[0], number + 1
    return needed * ((done / first) ** 2 if done <= first else 1 + (done - first) / (2 * first))


def longest_dip(series: Sequence[tuple[float, float]], fail: float) -> float:
    """How long the longest dip of a unit lasted: seconds from the first to behind the last of successive moments that
    are below its own median by more than the margin. `series`: seconds and values."""
    if len(series) < 3:
        return 0.0
    limit = statistics.median(value for _, value in series) * (1 - fail)
    longest, begun = 0.0, None
    for at, value in series:
        if value >= limit:
            longest = max(longest, 0.0 if begun is None else at - begun)
            begun = None
        elif begun is None:
            begun = at
    return max(longest, 0.0 if begun is None else series[-1][0] - begun)


def way_back(moments: Sequence[tuple[float, bool]]) -> float:
    """How long a suspect was slow after the screen, if it then recovered for two moments; else 0. `moments` as for
    `confirm`."""
    pairs = itertools.pairwise(moments)
    return next((since for (since, was_slow), (_, is_slow) in pairs if not was_slow and not is_slow), 0.0)
