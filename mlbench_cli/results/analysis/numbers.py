"""Format measured values, with the same rules for terminal, reports, dashboard and charts.

Three significant digits with a unit, and an exponent below 10^-4 and from 10^15 on. A mean of three runs or more has
its 95 % interval. A ratio says which way it goes: "1.45× faster (1.39 to 1.52)", or "3.20 % slower" if it is close to
1; without an interval it is no finding, and says so.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.model.goals import BEST, MEAN, name_metric
from mlbench_cli.results.analysis.stats import Estimate, Ratio
from mlbench_cli.util.text import decimals, significant

NO_VALUE = "–"
NO_DIFFERENCE = "no difference seen"
TOO_FEW_RUNS, TOO_FEW_SESSIONS, OTHER_SESSION = "too few runs", "too few sessions", "other session"
SECONDS = "s"
SAMPLES_PER_SECOND = "samples/s"
JOULES = "J"
CLOSE = 1.1  # smaller ratios are written in percent
_SPACE = "\u00a0"  # between a number and its unit
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_EXPONENT = 1e15  # values from here on have an exponent
_PERCENT = re.compile(r"Prec@\d+$")  # programs report an accuracy as a share, too
_PARTS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_value(value: float | str | None, unit: str = "") -> str:
    """ "6.17 s", "281 ms", "6 min 12 s"; "3.61k samples/s"; "90.4 %"; "0.767" without a unit; "–" for None."""
    if value is None:
        return NO_VALUE
    if isinstance(value, str):  # "nan", "inf", "-inf"
        return value
    if not math.isfinite(value):
        return f"{value:g}"
    value = value or 0.0  # not -0
    if unit == SECONDS:
        return _format_seconds(value)
    if unit == "%":
        return f"{value:.{_percent_digits(value)}f}{_SPACE}%"
    if unit in ("B", "B/s", "bit/s", JOULES):
        number = _with_prefix(value)
        prefix = number[-1] if number[-1] in "kMGT" else ""
        return f"{number.removesuffix(prefix)}{_SPACE}{prefix}{unit}"
    if abs(value) < 0.1 and not unit:
        return f"{value:.3g}"  # a learning rate is 0.005, not 0.00500
    text = significant(value) if abs(value) < 9999.5 and not unit else _with_prefix(value)
    return f"{text}{_SPACE}{unit}" if unit else text


def format_estimate(found: Estimate | None, unit: str = "", *, counts: bool = False, with_interval: bool = True) -> str:
    """The mean with its interval: "6.17 s (5.86 to 6.48)"; of fewer than three runs "9.70 s". With `counts` also how
    many runs there are: ", n = 3"."""
    if found is None:
        return NO_VALUE
    text = format_value(found.mean, unit)
    if with_interval and found.low is not None and found.high is not None and found.low != found.high:
        low, high = (_clip(end, unit, found.mean) for end in (found.low, found.high))
        text += f" ({_between(low, high, found.mean, unit)})"
    return f"{text}, n{_SPACE}={_SPACE}{found.count}" if counts else text


class Change(Struct, frozen=True):
    """B relative to A in words. Its text joins the parts: "1.45× faster (1.39 to 1.52)".

    difference    "1.45× faster", "3.20 % slower", "26.0 points lower", "equal", "no difference seen"
    ends          of the 95 % interval: "1.39 to 1.52"; empty without one
    note          why it is no finding: one of the words above; empty for a finding
    is_different  whether the repeats show a difference
    """

    difference: str
    ends: str = ""
    note: str = ""
    is_different: bool = False

    def __str__(self) -> str:
        ends = f" ({self.ends})" if self.ends else ""
        return f"{self.difference}{ends}{', ' if self.note else ''}{self.note}"


def describe_ratio(
    found: Ratio | None, higher_is_better: bool | None = False, *, is_time: bool = True, unit: str = ""
) -> Change:
    """New / old in words: "1.45× faster (1.39 to 1.52)", "no difference seen (0.92 to 1.17×)"; without a verdict
    "1.45× slower, too few runs".

    For figures that are no times: "1.45× higher", or "more" if it is not known which way is good; of values that are
    not all above 0 the difference in their `unit`: "5.20 lower (3.10 to 7.30)".
    """
    if found is None:
        return Change(NO_VALUE)
    difference = _difference(found, higher_is_better, is_time, unit)
    if found.low is None:
        return Change(difference, note=TOO_FEW_RUNS if found.has_too_few_runs else TOO_FEW_SESSIONS)
    turned = found if found.shift >= 0 else found.inverse
    if found.is_confounded:
        return Change(difference, _ends(turned, unit), OTHER_SESSION)
    if not found.is_different:
        return Change(NO_DIFFERENCE, f"{_ends(found, unit)}{'' if found.is_difference else '×'}")
    return Change(difference, _ends(turned, unit), is_different=True)


def _difference(found: Ratio, higher_is_better: bool | None, is_time: bool, unit: str) -> str:
    if found.shift == 0:
        return "equal"
    size = abs(found.shift) if found.is_difference else math.exp(abs(found.shift))
    amount = format_amount(size, unit) if found.is_difference else _times(size)
    return f"{amount} {_ratio_word(found.shift > 0, higher_is_better, is_time)}"


def format_amount(difference: float, unit: str) -> str:
    """A difference of two values: "5.20", "0.31 J"; percentages differ by points."""
    return f"{significant(difference)} points" if unit == "%" else format_value(difference, unit)


def _times(factor: float) -> str:
    """A factor of at least 1 as text: "1.45×"; close to 1, by how much it exceeds 1: "3.20 %"."""
    return f"{significant(100 * (factor - 1))}{_SPACE}%" if factor < CLOSE else f"{significant(factor)}×"


def describe_change(
    a: Estimate | None,
    b: Estimate | None,
    found: Ratio | None,
    unit: str,
    higher_is_better: bool | None = False,
    *,
    is_time: bool = True,
) -> Change:
    """B relative to A, with their ratio `found`: like `describe_ratio`, but percentages differ by points, which have no
    interval: "26.0 points lower"."""
    change = describe_ratio(found, higher_is_better, is_time=is_time, unit=unit)
    if unit != "%" or a is None or b is None or found is None or found.is_difference:
        return change
    points = b.mean - a.mean
    text = f"{significant(abs(points))} points {'higher' if points > 0 else 'lower'}" if points else "equal"
    is_seen = change.is_different or change.note
    return replace(change, difference=text if is_seen else NO_DIFFERENCE, ends="")


def format_factor(found: Ratio | None) -> str:
    """A speedup: "1.83× (1.75 to 1.92)"; the interval only if there is one."""
    if found is None:
        return NO_VALUE
    text = f"{significant(found.mean)}×"
    if found.low is None or found.high is None or found.low == found.high:
        return text
    return f"{text} ({significant(found.low)} to {significant(found.high)})"


def format_percent(share: float) -> str:
    """As `format_share`, of a ratio that may be above 1, such as an efficiency: "104 %"."""
    return f"{100 * share:.0f}{_SPACE}%" if share >= 0.0995 else format_share(share)


def format_money(amount: float) -> str:
    """An amount without its currency: "0.49", "1,240"; below a cent with up to three significant digits: "0.005"."""
    if 5e-7 <= abs(amount) < 0.01:
        return f"{amount:.{decimals(amount)}f}".rstrip("0")
    return f"{amount:.2f}" if abs(amount) < 100 else f"{amount:,.0f}"


def _ends(found: Ratio, unit: str) -> str:
    if found.is_difference:
        low, high = found.low or 0.0, found.high or 0.0
        return f"{format_amount(low, unit).removesuffix(' points')} to {format_amount(high, unit)}"
    low, high = found.low or 0.0, found.high or math.inf
    if found.shift > 0 and found.mean < CLOSE and (found.is_different or found.is_confounded):
        return f"{significant(100 * (low - 1))} to {significant(100 * (high - 1))}{_SPACE}%"
    nearest = min(abs(low - 1), abs(high - 1))
    if 0 < nearest < 0.005 and not found.is_different:  # else an end that is not 1 would look like it
        digits = min(9, 1 - math.floor(math.log10(nearest)))
        return f"{low:.{digits}f} to {high:.{digits}f}"
    return f"{significant(low)} to {significant(high)}"


def _percent_digits(value: float) -> int:
    return 1 if value == 0 or abs(value) >= 0.95 else decimals(value)


def unit_of(metric: str) -> str:
    """The unit of a metric by its name; empty if it has none, or it is unknown. Its best and mean have the same."""
    metric = metric.removesuffix(BEST).removesuffix(MEAN)
    if _PERCENT.search(metric):
        return "%"
    plain = metric.removeprefix("val_").removeprefix("train_")
    if plain in ("samples per second", "samples_per_second", "throughput"):
        return SAMPLES_PER_SECOND
    if plain in ("energy", "energy per sample", "energy per token"):
        return JOULES
    endings = {"GB/s": "GB/s", " us": "µs", "seconds": SECONDS}
    return next((unit for ending, unit in endings.items() if plain.endswith(ending)), "")


def format_goal(goal: Mapping[str, Any] | None, outcome: str | None, *, in_words: bool = False) -> str | None:
    """The goal of a result and the value beside its time: "Prec@1 80.5 % (>= 80)"; or "top-1 accuracy 80.5 %, goal 80".

    Of a run that spent a time budget it is the value at the end, and not the one that first met the goal.
    """
    if goal is None:
        return None
    value = goal.get("last") if outcome == "budget_spent" else goal.get("value")
    shown = format_value(value, unit_of(goal["metric"]))
    if in_words:
        return f"{name_metric(goal['metric'])} {shown}, goal {goal['threshold']:g}"
    return f"{goal['metric']} {shown} ({goal['comparison']} {goal['threshold']:g})"


def format_share(share: float) -> str:
    """ "72 %", "5.2 %": whole from 10 % on, and never outside 0 to 100 %."""
    percent = min(100.0, max(0.0, 100 * share))
    return f"{percent:.0f}{_SPACE}%" if percent >= 9.95 or percent == 0 else f"{percent:.1f}{_SPACE}%"


def _ratio_word(is_more: bool, higher_is_better: bool | None, is_time: bool) -> str:
    if is_time:
        return "slower" if is_more else "faster"
    if higher_is_better is None:
        return "more" if is_more else "less"
    return "higher" if is_more else "lower"


def _between(low: float, high: float, mean: float, unit: str) -> str:
    """Both ends with the decimals of the mean, and with the unit where it differs from the mean's."""
    if unit == SECONDS:
        scale, name = _scale_of_seconds(mean)
        if name is None:
            return f"{_format_seconds(low)} to {_format_seconds(high)}"
        digits = decimals(mean / scale)
        return f"{low / scale:.{digits}f} to {high / scale:.{digits}f}"
    if unit == "%":
        digits = _percent_digits(mean)
        return f"{low:.{digits}f} to {high:.{digits}f}"
    scale, name = next(((size, name) for size, name in PREFIXES if abs(mean) >= 0.9995 * size), (1.0, ""))
    if not unit and abs(mean) < 9999.5:
        scale, name = 1.0, ""
    if abs(mean) >= _EXPONENT or (not unit and abs(mean) < 1e-4):
        return f"{low:.3g} to {high:.3g}"
    digits = decimals(mean / scale)
    return f"{low / scale:.{digits}f}{name} to {high / scale:.{digits}f}{name}"


