"""The dashboard in a real browser."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbench_cli.results.archive.verify import verify
from mlbench_cli.storage.store_schema import SCHEMA_VERSION
from tests.browser import Browser, open_browser
from tests.contract.commands.store_locks import lock_out
from tests.contract.server.dashboards import CODE, PATIENCE, Dashboard

ENTER, TAB, SPACE = "\ue007", "\ue004", " "
# Cells whose words are broken into single letters.
NARROW_CELLS = (
    "return Array.from(document.querySelectorAll('.scroll th, .scroll td')).filter(e => e.offsetWidth && "
    "e.textContent.trim().length > 2 && e.offsetWidth < 40).map(e => e.textContent)"
)
IS_NARROW = "return document.documentElement.scrollWidth <= window.innerWidth"


def fill(browser: Browser, **fields: str) -> None:
    """Type texts into fields of the form, as a person at a keyboard does."""
    for name, text in fields.items():
        browser.run("const f = document.querySelector(`main [name=${arguments[0]}]`); f.focus(); f.select()", name)
        browser.type(text)


def choose(browser: Browser, **fields: str) -> None:
    for name, value in fields.items():
        script = "const f = document.getElementById('new').elements[arguments[0]]; f.value = arguments[1];"
        browser.run(f"{script} f.dispatchEvent(new Event('change', {{bubbles: true}}))", name, value)


def list_questions(browser: Browser) -> list[str]:
    """The questions that can be answered now."""
    script = "return Array.from(document.getElementById('new').elements).filter(e => e.name && !e.disabled)"
    return list(browser.run(f"{script}.filter(e => e.offsetParent !== null).map(e => e.name)"))


def status_text(browser: Browser) -> str:
    return str(browser.run("return document.querySelector('#new .status').textContent"))


def test_a_run_from_the_form_to_its_report(acting: Dashboard, program: str, tmp_path: Path) -> None:
    """Start, live curve, log, archive, report; no complaint on the console, and no request to anybody else."""
    text, rest = (tmp_path / "program.py").read_text().split("    time.sleep(0.3)\n")
    # It goes on after the steps 3 and 8 when the page has shown them, however slowly.
    gates = f"    while step in (3, 8) and not os.path.exists('{tmp_path}/step' + str(step)): time.sleep(0.05)\n"
    (tmp_path / "program.py").write_text(f"import os\n{text}{gates}{rest}")
    with open_browser() as browser:
        browser.open(acting.url)
        assert browser.run("return location.search") == ""  # the token has left the address bar
        assert acting.token not in browser.run("return document.cookie")
        browser.run("document.querySelector('a[href=\"/new\"]').click()")
        browser.wait_for("return document.getElementById('new') && document.querySelector('[name=preset]').length > 0")
        choose(browser, task="")
        fill(browser, name="form", command=program)
        browser.press(ENTER)
        browser.wait_for("return location.pathname === '/runs/form-1'")
        points = "Number((document.querySelector('figure[data-curve=loss]') || {dataset: {}}).dataset.points || 0)"
        first = browser.wait_for(f"return {points} > 0 && {points}")
        browser.wait_for("return document.getElementById('log').textContent.includes('line 2')")
        (tmp_path / "step3").touch()
        assert browser.wait_for(f"return {points} > arguments[0] && {points}", first) > first
        (tmp_path / "step8").touch()
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
        assert browser.console() == []
        assert browser.foreign_requests() == []
        browser.open(f"http://127.0.0.1:{acting.port}/experiments")
        browser.wait_for("return document.body.innerText.includes('1 of 1 runs finished')")
        browser.open(f"http://127.0.0.1:{acting.port}/report?run=form-1")
        assert browser.run("return document.querySelectorAll('figure [role=img]').length") > 0
        assert browser.console() == []


@pytest.mark.slow
def test_the_form_asks_what_the_wizard_asks_and_checks_the_answers(acting: Dashboard, tmp_path: Path) -> None:
    """Questions follow from answers; the browser refuses bad forms, and the server what only it can know."""
    (tmp_path / "empty").mkdir()
    with open_browser() as browser:
        browser.open(acting.url)
        browser.open(f"http://127.0.0.1:{acting.port}/new")
        browser.wait_for("return document.querySelector('[name=preset]').length > 0")
        choose(browser, task="digits_resnet", preset="tiny")
        always = ["name", "cluster", "task", "workers", "num_cpus", "backend", "options"]
        assert sorted(list_questions(browser)) == sorted([*always, "preset", "light"])
        choose(browser, backend="custom")
        assert "custom_backend" in list_questions(browser)
        choose(browser, task="")
        assert sorted(list_questions(browser)) == sorted([*always, "command", "custom_backend"])
        choose(browser, task="epsilon_logistic_regression", preset="spec", backend="gloo")
        assert "data missing" in browser.text()
        choose(browser, preset="tiny")
        assert "data missing" not in browser.text()
        fill(browser, name="Bad name")
        browser.run("document.getElementById('check').click()")
        assert status_text(browser) == ""
        assert browser.run("return document.activeElement.name") == "name"  # the browser says there what is wrong
        fill(browser, name="good", workers="1 2")
        browser.run("document.getElementById('check').click()")
        browser.wait_for("return document.body.innerText.includes('This starts good-1, good-2.')")
        assert "mlbench run good 1 2 --task epsilon_logistic_regression --preset tiny" in browser.text()
        choose(browser, cluster="new kind")
        browser.run("document.getElementById('check').click()")
        browser.wait_for("return document.body.innerText.includes('Run this command in a terminal')")
        assert "--create kind" in browser.text()
        assert browser.run("return document.querySelector('[name=gpu_type]').disabled") is True
        choose(browser, cluster="new gke", task="mnist")
        fill(browser, gpu_type="l4")
        browser.run("document.activeElement.blur()")
        browser.run("document.getElementById('check').click()")
        browser.wait_for("return document.body.innerText.includes('--create gke')")
        assert "--create gke --gpu-type l4" in browser.text()
        assert " --gpu " in browser.text()
        choose(browser, cluster="local", task="epsilon_logistic_regression")
        choose(browser, preset="spec")
        fill(browser, options=f"--data-dir {tmp_path / 'empty'}")
        browser.press(ENTER)
        browser.wait_for("return document.querySelector('#new .status').classList.contains('bad')")
        assert str(tmp_path / "empty") in status_text(browser)
        assert acting.ask("/api/v1/runs").document["runs"] == []
        browser.emulate(360)
        assert browser.run(IS_NARROW) is True
        (refusal,) = browser.console()  # of the answer that the form shows
        assert "/api/v1/runs - Failed to load resource" in refusal


@pytest.mark.slow
def test_an_experiment_is_started_stopped_and_its_runs_deleted_by_keyboard(acting: Dashboard) -> None:
    with open_browser() as browser:
        browser.open(acting.url)
        browser.open(f"http://127.0.0.1:{acting.port}/new")
        browser.wait_for("return document.querySelector('[name=preset]').length > 0")
        choose(browser, task="")
        fill(browser, name="long", workers="1 2", command="sleep 600")
        browser.press(ENTER)
        browser.wait_for("return location.pathname === '/experiments/long'")
        browser.wait_for("return document.querySelector('button[data-action]') !== null")
        until(acting, "long-1", "running")  # one that waits in the queue would stay there
        go_to(browser, "Stop")
        browser.press(SPACE)
        assert "Stop the experiment long?" in browser.accept()
        browser.wait_for("return document.querySelector('button[data-action]') === null")
        browser.open(f"http://127.0.0.1:{acting.port}/runs/long-1")
        browser.wait_for("return document.getElementById('outcome').textContent === 'canceled'")
        assert "Download the archive" in browser.text()
        go_to(browser, "Delete")
        browser.press(SPACE)
        browser.accept()
        browser.wait_for("return location.pathname === '/'")
        browser.wait_for("return document.getElementById('listing').dataset.loaded === 'yes'")
        assert "long-1" not in browser.text()
        assert browser.console() == []


RUNS_FILE = """
title: Study
num-cpus: 1
share-machine: true
workers: [1]
runs:
  - {{name: first, command: "sh -c 'until [ -e {folder}/first ]; do sleep 0.1; done'"}}
  - {{name: second, command: "sh -c 'until [ -e {folder}/second ]; do sleep 0.1; done'"}}
