"""Reports of archives with hand-written logs: what they say, and that nothing foreign becomes markup."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Finding, JsonObject
from mlbench_cli.results.analysis.published import published_values, read_published
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.chart import COLORS, PHASES, Axis, Chart, Kind, guide, thin
from mlbench_cli.results.figures.files import STYLE
from mlbench_cli.results.figures.svg import render_svg
from mlbench_cli.results.report.facts import Facts, collect
from mlbench_cli.results.report.render import check_target, render_html, render_markdown
from tests.unit.results.runs import sealed_run

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


def title_of(report: Facts) -> str:
    return render_markdown(report).partition("\n")[0].removeprefix("# ")


def answer(report: Facts, number: int = 0) -> list[dict[str, Any]]:
    """The rows of a job's table."""
    rows: list[dict[str, Any]] = report["jobs"][number]["rows"]
    return rows


def test_a_report_has_one_table_few_figures_and_details(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives())
    assert list(report["charts"]) == ["job1-way"]
    page = render_html(report)
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert headings[:3] == ["Time to the goal, by what it was spent on", "Findings", "Metrics"]
    assert page.index('<h2 id="findings">') < page.index('<details class="fold">')  # of the settings
    assert page.count('href="#details"') == 1


def test_its_rows_are_the_figure(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives())
    rows = answer(report)
    assert [row["name"] for row in rows] == ["1 worker", "2 workers", "4 workers"]
    assert [row["seconds"].mean for row in rows] == pytest.approx([100.0, 60.0, 40.0])
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 5 / 6, 0.625])
    assert [row["change"] for row in rows] == ["", "1.67× faster, too few runs", "2.50× faster, too few runs"]
    plots = [row["plot"] for row in rows]
    ends = [plot["spent"][-1]["begin"] + plot["spent"][-1]["share"] for plot in plots]
    assert [end / ends[0] for end in ends] == pytest.approx([1.0, 0.6, 0.4])
    assert [plot["ideal"] and plot["ideal"] / ends[0] for plot in plots] == [
        *(None, pytest.approx(0.5), pytest.approx(0.25)),
    ]
    assert title_of(report) == "1 worker and 4 workers, one run each: too few to compare"
    assert [row["efficiency"] for row in answer(collect(archives()[1:]))] == pytest.approx([1.0, 0.75])
    lead = re.findall(r'class="lead">(.*?)</p>', render_html(report))
    assert "2.50" not in " ".join(lead)  # single runs are no finding


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        (60.2, "No difference in time seen between bsp and topk on 2 workers"),
        (91.5, "topk is 1.52× slower than bsp on 2 workers"),
        (30.5, "topk is 1.94× faster than bsp on 2 workers"),
    ],
)
def test_the_title_names_the_size_that_was_compared(tmp_path: Path, seconds: float, title: str) -> None:
    """Not that of the fastest runs."""
    places = [(1, 20.0, "bsp"), (1, 25.0, "topk"), (2, 60.0, "bsp"), (2, seconds, "topk")]
    found = []
    for workers, own, method in places:
        for repeat in range(3):
            name = f"{method}-{workers}-r{repeat}"
            fields: JsonObject = {"workers": workers, "seconds": own + repeat, "method": {"name": method}}
            found.append(Archive.open(sealed_run(tmp_path / name, name=name, **fields)))
    assert title_of(collect(found)) == title


def test_the_goal_is_a_line_of_its_own(archives: Callable[..., list[Archive]]) -> None:
    *_, goal = collect(archives())["charts"]["job1-way"].lines
    assert [(row["series"], row["y"], row["style"]) for row in goal] == [("goal: 80", 80.0, "guide")] * 2


