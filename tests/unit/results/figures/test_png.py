"""What matplotlib was told to draw, read back from its own objects: scales, lines, error bars, bars, texts, legends."""

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from mlbench_cli.errors import MlbenchError
from mlbench_cli.results.figures.look import read_colors
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale, Sheet, Spread
from mlbench_cli.results.figures.png import MAX_MARKS, draw_sheets, write_sheets

ROWS = Axis("phase", Scale.CATEGORIES, categories=("forward", "backward", "wait"))


def draw(figure: Figure, **changes: Any) -> Any:
    """The only axes of a sheet with this figure."""
    [(_, picture)] = draw_sheets([Sheet("name", "Title", (figure,), **changes)])
    [axes] = picture.axes
    return axes


def curve(*lines: Line, kind: Kind = Kind.LINES, x: Axis | None = None, y: Axis | None = None) -> Figure:
    return Figure("key", "Title", x or Axis("workers"), y or Axis("seconds"), lines, kind=kind)


def rows(*lines: Line, kind: Kind) -> Figure:
    return Figure("key", "Title", ROWS, Axis("time", unit="s"), lines, kind=kind)


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("scale", "name"),
    [(Scale.LINEAR, "linear"), (Scale.LOG2, "log"), (Scale.LOG10, "log")],
    ids=lambda value: str(value),
)
def test_axes_have_their_scale_and_reach_over_all_values(scale: Scale, name: str) -> None:
    line = Line("a", (1.0, 2.0, 8.0), (3.0, 20.0, 700.0))
    axes = draw(curve(line, x=Axis("workers", scale), y=Axis("seconds", scale)))
    assert (axes.get_xscale(), axes.get_yscale()) == (name, name)
    for (low, high), values in ((axes.get_xlim(), line.xs), (axes.get_ylim(), (3.0, 700.0))):
        assert low <= min(values) < max(values) <= high
        assert high <= 10 * max(values)  # no more room than a decade
        assert low > (0 if scale.is_log else -0.1 * max(values))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("workers", "seconds")


def test_numbers_of_workers_are_the_ticks_and_at_most_eight_of_them() -> None:
    counts = tuple(float(count) for count in range(1, 18))
    axes = draw(curve(Line("a", counts, counts), x=Axis("workers", ticks=counts)))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "7", "10", "13", "16"]
    few = draw(curve(Line("a", (1.0, 2.0), (1.0, 2.0)), x=Axis("workers", ticks=(1.0, 2.0))))
    assert [tick.get_text() for tick in few.get_xticklabels()] == ["1", "2"]


def test_a_line_is_drawn_through_its_values_and_a_goal_is_dashed() -> None:
    axes = draw(
        curve(Line("a", (1.0, 2.0, 3.0), (5.0, None, 7.0)), Line("goal", (1.0, 3.0), (6.0, 6.0), reference=True))
    )
    own, goal = axes.get_lines()
    assert list(own.get_xdata()) == [1.0, 2.0, 3.0]
    assert [value if value == value else None for value in own.get_ydata()] == [5.0, None, 7.0]
    assert (own.get_linestyle(), goal.get_linestyle()) == ("-", "--")
    assert own.get_linewidth() > goal.get_linewidth()
    assert to_hex(goal.get_color()) == to_hex(read_colors()["edge"])
    assert (own.get_marker() != "None", goal.get_marker()) == (True, "None")


def test_lines_of_many_values_and_steps_have_no_marks() -> None:
    many = tuple(float(at) for at in range(MAX_MARKS + 1))
    [line] = draw(curve(Line("a", many, many))).get_lines()
    assert line.get_marker() == "None"
    [line] = draw(curve(Line("a", many[:-1], many[:-1]))).get_lines()
    assert line.get_marker() != "None"
    [line] = draw(curve(Line("a", many[:3], many[:3]), kind=Kind.STEPS)).get_lines()
    assert line.get_marker() == "None"


