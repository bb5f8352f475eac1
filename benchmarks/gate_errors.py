"""False alarms and power of the gate by simulation: `python -m benchmarks.gate_errors [--series N] [--json]`.

A run's time is exp(session + run): normal deviates with the deviation `session` between sessions and `within` between
runs of one. Nothing has changed (false alarms), or everything takes 10.5 % or 22 % longer (power), at the limit 1.0,
which leaves no margin. Each design says in which sessions the runs of both sides were measured. "before" is the same
rule without sessions, which took every run as independent.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mlbench_cli.results.analysis.sessions import Sessions, relate
from mlbench_cli.results.analysis.stats import Verdict, ratio

WITHIN = 0.02
SPREADS = (0.08, 0.15)
SLOWDOWNS = (0.0, 0.1, 0.2)  # on the logarithm: 10.5 and 22 % longer
_FIVE = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]  # five sessions with two runs each
# Sessions of the old and the new runs.
DESIGNS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "3 + 3 alternately in one session": ([0] * 3, [0] * 3),
    "5 + 5 alternately in one session": ([0] * 5, [0] * 5),
    "3 + 3 in two sessions": ([0] * 3, [1] * 3),
    "5 sessions of 2, 1 new of 3": (_FIVE, [9] * 3),
    "10 sessions of 1, 1 new of 1": (list(range(10)), [10]),
    "10 sessions of 1, 1 new of 3": (list(range(10)), [10] * 3),
    "5 + 5 sessions of 2": (_FIVE, [5 + number for number in _FIVE]),
    "5 sessions with 2 + 2 each": (_FIVE, _FIVE),
}


@dataclass(frozen=True)
class Errors:
    """Shares of the series that the gate failed (and left undecided), by the slowdown that was there."""

    design: str
    session_spread: float
    slowdown: float
    failed: float
    cannot_tell: float
    failed_without_sessions: float


def simulate(design: str, spread: float, slowdown: float, series: int, seed: int = 1) -> Errors:
    """The verdicts of `series` independent experiments."""
    random_numbers = random.Random(f"{seed} {design} {spread} {slowdown}")
    old_sessions, new_sessions = DESIGNS[design]
    sessions = Sessions(tuple(old_sessions), tuple(new_sessions))
    failed = undecided = before = 0
    for _ in range(series):
        levels = {number: random_numbers.gauss(0, spread) for number in {*old_sessions, *new_sessions}}

        def measure(each: Sequence[int], shift: float, levels: dict[int, float] = levels) -> list[float]:
            return [math.exp(levels[number] + shift + random_numbers.gauss(0, WITHIN)) for number in each]

        old, new = measure(old_sessions, 0.0), measure(new_sessions, slowdown)
        found, independent = relate(old, new, sessions), ratio(old, new)
        assert found is not None
        assert independent is not None
        failed += found.gate(1.0) is Verdict.FAILED
        undecided += found.gate(1.0) is Verdict.CANNOT_TELL
        before += independent.gate(1.0) is Verdict.FAILED
    return Errors(design, spread, slowdown, failed / series, undecided / series, before / series)


def main() -> None:
    """Print the table, or with --json one document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [
        simulate(design, spread, slowdown, options.series)
        for design in DESIGNS
        for spread in SPREADS
        for slowdown in SLOWDOWNS
    ]
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return
    print("| sessions of both sides | session spread | false alarms | before | found at +10.5 % | found at +22 % |")
    print("|---|---|---|---|---|---|")
    for number in range(0, len(found), len(SLOWDOWNS)):
        none, ten, twenty = found[number : number + len(SLOWDOWNS)]
        shares = (none.failed, none.failed_without_sessions, ten.failed, twenty.failed)
        cells = (f"{100 * share:.1f} %" for share in shares)
        print(f"| {none.design} | {100 * none.session_spread:.0f} % | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