def test_the_table_leaves_out_what_is_the_same_for_all(archives: Callable[..., list[Archive]]) -> None:
    assert not {"conditions", "runs"} & {*collect(archives())["jobs"][0]["columns"]}
    [job] = collect([*archives(), *archives(backend="mpi")])["jobs"]
    assert [row["name"] for row in job["rows"][:2]] == ["1 worker (gloo)", "1 worker (mpi)"]
    assert job["against"] == "gloo"
    assert all("too few runs" in row["change"] for row in job["rows"] if "mpi" in row["name"])


def test_several_jobs_have_a_section_each_and_are_not_compared(archives: Callable[..., list[Archive]]) -> None:
    report = collect([*archives(), *archives(data="other", task="other-task")])
    assert title_of(report) == "2 jobs, 6 runs"
    page = render_html(report)
    assert re.findall(r"<h2[^>]*>(.*?)</h2><p>(Too few runs)", page) == [
        ("other-task", "Too few runs"),
        ("unknown-task", "Too few runs"),
    ]


def test_repeats_have_intervals_in_their_rows_and_bars(archives: Callable[..., list[Archive]]) -> None:
    report = collect([run for seed in (42, 43, 44) for run in archives(seed=seed, data="digits")])
    assert answer(report)[0]["seconds"].count == 3
    assert answer(report)[0]["plot"]["low"] is not None


def test_what_the_figures_must_not_be_taken_for_comes_first(archives: Callable[..., list[Archive]]) -> None:
    page = render_html(collect(archives(synthetic=True, functional_only="one node")))
    top = page[: page.index("<h2")]
    assert "3 runs were on synthetic data" in top
    assert "3 runs were functional only, not a performance measurement: one node" in top


def test_a_run_that_failed_is_named_and_its_time_does_not_count(tmp_path: Path) -> None:
    report = collect([Archive.open(sealed_run(tmp_path / "bad", "failed"))])
    assert "1 run was left out of all times (failed)" in render_html(report)
    assert answer(report)[0]["seconds"] is None


def test_what_failed_is_explained_before_what_only_limits_a_result(tmp_path: Path) -> None:
    memory = {"machine": {"cpu": "a CPU", "cores": 4, "memory_bytes": 16 * 2**30}}
    good = Archive.open(sealed_run(tmp_path / "good", seconds=60.0, lines=["odd"], provenance=memory))
    bad = Archive.open(sealed_run(tmp_path / "bad", "failed", name="bad-2", seed=3, seconds=86400.0))
    good.findings = [Finding("log_gap", "Lines are missing.").to_dict()]
    bad.findings = [Finding("rank_crashed", "Rank 0 crashed.").to_dict()]
    report = collect([good, bad])
    assert [each["code"] for each in report["findings"]] == ["rank_crashed", "log_gap"]
    assert report["machines"]["memory"] == ["16.0 GiB"]
    assert report["date"] == "2025-10-10"  # when the last of them ended


def test_a_page_without_a_successful_run_has_no_empty_lead(tmp_path: Path) -> None:
    report = collect([Archive.open(sealed_run(tmp_path / name, "failed", name=name)) for name in ("a", "b")])
    assert "****" not in render_markdown(report)
    assert '<p class="lead"></p>' not in render_html(report)


def test_the_page_allows_its_own_style_no_script_and_no_network(archives: Callable[..., list[Archive]]) -> None:
    page = render_html(collect(archives()))
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert unescape(policy).startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script-src" not in policy
    sources = re.findall(r'<[^>]*\s(?:src|href|data)="([^"]*)"', page)
    assert all(source.startswith(("#", "data:,")) for source in sources)
    assert not re.search(r'<[^>]*\sstyle="', page)