"""


@pytest.mark.nightly
def test_the_progress_of_an_experiment_moves_and_it_opens_by_keyboard(acting: Dashboard, tmp_path: Path) -> None:
    """Its client is a process of its own, as on a terminal; its runs end when the test says so."""
    (tmp_path / "study.yaml").write_text(RUNS_FILE.format(folder=tmp_path))
    environment = {**os.environ, "MLBENCH_HOME": str(acting.home)}
    words = [sys.executable, "-c", CODE, "run", "-f", "study.yaml"]
    with open_browser() as browser:
        browser.open(acting.url)
        browser.open(f"http://127.0.0.1:{acting.port}/experiments")
        browser.wait_for("return document.body.innerText.includes('There are no experiments')")
        client = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            until(acting, "study-first-1", "queued", "running")
            browser.open(f"http://127.0.0.1:{acting.port}/experiments")
            browser.wait_for("return document.body.innerText.includes('0 of 2 runs finished')")
            browser.run("window.isSamePage = true")
            go_to(browser, "study")
            (tmp_path / "first").touch()
            browser.wait_for("return document.body.innerText.includes('1 of 2 runs finished')")
            # The list came again into the same page, and the keyboard kept its place.
            assert browser.run("return [window.isSamePage, document.activeElement.textContent]") == [
                True,
                "study",
            ]
            browser.emulate(360)
            assert browser.run(IS_NARROW) is True
            assert browser.run(NARROW_CELLS) == []
            browser.press(ENTER)
            browser.wait_for("return location.pathname === '/experiments/study'")
            browser.wait_for("return document.body.innerText.includes('1 of 2 runs finished')")
            (tmp_path / "second").touch()
            browser.wait_for("return document.body.innerText.includes('2 of 2 runs finished')")
            assert browser.run(IS_NARROW) is True
            browser.emulate(1280)
            assert client.wait(PATIENCE) == 0
        finally:
            for name in ("first", "second"):
                (tmp_path / name).touch()
            client.communicate(timeout=PATIENCE)
        browser.open(f"http://127.0.0.1:{acting.port}/experiments")
        browser.wait_for("return document.body.innerText.includes('2 of 2 runs finished')")
        assert browser.console() == []


def until(dashboard: Dashboard, name: str, *states: str) -> None:
    """Wait until a run is recorded in one of these states."""
    end = time.monotonic() + PATIENCE
    while (answer := dashboard.ask(f"/api/v1/runs/{name}")).status != 200 or answer.document["state"] not in states:
        assert time.monotonic() < end, f"{name} is not {states}: {answer.document}"
        time.sleep(0.1)


def go_to(browser: Browser, text: str) -> None:
    """Go to a link or button by the tabulator key."""
    browser.run("document.body.focus()")
    for _ in range(40):
        browser.press(TAB)
        if browser.run("return document.activeElement.textContent").startswith(text):
            return
    raise AssertionError(f"nothing called {text} can be reached by the keyboard")


@pytest.mark.slow
def test_a_list_that_cannot_be_read_any_more_says_why_and_comes_back(acting: Dashboard) -> None:
    """What the page had stays, with the reason above it."""
    wanted = {"name": "long", "workers": [1], "command": "sleep 600", "share_machine": True}
    headers = {"Content-Type": "application/json", "X-Mlbench-Action": "1"}
    path = acting.home / "mlbench.sqlite"
    with open_browser() as browser:
        acting.ask("/api/v1/runs", "POST", headers, json.dumps(wanted).encode())
        browser.open(acting.url)
        browser.wait_for("return document.getElementById('listing').dataset.loaded === 'yes'")
        set_version(path, 99)
        browser.wait_for("return document.getElementById('listing-problem') !== null")
        assert "newer mlbench (schema 99" in browser.text()
        assert "). Next: Upgrade mlbench" in browser.text()
        assert "long-1" in browser.text()
        set_version(path, SCHEMA_VERSION)
        browser.wait_for("return document.getElementById('listing-problem') === null")
        with lock_out(acting.home, "writers"):
            browser.open(f"http://127.0.0.1:{acting.port}/new")
            browser.wait_for("return document.querySelector('[name=backend]').length > 0")
            choose(browser, task="")
            fill(browser, name="other", command="true")
            browser.press(ENTER)
            browser.wait_for("return document.querySelector('#new .status').classList.contains('bad')")
            assert "is locked: another process" in status_text(browser)
        assert acting.ask("/api/v1/runs/long-1/cancel", "POST", headers).status == 200


def set_version(path: Path, version: int) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version={version}")


@pytest.mark.slow
def test_two_runs_are_compared_by_keyboard_and_their_report_opens(dashboard: Dashboard) -> None:
    with open_browser() as browser:
        browser.open(dashboard.url)
        browser.open(f"http://127.0.0.1:{dashboard.port}/compare")
        fill(browser, a="alpha-1", b="alpha-4")
        browser.press(ENTER)
        browser.wait_for("return document.body.innerText.includes('What differs')")
        text = browser.text()
        assert "Too few runs for a verdict on alpha-1 and alpha-4" in text
        assert "The numbers of workers differ: 1 and 4." in text
        browser.run("Array.from(document.links).find(a => a.textContent === 'Report of both').focus()")
        browser.press(ENTER)
        browser.wait_for("return location.pathname === '/report'")
        assert "alpha-4" in browser.run("return document.body.textContent")  # in a folded table
        assert browser.console() == []


@pytest.mark.slow
def test_a_finished_run_has_figures_and_a_paged_log(dashboard: Dashboard) -> None:
    with open_browser() as browser:
        browser.open(dashboard.url)
        browser.wait_for("return document.getElementById('listing').dataset.loaded === 'yes'")
        assert "alpha-2" in browser.text()
        assert "top-1 accuracy 80.5" in browser.text()
        browser.open(f"http://127.0.0.1:{dashboard.port}/runs/alpha-2")
        assert browser.run("return document.querySelectorAll('figure [role=img]').length") > 0
        browser.wait_for("return document.getElementById('log').textContent.includes('epoch 2 of 3')")
        browser.run("document.getElementById('log-rank').value = '1'; document.getElementById('log-first').click()")
        browser.wait_for("return document.getElementById('log-place').textContent.includes('bytes 0')")
        assert browser.run("return document.querySelectorAll('button[data-action]').length") == 0
        browser.open(f"http://127.0.0.1:{dashboard.port}/compare?a=alpha-1&b=alpha-2")
        assert "What differs" in browser.text()
        assert browser.console() == []


@pytest.mark.slow
def test_pages_work_on_a_narrow_screen_and_by_keyboard(dashboard: Dashboard) -> None:
    with open_browser(500, 900) as browser:
        browser.open(dashboard.url)
        browser.emulate(360)
        paths = (
            "/",
            "/experiments",
            "/runs/alpha-2",
            "/compare?a=alpha-1&b=alpha-2",
            "/report?run=alpha-1&run=alpha-2",
        )
        for path in paths:
            browser.open(f"http://127.0.0.1:{dashboard.port}{path}")
            assert browser.run(IS_NARROW) is True, path
            assert browser.run(NARROW_CELLS) == [], path
        browser.open(f"http://127.0.0.1:{dashboard.port}/")
        browser.press("\ue004")
        assert browser.run("return document.activeElement.className") == "skip"
        unnamed = (
            "return Array.from(document.querySelectorAll('input, select, button')).filter(e => !e.labels?.length && "
        )
        assert browser.run(f"{unnamed} !e.textContent && !e.ariaLabel).length") == 0


@pytest.mark.parametrize("path", ["/runs/nobody", "/nowhere", "/report?run=nobody"])
def test_what_does_not_exist_is_a_page_with_a_way_back(dashboard: Dashboard, path: str) -> None:
    answer = dashboard.ask(path, headers={"Accept": "text/html"})
    assert answer.status == 404
    assert b'<a href="/">All runs</a>' in answer.body
