"""Figures on pages: where curves, marks, intervals, ticks and bars stand, and which texts they have.

An axis from 0 to 10 has 8 % more room at its upper end, so that 10 stands at 10 / 10.8 = 92.59 % of the plot.
"""

from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale, Spread
from mlbench_cli.results.figures.svg import (
    render_mark,
    render_share,
    render_svg,
)

STEPS, LOSS = Axis("step", from_zero=True), Axis("loss", from_zero=True)
PHASES = Axis("phase", Scale.CATEGORIES, categories=("forward", "backward"))
TIME = Axis("time", unit="s", from_zero=True)
WHOLE = Line("whole", (0.0, 10.0), (0.0, 10.0), reference=True)  # makes both axes reach from 0 to 10


def plot(*lines: Line, **changes: Any) -> Figure:
    return Figure(**{"key": "k", "title": "Title", "x": STEPS, "y": LOSS, "lines": lines, **changes})


def rows(*lines: Line, kind: Kind = Kind.BARS, **changes: Any) -> Figure:
    return plot(*lines, **{"x": PHASES, "y": TIME, "kind": kind, **changes})


def page(figure: Figure) -> ElementTree.Element:
    drawn = render_svg(figure)
    assert "None" not in drawn
    return ElementTree.fromstring(f"<p>{drawn}</p>")


def of_class(item: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in item.iter() if name in str(each.get("class")).split()]


def paths(figure: Figure) -> list[tuple[str | None, str | None]]:
    """Class and outline of each curve and band, without the samples of the legend."""
    [area] = [each for each in of_class(page(figure), "area") if each.get("viewBox")]
    return [(each.get("class"), each.get("d")) for each in area]


def titles(figure: Figure) -> list[str]:
    return [(each.text or "").replace("\u00a0", " ") for each in page(figure).iter("title")]


def texts(item: ElementTree.Element) -> list[str]:
    return [text.replace("\u00a0", " ") for each in item.iter() if (text := (each.text or "").strip())]


# --- curves ---------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_values_from_left_to_right_and_upward() -> None:
    line = Line("a", (0.0, 5.0, 10.0), (0.0, 5.0, 10.0))
    assert paths(plot(line)) == [("curve c-step", "M0 1000L463 537L926 74")]


def test_a_curve_is_interrupted_where_a_value_is_missing() -> None:
    line = Line("a", (0.0, 2.5, 5.0, 7.5, 10.0), (0.0, 2.5, None, 7.5, 10.0))
    assert paths(plot(line)) == [("curve c-step", "M0 1000L231 769M694 306L926 74")]


def test_a_curve_is_interrupted_where_a_logarithmic_axis_has_no_place() -> None:
    figure = plot(Line("a", (0.0, 5.0, 10.0), (10.0, 0.0, 10.0)), y=Axis("y", Scale.LOG10))
    [(_, outline)] = paths(figure)
    assert outline is not None
    assert outline.count("M") == 2
    assert "L" not in outline
    assert titles(figure) == ["a, step 0: 10.0", "a, step 10: 10.0"]


@pytest.mark.parametrize(
    ("changes", "kind", "css"),
    [
        ({}, Kind.LINES, "curve c-step"),
        ({}, Kind.STEPS, "thin c-step"),
        ({"is_named": False}, Kind.LINES, "thin c-step"),
        ({"reference": True}, Kind.LINES, "reference c-reference"),
        ({"reference": True, "color": "small"}, Kind.LINES, "reference c-small"),
        ({"reference": True}, Kind.STEPS, "reference c-reference"),
        ({"color": "small"}, Kind.LINES, "curve c-small"),
    ],
)
def test_a_stroke_says_what_a_line_is(changes: dict[str, Any], kind: Kind, css: str) -> None:
    line = Line("a", (0.0, 10.0), (0.0, 10.0), **changes)
    assert [each for each, _ in paths(plot(line, kind=kind))] == [css]


def test_lines_without_a_color_get_one_by_their_place() -> None:
    lines = [Line(f"l{n}", (0.0, 10.0), (0.0, float(n))) for n in range(3)]
    assert [css for css, _ in paths(plot(*lines))] == ["curve c-step", "curve c-overlap", "curve c-sparse"]


