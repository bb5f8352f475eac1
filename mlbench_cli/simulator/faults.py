"""Training under random faults: the formulas of Young, Daly and the ETTR, and a replay that tests them."""

import random
import statistics
from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from mlbench_cli.model.faults import best_interval, expected_ettr
from mlbench_cli.util.durations import parse_duration

REPLAYS = 200
FAULTS = 100  # that each replay lives through on average
_NAMES = ("mtbf", "checkpoint", "restart", "interval")
_HINT = "--faults mtbf=10m,checkpoint=1s,restart=30s; interval=2m compares your own with the best one"


@dataclass(frozen=True)
class FaultRates:
    """Seconds: mean time between faults of the whole run, that a checkpoint blocks, from a fault until training goes
    on, and between checkpoints (None: the best interval)."""

    mtbf: float
    checkpoint: float
    restart: float
    interval: float | None = None


@dataclass(frozen=True)
class FaultPrediction:
    """Shares of the time that is productive, for checkpoints every `interval` seconds.

    formula    E[ETTR] of arXiv 2410.21680; replayed: mean over replays, with the range that holds 95 % of them"""

    interval: float
    is_best: bool
    formula: float
    replayed: float
    low: float
    high: float


def parse_rates(text: str, defaults: dict[str, float] | None = None) -> FaultRates:
    """Rates in "mtbf=10m,checkpoint=1s,restart=30s[,interval=2m]". `defaults` are measured ones of a run.

    Raises UsageError that names the word."""
    found: dict[str, float] = dict(defaults or {})
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in _NAMES or not equals:
            raise UsageError(
                f'--faults "{part[:40]}" is not one of {", ".join(f"{name}=..." for name in _NAMES)}.', hint=_HINT
            )
        found[name] = parse_duration(value, f"--faults {name}=")
    missing = [name for name in _NAMES[:3] if name not in found]
    if missing:
        raise UsageError(f"--faults says no {' and no '.join(missing)}.", hint=_HINT)
    rates = FaultRates(found["mtbf"], found["checkpoint"], found["restart"], found.get("interval"))
    if rates.mtbf <= 0 or (rates.interval is not None and rates.interval <= 0):
        raise UsageError("--faults: mtbf and interval must be above 0.", hint=_HINT)
    return rates


def predict_faults(rates: FaultRates, seed: int = 0) -> list[FaultPrediction]:
    """With the best interval, half and twice of it, and the interval that was asked for, in ascending order."""
    cost = max(rates.checkpoint, 1e-6)
    best = best_interval(cost, rates.mtbf)
    intervals = {best / 2: False, best: True, best * 2: False}
    if rates.interval is not None:
        intervals.setdefault(rates.interval, False)
    return [
        _predict(rates, interval, is_best, random.Random(f"{seed}/{interval}"))
        for interval, is_best in sorted(intervals.items())
    ]


def _predict(rates: FaultRates, interval: float, is_best: bool, generator: random.Random) -> FaultPrediction:
    shares = sorted(replay(rates, interval, FAULTS * rates.mtbf, generator) for _ in range(REPLAYS))
    return FaultPrediction(
        interval=interval,
        is_best=is_best,
        formula=expected_ettr(rates.mtbf, max(rates.checkpoint, 1e-6), interval, rates.restart),
        replayed=statistics.fmean(shares),
        low=shares[int(0.025 * REPLAYS)],
        high=shares[int(0.975 * REPLAYS) - 1],
    )


def replay(rates: FaultRates, interval: float, wall: float, generator: random.Random) -> float:
    """The productive share of `wall` seconds, fault by fault. Faults also strike during restarts and checkpoints."""
    now = kept = 0.0
    while now < wall:
        life = min(generator.expovariate(1 / rates.mtbf), wall - now)
        is_over = now + life >= wall
        trained = max(0.0, life - (rates.restart if now else 0.0))
        whole, rest = divmod(trained, interval + rates.checkpoint)
        kept += whole * interval + (min(rest, interval) if is_over else 0.0)
        now += life
    return kept / wall
