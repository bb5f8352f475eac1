"""The figure of `mlbench plan`: time against price of all candidates, and their Pareto front."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbench_cli.results.figures.look import choose_looks
from mlbench_cli.results.figures.model import Axis, Figure, Line, Scale, Sheet, thin
from mlbench_cli.results.figures.png import write_sheets

Points = Sequence[tuple[float, float]]
MAX_POINTS = 50  # of a cloud; lines with more points have no marks


def draw_plan(task: str, clouds: Mapping[str, Points], pareto: Points, best: Points, folder: Path) -> list[Path]:
    """Write plan.png and plan.svg into `folder`. `clouds` are points (seconds, price in USD) by cloud."""
    lines = []
    for (name, points), (color, shape) in zip(clouds.items(), choose_looks(list(clouds)), strict=True):
        shown = sorted((seconds, price) for seconds, price in points if seconds > 0 and price > 0)
        xs, ys = thin([x for x, _ in shown], [y for _, y in shown], MAX_POINTS)
        lines.append(Line(name, tuple(xs), tuple(ys), color=color, shape=shape, is_joined=False))
    for label, points, joined in (("nothing is faster and cheaper", pareto, True), ("the best", best, False)):
        shown = [point for point in points if point[1] > 0]
        if shown:
            xs, ys = [point[0] for point in shown], [point[1] for point in shown]
            lines.append(Line(label, tuple(xs), tuple(ys), reference=joined, is_joined=joined))
    figure = Figure(
        *("plan", f"Time and price to the goal of {task}, as predicted"),
        Axis("time to goal", Scale.LOG10, unit="s"),
        Axis("price in USD", Scale.LOG10),
        tuple(lines),
    )
    sheet = Sheet("plan", figure.title, (figure,), "Predictions, not measurements.")
    return write_sheets([sheet], folder)