def test_points_that_are_not_joined_have_marks_and_no_curve() -> None:
    figure = plot(Line("a", (0.0, 10.0), (0.0, 10.0), is_joined=False))
    assert paths(figure) == []
    assert titles(figure) == ["a, step 0: 0", "a, step 10: 10.0"]


# --- marks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "count"),
    [
        ({}, Kind.LINES, 2),
        ({}, Kind.STEPS, 0),
        ({"is_named": False}, Kind.LINES, 0),
        ({"reference": True}, Kind.LINES, 0),
        ({"reference": True, "color": "small"}, Kind.LINES, 2),
        ({"spread": Spread.BAND}, Kind.LINES, 0),
        ({"low": (0.0, 1.0), "high": (1.0, 2.0), "spread": Spread.BAND}, Kind.LINES, 0),
    ],
)
def test_only_measured_series_with_a_name_have_marks(changes: dict[str, Any], kind: Kind, count: int) -> None:
    line = Line("a", (0.0, 10.0), (0.0, 10.0), **changes)
    assert len(titles(plot(line, kind=kind))) == count


@pytest.mark.parametrize(("count", "marks"), [(60, 60), (61, 0)])
def test_a_curve_of_many_points_has_no_marks(count: int, marks: int) -> None:
    values = tuple(map(float, range(count)))
    assert len(titles(plot(Line("a", values, values)))) == marks


def test_a_mark_stands_at_its_value_and_says_what_it_is() -> None:
    line = Line("a", (0.0, 10.0), (0.0, 5.0), notes=("", "contended <"))
    figure = plot(WHOLE, line, x=Axis("workers", from_zero=True), y=Axis("time", from_zero=True, unit="s"))
    squares = of_class(page(figure), "mark")
    assert [(each.get("x"), each.get("y")) for each in squares if each.get("x") != "9"] == [
        ("0%", "100%"),
        ("92.59%", "53.7%"),
    ]
    assert titles(figure) == ["a, workers 0: 0 s", "a, workers 10: 5.00 s, contended <"]


def test_a_circle_is_the_first_mark_and_a_square_the_second() -> None:
    found = page(plot(Line("a", (0.0,), (0.0,)), Line("b", (10.0,), (10.0,))))
    [_, circle] = list(found.iter("circle"))  # the first one is the legend's
    assert circle.attrib == {"cx": "0%", "cy": "100%", "r": "4.2", "class": "k c-step"}
    square = list(found.iter("polygon"))[-1]
    assert square.attrib == {"class": "k c-overlap", "points": "-4.0,-4.0 4.0,-4.0 4.0,4.0 -4.0,4.0"}


@pytest.mark.parametrize(("shape", "has_corners"), [(0, False), (1, True), (5, True), (6, False), (7, True)])
def test_a_line_with_a_color_has_its_own_shape_of_which_there_are_six(shape: int, has_corners: bool) -> None:
    found = page(plot(Line("a", (0.0,), (1.0,), color="small", shape=shape)))
    assert bool(list(found.iter("polygon"))) == has_corners
    plain = page(plot(Line("a", (0.0,), (1.0,), shape=shape)))
    assert not list(plain.iter("polygon"))  # the place decides


def test_marks_of_two_runs_are_hollow() -> None:
    line = Line("a", (0.0, 10.0), (0.0, 10.0), few=(False, True))
    assert [each.get("class") for each in page(plot(line)).iter("circle")] == ["k c-step", "k c-step few"]


# --- intervals and bands --------------------------------------------------------------------------------------------


def test_an_interval_has_caps_at_both_ends() -> None:
    line = Line("a", (10.0,), (5.0,), (2.5,), (7.5,))
    found = of_class(page(plot(WHOLE, line)), "interval")
    assert [each.tag for each in found] == ["line", "path", "path"]
    assert found[0].attrib == {
        "x1": "92.59%",
        "x2": "92.59%",
        "y1": "76.85%",
        "y2": "30.56%",
        "class": "interval c-overlap",
    }
    caps = [each for each in of_class(page(plot(WHOLE, line)), "mark") if each.find("path") is not None]
    assert [(each.get("x"), each.get("y")) for each in caps] == [("92.59%", "76.85%"), ("92.59%", "30.56%")]


