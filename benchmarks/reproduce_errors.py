"""Verdicts of `mlbench reproduce` by simulation: `python -m benchmarks.reproduce_errors [--series N] [--json]`.

Times are log-normal with one deviation for both sides, in one session. The reproduction takes as long as the original,
as long as the margin allows (10 % longer), or 30 % longer. The number of repeats is what `--repeat auto` chooses from
the original's own, random spread. Errors: "reproduced" at the margin, and "different" of sides that are the same.
"""

import argparse
import json
import math
import random
import statistics
from collections import Counter
from dataclasses import asdict, dataclass

from mlbench_cli.results.analysis.reproduction import DEFAULT_MARGIN, REPEATS_OF_ONE
from mlbench_cli.results.analysis.stats import Verdict, ratio, repeats_needed, upper_deviation

ORIGINALS = (1, 3, 5)
DEVIATIONS = (0.01, 0.02, 0.04)
FACTORS = (1.0, 1.0 + DEFAULT_MARGIN, 1.3)


@dataclass(frozen=True)
class Shares:
    """Shares of the series with each verdict, and the mean number of repeats that was chosen."""

    originals: int
    deviation: float
    factor: float
    repeats: float
    reproduced: float
    different: float
    cannot_tell: float


def simulate(originals: int, deviation: float, factor: float, series: int, seed: int = 1) -> Shares:
    """The verdicts of `series` independent reproductions."""
    stream = random.Random(f"{seed} {originals} {deviation} {factor}")
    verdicts: Counter[Verdict] = Counter()
    repeats = 0
    for _ in range(series):
        before = [math.exp(stream.gauss(0, deviation)) for _ in range(originals)]
        number = REPEATS_OF_ONE
        if originals > 1:
            spread = upper_deviation(statistics.stdev(map(math.log, before)), originals)
            number = repeats_needed(spread, originals, DEFAULT_MARGIN)
        after = [factor * math.exp(stream.gauss(0, deviation)) for _ in range(number)]
        found = ratio(before, after)
        assert found is not None
        verdicts[found.same(DEFAULT_MARGIN)] += 1
        repeats += number
    shares = (verdicts[answer] / series for answer in (Verdict.REPRODUCED, Verdict.DIFFERENT, Verdict.CANNOT_TELL))
    return Shares(originals, deviation, factor, repeats / series, *shares)


def main() -> None:
    """Print a table in Markdown, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--series", type=int, default=2000, help="experiments for each row")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    given = parser.parse_args()
    if not given.json:
        print("| runs of the original | deviation | repeats | same: reproduced | same: different |", end="")
        print(" 10 % longer: reproduced | 30 % longer: different |\n|---|---|---|---|---|---|---|")
    for originals in ORIGINALS:
        for deviation in DEVIATIONS:
            rows = [simulate(originals, deviation, factor, given.series) for factor in FACTORS]
            if given.json:
                for row in rows:
                    print(json.dumps(asdict(row)))
                continue
            same, margin, longer = rows
            cells = (same.reproduced, same.different, margin.reproduced, longer.different)
            text = " | ".join(f"{100 * cell:.1f} %" for cell in cells)
            print(f"| {originals} | {100 * deviation:g} % | {same.repeats:.1f} | {text} |")


if __name__ == "__main__":
    main()
