"""A gate on a comparison: is B worse than A by more than the limit, not worse, or undecided?

The measure is "how many times worse B is than A": B / A for what should be low (seconds), A / B for what should be high
(throughput, accuracy). The whole 95 % interval decides: it fails if the lower end is above the limit, passes if the
upper end is not, and otherwise nothing can be told. So noise does not fail builds or hide regressions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.results.analysis.compare import THROUGHPUT, TIMES, Comparison, ComparisonRow
from mlbench_cli.results.analysis.numbers import format_ratio
from mlbench_cli.results.analysis.program_metrics import BEST, MEAN
from mlbench_cli.results.analysis.sessions import Basis
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.util.text import significant


class Direction(StrEnum):
    """What is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True)
class GateResult:
    """`worse` is how many times worse B is than A, with its interval; None if it is not known."""

    verdict: Verdict
    reason: str
    metric: str | None
    direction: Direction | None
    limit: float
    worse: Estimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """The decision as `-o json` prints it."""
        worse = None if self.worse is None else self.worse.to_dict()
        names = {"verdict": str(self.verdict), "reason": self.reason, "metric": self.metric}
        direction = None if self.direction is None else str(self.direction)
        return {**names, "direction": direction, "limit": self.limit, "worse": worse}


def parse_limit(text: str, what: str) -> float:
    """The factor in "1.2" or "+20%". Raises UsageError that names `what`, also for what can be read in two ways."""
    share = text.removeprefix("+").removesuffix("%")
    if text.endswith("%") and not text.startswith(("+", "-")) and _is_number(share):
        raise UsageError(
            f'{what} "{text[:60]}" can mean a factor of {float(share) / 100:g}, or {float(share):g} % more.',
            hint=f"Write {float(share) / 100:g}, or +{float(share):g}%.",
        )
    if text.startswith("+") and not text.endswith("%") and _is_number(share):
        raise UsageError(
            f'{what} "{text[:60]}" can mean a factor of {float(share):g}, or {float(share):g} % more.',
            hint=f"Write {float(share):g}, or +{float(share):g}%.",
        )
    try:
        factor = 1 + float(share) / 100 if text.endswith("%") else float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise UsageError(f'{what} "{text[:60]}" is neither a factor nor a percentage.', hint="For example 1.2 or +20%.")
    return factor


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def describe_limit(limit: float) -> str:
    """ "limit 1.2× worse (+20 %)"."""
    share = 100 * (limit - 1)
    return f"limit {_trim(limit)}× ({'+' if share >= 0 else ''}{_trim(share)} %)"


def _trim(value: float) -> str:
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def check_gate(
    found: Comparison, limit: float, metric: str | None = None, direction: Direction | None = None
) -> GateResult:
    """Check a comparison against `limit`. Raises UsageError for an unknown metric."""
    name = find_metric(found.rows, metric)
    row = found.rows.get(name) if name else None
    direction = direction or _default_direction(row)
    if found.failed:
        return GateResult(Verdict.FAILED, f"{', '.join(found.failed)} did not succeed.", name, direction, limit)
    if found.obstacles:
        reason = f"{found.b} cannot be compared with {found.a}. {found.obstacles[0].text}"
        return GateResult(Verdict.CANNOT_TELL, reason, name, direction, limit)
    if found.sessions.a and found.sessions.basis is Basis.UNKNOWN:
        hint = "Measure both sides in one session, e.g. as a matrix, which alternates them."
        reason = f"{found.sessions.note[0].upper()}{found.sessions.note[1:]}. {hint}"
        return GateResult(Verdict.CANNOT_TELL, reason, name, direction, limit)
    if row is None or row.ratio is None:
        missing = f"{name or 'a time'} above 0"
        return GateResult(Verdict.CANNOT_TELL, f"Not both sides have {missing}.", name, direction, limit)
    if direction is None:
        raise UsageError(
            f'It is unknown whether lower or higher is better for "{name}".', hint="--direction higher, or lower"
        )
    worse = row.ratio if direction is Direction.LOWER else row.ratio.inverse
    return GateResult(*_decide(found, str(name), worse, limit), name, direction, limit, worse)


def find_metric(rows: Mapping[str, ComparisonRow], asked: str | None) -> str | None:
    """The row that is meant: by its name, by "seconds", "throughput" or "bandwidth", or by a part of it that is unique.

    Raises UsageError that names those that exist.
    """
    if asked in (None, "seconds"):
        known = [name for name in TIMES if name in rows]
        return next((name for name in known if rows[name].ratio is not None), known[0] if known else None)
    words = {"throughput": THROUGHPUT, "bandwidth": "busbw"}
    plain = str(asked).lower()
    wanted = plain if any(name.lower() == plain for name in rows) else words.get(plain, plain)
    exact = [name for name in rows if name.lower() == wanted]
    matches = exact or [name for name in rows if wanted in name.lower()]
    lasts = [name for name in matches if not name.endswith((BEST, MEAN))]
    matches = lasts if len(lasts) == 1 else matches  # "acc" means the last value of accuracy, not its best or mean
    if len(matches) == 1:
        return matches[0]
    problem = f"names {len(matches)} figures" if matches else "is not a figure of these results"
    near = "" if matches else did_you_mean(str(asked), list(rows))
    raise UsageError(f'--metric "{str(asked)[:60]}" {problem}.{near}', hint=f"One of: {', '.join(matches or rows)}.")


def _default_direction(row: ComparisonRow | None) -> Direction | None:
    if row is None or row.higher_is_better is None:
        return None
    return Direction.HIGHER if row.higher_is_better else Direction.LOWER


def _decide(found: Comparison, name: str, worse: Estimate, limit: float) -> tuple[Verdict, str]:
    row = found.rows[name]
    is_time = name in found.seconds
    begin = f"{name}: {found.b} against {found.a}: {format_ratio(row.ratio, row.higher_is_better, is_time=is_time)}"
    shown = describe_limit(limit) + (f"; {found.sessions.note}" if found.sessions.a else "")
    shown += "; the sides did not alternate" if found.sessions.in_blocks else ""
    if worse.low is None or worse.high is None:
        reason = f"{begin}; there is no interval without repeats on both sides; {shown}."
        return Verdict.CANNOT_TELL, reason
    if worse.low > limit:
        return Verdict.FAILED, f"{begin}; {shown}."
    if worse.high <= limit:
        return Verdict.PASSED, f"{begin}; {shown}."
    return Verdict.CANNOT_TELL, f"{begin}; {shown}, which is inside the interval. More repeats would narrow it."
