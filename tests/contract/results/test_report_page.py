"""The report page in a real browser, from a file, and the command that writes it."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.report.facts import collect
from mlbench_cli.results.report.render import write_report
from tests.browser import open_browser
from tests.unit.results.runs import sealed_run

ENTER = "\ue007"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three sizes and two backends."""
    folder = tmp_path_factory.mktemp("report")
    archives = [
        Archive.open(
            sealed_run(folder / f"{backend}-{workers}", workers=workers, seconds=90.0 / workers, backend=backend)
        )
        for backend in ("gloo", "mpi")
        for workers in (1, 2, 4)
    ]
    write_report(collect(archives), folder / "report.html")
    return folder / "report.html"


def test_every_figure_is_drawn_without_network_and_without_complaint(page: Path) -> None:
    with open_browser() as browser:
        browser.open(page.as_uri())
        count = browser.run("return document.querySelectorAll('figure').length")
        drawn = (
            "return Array.from(document.querySelectorAll('figure .plot, figure .bars'))"
            ".filter(f => f.getBoundingClientRect().width > 200 && f.querySelector('path, rect, circle')).length"
        )
        browser.run("document.querySelectorAll('details.fold').forEach(fold => { fold.open = true; })")
        assert browser.run(drawn) == count > 0
        assert browser.run("return document.scripts.length") == 0
        assert browser.foreign_requests() == []
        assert browser.console() == []


def test_text_in_charts_has_one_size_at_every_width(page: Path) -> None:
    sizes = (
        "return Array.from(new Set(Array.from(document.querySelectorAll('figure text'))"
        ".filter(t => t.getBoundingClientRect().height > 0).map(t => getComputedStyle(t).fontSize)))"
    )
    texts = "Array.from(document.querySelectorAll('.plot text'))"
    heights = f"return Math.max(...{texts}.map(t => t.getBoundingClientRect().height))"
    with open_browser() as browser:
        browser.open(page.as_uri())
        wide = browser.run(heights)
        assert browser.run(sizes) == ["12px"]
        browser.emulate(400)
        assert browser.run(sizes) == ["12px"]
        assert browser.run(heights) == pytest.approx(wide, abs=1)


def test_the_first_figure_is_a_table_and_every_curve_has_a_name_and_its_numbers(page: Path) -> None:
    with open_browser() as browser:
        browser.open(page.as_uri())
        script = """return Array.from(document.querySelectorAll('figure')).filter(f =>
            !f.querySelector('[role=img][aria-label]') || !f.querySelector('a.csv[download]')).length"""
        assert browser.run(script) == 0
        rows = "return Array.from(document.querySelectorAll('table.answer tbody tr'))"
        times = browser.run(f"{rows}.map(row => row.querySelector('td[data-label=time]').innerText)")
        assert {" ".join(time.split()) for time in times} >= {"90.0 s", "45.0 s", "22.5 s"}
        drawn = browser.run(f"{rows}.filter(row => row.querySelector('td.drawn rect')).length")
        assert drawn == len(times)
        assert browser.run("return document.querySelector('table.answer').getBoundingClientRect().top") < 900
        assert browser.run("return document.querySelectorAll('*').length") < 2000


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Path) -> None:
    with open_browser() as browser:
        for width in (400, 800):
            browser.open(page.as_uri())
            browser.emulate(width)
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth") is True


def test_the_command_writes_page_and_data(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives = [str(path) for path in sorted(page.parent.glob("gloo-*"))]
    assert run(["report", str(tmp_path / "out.html"), *archives]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.html'}\n"
    assert run(["report", str(tmp_path / "out.md"), *archives, "--title", "Mine"]) == 0
    assert (tmp_path / "out.md").read_text().startswith("# Mine\n")
    with open(tmp_path / "out-data" / "results.csv", newline="") as file:
        assert [(row["workers"], row["seconds_mean"]) for row in csv.DictReader(file)] == [
            *(("1", "90"), ("2", "45"), ("4", "22.5")),
        ]
    assert (tmp_path / "out-data" / "job1-way.csv").is_file()


def test_a_warning_of_many_runs_is_one_sentence_that_names_them(tmp_path: Path) -> None:
    alike: dict[str, Any] = {"share_machine": True, "synthetic": True, "functional_only": "one node"}
    archives = [str(sealed_run(tmp_path / f"alike-{number}", name=f"alike-{number}", **alike)) for number in range(4)]
    archives.append(str(sealed_run(tmp_path / "clean", name="clean")))
    assert run(["report", str(tmp_path / "out.md"), *archives]) == 0
    assert run(["report", str(tmp_path / "out.html"), *archives]) == 0
    lines = [line for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("> ")]
    notes = re.findall(r'<div class="note.*?</div>', (tmp_path / "out.html").read_text())
    for warnings in (lines, notes):
        for condition in ("functional only", "on synthetic data", "shared"):
            (sentence,) = [each for each in warnings if f"4 runs were {condition}" in each]
            assert [name for name in ("alike-0", "alike-1", "alike-2", "alike-3", "clean") if name in sentence] == [
                f"alike-{number}" for number in range(4)
            ]
            assert sum(condition in each for each in warnings) == 1


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["out.html", "./nothing"], 4, "There is no archive"),
        (["out.html", "nobody"], 4, "no run"),
        (["out.html"], 4, "no finished runs"),
        (["out.html", "broken.zip"], 2, "broken.zip"),
    ],
)
def test_bad_input_is_named(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, reason: str
) -> None:
    Path("broken.zip").write_bytes(b"PK\x03\x04 no zip at all")
    assert run(["report", *words]) == code
    assert reason in capsys.readouterr().err
    assert not Path("out.html").exists()
