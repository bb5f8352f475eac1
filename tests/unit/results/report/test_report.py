"""Reports of archives with hand-written logs: what they say, and that nothing foreign becomes markup."""

import csv
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model import JsonObject
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.report.collect import collect
from mlbench_cli.results.report.environment import VENDORED
from mlbench_cli.results.report.html import render_html
from mlbench_cli.results.report.markdown import render_markdown
from mlbench_cli.results.report.model import Axis, Figure, Kind, Line, Report, ReportTable, Scale, Section, thin
from mlbench_cli.results.report.published import published_lines, read_published
from mlbench_cli.results.report.svg import render_svg
from mlbench_cli.results.report.write import check_target, figure_csv, write_report
from tests.unit.results.runs import sealed_run

HOSTILE = "</script><img src=x onerror=alert(1)>"
SAMPLES = [
    {"time": 1_760_000_000.0 + second, "rank": rank, "cpu_seconds": second * 0.9, "rss_bytes": 1e9 + second}
    for second in range(4)
    for rank in (0, 1)
]


@pytest.fixture
def archives(tmp_path: Path) -> Callable[..., list[Archive]]:
    """Runs with 1, 2 and 4 workers that get faster; `changes` are fields of all of them."""

    def make(**changes: Any) -> list[Archive]:
        found = []
        for workers, seconds in ((1, 100.0), (2, 60.0), (4, 40.0)):
            folder = tmp_path / f"run-{workers}-{len(list(tmp_path.iterdir()))}"
            fields: JsonObject = {"workers": workers, "seconds": seconds, "samples": SAMPLES, **changes}
            found.append(Archive.open(sealed_run(folder, **fields)))
        return found

    return make


def figures_of(report: Report) -> dict[str, Figure]:
    return {figure.key: figure for figure in report.figures}


def test_a_report_has_every_figure_that_its_runs_allow(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives())
    assert set(figures_of(report)) == {
        *("job1-time", "job1-speedup", "job1-efficiency", "job1-compute-speedup", "job1-phases-0"),
        *("job1-communication", "job1-price-index", "job1-throughput", "job1-loss", "job1-goal-metric"),
        *("job1-ranks", "timeline", "machine-cpu", "machine-memory"),
    }
    assert [section.heading for section in report.sections][:2] == ["Result", "What was run, and on what"]


def test_its_numbers_are_those_of_the_runs(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives())
    found = figures_of(report)
    assert found["job1-time"].lines[0].ys == (100.0, 60.0, 40.0)
    assert found["job1-speedup"].lines[0].ys == pytest.approx((1.0, 100 / 60, 2.5))
    assert found["job1-efficiency"].lines[0].ys == pytest.approx((1.0, 100 / 120, 0.625))
    assert found["job1-price-index"].lines[0].ys == pytest.approx((1.0, 2 / (100 / 60) ** 2, 4 / 2.5**2))
    assert found["job1-communication"].lines[0].ys == pytest.approx((0.24, 0.24, 0.24))
    stacked = found["job1-phases-0"]
    assert [sum(line.ys[place] or 0 for line in stacked.lines) for place in range(3)] == pytest.approx([100, 60, 40])
    assert report.headline[0].startswith("unknown-task: 40 s with 4 workers")
    assert "2.5 times as fast as with 1 worker" in report.headline[0]


def test_the_goal_is_a_line_of_its_own(archives: Callable[..., list[Archive]]) -> None:
    *_, goal = figures_of(collect(archives()))["job1-goal-metric"].lines
    assert (goal.label, goal.ys, goal.reference) == ("goal >= 80", (80.0, 80.0), True)


def test_repeats_have_intervals(archives: Callable[..., list[Archive]]) -> None:
    line = figures_of(collect([*archives(), *archives(seed=43, data="digits")]))["job1-time"].lines[0]
    assert len(line.low) == 3
    assert line.ys == (100.0, 60.0, 40.0)


