"""Tests with their margins, the screen, what explains the rates of pairs, and the confirmation. Standard library only:
rank 0 asks `Evidence` what to measure next, and the judge of the certificate what it means.

screen     The median of a unit's logarithms is 0.7 of the fail margin or more below the fleet's median, and at
           least 3 robust deviations. Whoever passes is not looked at again.
confirm    A suspect and healthy peers are measured again at the same moments. A sign test counts the moments at
           which the suspect is below the median of its peers by more than the fail margin: for a suspect whose true
           shortfall is just the margin, each is a coin's toss at most.
error      Looks after 12, 16 and 20 moments, at the level ERROR / (3 S) for S suspects: at most ERROR of clusters
           get a wrong name, whatever the distribution of the noise, if moments are independent.
span       A disturbance that lasts makes moments dependent. If it goes on for a mean time L however long it has lasted
           (its length is exponentially distributed), one that is under way at the screen still lasts after
           L ln(S / ERROR) in one of S cases with the probability ERROR. Moments get rarer: a suspect that has
           recovered is soon dropped, and one that has not waits for the span.
"""

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

STAGES = ("drift", "node", "pairs", "collectives", "training", "soak")
PREFIX = "certify "  # of a log line with one JSON object
ERROR = 0.02
LOOKS = (12, 16, 20)
LEAST_DIP = 300.0  # seconds: mean length of disturbances that every level outlasts
PEERS = 3
SCREEN_SHARE, SCREEN_DEVIATIONS, LEAST_SCALE = 0.7, 3.0, 0.005
LEAST_FLEET = 4  # with fewer nodes nobody can say which of them is the odd one
_ALMOST = 0.999  # clocks are rounded
CROWD = 0.25  # share of the units above which suspects are a group, and no outliers
_LEVEL_QUANTILE, _LOOK_QUANTILE = 1.645, 1.55  # 95 %: of one normal number, and of each of about 16 of 20

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

    @property
    def lag(self) -> float:
        """How far the peers are below the fleet."""
        return statistics.median([self.short((rank,)) for rank in self.peers] or [0.0])

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
    noise, repeats = deviation(rates.values()), sum(map(len, rates.values())) / len(levels)
    suspects = _find_slow_group(levels, logarithm(fail), noise * math.sqrt(math.pi / repeats))
    if not suspects:
        suspects = sorted((unit for unit in levels if median - levels[unit] >= limit), key=levels.__getitem__)
    return Screen(median, scale, levels, suspects, noise)


def _find_gaps(levels: Mapping[Unit, float], limit: float) -> Iterator[tuple[list[Unit], list[Unit]]]:
    """The units below and above each gap of at least `limit` between successive levels, the widest gap first."""
    ordered = sorted(levels, key=levels.__getitem__)
    gaps = [(levels[above] - levels[below], place) for place, (below, above) in enumerate(pairwise(ordered), 1)]
    for _, place in sorted((gap for gap in gaps if gap[0] >= limit), reverse=True):
        yield ordered[:place], ordered[place:]


def _find_slow_group(levels: Mapping[Unit, float], limit: float, noise: float) -> list[Unit]:
    """The slower of two groups of units, slowest first: each of more than a quarter of all, alike among themselves, and
    apart by `limit` or more. Half of the units are no outliers of their median, which lies between the groups. `noise`:
    deviation of the difference of two levels of equal units."""
    for low, high in _find_gaps(levels, limit):
        sides = [[levels[unit] for unit in side] for side in (low, high)]
        widths = [spread(level - statistics.median(side) for level in side) for side in sides]
        is_apart = min(sides[1]) - max(sides[0]) >= SCREEN_DEVIATIONS * max(*widths, noise)
        if is_apart and min(len(low), len(high)) > CROWD * len(levels):
            return low
    return []


def spread(differences: Iterable[float]) -> float:
    """A robust deviation of differences from their median."""
    return max(1.4826 * statistics.median(map(abs, differences)), LEAST_SCALE)


