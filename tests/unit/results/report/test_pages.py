"""A report as Markdown, as a page, in a notebook and as files: where each part of it stands, and what is cut."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale
from mlbench_cli.results.report.display import make_displayable
from mlbench_cli.results.report.environment import make_environment, rows_of
from mlbench_cli.results.report.html import render_html
from mlbench_cli.results.report.markdown import escape, render_markdown
from mlbench_cli.results.report.model import Badge, KeyNumber, Note, Report, ReportTable, Section, Tone
from mlbench_cli.results.report.write import check_target, write_report

TIMES = Figure(
    "job1-time",
    "Time",
    Axis("workers", Scale.LOG2),
    Axis("seconds", unit="s"),
    (Line("bsp", (1.0, 2.0), (100.0, 60.0), (90.0, None), (110.0, None)), Line("topk", (2.0, 4.0), (30.0, None))),
    caption="Less is better.",
)
TABLE = ReportTable("Sizes", ("series", "workers"), (("bsp", "1"), ("a|b", "2")), (1,))


def report(*sections: Section, **changes: Any) -> Report:
    fields: dict[str, Any] = {"title": "Title", "headline": ("One.",), "warnings": (), "sections": sections}
    return Report(**{**fields, **changes})


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


# --- parts of a report ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "count", "is_empty"),
    [
        ({}, 0, True),
        ({"paragraphs": ("a",)}, 0, False),
        ({"tables": (TABLE, TABLE)}, 4, False),
        ({"tables": (TABLE,), "figures": (TIMES,)}, 1, False),
        ({"figures": (TIMES,), "notes": (Note("a"), Note("b"))}, 2, False),
        ({"commands": ("mlbench",)}, 0, False),
        ({"summary": "a"}, 0, True),
    ],
)
def test_a_section_counts_its_notes_figures_or_rows(content: dict[str, Any], count: int, is_empty: bool) -> None:
    section = Section("Heading", **content)
    assert (section.count, section.is_empty) == (count, is_empty)


def test_figures_of_a_report_are_those_of_its_sections_in_order() -> None:
    other = Figure("k", "t", Axis("x"), Axis("y"), ())
    assert report(Section("a", figures=(other,)), Section("b"), Section("c", figures=(TIMES,))).figures == (
        other,
        TIMES,
    )


# --- Markdown -------------------------------------------------------------------------------------------------------


def test_a_report_as_markdown() -> None:
    section = Section(
        "All *sizes*",
        ("A word.",),
        (TABLE,),
        (TIMES,),
        notes=(Note("r1: Killed.", "(oom)", "mlbench run"), Note("Two runs")),
        commands=("mlbench run `a`\nx", "mlbench run b"),
    )
    assert plain(render_markdown(report(section, warnings=("W1.", "W2.")))) == (
        "# Title\n\n**One.**\n\n> W1.\n> W2.\n"
        "\n## All \\*sizes\\*\n\nA word.\n"
        "\n- **r1: Killed.** \\(oom\\) Next: mlbench run\n"
        "\n- **Two runs**\n"
        "\n**Sizes**\n\n| series | workers |\n| --- | ---: |\n| bsp | 1 |\n| a\\|b | 2 |\n"
        "\n```\nmlbench run 'a' x\nmlbench run b\n```\n"
        "\n<details><summary>Time (seconds)</summary>\n"
        "\n| workers | bsp | topk |\n| ---: | ---: | ---: |\n"
        "| 1 | 100 s | – |\n| 2 | 60.0 s | 30.0 s |\n| 4 | – | – |\n"
        "\n</details>\n"
    )


@pytest.mark.parametrize(("count", "is_table"), [(12, True), (13, False)])
def test_a_figure_of_few_places_is_a_table_and_others_are_counted(count: int, is_table: bool) -> None:
    places = tuple(map(float, range(count)))
    figure = Figure("k", "Loss", Axis("step"), Axis("loss"), (Line("a", places, places), Line("b", (0.0,), (1.0,))))
    text = render_markdown(report(Section("Figures", figures=(figure,))))
    assert ("<summary>Loss" in text) == is_table
    assert ("*1 figures over time are in the HTML report.*" in text) != is_table


def test_rows_of_categories_are_always_a_table_with_a_limit() -> None:
    names = tuple(f"run {number}" for number in range(25))
    places = tuple(map(float, range(len(names))))
    axis = Axis("run", Scale.CATEGORIES, categories=names)
    figure = Figure("k", "Time", axis, Axis("time", unit="s"), (Line("a", places, places),), kind=Kind.BARS)
    text = plain(render_markdown(report(Section("Figures", figures=(figure,)))))
    assert "| run 23 | 23.0 s |" in text
    assert "run 24 " not in text


def test_markdown_of_exactly_the_limit_is_whole() -> None:
    cut = "\n\n*The rest is in the HTML report.*\n"
    whole = report(Section("A", ("é" * 10,)), Section("B", ("b",)))
    text = render_markdown(whole)
    size = len((text + cut).encode())  # bytes, and not letters
    assert render_markdown(whole, limit=size) == text
    shorter = render_markdown(whole, limit=size - 1)
    assert shorter.endswith(f"{'é' * 10}\n{cut}")
    assert "## B" not in shorter


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb  c", "a b c"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("@me #1 ![x](y)", r"\@me \#1 \!\[x\]\(y\)"),
        (r"\_`{~}", r"\\\_\`\{\~\}"),
    ],
)
def test_text_is_escaped_on_one_line(text: str, shown: str) -> None:
    assert escape(text) == shown


# --- pages ----------------------------------------------------------------------------------------------------------


def test_a_page_has_every_part_of_a_report() -> None:
    looks = (("step", 0), ("sparse", 1))
    table = ReportTable("Sizes", TABLE.head, TABLE.rows, (1,), looks, (1.0, 0.5), 1, (Tone.PLAIN, Tone.BAD))
    section = Section("Results", ("A word.",), (table,), (TIMES,), notes=(Note("Lead", "text", "mlbench x", Tone.BAD),))
    page = render_html(
        report(
            section,
            badges=(Badge("1 archive verified", Tone.GOOD),),
            numbers=(KeyNumber("Time", "30 s", ("n = 3", "2 workers")),),
            context="digits · today",
        ),
        "out-data",
    )
    for text in (
        *("Title", "One.", "1 archive verified", "Time", "30 s", "n = 3", "2 workers", "digits · today"),
        *("A word.", "Lead", "mlbench x", "Less is better.", "out-data/job1-time.csv", "a|b"),
    ):
        assert text in page, text
    assert page.count('class="share"') == 2
    assert page.count('class="chip"') == 2
    assert "c-sparse" in page


@pytest.mark.parametrize(("count", "left"), [(400, 0), (401, 1)])
def test_the_table_of_a_figure_has_a_limit(count: int, left: int) -> None:
    places = tuple(map(float, range(count)))
    found = rows_of(Figure("k", "t", Axis("x"), Axis("y"), (Line("a", places, places),)))
    assert (len(found.shown), found.left, found.has_interval) == (400, left, False)


def test_the_table_of_a_figure_has_intervals_if_one_point_has() -> None:
    assert rows_of(TIMES).has_interval
    assert rows_of(TIMES).shown[1] == ("bsp", "2", 60.0, None, None)


@pytest.mark.parametrize(("tone", "has_icon"), [("good", True), ("warn", True), ("bad", True), ("", False)])
def test_a_tone_has_an_icon_and_not_only_a_color(tone: str, has_icon: bool) -> None:
    drawn = str(make_environment().filters["icon"](Tone(tone)))
    assert drawn.startswith('<svg class="i"') if has_icon else drawn == ""


def test_estimates_and_changes_of_documents_are_shown_as_elsewhere() -> None:
    filters = make_environment().filters
    a, b = Estimate(3, 10.0, 9.0, 11.0), Estimate(3, 5.0, 4.5, 5.5)
    ratio = Estimate(3, 0.5, 0.45, 0.55)
    assert plain(filters["estimate"](a.to_dict(), "s")) == "10.0 s (9.0 to 11.0)"
    assert filters["estimate"](None) == "–"
    row = {"a": a.to_dict(), "b": b.to_dict(), "ratio": ratio.to_dict(), "higher_is_better": False}
    assert filters["change"](row, "s", True) == "2.00× faster (1.82 to 2.22)"
    assert filters["change"](row, "%", True) == "5.00 points lower"
    assert filters["change"]({**row, "b": None, "ratio": None}, "s", True) == "–"


# --- notebooks ------------------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_report_with_its_warnings_tables_and_figures() -> None:
    shown = make_displayable(report(Section("Re<sults", (), (TABLE,), (TIMES,)), warnings=("Mind <this>.",)))
    page = shown._repr_html_()
    order = ["<h3>Title</h3>", "<p>One.</p>", "<p>⚠ Mind &lt;this&gt;.</p>", "<h4>Re&lt;sults</h4>", "<td>a|b</td>"]
    places = [page.index(part) for part in [*order, "<figcaption>Time<br><small>Less is better.</small></figcaption>"]]
    assert places == sorted(places)
    [figure] = shown.figures
    assert figure == make_displayable(shown).figures[0]
    drawn = figure._repr_html_()  # type: ignore[attr-defined]
    assert drawn.startswith("<style>")
    assert '<svg class="plot"' in drawn


def test_a_figure_without_a_caption_has_its_title_alone() -> None:
    figure = Figure("k", "A <b>", Axis("x"), Axis("y"), (Line("a", (1.0,), (1.0,)),))
    [shown] = make_displayable(report(Section("S", figures=(figure,)))).figures
    assert "<figcaption>A &lt;b&gt;</figcaption>" in shown._repr_html_()  # type: ignore[attr-defined]


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_page_is_written_with_the_data_of_its_figures(tmp_path: Path) -> None:
    target = tmp_path / "new" / "my report.HTML"
    written = write_report(report(Section("S", figures=(TIMES,))), target)
    data = tmp_path / "new" / "my report-data" / "job1-time.csv"
    assert written == [target, data]
    assert "my%20report-data/job1-time.csv" in target.read_text()
    assert data.read_text() == (
        "line,workers,seconds,low,high\nbsp,1,100.0,90.0,110.0\nbsp,2,60.0,,\ntopk,2,30.0,,\ntopk,4,,,\n"
    )
    assert write_report(report(Section("S", figures=(TIMES,))), target) == written  # again


@pytest.mark.parametrize("suffix", [".md", ".markdown", ".MD"])
def test_a_name_of_markdown_gives_markdown(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"report{suffix}"
    assert write_report(report(Section("S", ("a",))), target) == [target]
    assert target.read_text() == "# Title\n\n**One.**\n\n## S\n\na\n"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]  # no folder without figures


@pytest.mark.parametrize("suffix", [".html", ".htm"])
def test_a_name_of_a_page_gives_a_page(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"report{suffix}"
    write_report(report(Section("S", ("a",))), target)
    assert target.read_text().lower().startswith("<!doctype html>")


def test_a_folder_or_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.html").mkdir()
    with pytest.raises(UsageError, match="is a folder") as caught:
        check_target(tmp_path / "x.html")
    assert caught.value.hint == f"mlbench report {tmp_path / 'x.html' / 'report.html'}"
    with pytest.raises(UsageError, match=r"must end in [.]html or [.]htm or [.]md or [.]markdown") as caught:
        check_target(tmp_path / "x.txt")
    assert caught.value.hint == "mlbench report OUT.html"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"The folder .*file cannot be created: File exists\."):
        write_report(report(), tmp_path / "file" / "x.html")