@pytest.mark.parametrize("change", [{"data": "other"}, {"synthetic": True}, {"task": "other-task"}])
def test_runs_that_did_something_else_are_in_no_common_figure(
    archives: Callable[..., list[Archive]], change: dict[str, object]
) -> None:
    found = figures_of(collect([*archives(), *archives(**change)]))
    assert len(found["job1-time"].lines) == len(found["job2-time"].lines) == 1


def test_backends_share_a_figure_and_are_named(archives: Callable[..., list[Archive]]) -> None:
    found = figures_of(collect([*archives(), *archives(backend="mpi")]))
    assert [line.label for line in found["job1-time"].lines] == ["gloo", "mpi"]
    assert "job2-time" not in found


def test_what_the_figures_must_not_be_taken_for_comes_first(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives(synthetic=True, functional_only="one node"))
    assert any("synthetic data" in text for text in report.warnings)
    assert any("not a performance measurement: one node" in text for text in report.warnings)


def test_a_run_that_failed_is_named_and_its_time_does_not_count(tmp_path: Path) -> None:
    report = collect([Archive.open(sealed_run(tmp_path / "bad", "failed"))])
    assert any("ended as failed" in text for text in report.warnings)
    assert "job1-time" not in figures_of(report)


class Page(HTMLParser):
    """Elements with their attributes, and the texts of script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts.append(data)
            self._within = ""


def hostile_report() -> Report:
    figure = Figure("x", HOSTILE, Axis(HOSTILE), Axis(HOSTILE), (Line(HOSTILE, (1.0, 2.0), (1.0, None)),), HOSTILE)
    table = ReportTable(HOSTILE, (HOSTILE, "b"), ((HOSTILE, "`|x|`"),))
    return Report(HOSTILE, (HOSTILE,), (HOSTILE,), (Section(HOSTILE, (HOSTILE,), (table,), (figure,)),))


def test_foreign_text_is_never_markup() -> None:
    page = Page(render_html(hostile_report()))
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    (data,) = [json.loads(text) for text in page.scripts if text.startswith("{")]
    assert data["title"] == HOSTILE


def test_foreign_text_is_never_markdown() -> None:
    text = render_markdown(hostile_report())
    assert "<img" not in text
    assert "</script" not in text
    assert "&lt;img" in text
    assert r"\`\|x\|\`" in text


def test_the_page_allows_only_its_own_scripts_and_no_network() -> None:
    text = render_html(hostile_report())
    page = Page(text)
    policy = next(item["content"] or "" for tag, item in page.elements if tag == "meta" and "http-equiv" in item)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    sources = [value for _, item in page.elements for name, value in item.items() if name in ("src", "href", "data")]
    assert all((value or "").startswith(("#", "data:,")) for value in sources)
    assert not [item for _, item in page.elements if "style" in item]


def test_the_same_archives_give_the_same_bytes(archives: Callable[..., list[Archive]]) -> None:
    opened = archives()
    assert render_html(collect(opened)) == render_html(collect(opened))


def test_the_library_is_unchanged() -> None:
    for line in (VENDORED / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("scale", [Scale.LINEAR, Scale.LOG2, Scale.LOG10])
def test_a_static_picture_is_well_formed_and_has_two_ticks(kind: Kind, scale: Scale) -> None:
    names = ("a & b", "<c>")
    x = Axis("x", Scale.CATEGORIES, categories=names) if kind is Kind.STACK else Axis("x", scale)
    values = (0.0, 5.0) if scale is Scale.LINEAR else (1.0, 5.0)
    lines = tuple(Line(f"l{n}", values if kind is not Kind.STACK else (0.0, 1.0), (3.0, 4.0)) for n in range(9))
    y = Axis("y", Scale.LINEAR if kind is Kind.STACK else scale)
    root = ElementTree.fromstring(render_svg(Figure("k", "t <b>", x, y, lines, kind=kind)))
    texts = [item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(1 for text in texts if re.fullmatch(r"[\d.,]+", text)) >= 2


def test_a_value_that_an_axis_cannot_hold_is_left_out() -> None:
    y = Axis("y", Scale.LOG10)
    figure = Figure("k", "t", Axis("x"), y, (Line("a", (1.0, 2.0, 3.0), (0.0, None, 2.0), (-1.0,) * 3, (5.0,) * 3),))
    assert "nan" not in render_svg(figure)


def test_data_of_a_figure_are_beside_the_page(tmp_path: Path, archives: Callable[..., list[Archive]]) -> None:
    written = write_report(collect(archives()), tmp_path / "out.html")
    assert written[0] == tmp_path / "out.html"
    with open(tmp_path / "out-data" / "job1-time.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["line", "workers", "seconds to the goal", "low", "high"]
    assert rows[1] == ["gloo", "1", "100.0", "", ""]


def test_a_cell_is_never_a_formula() -> None:
    figure = Figure("k", "t", Axis("x"), Axis("y"), (Line("=HYPERLINK()", (1.0,), (1.0,)),))
    assert "'=HYPERLINK" in figure_csv(figure)


@pytest.mark.parametrize("name", ["report.pdf", "report"])
def test_a_name_that_is_no_page_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="ends in none of"):
        check_target(Path(name))


def test_a_comment_is_cut_between_sections(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives())
    text = render_markdown(report, limit=1500)
    assert len(text.encode()) <= 1500
    assert text.endswith("*The rest is in the HTML report.*\n")
    assert len(render_markdown(report)) > len(text)


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    ys: list[float | None] = [float(index % 7) for index in range(10_000)]
    ys[5003] = 99.0
    xs, kept = thin([float(index) for index in range(10_000)], ys)
    assert len(xs) <= 700
    assert (xs[0], xs[-1], max(y or 0 for y in kept)) == (0.0, 9999.0, 99.0)


def test_published_speedups_follow_from_published_seconds() -> None:
    values = {(item.task, item.variant, item.metric, item.workers): item.value for item in read_published()}
    checked = 0
    for (task, variant, metric, workers), seconds in values.items():
        if metric == "seconds" and (task, variant, "seconds", 1) in values:
            speedup = values[task, variant, "speedup", workers]
            assert values[task, variant, "seconds", 1] / seconds == pytest.approx(speedup, rel=0.03)
            checked += 1
    assert checked > 30


def test_published_price_indices_follow_from_speedups() -> None:
    values = {(item.task, item.variant, item.metric, item.workers): item.value for item in read_published()}
    for (task, variant, metric, workers), index in values.items():
        if metric == "price_index":
            speedup = values[task, variant, "speedup", workers]
            assert workers / speedup**2 == pytest.approx(index, rel=0.02, abs=0.011)


def test_a_variant_of_a_task_has_its_published_lines() -> None:
    lines = list(published_lines("cifar10_resnet20_ddp", "seconds"))
    assert all(line.reference for line in lines)
    assert any(line.label.startswith("published: K80, 2019") for line in lines)


def test_turned_names_have_room_above_the_title_of_the_axis() -> None:
    names = tuple(f"a long name {index}" for index in range(8))
    xs = tuple(map(float, range(8)))
    axis, seconds = Axis("phase", Scale.CATEGORIES, categories=names), Axis("seconds")
    picture = render_svg(Figure("x", "X", axis, seconds, (Line("one", xs, xs),)))
    lowest = max(float(y) + 20 * 6.4 * 0.4 for y in re.findall(r'y="([0-9.]+)" transform="rotate\(-24', picture))
    title = float(re.findall(r'y="([0-9.]+)" class="middle">phase', picture)[0])
    assert title > lowest - 15
    assert re.findall(r'viewBox="0 0 640 (\d+)"', picture)[0] == "361"