def test_the_range_of_two_runs_has_no_caps() -> None:
    found = page(plot(WHOLE, Line("a", (10.0,), (5.0,), (2.5,), (7.5,), few=(True,))))
    assert [each.get("class") for each in of_class(found, "range")] == ["range c-overlap"]
    assert of_class(found, "interval") == []


@pytest.mark.parametrize(("low", "high"), [(None, 7.0), (2.0, None)])
def test_an_interval_needs_both_ends(low: float | None, high: float | None) -> None:
    found = page(plot(WHOLE, Line("a", (10.0,), (5.0,), (low,), (high,))))
    assert of_class(found, "interval") == []


def test_an_interval_that_reaches_zero_ends_at_the_bottom_of_a_logarithmic_axis() -> None:
    line = Line("a", (1.0, 2.0), (10.0, 100.0), (0.0, 90.0), (20.0, 110.0))
    [first, *_] = of_class(page(plot(line, y=Axis("y", Scale.LOG10))), "interval")
    assert first.get("y1") == "100%"


def test_a_band_goes_along_the_upper_ends_and_back_along_the_lower_ones() -> None:
    band = Line("b", (0.0, 5.0, 10.0), (1.0, 5.0, 8.0), (0.0, None, 5.0), (2.5, 9.0, 10.0), spread=Spread.BAND)
    assert paths(plot(band, kind=Kind.STEPS)) == [
        ("band c-step", "M0 769L926 74L926 537L0 1000Z"),
        ("thin c-step", "M0 907L463 537L926 259"),
    ]
    alone = Line("b", (0.0, 10.0), (0.0, 10.0), spread=Spread.BAND, is_joined=False)
    assert paths(plot(WHOLE, alone))[1:] == []


# --- axes -----------------------------------------------------------------------------------------------------------


def test_each_axis_has_its_ticks_and_its_name() -> None:
    found = page(plot(Line("a", (0.0, 10.0), (0.0, 10.0)), x=Axis("step <", from_zero=True)))
    [grid], [ticks] = of_class(found, "grid"), of_class(found, "ticks")
    lines = [(each.get("y1"), each.get("class")) for each in grid]
    shares = ["100%", "81.48%", "62.96%", "44.44%", "25.93%", "7.41%"]
    assert lines == [(share, "base" if share == "100%" else None) for share in shares]
    assert all(each.get("y1") == each.get("y2") for each in grid)
    up = [(each.get("y"), each.text) for each in ticks if each.get("dx") == "-8"]
    assert up == list(zip(shares, ("0", "2", "4", "6", "8", "10"), strict=True))
    across = [(each.get("x"), each.text) for each in ticks if each.get("class") == "middle"]
    assert across == [
        *(("0%", "0"), ("18.52%", "2"), ("37.04%", "4"), ("55.56%", "6"), ("74.07%", "8"), ("92.59%", "10")),
    ]
    names = [each.text for each in ticks if each.get("dy") in ("-14", "36")]
    assert names == ["loss", "step <"]


@pytest.mark.parametrize(("count", "shown"), [(2, 2), (7, 7), (8, 4), (14, 7), (15, 5)])
def test_at_most_seven_of_the_ticks_below_are_named(count: int, shown: int) -> None:
    places = tuple(map(float, range(1, count + 1)))
    found = page(plot(Line("a", places, places), x=Axis("workers", ticks=places)))
    assert len(of_class(found, "middle")) == shown
    assert of_class(found, "middle")[0].text == "1"


@pytest.mark.parametrize(
    ("scale", "ticks", "name"),
    [
        (Scale.LOG10, (), "x (log)"),
        (Scale.LOG2, (4.0,), "x (log)"),
        (Scale.LOG2, (4.0, 8.0), "x"),
        (Scale.LINEAR, (), "x"),
    ],
)
def test_a_logarithmic_axis_says_so_unless_its_ticks_do(scale: Scale, ticks: tuple[float, ...], name: str) -> None:
    found = page(plot(Line("a", (4.0, 8.0), (1.0, 2.0)), x=Axis("x", scale, ticks)))
    assert [each.text for each in found.iter("text") if each.get("dy") == "36"] == [name]