def test_points_that_are_not_joined_have_no_line() -> None:
    [line] = draw(curve(Line("a", (1.0, 2.0), (5.0, 6.0), is_joined=False))).get_lines()
    assert line.get_linestyle() == "None"


def test_an_interval_is_a_bar_from_its_low_to_its_high_end() -> None:
    axes = draw(curve(Line("a", (1.0, 2.0), (5.0, 6.0), (4.0, None), (8.0, None), notes=("contended", ""))))
    [bar] = axes.containers
    [[(_, low), (_, high)]] = bar[2][0].get_segments()
    assert (low, high) == (4.0, 8.0)
    assert "contended" in texts(axes)


def test_a_range_of_two_runs_is_pale_without_caps_and_its_mark_is_hollow() -> None:
    axes = draw(curve(Line("a", (1.0,), (5.0,), (4.0,), (8.0,), few=(True,))))
    [bar] = axes.containers
    assert (bar[1], bar[2][0].get_alpha()) == ((), 0.35)
    assert "white" in [line.get_markerfacecolor() for line in axes.get_lines()]


def test_a_band_is_the_area_between_its_ends() -> None:
    band = Line("b", (1.0, 2.0, 3.0), (5.0, 6.0, 7.0), (4.0, None, 6.0), (8.0, None, 9.0), spread=Spread.BAND)
    axes = draw(curve(Line("a", (1.0, 3.0), (5.0, 7.0)), band))
    [area] = axes.collections
    corners = {tuple(point) for point in area.get_paths()[0].vertices}
    assert corners == {(1.0, 4.0), (1.0, 8.0), (3.0, 6.0), (3.0, 9.0)}


def test_parts_of_a_bar_are_stacked_and_their_sum_is_written() -> None:
    parts = Line("first", (0.0, 1.0), (1.0, 4.0)), Line("second", (0.0, 1.0), (2.0, -3.0))
    axes = draw(rows(*parts, kind=Kind.BARS))
    found = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert found == [(0.0, 0.0, 1.0), (1.0, 0.0, 4.0), (0.0, 1.0, 2.0), (1.0, 4.0, 0.0)]
    assert texts(axes) == ["3.00\u00a0s", "4.00\u00a0s", "–"]  # less than nothing is drawn as nothing
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["forward", "backward", "wait"]
    assert axes.get_ylim() == (2.6, -0.6)  # the first row is on top
    assert axes.get_xlim() == (0.0, pytest.approx(1.2 * 4.0))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first", "second"]


def test_the_interval_of_a_bar_ends_no_lower_than_zero() -> None:
    axes = draw(rows(Line("all", (0.0, 1.0), (2.0, 5.0), (-1.0, 4.0), (6.0, 5.5)), kind=Kind.BARS))
    bars = [container[2][0].get_segments()[0] for container in axes.containers if hasattr(container, "has_xerr")]
    assert [(begin[0], end[0]) for begin, end in bars] == [(0.0, 6.0), (4.0, 5.5)]
    positions = [text.xy[0] for text in axes.texts]
    assert positions == [6.0, 5.5, 0.0]  # texts stand behind the intervals


def test_spans_reach_from_low_to_high_and_say_how_long_or_why() -> None:
    spans = Line("a", (0.0, 1.0, 2.0), (0.0, 0.0, 0.0), (0.0, 1.0, 3.0), (1.0, 3.5, 4.0), notes=("", "", "killed"))
    axes = draw(rows(spans, kind=Kind.SPANS))
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0.0, 1.0), (1.0, 2.5), (3.0, 1.0)]
    assert texts(axes) == ["1.00\u00a0s", "2.50\u00a0s", "killed"]