def _clip(value: float, unit: str, mean: float) -> float:
    """Clip the end of an interval to possible values: times and rates to at least 0, percentages to 0 to 100."""
    if unit == "%" and 0 <= mean <= 100:
        return min(100.0, max(0.0, value))
    return max(0.0, value) if unit in (SECONDS, SAMPLES_PER_SECOND) and mean >= 0 else value


def _format_seconds(seconds: float) -> str:
    scale, name = _scale_of_seconds(seconds)
    if 0 < abs(seconds) < 1e-8:
        return f"below 0.01{_SPACE}µs"
    if name is not None:
        return f"{significant(seconds / scale)}{_SPACE}{name}"
    whole = round(seconds)
    if whole >= 86400:
        days, rest = divmod(round(seconds / 3600), 24)
        return f"{days}{_SPACE}d{_SPACE}{rest:02d}{_SPACE}h"
    if whole >= 3600:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours}{_SPACE}h{_SPACE}{minutes:02d}{_SPACE}min"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}{_SPACE}min{_SPACE}{rest:02d}{_SPACE}s"


def _scale_of_seconds(seconds: float) -> tuple[float, str | None]:
    """The unit of a time in seconds; None from five minutes on, which are minutes and seconds."""
    size = abs(seconds)
    if size >= 299.5:
        return 1.0, None
    if size == 0:
        return 1.0, "s"
    return next(((scale, name) for scale, name in _PARTS if size >= 0.9995 * scale), _PARTS[-1])


def _with_prefix(value: float) -> str:
    for size, name in PREFIXES:
        if 0.9995 * size <= abs(value) < _EXPONENT:
            return f"{significant(value / size)}{name}"
    return significant(value)


def format_price(amount: float | None, currency: str) -> str:
    """An amount as text with at least two digits; "free" for 0, "unknown" for None."""
    if amount is None:
        return "unknown"
    if not amount:
        return "free"
    return f"{format_money(amount)} {currency}"
