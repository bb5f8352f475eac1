"""What was measured so far, who is suspected by it, and who is confirmed.

Rank 0 asks it what to measure next, and the judge of the certificate what it means. Standard library only.
"""

import json
import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from task_images.certify import pairs, rules
from task_images.certify.rules import TESTS, Unit


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
    """Whom the screen suspects in which test: a rank; of the network a node, or the two nodes of a link."""

    test: str
    who: Unit
    short: float  # logarithm


class Case(NamedTuple):
    """A suspect that is measured again beside these peers: ranks, or nodes."""

    test: str
    who: Unit
    peers: tuple[int, ...]


class Earlier(NamedTuple):
    """A suspect of an earlier certificate: its node and tests, and how long ago. That counts for the span."""

    node: str = ""
    tests: Sequence[str] = ()
    seconds: float = 0.0


def read_earlier(text: str) -> Earlier:
    """The parameter of a run; nobody if it says nothing sensible."""
    try:
        row = json.loads(text) if text else {}
        seconds = float(row.get("seconds", 0.0))
        return Earlier(str(row.get("node", "")), tuple(map(str, row.get("tests", ()))), max(0.0, min(seconds, 1e9)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return Earlier()


class Evidence:
    """Samples, and what follows from them. The properties hold from the end of the screen on."""

    def __init__(
        self, per_node: int, least_dip: float, earlier: Earlier = Earlier(), names: Sequence[str] = ()
    ) -> None:
        """`least_dip`: mean length of disturbances to outlast, in seconds. `names` of nodes; rank 0 does not know them,
        and takes any suspect for the earlier one."""
        self.per_node, self.least_dip, self.earlier, self.names = per_node, least_dip, earlier, names
        self.rounds: dict[str, dict[Unit, list[float]]] = {}
        self.cycles: dict[str, dict[Unit, list[float]]] = {}
        self.cases: list[Case] = []
        self.again: dict[int, list[Sample]] = {}  # of each case
        self.screened = 0.0  # seconds

    def add(self, sample: Sample) -> None:
        if sample.case is not None:
            self.again.setdefault(sample.case, []).append(sample)
        elif sample.cycle is not None:
            self.cycles.setdefault(sample.test, {}).setdefault(sample.unit, []).append(sample.rate)
        elif sample.round is not None:
            self.rounds.setdefault(sample.test, {}).setdefault(sample.unit, []).append(sample.rate)

    def nodes_of(self, test: str, who: Unit) -> Unit:
        return who if test == "network" else (who[0] // self.per_node,)

    # --- screen -----------------------------------------------------------------------------------------------------

    @cached_property
    def screens(self) -> dict[str, rules.Screen]:
        """Of every test of nodes."""
        found = {
            test: rules.screen(rates, TESTS[test].fail) for test, rates in self.rounds.items() if test != "network"
        }
        return {test: screen for test, screen in found.items() if screen is not None}

    @cached_property
    def explanation(self) -> pairs.Explanation | None:
        """What explains the rates of pairs; None for fewer than three nodes."""
        best = {(unit[0], unit[1]): max(rates) for unit, rates in self.rounds.get("network", {}).items()}
        few = len({node for pair in best for node in pair}) < 3
        return None if few else pairs.explain(best, TESTS["network"].fail)

    @cached_property
    def suspects(self) -> list[Suspect]:
        """Each suspected node in the test in which it is the furthest beyond its margin, and what slows pairs and
        touches none of those: one slow node is slow in many tests, and each suspect makes all wait longer."""
        worst: dict[int, tuple[float, Suspect]] = {}
        for test, found in self.screens.items():
            for unit in () if found.is_crowd else found.suspects:
                share = found.short(unit) / rules.logarithm(TESTS[test].fail)
                (node,) = self.nodes_of(test, unit)
                if node not in worst or share > worst[node][0]:
                    worst[node] = share, Suspect(test, unit, found.short(unit))
        suspects = [suspect for _, suspect in worst.values()]
        if self.explanation is not None and not self.explanation.is_crowd:
            causes = self.explanation.causes.items()
            suspects += [Suspect("network", who, short) for who, short in causes if not worst.keys() & set(who)]
        return suspects

    # --- confirmation -----------------------------------------------------------------------------------------------

    def open_cases(self, at: float) -> None:
        """End the screen at `at` seconds: choose the peers of every suspect."""
        self.screened = at
        slow = {node for suspect in self.suspects for node in self.nodes_of(suspect.test, suspect.who)}
        paired = sorted({node for pair in self.rounds.get("network", {}) for node in pair} - slow)
        for test, who, _ in self.suspects:
            peers = paired if test == "network" else rules.choose_peers(self.screens[test])
            self.cases.append(Case(test, who, tuple(peers)))

    def moments(self, number: int) -> list[tuple[float, bool]]:
        """When a case was measured again, in seconds since the screen, and whether it was slow then: its rate was below
        the median of its peers by more than the margin."""
        case, rows = self.cases[number], dict[int, list[Sample]]()
        for sample in self.again.get(number, ()):
            if sample.moment is not None and sample.test == case.test:
                rows.setdefault(sample.moment, []).append(sample)
        found = []
        for samples in rows.values():
            own = [sample.rate for sample in samples if set(case.who) <= set(sample.unit)]
            peers = [
                sample.rate
                for sample in samples
                if not set(case.who) <= set(sample.unit) and self._is_peer(case, sample)
            ]
            if own and peers:
                is_slow = own[0] < statistics.median(peers) * (1 - TESTS[case.test].fail)
                found.append((max(sample.at for sample in samples) - self.screened, is_slow))
        return sorted(found)

    @staticmethod
    def _is_peer(case: Case, sample: Sample) -> bool:
        """Whether a sample of a case is of its peers; beside a link, one end and a peer are a pair, too."""
        return set(sample.unit) <= {*case.peers, *(case.who if len(case.who) == 2 else ())}

    @property
    def longest_dip(self) -> float:
        """How long disturbances last: at least as assumed, as those of healthy peers, or of suspects that recovered."""
        found = [self.least_dip]
        for number, case in enumerate(self.cases):
            series: dict[Unit, list[tuple[float, float]]] = {}
            for sample in self.again.get(number, ()):
                if sample.test == case.test and set(sample.unit) <= set(case.peers):
                    series.setdefault(sample.unit, []).append((sample.at, sample.rate))
            found += [rules.longest_dip(sorted(rows), TESTS[case.test].fail) for rows in series.values()]
            found.append(rules.way_back(self.moments(number)))
        return max(found)

    @property
    def span(self) -> float:
        """Seconds from the screen to the first moment that names anybody."""
        return rules.span_needed(self.longest_dip, len(self.suspects))

    def confirm(self) -> list[rules.Confirmation]:
        """The sign test of every suspect."""
        numbers, span = {(case.test, case.who): number for number, case in enumerate(self.cases)}, self.span
        found = []
        for suspect in self.suspects:
            number = numbers.get((suspect.test, suspect.who))
            moments, credit = [] if number is None else self.moments(number), self._credit(suspect)
            found.append(rules.confirm([(at + credit, slow) for at, slow in moments], len(self.suspects), span))
        return found

    def _credit(self, suspect: Suspect) -> float:
        nodes = (
            [self.names[node] for node in self.nodes_of(suspect.test, suspect.who)]
            if self.names
            else [self.earlier.node]
        )
        is_same = nodes == [self.earlier.node] and suspect.test in self.earlier.tests
        return self.earlier.seconds if is_same else 0.0

    def pause(self, now: float, taken: int) -> float:
        """Seconds until moment number `taken` is due."""
        return rules.next_pause(now - self.screened, taken, max(0.0, self.span - self.earlier.seconds))
