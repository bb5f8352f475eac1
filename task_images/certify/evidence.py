"""What was measured so far, who is suspected by it, and who is confirmed.

Rank 0 asks it what to measure next, and the judge of the certificate what it means. Standard library only.
"""

import statistics
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
    def screens(self) -> dict[str, rules.Screen]:
        """Of every test of nodes."""
        found = {
            test: rules.screen(rates, TESTS[test].fail) for test, rates in self.rounds.items() if test != "network"
        }
        return {test: screen for test, screen in found.items() if screen is not None}

    @cached_property
    def explanation(self) -> pairs.Explanation | None:
        """What explains the rates of pairs; None for fewer than LEAST_FLEET nodes."""
        best = {(unit[0], unit[1]): max(rates) for unit, rates in self.rounds.get("network", {}).items()}
        few = len({node for pair in best for node in pair}) < rules.LEAST_FLEET
        return None if few else pairs.explain(best, TESTS["network"].fail)

    @cached_property
    def suspects(self) -> list[Suspect]:
        """Each suspected node in the test in which it is the furthest beyond its margin, and what slows pairs and
        touches none of those: one slow node is slow in many tests, and each suspect makes all wait longer."""
        worst: dict[int, tuple[float, Suspect]] = {}
        for test, found in self.screens.items():
            for unit in () if found.is_crowd else found.suspects:
                suspect = Suspect(test, unit, found.peers, found.short(unit))
                share, (node,) = suspect.short / rules.logarithm(TESTS[test].fail), self.nodes_of(suspect)
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
            moments = [] if number is None else self.moments(number)
            found.append(rules.confirm(moments, len(self.suspects), span))
        return found

    def pause(self, now: float, taken: int) -> float:
        """Seconds until moment number `taken` is due: after the span for the first look, even if the span has just
        grown, and never at once after the one before."""
        return max(self.span / rules.LOOKS[0] ** 2, rules.moment_due(taken, self.span) - (now - self.screened))