def deviation(repeats: Iterable[Sequence[float]]) -> float:
    """The deviation of repeats of the same rate, in logarithms: the median over units, which a busy moment of some does
    not change. The median of a chi-squared number with n degrees of freedom is about n (1 - 2 / 9n)^3."""
    found = []
    for logs in ([math.log(rate) for rate in some] for some in repeats if len(some) > 1):
        mean, free = math.fsum(logs) / len(logs), len(logs) - 1
        found.append(math.fsum((log - mean) ** 2 for log in logs) / free / (1 - 2 / (9 * free)) ** 3)
    return math.sqrt(statistics.median(found)) if found else 0.0


def logarithm(shortfall: float) -> float:
    """A shortfall of a rate as the distance of logarithms."""
    return -math.log1p(-shortfall)


def smallest_shortfall(fail: float, scale: float, noise: float, repeats: float = 3.0, lag: float = 0.0) -> float:
    """The shortfall of one unit that is found 95 times in 100, with this scale of the fleet and noise of repeats: it
    must pass the screen, and be slow at each of about 16 of 20 moments, beside peers that are `lag` below the fleet."""
    level_noise = _LEVEL_QUANTILE * noise * math.sqrt(math.pi / 2 / max(1.0, repeats))
    at_screen = max(SCREEN_SHARE * logarithm(fail), SCREEN_DEVIATIONS * scale) + level_noise
    at_looks = logarithm(fail) + lag + level_noise * math.sqrt(math.pi / 2 / PEERS)  # which hides the true lag
    at_looks += _LOOK_QUANTILE * noise * math.sqrt(1 + math.pi / 2 / PEERS)
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
    pairs = pairwise(moments)
    return next((since for (since, was_slow), (_, is_slow) in pairs if not was_slow and not is_slow), 0.0)


# --- pairs: which nodes, links or boundaries explain the rates, -log r_ij = m + a_i + a_j + l_ij ----------------------
# Up to ENUMERATED nodes, explanations by at most two causes are enumerated, each cause at a price; median polish alone
# errs in two thirds of cases with two slow nodes of six. With more nodes, few causes stand out after median polish.


ENUMERATED = 8
LINK_DEVIATIONS = 4.0

Pair = tuple[int, int]
Cause = tuple[int, ...]  # (node,) or (node, node)


class Explanation(NamedTuple):
    """Suspected causes, worst first, with what each takes from the logarithm of a rate. `islands`: groups of nodes that
    are fast inside and slow between; then no cause is named."""

    causes: dict[Cause, float]
    levels: dict[int, float]  # node -> what it takes
    typical: float  # logarithm of the rate that nothing slows down
    islands: tuple[frozenset[int], ...] = ()

    @property
    def is_crowd(self) -> bool:
        """Whether the causes are too many to be outliers; up to two are told apart in any fleet."""
        return len(self.causes) > max(2.0, CROWD * len(self.levels))


def make_rounds(nodes: Sequence[int], most: int | None = None, seed: int = 0) -> list[list[Pair]]:
    """Rounds in which each node has one partner: all of them (circle method), or `most` random ones."""
    ring: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        matched = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in matched if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    if most is not None and most < len(rounds):
        rounds = random.Random(seed).sample(rounds, most)
    return rounds


def explain(rates: Mapping[Pair, float], margin: float) -> Explanation:
    """What explains the logarithms of `rates`, with the fail margin as a share."""
    logs = {pair: -math.log(rate) for pair, rate in rates.items()}  # of times, to which causes add
    nodes = sorted({node for pair in logs for node in pair})
    limit = logarithm(margin)
    islands = _find_islands(logs, nodes, limit)
    if islands:
        return Explanation({}, {}, -statistics.median(logs.values()), islands)
    if slow := _find_slow_nodes(logs, nodes, limit):
        typical = statistics.median(log for pair, log in logs.items() if not slow & {*pair})
        own = {node: statistics.median(log for pair, log in logs.items() if node in pair) for node in slow}
        worst_first = sorted(slow, key=own.__getitem__, reverse=True)
        levels = dict.fromkeys(nodes, 0.0) | {node: own[node] - typical for node in worst_first}
        return Explanation({(node,): levels[node] for node in worst_first}, levels, -typical)
    if len(nodes) <= ENUMERATED:
        return _enumerate(logs, nodes, limit)
    return _stand_out(logs, nodes, limit)


