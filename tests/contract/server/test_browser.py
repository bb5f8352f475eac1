"""The dashboard in a real browser."""

import os
from pathlib import Path

import pytest

from mlbench_cli.results.archive.verify import verify
from tests.browser import Browser, open_browser
from tests.contract.server.dashboards import Dashboard

SHOTS = os.environ.get("MLBENCH_SCREENSHOTS")  # a folder for pictures to look at


def shoot(browser: Browser, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")


def test_a_run_from_the_form_to_its_report(acting: Dashboard, program: str, tmp_path: Path) -> None:
    """Start, live curve, log, archive, report; no complaint on the console, and no request to anybody else."""
    with open_browser() as browser:
        browser.open(acting.url)
        assert browser.run("return location.search") == ""  # the token has left the address bar
        assert acting.token not in browser.run("return document.cookie")
        browser.run("document.querySelector('a[href=\"/new\"]').click()")
        browser.wait_for(
            "return document.getElementById('new') !== null && document.getElementById('preset').length > 0"
        )
        shoot(browser, "new")
        browser.run(
            "const f = document.getElementById('new').elements; f.name.value = 'form'; f.workers.value = '1';"
            "f.task.value = ''; f.task.dispatchEvent(new Event('change')); f.command.value = arguments[0];"
            "document.querySelector('#new button').click()",
            program,
        )
        browser.wait_for("return location.pathname === '/runs/form-1'")
        points = "Number((document.querySelector('figure[data-curve=loss]') || {dataset: {}}).dataset.points || 0)"
        first = browser.wait_for(f"return {points} > 0 && {points}")
        browser.wait_for("return document.getElementById('log').textContent.includes('line 2')")
        assert browser.wait_for(f"return {points} > arguments[0] && {points}", first) > first
        shoot(browser, "live")
        browser.wait_for("return document.querySelector('a[download]') !== null")
        assert browser.wait_for("return document.getElementById('log').textContent.includes('line 10')")
        assert "<img src=x" in browser.run("return document.getElementById('log').textContent")
        assert browser.run("return document.querySelectorAll('main img').length") == 0
        data = browser.run(
            "return fetch(document.querySelector('a[download]').href).then(a => a.arrayBuffer())"
            ".then(b => Array.from(new Uint8Array(b)))"
        )
        path = tmp_path / "form-1.zip"
        path.write_bytes(bytes(data))
        assert not verify(path).problems
        shoot(browser, "finished")
        assert browser.console() == []
        assert browser.foreign_requests() == []
        browser.open(f"http://127.0.0.1:{acting.port}/experiments")
        browser.wait_for("return document.body.innerText.includes('1 of 1 runs finished')")
        shoot(browser, "experiments")
        browser.open(f"http://127.0.0.1:{acting.port}/report?run=form-1")
        browser.run("document.querySelectorAll('figure').forEach(f => mlbenchFigures.enliven(f))")
        browser.wait_for("return document.querySelectorAll('figure canvas').length > 2")
        shoot(browser, "report")
        assert browser.console() == []


def test_a_finished_run_has_figures_and_a_paged_log(dashboard: Dashboard) -> None:
    with open_browser() as browser:
        browser.open(dashboard.url)
        browser.wait_for("return document.getElementById('listing').dataset.loaded === 'yes'")
        shoot(browser, "overview")
        assert "alpha-2" in browser.text()
        assert "Prec@1 80.5" in browser.text()
        browser.open(f"http://127.0.0.1:{dashboard.port}/runs/alpha-2")
        browser.wait_for("return document.querySelectorAll('figure canvas').length > 0")
        browser.wait_for("return document.getElementById('log').textContent.includes('epoch 2 of 3')")
        browser.run("document.getElementById('log-rank').value = '1'; document.getElementById('log-first').click()")
        browser.wait_for("return document.getElementById('log-place').textContent.includes('bytes 0')")
        assert browser.run("return document.querySelectorAll('button[data-action]').length") == 0
        browser.open(f"http://127.0.0.1:{dashboard.port}/compare?a=alpha-1&b=alpha-2")
        assert "Differences" in browser.text()
        shoot(browser, "compare")
        assert browser.console() == []


def test_pages_work_on_a_narrow_screen_and_by_keyboard(dashboard: Dashboard) -> None:
    with open_browser(500, 900) as browser:
        browser.open(dashboard.url)
        for path in ("/", "/experiments", "/runs/alpha-2", "/compare?a=alpha-1&b=alpha-2"):
            browser.open(f"http://127.0.0.1:{dashboard.port}{path}")
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth") is True, path
        shoot(browser, "narrow")
        browser.open(f"http://127.0.0.1:{dashboard.port}/")
        browser.press("\ue004")
        assert browser.run("return document.activeElement.className") == "skip"
        unnamed = (
            "return Array.from(document.querySelectorAll('input, select, button')).filter(e => !e.labels?.length && "
        )
        assert browser.run(f"{unnamed} !e.textContent && !e.ariaLabel).length") == 0


def test_a_rebinding_name_is_refused(dashboard: Dashboard) -> None:
    with open_browser() as browser:
        browser.open(f"http://rebound.example:{dashboard.port}/")
        assert "not served under that name" in browser.text()


def test_without_a_valid_token_a_page_says_what_to_do(dashboard: Dashboard) -> None:
    with open_browser() as browser:
        browser.open(f"http://127.0.0.1:{dashboard.port}/?token=old")
        assert "get-dashboard-url" in browser.text()


@pytest.mark.parametrize("path", ["/runs/nobody", "/nowhere", "/report?run=nobody"])
def test_what_does_not_exist_is_a_page_with_a_way_back(dashboard: Dashboard, path: str) -> None:
    answer = dashboard.ask(path, headers={"Accept": "text/html"})
    assert answer.status == 404
    assert b'<a href="/">All runs</a>' in answer.body