def test_the_same_archives_give_the_same_bytes(archives: Callable[..., list[Archive]]) -> None:
    opened = archives()
    assert render_html(collect(opened)) == render_html(collect(opened))


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("values", [(3.0, 4.0), (0.0, 0.0), (-1.0, 1e300), (1e-320, 5e-324), (7.0, None)])
def test_a_picture_is_well_formed_and_has_a_name(
    kind: Kind, is_log: bool, values: tuple[float | None, float | None]
) -> None:
    """Whatever a program reported: an axis has two ticks, and what has no place is left out."""
    is_plot = kind not in (Kind.BARS, Kind.SPANS)
    rows = [
        {"series": f"l{n}", "x": place if is_plot else f"<{place}>", "y": y, "low": 1.0, "high": 5.0, "few": n == 0}
        for n in range(9)
        for place, y in enumerate(values, 1)
    ]
    rows += guide("goal 80", [(1.0, 4.0), (2.0, 4.0)]) if is_plot else []
    chart = Chart("k", "t <b>", Axis("x"), Axis("y", is_log=is_log), tuple(rows), kind)
    root = ElementTree.fromstring(f"<p>{render_svg(chart)}</p>")
    (picture,) = [item for item in root.iter() if item.get("role") == "img"]
    assert (picture.get("aria-label") or "").startswith("t <b>: y over x, for l0, l1")
    texts = [item.text or "" for item in root.iter()]
    ticks = [
        item for item in root.iter("text") if (item.get("class") or "") in ("end", "middle") and item.get("dx") != "-44"
    ]
    assert len(ticks) >= 5 if is_plot else {"<1>", "<2>"} <= set(texts)  # two on each axis, and the name of x
    assert {*(f"l{n}" for n in range(7)), "2 more"} <= set(texts)  # the key
    assert not re.search(r"\bnan\b|\binf\b", ElementTree.tostring(root).decode())


def test_the_pages_and_the_files_have_the_same_colors() -> None:
    """A class for each color that a series can have, with values for light and dark pages."""
    style = STYLE.read_text("utf-8")
    light, dark = style.split("@media", 2)[:2]
    used = {*COLORS, *(color for _, color, _ in PHASES)}
    values = {name: re.findall(rf"--{name}: (#[0-9a-f]{{6}});", part) for name in used for part in (light, dark)}
    assert all(values.values())
    assert all(f".c-{name} {{ --c: var(--{name}); }}" in style for name in used)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["report.pdf", "demo"], "mlbench report report.pdf.html demo"),
        (["demo"], "mlbench report demo.html demo"),
        (["there", "demo-1", "demo-2"], "mlbench report there/report.html demo-1 demo-2"),
    ],
)
def test_a_name_that_is_no_page_is_refused_with_the_command_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    with pytest.raises(UsageError, match="must end in") as caught:
        check_target(Path(words[0]), words[1:])
    assert caught.value.hint == hint


def test_a_comment_is_cut_between_sections(archives: Callable[..., list[Archive]]) -> None:
    report = collect(archives())
    text = render_markdown(report, limit=1500)
    assert len(text.encode()) <= 1500
    assert text.endswith("*The rest is in the HTML report.*\n")
    assert len(render_markdown(report)) > len(text)


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    points: list[tuple[float, float | None]] = [(index, float(index % 7)) for index in range(10_000)]
    points[5003] = 5003.0, 99.0
    kept = thin(points)
    assert len(kept) <= 700
    assert (kept[0][0], kept[-1][0], max(y or 0 for _, y in kept)) == (0.0, 9999.0, 99.0)


def test_published_price_indices_follow_from_speedups() -> None:
    """And speedups from times."""
    values = {(item.task, item.variant, item.metric, item.workers): item.value for item in read_published()}
    checked = 0
    for (task, variant, metric, workers), value in values.items():
        speedup = values.get((task, variant, "speedup", workers))
        if metric == "price_index" and speedup:
            assert workers / speedup**2 == pytest.approx(value, rel=0.02, abs=0.011)
        elif metric == "seconds" and (task, variant, "seconds", 1) in values:
            assert values[task, variant, "seconds", 1] / value == pytest.approx(speedup, rel=0.03)
            checked += 1
    assert checked > 30


def test_a_variant_of_a_task_has_its_published_values() -> None:
    assert any(value.name.startswith("published: K80, 2019") for value in published_values("cifar10_resnet20_ddp"))
