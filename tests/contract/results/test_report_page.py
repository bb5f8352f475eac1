"""The report page in a real browser, from a file, and the command that writes it."""

from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.report.collect import collect
from mlbench_cli.results.report.write import write_report
from tests.browser import Browser, open_browser
from tests.unit.results.runs import sealed_run


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


def draw_all(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.run("document.querySelectorAll('figure').forEach(f => mlbenchFigures.enliven(f))")
    browser.wait_for("return document.querySelectorAll('figure.drawn .u-wrap').length > 0")


def test_every_figure_is_drawn_without_network_and_without_complaint(page: Path) -> None:
    with open_browser() as browser:
        draw_all(browser, page)
        count = browser.run("return document.querySelectorAll('figure').length")
        assert browser.run("return document.querySelectorAll('figure canvas').length") == count > 10
        painted = (
            "return Array.from(document.querySelectorAll('figure canvas')).filter(c => c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data.some(v => v)).length"
        )
        assert browser.wait_for(f"{painted} === {count} ? {count} : 0") == count
        assert browser.foreign_requests() == []
        assert browser.console() == []


def test_a_table_has_the_numbers_of_its_figure(page: Path) -> None:
    script = """
        return Array.from(document.querySelectorAll('figure')).every(f => {
            const data = JSON.parse(f.querySelector('script').textContent);
            const count = data.lines.reduce((sum, line) => sum + line.xs.length, 0);
            return f.querySelectorAll('tbody tr').length === Math.min(400, count);
        })"""
    with open_browser() as browser:
        browser.open(page.as_uri())
        assert browser.run(script) is True


def test_a_line_is_switched_off_by_keyboard(page: Path) -> None:
    with open_browser() as browser:
        draw_all(browser, page)
        browser.run("document.querySelector('#figure-job1-speedup .u-series:nth-child(2)').focus()")
        browser.press("\ue007")
        assert browser.wait_for(
            "return document.querySelector('#figure-job1-speedup').plot.series[1].show === false && "
            "document.activeElement.getAttribute('aria-pressed') === 'false'"
        )


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Path) -> None:
    with open_browser(500, 900) as browser:
        draw_all(browser, page)
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth") is True


def test_print_shows_the_static_pictures(page: Path) -> None:
    with open_browser() as browser:
        draw_all(browser, page)
        rules = (
            "return Array.from(document.styleSheets[0].cssRules).some(r => r.media && r.media.mediaText === 'print')"
        )
        assert browser.run(rules) is True
        assert browser.run("return document.querySelectorAll('figure svg.static[role=img][aria-label]').length") == (
            browser.run("return document.querySelectorAll('figure').length")
        )


def test_the_command_writes_page_and_data(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives = [str(path) for path in sorted(page.parent.glob("gloo-*"))]
    assert run(["report", str(tmp_path / "out.html"), *archives]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.html'}\n"
    assert run(["report", str(tmp_path / "out.md"), *archives, "--title", "Mine"]) == 0
    assert (tmp_path / "out.md").read_text().startswith("# Mine\n")
    assert (tmp_path / "out-data" / "job1-time.csv").is_file()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["out.pdf"], 2, "ends in none of"),
        (["out.html", "./nothing"], 4, "There is no archive"),
        (["out.html", "nobody"], 4, "no run"),
        (["out.html"], 4, "no finished runs"),
        (["/proc/none/out.html", "ARCHIVE"], 2, "cannot be made"),
        (["out.html", "BROKEN"], 2, "BROKEN"),
    ],
)
def test_bad_input_is_named(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "BROKEN.zip"
    broken.write_bytes(b"PK\x03\x04 no zip at all")
    places = {"ARCHIVE": str(page.parent / "gloo-1"), "BROKEN": str(broken)}
    assert run(["report", *(places.get(word, word) for word in words)]) == code
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()
