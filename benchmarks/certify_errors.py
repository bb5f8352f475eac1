"""Wrong names of certify by simulation, and its power: `python -m benchmarks.certify_errors [--clusters N] [--json]`.

Every cluster is judged by `mlbench_cli.certify.judge`, from samples as the task would have made them: the rates of
nodes differ by 1 %, repeats by 0.5 %, and 3 % of the measurements meet a busy moment that costs 15 % on average.
"lasting L s" are disturbances of one test on one node that last L seconds on average, for 3 % of the time; their
lengths are exponentially distributed, and those of "heavy-tailed L s" by a power law (Pareto, exponent 1.5). A wrong
name is a node that is to be returned although it is within the fail margin of the fleet. Power: one node is slower in
one test than the median of the fleet, of which it is one; "as said" by the shortfall that the certificate of the same
cluster says would be found in 95 of 100 runs. `least_dip` is the mean length of disturbances that the confirmation
outlasts: 300 s at the levels quick and standard, 1,800 s at soak. The results in `certify_errors.json` are of 300
clusters of 8 and of 64 nodes, 100 of 256 and 10 of 1,024; those of power of 200, and of 33 with 256 nodes.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlbench_cli.certify.judge import Document, judge
from mlbench_cli.certify.samples import Inventory, Samples, Scope
from task_images.certify import rules
from task_images.certify.rules import TESTS, Evidence, Sample

NODE_TESTS = [test for test in TESTS if test != "network"]
SPREAD, NOISE = 0.01, 0.005
BUSY, DEPTH = 0.03, 0.15
RECHECKED = 7200.0  # seconds until a recheck
LONGEST = 12  # the task's confirm_seconds, in least_dip_seconds
TAIL = 1.5  # of lengths by a power law
PROMISED = ("normal", "heavy tails", "autocorrelated", "lasting 10 s", "lasting 60 s", "lasting 300 s")
NOISES = (*PROMISED, "lasting 1800 s", "heavy-tailed 60 s")


def length_of(noise: str) -> float:
    """The mean length of its disturbances in seconds; 0: of one measurement."""
    return float(noise.split()[1]) if noise.endswith(" s") else 0.0


class Cluster:
    """Healthy nodes, of which one may be slower by `fault` (of its rate) in the test `where`.

    With `has_pairs`, pairs of nodes are measured, too, and `where` may be "network", or "link": to the next node.
    """

    def __init__(
        self,
        nodes: int,
        noise: str,
        seed: int,
        fault: float = 0.0,
        least_dip: float = rules.LEAST_DIP,
        where: str = "matmul.burst",
        *,
        has_pairs: bool = False,
    ) -> None:
        self.nodes, self.noise, self.least_dip, self.has_pairs = nodes, noise, least_dip, has_pairs
        self.random = np.random.default_rng(seed)
        shape = (len(TESTS), nodes)
        if noise == "heavy tails":
            self.levels = self.random.standard_t(5, shape) * SPREAD * math.sqrt(3 / 5)
        else:
            self.levels = self.random.normal(0, SPREAD, shape)
        self.victim, self.slow_link, self.fault = int(self.random.integers(nodes)), (-1, -1), fault
        if where == "link":
            other = (self.victim + 1) % nodes
            self.slow_link = (min(self.victim, other), max(self.victim, other))
        elif fault:
            row = self.levels[list(TESTS).index(where)]
            row[self.victim] = -math.inf
            row[self.victim] = np.median(row) + math.log1p(-fault)
        self.length = length_of(noise)
        # Of every test and node: how much is lost now, until when; in the stationary state.
        is_on = self.random.random(shape) < (BUSY if self.length else 0.0)
        self.lost = is_on * self.random.exponential(DEPTH, shape)
        pause = self.length * (1 - BUSY) / BUSY
        on, off = (self.random.exponential(mean or 1, shape) for mean in (self.length, pause))
        if noise.startswith("heavy-tailed"):  # of those that are under way, long ones are many
            shortest = self.length * (TAIL - 1) / TAIL
            on = shortest * (1 + self.random.pareto(TAIL - 1, shape)) * self.random.random(shape)
        self.until = np.where(is_on, on, off)
        self.drift = self.random.normal(0, NOISE, shape)
        self.confirmed = 0.0  # seconds
        self.taken: list[Sample] = []

    def measure(self, test: int, node: int, at: float) -> float:
        """The logarithm of a rate, the better of two measurements."""
        noise = self.random.standard_t(5) * math.sqrt(3 / 5) if self.noise == "heavy tails" else self.random.normal()
        best = self.levels[test, node] + NOISE * noise
        if self.length:
            while at > self.until[test, node]:
                was_on = self.lost[test, node] > 0
                self.lost[test, node] = 0.0 if was_on else self.random.exponential(DEPTH)
                mean = self.length * (1 - BUSY) / BUSY if was_on else self.length
                if self.noise.startswith("heavy-tailed") and not was_on:
                    self.until[test, node] += mean * (TAIL - 1) / TAIL * (1 + self.random.pareto(TAIL))
                else:
                    self.until[test, node] += self.random.exponential(mean)
            return float(best - self.lost[test, node])
        if self.noise == "autocorrelated":
            step = self.random.normal(0, NOISE * math.sqrt(1 - 0.95**2))
            self.drift[test, node] = 0.95 * self.drift[test, node] + step
            best += self.drift[test, node]
        return float(best - min(self.random.exponential(DEPTH) * (self.random.random() < BUSY) for _ in range(2)))

    def samples(self) -> Samples:
        """As the task takes them: three rounds, then suspects beside healthy peers, spread over time."""
        evidence = Evidence(1, self.least_dip)
        self.screen(evidence, 0.0)
        self.confirm(evidence)
        keys = {node: Inventory({"cpu": "same"}) for node in range(self.nodes)}
        return Samples(evidence, self.nodes, keys, scope=Scope(False, {}), ended=1e6)

    def screen(self, evidence: Evidence, begun: float) -> None:
        for number in range(3):
            for node in range(self.nodes):
                for test in NODE_TESTS:
                    self._add(evidence, test, (node,), begun + 3.0 * number, round=number)
            for pair in itertools.combinations(range(self.nodes), 2) if self.has_pairs else ():
                self._add(evidence, "network", pair, begun + 3.0 * number, round=number)
        evidence.open_cases(begun + 6.0)

    def _add(self, evidence: Evidence, test: str, unit: rules.Unit, at: float, **place: int) -> None:
        """Measure a unit. A pair is as slow as both of its nodes and its link."""
        rate = sum(self.measure(list(TESTS).index(test), node, at) for node in unit)
        rate += math.log1p(-self.fault) if unit == self.slow_link else 0.0
        self.taken.append(Sample(test, unit, math.exp(rate), at, **place))
        evidence.add(self.taken[-1])

    def confirm(self, evidence: Evidence) -> None:
        at = evidence.screened
        for moment in range(max(rules.LOOKS)):
            left = [number for number, found in enumerate(evidence.confirm()) if found.is_named is None]
            at += evidence.pause(at, moment)
            if not left or at - evidence.screened > LONGEST * self.least_dip:
                return  # who is not decided by then is on watch
            for number in left:
                case = evidence.cases[number]
                units: list[rules.Unit] = [(rank,) for rank in (*case.who, *case.peers)]
                if case.test == "network":
                    one, other = sorted(self.random.choice(case.peers, 2, replace=False).tolist())
                    ends = [(min(end, one), max(end, one)) for end in case.who]
                    units = [case.who, *ends] if len(case.who) == 2 else [*ends, (one, other)]
                for unit in units:
                    self._add(evidence, case.test, unit, at, case=number, moment=moment)
            self.confirmed = at - evidence.screened

    def is_named_again(self, found: Document) -> bool:
        """Whether a recheck RECHECKED seconds later names the node of a finding, too."""
        node = int(found["nodes"][0][1:])
        evidence = Evidence(1, self.least_dip)
        self.screen(evidence, 6.0 + self.confirmed + RECHECKED)
        self.confirm(evidence)
        named = [suspect for suspect, said in zip(evidence.suspects, evidence.confirm(), strict=True) if said.is_named]
        return any(evidence.nodes_of(suspect) == (node,) for suspect in named)

    def judge(self) -> Document:
        """The certificate of these nodes."""
        samples = self.samples()
        return judge(samples, [f"n{node}" for node in range(self.nodes)], [True] * self.nodes)

    def wrong(self, document: Document) -> list[Document]:
        """The findings that name a node for a test in which it is within the margin."""
        found = []
        for finding in document["findings"]:
            if finding["state"] == "slow":
                row, node = list(TESTS).index(finding["test"]), int(finding["nodes"][0][1:])
                short = float(np.median(self.levels[row]) - self.levels[row, node])
                found += [finding] if short <= rules.logarithm(TESTS[finding["test"]].fail) else []
        return found


@dataclass(frozen=True)
class Errors:
    """Of healthy clusters: how many, in how many a node was named wrongly, and also by a recheck two hours later;
    suspects and seconds of confirmation of a cluster, on average, and of the longest."""

    nodes: int
    noise: str
    least_dip: float
    clusters: int
    wrong: int
    wrong_twice: int
    suspects: float
    seconds: float
    most_seconds: float


@dataclass(frozen=True)
class Power:
    """Of clusters with a node that is slower by `fault` in one test, or on average if it `is_said`: in how many it was
    named, also by a recheck two hours later, and in how many another one."""

    nodes: int
    fault: float
    is_said: bool
    clusters: int
    named: int
    named_twice: int
    others: int


def count_errors(
    nodes: int, noise: str, clusters: int, least_dip: float = rules.LEAST_DIP, *, has_pairs: bool = False
) -> Errors:
    """Judge healthy clusters."""
    wrong = twice = suspects = 0
    spans = []
    for number in range(clusters):
        seed = random.Random(f"{nodes} {noise} {number}").getrandbits(32)
        cluster = Cluster(nodes, noise, seed, 0.0, least_dip, has_pairs=has_pairs)
        document = cluster.judge()
        found = cluster.wrong(document)
        spans.append(cluster.confirmed)
        wrong += bool(found)
        twice += any(map(cluster.is_named_again, found))
        suspects += document["method"]["suspects"]
    mean = math.fsum(spans) / clusters
    return Errors(
        nodes, noise, least_dip, clusters, wrong, twice, round(suspects / clusters, 2), round(mean), round(max(spans))
    )


def measure_power(nodes: int, fault: float | None, clusters: int, where: str = "matmul.burst") -> Power:
    """Judge clusters with a node that is slow in the test `where`. `fault`: None: as said."""
    named = twice = others = 0
    faults = []
    for number in range(clusters):
        seed = random.Random(f"{nodes} {fault} {number}").getrandbits(32)
        faults.append(_find_least(nodes, seed, where) if fault is None else fault)
        cluster = Cluster(nodes, "normal", seed, faults[-1], where=where, has_pairs=where == "network")
        document = cluster.judge()
        slow = {node["node"] for node in document["nodes"] if node["state"] == "slow"}
        found = [
            row for row in document["findings"] if row["nodes"] == [f"n{cluster.victim}"] and row["state"] == "slow"
        ]
        named += bool(found)
        twice += any(map(cluster.is_named_again, found))
        others += bool(slow - {f"n{cluster.victim}"})
    mean = round(math.fsum(faults) / clusters, 4)
    return Power(nodes, mean, fault is None, clusters, named, twice, others)


def _find_least(nodes: int, seed: int, where: str) -> float:
    """What the certificate of a cluster says would be found."""
    cluster = Cluster(nodes, "normal", seed, 0.2, where=where, has_pairs=where == "network")
    said: float = cluster.judge()["fleet"][where]["smallest_shortfall"]
    return said


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 64, 256, 1024])
    parser.add_argument("--noise", nargs="*", default=list(NOISES), choices=NOISES)
    parser.add_argument("--pairs", action="store_true", help="measure pairs, too; what is slow is a node's network")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[Errors | Power] = []
    for nodes in options.nodes:
        for noise in options.noise:
            for least_dip in sorted({rules.LEAST_DIP, max(rules.LEAST_DIP, length_of(noise))}):
                rows.append(count_errors(nodes, noise, options.clusters, least_dip, has_pairs=options.pairs))
                _say(rows[-1], options.json)
        for fault in (None, 0.08, 0.105, 0.14, 0.20):
            where = "network" if options.pairs else "matmul.burst"
            rows.append(measure_power(nodes, fault, max(10, options.clusters // 3), where))
            _say(rows[-1], options.json)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


def _say(row: Any, as_json: bool) -> None:
    if not as_json:
        print("  ".join(f"{name} {value}" for name, value in asdict(row).items()), flush=True)


if __name__ == "__main__":
    main()