def test_lines_of_ranges_have_lanes_with_a_mark_at_the_value() -> None:
    one = Line("a", (0.0,), (2.0,), (1.0,), (3.0,), notes=("3 runs",))
    two = Line("b", (0.0,), (4.0,), (3.0,), (6.0,))
    axes = draw(rows(one, two, kind=Kind.RANGES))
    lanes = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert lanes == [pytest.approx(-0.175), pytest.approx(0.175)]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines()] == [
        (2.0, pytest.approx(-0.175)), (4.0, pytest.approx(0.175))
    ]  # fmt: skip
    assert texts(axes)[0] == "3 runs"
    assert axes.texts[0].xy[0] == 6.0


def test_a_sheet_has_its_texts_and_without_figures_a_message() -> None:
    [(_, picture)] = draw_sheets(
        [
            Sheet(
                "n",
                "Title",
                (),
                subtitle="Under it",
                footnote="Below",
                marks=("SYNTHETIC DATA",),
                message="Nothing\nyet",
            )
        ]
    )
    words = [text.get_text().strip() for text in picture.texts]
    assert words == ["Title", "SYNTHETIC DATA", "Under it", "Nothing\nyet", "Below"]
    assert picture.axes == []


def test_three_figures_stand_in_a_row_and_a_fourth_in_the_next() -> None:
    figures = tuple(Figure(str(n), f"Figure {n}", Axis("x"), Axis("y"), (Line("a", (1.0,), (1.0,)),)) for n in range(5))
    [(_, picture)] = draw_sheets([Sheet("n", "Title", figures)])
    assert [axes.get_title(loc="left") for axes in picture.axes] == [*(f"Figure {n}" for n in range(5)), ""]
    tops = [round(axes.get_position().y1, 2) for axes in picture.axes[:5]]
    assert tops[0] == tops[1] == tops[2] > tops[3] == tops[4]
    assert picture.axes[5].axison is False


# --- the sheet ------------------------------------------------------------------------------------------------------


def sheet(*figures: Figure, **texts_of_it: Any) -> Any:
    [(_, picture)] = draw_sheets([Sheet("name", "Title", figures, **texts_of_it)])
    return picture


def plots(count: int) -> list[Figure]:
    return [curve(Line("a", (1.0, 2.0), (1.0, 2.0))) for _ in range(count)]


@pytest.mark.parametrize(("count", "width", "rows_of_plots"), [(1, 7.5, 1), (2, 10.5, 1), (3, 13.5, 1), (4, 10.5, 2)])
def test_a_sheet_grows_with_its_figures(count: int, width: float, rows_of_plots: int) -> None:
    """A plot is 2.7 inches high with 0.95 around it; the title needs 0.46, and the lower edge 0.1."""
    found = sheet(*plots(count)).get_size_inches()
    assert list(found) == pytest.approx([width, 0.56 + rows_of_plots * 3.65])


@pytest.mark.parametrize(
    ("changes", "height"),
    [
        ({"subtitle": "words " * 20, "message": "not shown beside figures"}, 0.36),  # 101 letters in a line
        ({"footnote": "words " * 25}, 0.30),  # 120 letters in a line
    ],
)
def test_texts_above_and_below_have_their_room(changes: dict[str, Any], height: float) -> None:
    assert sheet(*plots(1), **changes).get_size_inches()[1] == pytest.approx(0.56 + 3.65 + height)


def test_a_message_is_cut_at_forty_lines() -> None:
    picture = sheet(message="\n".join(f"{number} {'x' * 99}" for number in range(50)))
    [shown] = [text.get_text() for text in picture.texts if "x" in text.get_text()]
    lines = shown.strip("\n").splitlines()
    assert len(lines) == 40
    assert {len(line) for line in lines} == {90}
    assert picture.get_size_inches()[1] == pytest.approx(0.56 + 41 * 0.18)


