"""The picture of `mlbench predict --check`: what was predicted over what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive import layout
from mlbench_cli.results.figures.style import COLORS, MARKERS, style, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.15  # of the relative error, shaded


@dataclass(frozen=True)
class PredictedPair:
    """A measured and a predicted value, as a picture shows them: one panel for each `group`."""

    group: str
    method: str
    measured: float
    predicted: float


def draw_predictions(pairs: Sequence[PredictedPair], unit: str, folder: Path) -> list[Path]:
    """Write predictions.png and .svg into `folder`: one panel for each group. Raises UsageError for no pair."""
    if not pairs:
        raise UsageError("There is nothing to draw: no run has measured its steps.")
    with style(), layout.naming_file_on_os_error(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        figure = _draw(pairs, unit)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return write(figure, folder / "predictions")


def _draw(pairs: Sequence[PredictedPair], unit: str) -> "Figure":
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(pair.group for pair in pairs))
    methods = list(dict.fromkeys(pair.method for pair in pairs))
    figure = Figure(figsize=(3.4 * len(groups) + 1.2, 4.2), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        _draw_panel(panel, group, [pair for pair in pairs if pair.group == group], methods)
        panel.set_xlabel(f"measured {unit}")
    panels[0].set_ylabel(f"predicted {unit}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _draw_panel(panel: "Axes", title: str, pairs: Sequence[PredictedPair], methods: Sequence[str]) -> None:
    from matplotlib.ticker import NullFormatter

    values = [value for pair in pairs for value in (pair.measured, pair.predicted)]
    ends = [min(values) / 1.3, max(values) * 1.3]
    panel.set(title=title, xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    panel.fill_between(
        ends, [(1 - BAND) * end for end in ends], [(1 + BAND) * end for end in ends], color="#e8e8e8", linewidth=0,
        label=f"within {BAND:.0%}",
    )  # fmt: skip
    panel.plot(ends, ends, color="#888888", linewidth=0.8)
    for number, method in enumerate(methods):
        own = [pair for pair in pairs if pair.method == method]
        panel.plot(
            [pair.measured for pair in own], [pair.predicted for pair in own], MARKERS[number % len(MARKERS)],
            color=COLORS[number % len(COLORS)], markersize=4, label=method, alpha=0.8, markeredgewidth=0,
        )  # fmt: skip
