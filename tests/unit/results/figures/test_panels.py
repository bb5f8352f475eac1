"""Small multiples: figures of many series show all of them, with equal axes and colors in every panel."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.charts import list_sheets
from mlbench_cli.results.figures.look import FAMILIES
from mlbench_cli.results.figures.model import MAX_SERIES, Axis, Figure, Kind, Line, Sheet, split_panels
from mlbench_cli.results.figures.png import draw_sheets
from mlbench_cli.results.figures.scaling import split_jobs
from mlbench_cli.results.figures.svg import render_svg
from mlbench_cli.results.report.collect import collect as collect_report
from tests.unit.results.figures.test_charts import series

METHODS = ("bsp", "wfbp", "mgwfbp", "eftopk", "powersgd", "localsgd")
NETWORKS = ("100mbit,5ms", "1gbit,1ms", "50mbit,5ms")  # in the order of series, which is that of their labels


def many(count: int, kind: Kind = Kind.LINES) -> Figure:
    lines = [Line(f"s{n}", (0.0, 1.0), (1.0 + n, 2.0 + n)) for n in range(count)]
    goal = Line("goal", (0.0, 1.0), (3.0, 3.0), reference=True)
    return Figure("k", "t", Axis("x"), Axis("y", from_zero=True), (*lines, goal), kind=kind)


def page(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(f"<p>{render_svg(figure)}</p>")


def texts(item: ElementTree.Element) -> list[str]:
    return [text for each in item.iter() if (text := (each.text or "").strip())]


@pytest.mark.parametrize("kind", [Kind.LINES, Kind.STEPS])
def test_few_series_share_a_plot_and_many_are_split_evenly(kind: Kind) -> None:
    assert split_panels(many(MAX_SERIES, kind)).figures == (many(MAX_SERIES, kind),)
    panels, legend = split_panels(many(18, kind))
    assert [panel.panel for panel in panels] == ["1–6 of 18", "7–12 of 18", "13–18 of 18"]
    assert not legend  # 18 names: each panel has the six that it shows
    names = [line.label for panel in panels for line in panel.lines if line.label != "goal"]
    assert names == [f"s{n}" for n in range(18)]
    assert all("goal" in [line.label for line in panel.lines] for panel in panels)
    looks = [(line.color, line.shape) for panel in panels for line in panel.lines if line.label != "goal"]
    assert len(set(looks)) == 18  # as in one plot


def test_panels_have_the_same_axes_and_a_name_each() -> None:
    pictures = [item for item in page(many(18)).iter() if item.get("role") == "img"]
    assert [item.get("aria-label", "").partition(":")[0] for item in pictures] == [
        f"t, {place} of 18" for place in ("1–6", "7–12", "13–18")
    ]
    ticks = [re.findall(r">([\d.,]+)<", ElementTree.tostring(item).decode()) for item in pictures]
    assert ticks[0] == ticks[1] == ticks[2]
    assert "20" in ticks[0]  # of the largest value, which is in the last panel


def test_repeats_and_fits_stay_with_their_series() -> None:
    lines = []
    for n in range(10):
        lines.append(Line(f"s{n}", (0.0, 1.0), (1.0, 2.0), color="step"))
        lines.append(Line(f"s{n}: fit", (0.0, 1.0), (1.0, 2.0), reference=True, is_named=False))
    lines.append(Line("s0", (0.0, 1.0), (1.5, 2.5), color="step", is_named=False))
    panels, _ = split_panels(Figure("k", "t", Axis("x"), Axis("y"), tuple(lines)))
    found = [[line.label for line in panel.lines] for panel in panels]
    assert found[0] == [*(f"s{n}{end}" for n in range(5) for end in ("", ": fit")), "s0"]
    assert found[1] == [f"s{n}{end}" for n in range(5, 10) for end in ("", ": fit")]


def test_hostile_names_are_escaped_in_panels() -> None:
    name = '<script>alert("x")</script> & \u202e'
    lines = tuple(Line(f"{name}{n}", (0.0, 1.0), (1.0, 2.0), panel=f"{name}{n % 3}", short=name * 30) for n in range(9))
    picture = render_svg(Figure("k", name, Axis(name), Axis(name), lines))
    assert "<script" not in picture
    assert picture.count('class="panel"') == 3


def runs_of(networks: tuple[str, ...], methods: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"workers": workers, "seconds": 100.0 / workers + number, "method": {"name": method}, "network": network}
        for number, (network, method) in enumerate((network, method) for network in networks for method in methods)
        for workers in (1, 2)
    ]


def test_series_of_a_report_are_divided_by_the_setting_with_the_fewest_panels(tmp_path: Path) -> None:
    found = series(tmp_path, *runs_of(NETWORKS, METHODS))
    [job] = split_jobs(found, {})
    assert len(job.groups) == 18
    [sheet] = [sheet for sheet in list_sheets(found) if sheet.name == "total_time"]
    [figure] = sheet.figures
    assert len(figure.lines) == 18
    panels, legend = split_panels(figure)
    assert [panel.panel for panel in panels] == [*NETWORKS]
    assert sorted(line.label for line in legend) == sorted(METHODS)  # once, and not once per panel
    for method in METHODS:
        [look] = {(line.color, line.shape) for panel in panels for line in panel.lines if line.label == method}
        assert look[0] in [family for family, names in FAMILIES.items() if method in names]
    assert len({row[0] for row in figure.rows()}) == 18  # the table names both settings


def test_many_methods_are_divided_by_family(tmp_path: Path) -> None:
    methods = (*FAMILIES["overlap"], *FAMILIES["sparse"], "powersgd", "fp16")
    [job] = split_jobs(series(tmp_path, *runs_of(("1gbit,1ms",), methods)), {})
    titles = ["during the backward pass", "only the largest numbers, fewer bits, lower rank"]
    assert sorted({panel for panel, _ in job.places}) == titles
    assert [name for _, name in job.places] == [group.label for group in job.groups]


def legends_of(picture: Any) -> list[list[str]]:
    found = [legend for axes in picture.axes if (legend := axes.get_legend()) is not None]
    return [[text.get_text() for text in legend.get_texts()] for legend in found]


def test_the_files_have_the_same_panels(tmp_path: Path) -> None:
    found = series(tmp_path, *runs_of(NETWORKS, METHODS))
    [sheet] = [sheet for sheet in list_sheets(found) if sheet.name == "total_time"]
    [(_, picture)] = draw_sheets([sheet])
    plots = [axes for axes in picture.axes if axes.lines]
    assert [axes.get_title(loc="left") for axes in plots] == [*NETWORKS]
    assert len({axes.get_ylim() for axes in plots}) == len({axes.get_xlim() for axes in plots}) == 1
    [legend] = legends_of(picture)
    assert sorted(legend) == sorted(METHODS)
    [(_, picture)] = draw_sheets([Sheet("s", "t", (many(18),))])
    assert legends_of(picture) == [[*(f"s{n}" for n in range(start, start + 6)), "goal"] for start in (0, 6, 12)]


def test_the_report_shows_each_run_over_time(tmp_path: Path) -> None:
    series(tmp_path, *runs_of(NETWORKS, METHODS))
    report = collect_report([Archive.open(path) for path in sorted(tmp_path.iterdir())])
    figures = {figure.key: figure for figure in report.figures}
    way = figures["job1-way"]
    panels, _ = split_panels(way)
    assert len({line.label for line in way.lines if not line.reference}) == 18
    assert [panel.panel for panel in panels] == [*NETWORKS]
    assert all(len(panel.lines) == len(METHODS) + 1 for panel in panels)  # and the goal