# --- values at the ends of lines ------------------------------------------------------------------------------------


def ends(*lines: Line, **changes: Any) -> list[tuple[str | None, str | None]]:
    """Text and height of the values beside the ends of lines."""
    found = page(plot(*lines, **changes))
    return [(each.text, each.get("y")) for each in found.iter("text") if each.get("dx") == "9"]


def test_the_last_value_of_a_line_and_the_name_of_a_reference_are_written() -> None:
    one = Line("one", (10.0, 0.0), (10.0, 9.0))  # its points may be in any order
    goal = Line("goal", (0.0, 10.0), (0.0, 0.0), reference=True)
    assert ends(one, goal) == [("10.0", "7.41%"), ("goal", "100%")]
    [value, name] = [each for each in page(plot(one, goal)).iter("text") if each.get("dx") == "9"]
    assert (value.get("class"), name.get("class"), value.get("x")) == ("value", "", "92.59%")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"is_joined": False}, Kind.LINES), ({"spread": Spread.BAND}, Kind.LINES), ({}, Kind.STEPS)],
)
def test_bands_steps_and_points_have_no_value_at_their_end(changes: dict[str, Any], kind: Kind) -> None:
    assert ends(Line("a", (0.0, 10.0), (0.0, 10.0), **changes), kind=kind) == []


def test_a_line_without_values_has_no_end() -> None:
    assert ends(Line("a", (0.0, 10.0), (0.0, 10.0)), Line("b", (0.0, 10.0), (None, None))) == [("10.0", "7.41%")]


@pytest.mark.parametrize(("last", "count"), [(7.0, 0), (7.56, 0), (7.6, 1)])
def test_a_line_that_ends_before_the_right_third_has_no_value(last: float, count: int) -> None:
    """7.56 of 10.8 are 70 %."""
    whole = Line("whole", (0.0, 10.0), (0.0, 10.0), is_joined=False)
    assert len(ends(whole, Line("a", (0.0, last), (0.0, 5.0)))) == count


@pytest.mark.parametrize(("name", "shown"), [("nine char", ["nine char"]), ("ten letter", [])])
def test_a_long_name_does_not_fit_beside_the_plot(name: str, shown: list[str]) -> None:
    assert [text for text, _ in ends(Line(name, (0.0, 10.0), (0.0, 10.0), reference=True))] == shown


@pytest.mark.parametrize(
    ("heights", "shown"),
    [
        ((10.0, 9.08), ["10.0", "9.08"]),  # 8.5 % apart
        ((10.0, 9.14), []),  # 7.96 % apart
        ((10.0, 9.2, 1.0), ["1.00"]),
        ((10.0, 1.5, 1.0), ["10.0"]),
    ],
)
def test_values_that_would_overlap_are_left_out(heights: tuple[float, ...], shown: list[str]) -> None:
    lines = [Line(str(height), (0.0, 10.0), (0.0, height)) for height in heights]
    assert [text for text, _ in ends(*lines)] == shown


@pytest.mark.parametrize(("count", "shown"), [(5, 5), (6, 0)])
def test_many_lines_have_no_values_at_their_ends(count: int, shown: int) -> None:
    lines = [Line(str(n), (0.0, 10.0), (0.0, 10.0 * n / count)) for n in range(count)]
    assert len(ends(*lines)) == shown


# --- the legend -----------------------------------------------------------------------------------------------------


def test_a_legend_has_a_sample_of_each_named_line() -> None:
    lines = (
        Line("a <", (0.0, 10.0), (0.0, 10.0)),
        Line("hidden", (0.0, 10.0), (0.0, 10.0), is_named=False),
        Line("goal", (0.0, 10.0), (5.0, 5.0), reference=True),
        Line("points", (0.0,), (1.0,), is_joined=False),
    )
    [legend] = of_class(page(plot(*lines)), "legend")
    assert [texts(item) for item in legend] == [["a <"], ["goal"], ["points"]]
    joined, goal, points = legend
    for item, css, stroke in ((joined, "area c-step", "curve"), (goal, "area c-reference", "reference")):
        assert [(each.get("class"), each[0].get("class")) for each in item.iter("g")] == [(css, stroke)]
    assert list(goal.iter("circle")) == []
    assert list(points.iter("path")) == []
    assert len(of_class(points, "k")) == 1
    assert len(of_class(joined, "k")) == 1