@pytest.mark.parametrize(
    ("kind", "count", "names", "height"),
    [
        (Kind.BARS, 1, 3, 3 * 0.3),
        (Kind.BARS, 1, 1, 2 * 0.3),  # a single bar has the room of two
        (Kind.RANGES, 5, 3, 3 * 0.4 * 5 * 0.3),
        (Kind.BARS, 5, 3, 3 * 0.3),
    ],
)
def test_rows_need_less_room_than_plots(kind: Kind, count: int, names: int, height: float) -> None:
    """And each line of a legend 0.17 inches."""
    axis = Axis("phase", Scale.CATEGORIES, categories=ROWS.categories[:names])
    lines = tuple(Line(f"l{n}", (0.0,), (1.0,), (0.5,), (2.0,)) for n in range(count))
    figure = Figure("key", "Title", axis, Axis("time", unit="s"), lines, kind=kind)
    legend = 0.17 * count if count > 1 else 0.0
    assert sheet(figure).get_size_inches()[1] == pytest.approx(0.56 + 0.95 + height + legend)


def test_a_long_name_in_a_legend_is_wrapped_and_cut() -> None:
    long, short = Line("word " * 50, (1.0, 2.0), (1.0, 2.0)), Line("b", (1.0, 2.0), (2.0, 3.0))
    axes = draw(curve(long, short))
    first, second = (text.get_text() for text in axes.get_legend().get_texts())
    assert second == "b"
    assert max(map(len, first.splitlines())) <= 71  # letters on 7.5 inches
    assert first.endswith("…")
    assert len(first.replace("\n", " ")) <= 150


def test_a_figure_alone_has_the_sheets_title_and_several_have_their_own() -> None:
    [axes] = sheet(*plots(1)).axes
    assert axes.get_title(loc="left") == ""
    assert [each.get_title(loc="left") for each in sheet(*plots(2)).axes] == ["Title", "Title"]


def test_warnings_stand_behind_the_title_in_another_color() -> None:
    picture = sheet(*plots(1), marks=("SYNTHETIC DATA", "FUNCTIONAL"))
    title, *marks = [text for text in picture.texts if text.get_text().strip()]
    assert [mark.get_text() for mark in marks] == ["   SYNTHETIC DATA", "   FUNCTIONAL"]
    assert {to_hex(mark.get_color()) for mark in marks} == {to_hex(read_colors()["overlap"])}
    places = [text.get_position()[0] for text in (title, *marks)]
    assert places == sorted(places)
    assert places[0] == pytest.approx(0.12 / 7.5)
    assert len({text.get_position()[1] for text in (title, *marks)}) == 1


def test_notes_that_would_overlap_are_left_out() -> None:
    far = draw(curve(Line("a", (1.0, 9.0), (1.0, 9.0), notes=("first", "last"))))
    assert texts(far) == ["first", "last"]
    near = draw(curve(Line("a", (1.0, 1.001, 9.0), (1.0, 1.001, 9.0), notes=("first", "second", ""))))
    assert texts(near) == ["first"]


def test_points_of_two_runs_are_hollow_only_where_there_are_marks() -> None:
    line = Line("a", (1.0, 2.0), (1.0, 2.0), few=(True, True))
    assert len(draw(curve(line)).get_lines()) == 3
    assert len(draw(curve(line, kind=Kind.STEPS)).get_lines()) == 1


def test_sheets_and_tables_are_written_side_by_side(tmp_path: Path) -> None:
    written = write_sheets(
        [Sheet("one", "Title", (), message="Nothing")], tmp_path / "new", {"one.csv": "a,b\n", "two.md": "# x\n"}
    )
    assert [path.name for path in written] == ["one.png", "one.svg", "one.csv", "two.md"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in written)
    assert written[0].read_bytes()[:4] == b"\x89PNG"
    assert written[1].read_bytes().startswith(b"<?xml")
    assert b"Matplotlib" not in written[0].read_bytes() + written[1].read_bytes()
    assert written[2].read_bytes() == b"a,b\n"


def test_without_matplotlib_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MlbenchError, match="Charts need matplotlib, which is not installed") as caught:
        next(draw_sheets([]), None)
    assert "[plots]" in str(caught.value.hint)
