"""The figure of `mlbench predict --check`: predicted over measured values."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.results.figures.look import choose_looks, family_of
from mlbench_cli.results.figures.model import Axis, Figure, Line, Scale, Sheet, Spread
from mlbench_cli.results.figures.png import write_sheets

BAND = 0.15  # of the relative error, shaded


@dataclass(frozen=True)
class PredictedPair:
    """A measured and a predicted value; each `group` has a panel."""

    group: str
    method: str
    measured: float
    predicted: float


def draw_predictions(pairs: Sequence[PredictedPair], unit: str, folder: Path) -> list[Path]:
    """Write predictions.png and predictions.svg into `folder`. Raises UsageError without pairs."""
    if not pairs:
        raise UsageError("Nothing to draw: no run has measured its steps.")
    groups = dict.fromkeys(pair.group for pair in pairs)
    methods = list(dict.fromkeys(pair.method for pair in pairs))
    looks = dict(zip(methods, choose_looks(methods), strict=True))
    figures = tuple(_figure(group, [pair for pair in pairs if pair.group == group], unit, looks) for group in groups)
    sheet = Sheet(
        "predictions", "Predicted over measured", figures, f"The band is {BAND:.0%} around the measured value."
    )
    return write_sheets([sheet], folder)


def _figure(group: str, pairs: Sequence[PredictedPair], unit: str, looks: dict[str, tuple[str, int]]) -> Figure:
    values = [value for pair in pairs for value in (pair.measured, pair.predicted)]
    ends = (min(values) / 1.3, max(values) * 1.3)
    low, high = (tuple(factor * end for end in ends) for factor in (1 - BAND, 1 + BAND))
    lines = [
        Line(f"within {BAND:.0%}", ends, ends, low, high, reference=True, spread=Spread.BAND, is_joined=False),
        Line("equal", ends, ends, reference=True),
    ]
    for method, (color, shape) in looks.items():
        own = [pair for pair in pairs if pair.method == method]
        if own:
            xs, ys = tuple(pair.measured for pair in own), tuple(pair.predicted for pair in own)
            lines.append(Line(method, xs, ys, color=color, shape=shape, is_joined=False, panel=family_of(method)))
    x, y = (Axis(f"{word} {unit}", Scale.LOG10) for word in ("measured", "predicted"))
    return Figure(group, group, x, y, tuple(lines))