def test_a_single_series_needs_no_legend() -> None:
    assert of_class(page(plot(WHOLE)), "legend") == []


def test_parts_of_bars_have_squares_in_the_legend() -> None:
    figure = rows(Line("a", (0.0,), (1.0,), color="compute"), Line("b", (0.0,), (1.0,), color="data"))
    [legend] = of_class(page(figure), "legend")
    assert [each.get("class") for each in legend.iter("rect")] == ["c-compute k", "c-data k"]
    assert list(legend.iter("path")) == []


# --- rows -----------------------------------------------------------------------------------------------------------


def boxes(figure: Figure) -> list[tuple[str | None, str | None, str | None]]:
    [bars] = of_class(page(figure), "bars")
    return [(each.get("class"), each.get("x"), each.get("width")) for each in bars.iter("rect")]


def totals(figure: Figure) -> list[str]:
    return [(each.text or "").replace("\u00a0", " ") for each in of_class(page(figure), "total")]


def test_parts_of_a_bar_are_on_top_of_each_other_and_the_longest_fills_the_row() -> None:
    one = Line("one", (0.0, 1.0), (1.0, 6.0), color="compute")
    two = Line("two", (0.0, 1.0), (3.0, 2.0), color="communication", notes=("", "3 runs"))
    figure = rows(one, two)
    assert boxes(figure) == [
        ("c-compute", "0%", "12.5%"),
        ("c-communication", "12.5%", "37.5%"),
        ("c-compute", "0%", "75%"),
        ("c-communication", "75%", "25%"),
    ]
    assert totals(figure) == ["4.00 s", "8.00 s  3 runs"]
    assert titles(figure) == ["one: 1.00 s", "two: 3.00 s", "one: 6.00 s", "two: 2.00 s"]
    [bars] = of_class(page(figure), "bars")
    assert bars.get("aria-label") == figure.alt
    assert [each.text for each in bars if each.get("class") is None and each.tag == "span"] == ["forward", "backward"]
    assert of_class(bars, "ends") == []


def test_a_bar_has_no_part_for_zero_and_nothing_is_a_dash() -> None:
    figure = rows(Line("one", (0.0, 1.0), (2.0, 0.0)), Line("two", (0.0, 1.0), (-1.0, None)))
    assert boxes(figure) == [("c-step", "0%", "100%")]
    assert totals(figure) == ["2.00 s", "–"]
    assert totals(rows(Line("one", (), ()))) == ["–", "–"]


@pytest.mark.parametrize(
    ("color", "share", "is_written"),
    [("compute", 3.0, True), ("communication", 3.0, True), ("compute", 2.9, False), ("data", 3.0, False)],
)
def test_a_value_is_written_into_a_part_with_room_for_it(color: str, share: float, is_written: bool) -> None:
    """Of 10 seconds, 3 are 30 % of the row."""
    part = Line("a", (0.0,), (share,), color=color)
    rest = Line("b", (0.0,), (10.0 - share,), color="data")
    [bars] = of_class(page(rows(part, rest)), "bars")
    assert bool(list(bars.iter("text"))) == is_written
    if is_written:
        [text] = bars.iter("text")
        assert (text.get("x"), text.text) == ("0%", "3.00\u00a0s")
    alone = rows(Line("a", (0.0,), (3.0,), color=color))
    assert list(page(alone).iter("text")) == []  # its total is beside it


def test_a_bar_has_the_interval_of_its_value() -> None:
    line = Line("a", (0.0, 1.0), (6.0, 8.0), (4.0, 7.0), (10.0, 9.0), few=(False, True))
    figure = rows(line)
    found = list(page(figure).iter("line"))
    assert [(each.get("x1"), each.get("x2"), each.get("class")) for each in found] == [
        ("40%", "100%", "interval c-engine"),
        ("70%", "90%", "range c-engine"),
    ]
    assert [width for _, _, width in boxes(figure)] == ["60%", "80%"]


