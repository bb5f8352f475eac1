"""Wrong names of certify by simulation, and its power: `python -m benchmarks.certify_errors [--clusters N] [--json]`.

Every cluster is judged by `mlbench_cli.certify.judge`, from samples as the task would have made them: the rates of
nodes differ by 1 %, repeats by 0.5 %, and 3 % of the measurements meet a busy moment that costs 15 % on average.
"lasting L s" are disturbances of one test on one node that last L seconds on average, for 3 % of the time. A wrong name
is a node that is to be returned although it is within the fail margin of the fleet. Power: one node is slower in one
test. `least_dip` is the mean length of disturbances that the confirmation outlasts: 300 s at the levels quick and
standard, 1,800 s at soak. The results in `certify_errors.json` are of 300 clusters, and of 60 with 1,024 nodes.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlbench_cli.certify.judge import Document, judge
from mlbench_cli.certify.samples import Case, NodeSample, Samples
from task_images.certify import rules
from task_images.certify.rules import TESTS

NODE_TESTS = [test for test in TESTS if test != "network"]
SPREAD, NOISE = 0.01, 0.005
BUSY, DEPTH = 0.03, 0.15
LONGEST = 12  # the task's confirm_seconds, in least_dip_seconds
NOISES = ("normal", "heavy tails", "autocorrelated", "lasting 10 s", "lasting 60 s", "lasting 300 s", "lasting 1800 s")


class Cluster:
    """Healthy nodes, of which one may be slower by `fault` (of its rate) in the test `where`."""

    def __init__(
        self, nodes: int, noise: str, seed: int, fault: float = 0.0, least_dip: float = rules.LEAST_DIP
    ) -> None:
        self.nodes, self.noise, self.least_dip = nodes, noise, least_dip
        self.random = np.random.default_rng(seed)
        shape = (len(NODE_TESTS), nodes)
        if noise == "heavy tails":
            self.levels = self.random.standard_t(5, shape) * SPREAD * math.sqrt(3 / 5)
        else:
            self.levels = self.random.normal(0, SPREAD, shape)
        self.victim = int(self.random.integers(nodes))
        if fault:
            row = NODE_TESTS.index("matmul.burst")
            self.levels[row, self.victim] = np.median(self.levels[row]) + math.log1p(-fault)
        self.length = float(noise.split()[1]) if noise.startswith("lasting") else 0.0
        # Of every test and node: how much is lost now, until when; in the stationary state.
        is_on = self.random.random(shape) < (BUSY if self.length else 0.0)
        self.lost = is_on * self.random.exponential(DEPTH, shape)
        pause = self.length * (1 - BUSY) / BUSY
        self.until = np.where(
            is_on, self.random.exponential(self.length or 1, shape), self.random.exponential(pause or 1)
        )
        self.drift = self.random.normal(0, NOISE, shape)
        self.confirmed = 0.0  # seconds

    def measure(self, test: int, node: int, at: float) -> float:
        """The logarithm of a rate, the better of two measurements."""
        noise = self.random.standard_t(5) * math.sqrt(3 / 5) if self.noise == "heavy tails" else self.random.normal()
        best = self.levels[test, node] + NOISE * noise
        if self.length:
            while at > self.until[test, node]:
                was_on = self.lost[test, node] > 0
                self.lost[test, node] = 0.0 if was_on else self.random.exponential(DEPTH)
                mean = self.length * (1 - BUSY) / BUSY if was_on else self.length
                self.until[test, node] += self.random.exponential(mean)
            return float(best - self.lost[test, node])
        if self.noise == "autocorrelated":
            step = self.random.normal(0, NOISE * math.sqrt(1 - 0.95**2))
            self.drift[test, node] = 0.95 * self.drift[test, node] + step
            best += self.drift[test, node]
        return float(best - min(self.random.exponential(DEPTH) * (self.random.random() < BUSY) for _ in range(2)))

    def samples(self) -> Samples:
        """As the task takes them: three rounds, then suspects beside healthy peers, spread over time."""
        found = Samples(self.nodes, has_scope=True, screened=6.0, ended=1e6)
        found.inventories = {node: {"cpu": "same"} for node in range(self.nodes)}
        values: list[dict[str, list[float]]] = [{} for _ in NODE_TESTS]
        for number in range(3):
            at = 3.0 * number
            for node in range(self.nodes):
                rates = {test: math.exp(self.measure(row, node, at)) for row, test in enumerate(NODE_TESTS)}
                found.nodes.append(NodeSample(node, at, rates, round=number))
                for row, test in enumerate(NODE_TESTS):
                    values[row].setdefault(str(node), []).append(rates[test])
        tests = {test: rules.screen(values[row], TESTS[test].fail) for row, test in enumerate(NODE_TESTS)}
        screens = {test: screen for test, screen in tests.items() if screen is not None}
        for test, rank in rules.worst_of_each_node(screens, 1):
            peers = tuple(map(int, rules.choose_peers(screens[test], screens[test].suspects)))
            found.cases.append(Case(len(found.cases), test, (rank,), peers))
        self._confirm(found)
        return found

    def _confirm(self, found: Samples) -> None:
        at, count, dips = 6.0, len(found.cases), dict[tuple[str, int], list[tuple[float, float]]]()
        moments: dict[int, list[tuple[float, bool]]] = {case.number: [] for case in found.cases}
        for moment in range(max(rules.LOOKS)):
            seen = [rules.longest_dip(series, TESTS[test].fail) for (test, _), series in dips.items()]
            longest = max([self.least_dip, *seen, *map(rules.way_back, moments.values())])
            needed = rules.span_needed(longest, count)
            left = [case for case in found.cases if rules.confirm(moments[case.number], count, needed).is_named is None]
            if not left:
                return
            at += rules.next_pause(at - 6.0, moment, needed)
            if at - 6.0 > LONGEST * self.least_dip:
                return  # who is not decided by then is on watch
            for case in left:
                row = NODE_TESTS.index(case.test)
                rates = {node: math.exp(self.measure(row, node, at)) for node in (*case.suspect, *case.peers)}
                found.nodes += [
                    NodeSample(node, at, {case.test: rate}, case=case.number, moment=moment)
                    for node, rate in rates.items()
                ]
                own = rates.pop(case.suspect[0])
                for node, rate in rates.items():
                    dips.setdefault((case.test, node), []).append((at, rate))
                is_slow = bool(rules.is_slow(own, list(rates.values()), TESTS[case.test].fail))
                moments[case.number].append((at - 6.0, is_slow))
            self.confirmed = at - 6.0

    def judge(self) -> Document:
        """The certificate of these nodes."""
        names = [f"n{node}" for node in range(self.nodes)]
        return judge(self.samples(), names, [True] * self.nodes, least_dip=self.least_dip)

    def is_wrong(self, document: Document) -> bool:
        """Whether a node is named for a test in which it is within the margin."""
        for found in document["findings"]:
            if found["state"] == "slow":
                row, node = NODE_TESTS.index(found["test"]), int(found["nodes"][0][1:])
                short = float(np.median(self.levels[row]) - self.levels[row, node])
                if short <= -math.log1p(-TESTS[found["test"]].fail):
                    return True
        return False


@dataclass(frozen=True)
class Errors:
    """Of healthy clusters: how many, and in how many a node was named wrongly; suspects and seconds of confirmation
    of a cluster, on average, and of the longest."""

    nodes: int
    noise: str
    least_dip: float
    clusters: int
    wrong: int
    suspects: float
    seconds: float
    most_seconds: float


@dataclass(frozen=True)
class Power:
    """Of clusters with a node that is slower by `fault` in one test: in how many it was named, and another one."""

    nodes: int
    fault: float
    clusters: int
    named: int
    others: int


def count_errors(nodes: int, noise: str, clusters: int, least_dip: float = rules.LEAST_DIP) -> Errors:
    """Judge healthy clusters."""
    wrong = suspects = 0
    spans = []
    for number in range(clusters):
        cluster = Cluster(nodes, noise, random.Random(f"{nodes} {noise} {number}").getrandbits(32), 0.0, least_dip)
        document = cluster.judge()
        wrong += cluster.is_wrong(document)
        suspects += document["method"]["suspects"]
        spans.append(cluster.confirmed)
    mean = math.fsum(spans) / clusters
    return Errors(
        nodes, noise, least_dip, clusters, wrong, round(suspects / clusters, 2), round(mean), round(max(spans))
    )


def measure_power(nodes: int, fault: float, clusters: int) -> Power:
    """Judge clusters with a slow node."""
    named = others = 0
    for number in range(clusters):
        cluster = Cluster(nodes, "normal", random.Random(f"{nodes} {fault} {number}").getrandbits(32), fault)
        document = cluster.judge()
        slow = {node["node"] for node in document["nodes"] if node["state"] == "slow"}
        named += f"n{cluster.victim}" in slow
        others += bool(slow - {f"n{cluster.victim}"})
    return Power(nodes, fault, clusters, named, others)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--noise", nargs="+", default=list(NOISES), choices=NOISES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[Errors | Power] = []
    for nodes in options.nodes:
        for noise in options.noise:
            length = float(noise.split()[1]) if noise.startswith("lasting") else 0.0
            for least_dip in sorted({rules.LEAST_DIP, max(rules.LEAST_DIP, length)}):
                rows.append(count_errors(nodes, noise, options.clusters, least_dip))
                _say(rows[-1], options.json)
        for fault in (0.08, 0.105, 0.14, 0.20):
            rows.append(measure_power(nodes, fault, max(10, options.clusters // 3)))
            _say(rows[-1], options.json)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


def _say(row: Any, as_json: bool) -> None:
    if not as_json:
        print("  ".join(f"{name} {value}" for name, value in asdict(row).items()), flush=True)


if __name__ == "__main__":
    main()