# --- few nodes ------------------------------------------------------------------------------------------------------


def _enumerate(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> Explanation:
    options: list[Cause] = [*((node,) for node in nodes), *logs]
    typical = statistics.median(logs.values())
    best_cost, best = sum(abs(log - typical) for log in logs.values()), Explanation({}, {}, -typical)
    # A cause must touch a pair that is slow.
    slow = {pair for pair, log in logs.items() if log - min(logs.values()) >= SCREEN_SHARE * limit}
    options = [cause for cause in options if any(set(cause) <= set(pair) for pair in slow)]
    for count in (1, 2):
        for causes in itertools.combinations(options, count):
            cost, effects, middle = _fit(logs, causes)
            cost += limit * count
            if cost < best_cost and min(effects.values()) >= SCREEN_SHARE * limit:
                best_cost, best = cost, Explanation(effects, {}, -middle)
    levels = {node: best.causes.get((node,), 0.0) for node in nodes}
    worst_first = dict(sorted(best.causes.items(), key=lambda item: -item[1]))
    return Explanation(worst_first, levels, best.typical)


def _fit(logs: Mapping[Pair, float], causes: Sequence[Cause]) -> tuple[float, dict[Cause, float], float]:
    """The absolute residual, what each cause adds, and the time without any."""
    touched = {pair: [cause for cause in causes if set(cause) <= set(pair)] for pair in logs}
    free = [log for pair, log in logs.items() if not touched[pair]]
    typical = statistics.median(free) if free else min(logs.values())
    effects = dict.fromkeys(causes, 0.0)
    for _ in range(6 if len(causes) > 1 else 2):
        for cause in causes:
            left = [
                log - typical - sum(effects[other] for other in touched[pair] if other != cause)
                for pair, log in logs.items()
                if cause in touched[pair]
            ]
            effects[cause] = max(0.0, statistics.median(left))
        typical = statistics.median(log - sum(effects[c] for c in touched[pair]) for pair, log in logs.items())
    residual = sum(abs(log - typical - sum(effects[c] for c in touched[pair])) for pair, log in logs.items())
    return residual, effects, typical


# --- many nodes -----------------------------------------------------------------------------------------------------


def _stand_out(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> Explanation:
    partners: dict[int, list[tuple[int, float]]] = {node: [] for node in nodes}
    for (a, b), log in logs.items():
        partners[a].append((b, log))
        partners[b].append((a, log))
    typical, levels = statistics.median(logs.values()), dict.fromkeys(nodes, 0.0)
    for _ in range(10):
        for node in nodes:
            levels[node] = statistics.median(log - typical - levels[other] for other, log in partners[node])
        middle = statistics.median(levels.values())
        levels = {node: level - middle for node, level in levels.items()}
        typical = statistics.median(log - levels[a] - levels[b] for (a, b), log in logs.items())
    rest = {pair: log - typical - levels[pair[0]] - levels[pair[1]] for pair, log in logs.items()}
    scale, link_scale = spread(levels.values()), spread(rest.values())
    least = SCREEN_SHARE * limit
    slow = {node for node in nodes if levels[node] >= max(least, 3 * scale)}
    causes: dict[Cause, float] = {(node,): levels[node] for node in slow}
    causes |= {
        pair: value
        for pair, value in rest.items()
        if value >= max(least, LINK_DEVIATIONS * link_scale) and not slow & set(pair)
    }
    return Explanation(dict(sorted(causes.items(), key=lambda item: -item[1])), levels, -typical)


# --- boundaries -----------------------------------------------------------------------------------------------------


def _find_slow_nodes(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> set[int]:
    """The nodes without a fast pair, if they and the others are more than a quarter each, and all pairs of the others
    are faster by `limit`. A pair is as fast as the slower of its nodes. One fast pair is luck."""
    for slow, fast in _find_gaps({pair: -log for pair, log in logs.items()}, limit):
        quick = {node for pair in fast for node in pair}
        are_two = min(len(quick), len(nodes) - len(quick)) > CROWD * len(nodes)
        if are_two and len(fast) > 1 and not any({*pair} <= quick for pair in slow):
            return {*nodes} - quick
    return set()


def _find_islands(logs: Mapping[Pair, float], nodes: Sequence[int], limit: float) -> tuple[frozenset[int], ...]:
    """Groups of at least two nodes such that every pair between groups is slower than every pair inside one, by the
    margin. Needs pairs between most nodes: matchings of many nodes do not show it."""
    if len(nodes) < 4 or len(logs) < len(nodes) * (len(nodes) - 1) // 2:
        return ()
    ordered = sorted(logs.values())
    gaps = [(after - before, before) for before, after in pairwise(ordered)]
    widest, edge = max(gaps)
    if widest < limit:
        return ()
    groups: list[set[int]] = []
    for pair in (pair for pair, log in logs.items() if log <= edge):
        joined = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in joined]
        groups.append(set(pair).union(*joined))
    if len(groups) < 2 or sum(map(len, groups)) < len(nodes) or min(map(len, groups)) < 2:
        return ()
    home = {node: number for number, group in enumerate(groups) for node in group}
    if any((log <= edge) != (home[a] == home[b]) for (a, b), log in logs.items()):
        return ()
    return tuple(sorted(map(frozenset, groups), key=min))


# --- what was measured so far, who is suspected by it, and who is confirmed -------------------------------------------


class Sample(NamedTuple):
    """A rate of a unit in a test: in a `round` of the screen, at a `moment` of the confirmation of a `case` or between
    two of them, or in a `cycle` of a soak."""

    test: str
    unit: Unit
    rate: float
    at: float  # seconds since the start, on rank 0's clock
    round: int | None = None
    case: int | None = None
    moment: int | None = None
    cycle: int | None = None


class Suspect(NamedTuple):
    """Whom the screen suspects in which test: a rank; of the network a node, or the two nodes of a link. It is measured
    again beside `peers`: ranks, or nodes."""

    test: str
    who: Unit
    peers: tuple[int, ...]
    short: float  # logarithm


class Evidence:
    """Samples, and what follows from them. The properties hold from the end of the screen on."""

    def __init__(self, per_node: int, least_dip: float) -> None:
        """`least_dip`: mean length of disturbances to outlast, in seconds."""
        self.per_node, self.least_dip = per_node, least_dip
        self.rounds: dict[str, dict[Unit, list[float]]] = {}
        self.cycles: dict[str, dict[Unit, list[float]]] = {}
        self.cases: list[Suspect] = []  # that rank 0 has measured again
        self.again: dict[int, list[Sample]] = {}  # of each case
        self.screened = 0.0  # seconds

    def add(self, sample: Sample) -> None:
        if sample.case is not None:
            self.again.setdefault(sample.case, []).append(sample)
        elif sample.cycle is not None:
            self.cycles.setdefault(sample.test, {}).setdefault(sample.unit, []).append(sample.rate)
        elif sample.round is not None:
            self.rounds.setdefault(sample.test, {}).setdefault(sample.unit, []).append(sample.rate)

    def nodes_of(self, suspect: Suspect) -> Unit:
        return suspect.who if suspect.test == "network" else (suspect.who[0] // self.per_node,)

    # --- screen -----------------------------------------------------------------------------------------------------

    @cached_property
    def screens(self) -> dict[str, Screen]:
        """Of every test of nodes."""
        found = {test: screen(rates, TESTS[test].fail) for test, rates in self.rounds.items() if test != "network"}
        return {test: screen for test, screen in found.items() if screen is not None}

    @cached_property
    def explanation(self) -> Explanation | None:
        """What explains the rates of pairs; None for fewer than LEAST_FLEET nodes."""
        best = {(unit[0], unit[1]): max(rates) for unit, rates in self.rounds.get("network", {}).items()}
        few = len({node for pair in best for node in pair}) < LEAST_FLEET
        return None if few else explain(best, TESTS["network"].fail)

    @cached_property
    def suspects(self) -> list[Suspect]:
        """Each suspected node in the test in which it is the furthest beyond its margin, and what slows pairs and
        touches none of those: one slow node is slow in many tests, and each suspect makes all wait longer."""
        worst: dict[int, tuple[float, Suspect]] = {}
        for test, found in self.screens.items():
            for unit in () if found.is_crowd else found.suspects:
                suspect = Suspect(test, unit, found.peers, found.short(unit))
                share, (node,) = suspect.short / logarithm(TESTS[test].fail), self.nodes_of(suspect)
                if node not in worst or share > worst[node][0]:
                    worst[node] = share, suspect
        suspects = [suspect for _, suspect in worst.values()]
        if self.explanation is not None and not self.explanation.is_crowd:
            causes = {who: short for who, short in self.explanation.causes.items() if not worst.keys() & {*who}}
            slow = {*worst, *(node for who in causes for node in who)}
            peers = tuple(sorted({node for pair in self.rounds["network"] for node in pair} - slow))
            suspects += [Suspect("network", who, peers, short) for who, short in causes.items()]
        return suspects

    # --- confirmation -----------------------------------------------------------------------------------------------

    def open_cases(self, at: float) -> None:
        """End the screen at `at` seconds: all suspects are to be measured again."""
        self.screened, self.cases = at, self.suspects

    def moments(self, number: int) -> list[tuple[float, bool]]:
        """When a case was measured again, in seconds since the screen, and whether it was slow then: its rate was below
        the median of its peers by more than the margin."""
        case, rows = self.cases[number], dict[int, list[Sample]]()
        for sample in self.again.get(number, ()):
            if sample.moment is not None and sample.test == case.test:
                rows.setdefault(sample.moment, []).append(sample)
        # Beside a link, a pair of one of its ends and a peer counts as a peer.
        peers = {*case.peers, *(case.who if len(case.who) == 2 else ())}
        found = []
        for samples in rows.values():
            own = [sample.rate for sample in samples if {*case.who} <= {*sample.unit}]
            others = [
                sample.rate for sample in samples if not {*case.who} <= {*sample.unit} and {*sample.unit} <= peers
            ]
            if own and others:
                is_slow = own[0] < statistics.median(others) * (1 - TESTS[case.test].fail)
                found.append((max(sample.at for sample in samples) - self.screened, is_slow))
        return sorted(found)

    @property
    def longest_dip(self) -> float:
        """How long disturbances last: at least as assumed, as those of healthy peers, or of suspects that recovered."""
        found = [self.least_dip]
        for number, case in enumerate(self.cases):
            series: dict[Unit, list[tuple[float, float]]] = {}
            for sample in self.again.get(number, ()):
                if sample.test == case.test and {*sample.unit} <= {*case.peers}:
                    series.setdefault(sample.unit, []).append((sample.at, sample.rate))
            found += [longest_dip(sorted(rows), TESTS[case.test].fail) for rows in series.values()]
            found.append(way_back(self.moments(number)))
        return max(found)

    @property
    def span(self) -> float:
        """Seconds from the screen to the first moment that names anybody."""
        return span_needed(self.longest_dip, len(self.suspects))

    def confirm(self) -> list[Confirmation]:
        """The sign test of every suspect."""
        numbers, span = {(case.test, case.who): number for number, case in enumerate(self.cases)}, self.span
        found = []
        for suspect in self.suspects:
            number = numbers.get((suspect.test, suspect.who))
            moments = [] if number is None else self.moments(number)
            found.append(confirm(moments, len(self.suspects), span))
        return found

    def pause(self, now: float, taken: int) -> float:
        """Seconds until moment number `taken` is due: after the span for the first look, even if the span has just
        grown, and never at once after the one before."""
        return max(self.span / LOOKS[0] ** 2, moment_due(taken, self.span) - (now - self.screened))