@pytest.mark.parametrize(("low", "high"), [(None, 7.0), (5.0, None)])
def test_the_interval_of_a_bar_needs_both_ends(low: float | None, high: float | None) -> None:
    assert list(page(rows(Line("a", (0.0,), (6.0,), (low,), (high,)))).iter("line")) == []


def test_rows_without_values_have_an_axis_of_one_unit() -> None:
    figure = rows(Line("a", (), ()), kind=Kind.SPANS)
    assert texts(of_class(page(figure), "ends")[0]) == ["0", "1.00 s"]
    assert totals(figure) == ["0 s", "0 s"]


def test_spans_stand_where_they_begin_and_add_up() -> None:
    lane = Line.of_spans("a", "compute", [(0, 0.0, 2.0), (0, 6.0, 8.0), (1, 2.0, 6.0)], ("", "", ""))
    other = Line.of_spans("b", "data", [(1, 6.0, 7.0)], ("killed",))
    figure = rows(lane, other, kind=Kind.SPANS)
    assert boxes(figure) == [
        ("c-compute", "0%", "25%"),
        ("c-compute", "75%", "25%"),
        ("c-compute", "25%", "50%"),
        ("c-data", "75%", "12.5%"),
    ]
    assert totals(figure) == ["4.00 s", "killed"]
    [scale] = of_class(page(figure), "ends")
    assert texts(scale) == ["0", "8.00 s"]
    assert titles(figure) == ["a: 2.00 s", "a: 2.00 s", "a: 4.00 s", "b: 1.00 s"]
    assert not list(page(figure).iter("text"))  # of wide spans, too


def test_each_series_of_ranges_has_its_lane() -> None:
    one = Line("a", (0.0, 1.0), (2.0, 4.0), (1.0, None), (4.0, None))
    two = Line("b", (1.0,), (8.0,), (6.0,), (8.0,), notes=("slow",), few=(True,))
    found = page(rows(one, two, kind=Kind.RANGES))
    lines = [(each.get("x1"), each.get("x2"), each.get("y1"), each.get("class")) for each in found.iter("line")]
    assert lines == [("12.5%", "50%", "25%", "range c-step"), ("75%", "100%", "75%", "range c-overlap")]
    assert [(each.get("cx"), each.get("cy")) for each in found.iter("circle")][1:] == [("25%", "25%"), ("50%", "25%")]
    squares = [each for each in of_class(found, "mark") if str(each.get("y")).endswith("%")]
    assert [(each.get("x"), each.get("y")) for each in squares] == [("100%", "75%")]
    assert squares[0][0].get("class") == "k c-overlap few"
    assert [text.replace("\u00a0", " ") for text in (each.text or "" for each in found.iter("title"))] == [
        *("a, phase forward: 2.00 s", "a, phase backward: 4.00 s", "b, phase backward: 8.00 s, slow"),
    ]
    assert totals(rows(one, two, kind=Kind.RANGES)) == ["", ""]


# --- parts of tables ------------------------------------------------------------------------------------------------


def test_a_mark_in_a_table_has_the_color_and_shape_of_its_series() -> None:
    circle = ElementTree.fromstring(render_mark(("sparse", 0)))
    assert (circle.get("class"), circle[0].attrib) == (
        "chip",
        {"cx": "8", "cy": "8", "r": "4.2", "class": "k c-sparse"},
    )
    square = ElementTree.fromstring(render_mark(("sparse", 1)))
    assert (square[0].get("x"), square[0].get("y"), square[0][0].get("class")) == ("8", "8", "k c-sparse")


@pytest.mark.parametrize(
    ("share", "width"), [(0.0, "0%"), (0.5, "50%"), (0.123456, "12.35%"), (1.0, "100%"), (1.5, "100%"), (-0.1, "0%")]
)
def test_a_bar_in_a_cell_is_at_most_as_wide_as_the_cell(share: float, width: str) -> None:
    bar = ElementTree.fromstring(render_share(share, ("sparse", 0)))
    assert (bar.get("class"), bar[0].attrib) == ("share", {"class": "c-sparse k", "width": width, "height": "100%"})
