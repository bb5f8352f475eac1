"""Experiments, and large or broken stores in the dashboard."""

import json
import random
import sqlite3
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.server.log_pages import MAX_LINE_BYTES, read_page
from mlbench_cli.storage.store_schema import SCHEMA_VERSION
from tests import NIGHTLY
from tests.contract.commands.store_locks import lock_out
from tests.contract.server.dashboards import Dashboard, serve

FILE = """
title: Demo
num-cpus: 1
share-machine: true
workers: [1]
runs:
  - {name: good, command: "true"}
  - {name: bad, command: "false"}
"""


@pytest.mark.slow
def test_a_file_of_runs_is_one_experiment_with_its_progress(home: Path) -> None:
    Path("study.yaml").write_text(FILE)
    assert run(["run", "-f", "study.yaml"]) == 7
    assert run(["run", "alone", "1", "--command", "true"]) == 0
    with serve(home) as dashboard:
        page = dashboard.ask("/experiments", headers={"Accept": "text/html"})
        assert (page.status, b"/experiment-list" in page.body) == (200, True)
        text = dashboard.ask("/experiment-list").body.decode()
        whole = dashboard.ask("/experiments/study").body.decode()
        rows = dashboard.ask("/listing").body.decode().partition('<table class="rows runs">')[2]
    newest, _, other = text.partition("/experiments/study")
    assert "/experiments/alone" in newest
    assert "2 of 2 runs finished, 1 failed" in other
    group = rows.partition('<tr class="group">')[2].partition("</tbody>")[0]
    assert '<a href="/experiments/study">study</a>' in group
    assert ("study-good-1" in group, "study-bad-1" in group, "alone-1" in group) == (True, True, False)
    assert rows.count('class="group"') == 1
    assert ("study-good-1" in whole, "study-bad-1" in whole, "alone" in other) == (True, True, False)


PAGES = ("/", "/listing", "/experiments", "/experiment-list", "/runs/demo-1", "/api/v1/runs")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["newer", "forbidden", "broken"])
def test_a_store_that_cannot_be_used_is_a_clear_answer(tmp_path: Path, damage: str) -> None:
    """The dashboard was started with a good store; nothing of it is lost, and it goes on when the store is back."""
    home = tmp_path / "home"
    home.mkdir()
    path = home / "mlbench.sqlite"
    with serve(home) as dashboard:
        assert dashboard.ask("/api/v1/runs").status == 200
        if damage == "newer":
            _set_version(path, 99)
            _check_pages(dashboard, {503}, b"newer mlbench (schema 99")
            _set_version(path, SCHEMA_VERSION)
        elif damage == "forbidden":
            path.chmod(0)
            _check_pages(dashboard, {200, 404, 503}, b"")
            path.chmod(0o600)
        else:
            before = path.read_bytes()
            path.write_bytes(b"no database" * 100)
            (home / "mlbench.sqlite-wal").unlink(missing_ok=True)
            _check_pages(dashboard, {200, 404, 503}, b"")
            path.write_bytes(before)
        assert dashboard.ask("/api/v1/runs").status == 200
        assert dashboard.ask("/static/x/page.css").status == 200


@pytest.mark.slow
def test_a_store_that_another_process_writes_to_is_shown_and_refuses_actions_with_a_reason(acting: Dashboard) -> None:
    """Readers are not in the way of a writer. A lock that shuts out readers, too, keeps a dashboard from starting."""
    wanted = {"name": "x", "workers": [1], "command": "true", "share_machine": True}
    headers = {"Content-Type": "application/json", "X-Mlbench-Action": "1"}
    assert acting.ask("/api/v1/runs").status == 200
    with lock_out(acting.home, "writers"):
        for page in ("/", "/listing", "/experiment-list", "/api/v1/runs"):
            assert acting.ask(page, headers={"Accept": "text/html"}).status == 200
        answer = acting.ask("/api/v1/runs", "POST", headers, json.dumps(wanted).encode())
        assert (answer.status, "is locked: another process" in answer.document["message"]) == (503, True)
        assert "lsof" in answer.document["hint"]
        assert acting.ask("/api/v1/runs").document["runs"] == []
    answer = acting.ask("/api/v1/runs", "POST", headers, json.dumps(wanted).encode())
    assert (answer.status, answer.document["runs"]) == (201, ["x-1"])


def _set_version(path: Path, version: int) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version={version}")


def _check_pages(dashboard: Dashboard, statuses: set[int], text: bytes) -> None:
    for page in PAGES:
        answer = dashboard.ask(page, headers={"Accept": "text/html"})
        if page == "/experiments":  # the frame of its list
            assert answer.status == 200
            continue
        assert answer.status in statuses, (page, answer)
        assert b"Traceback" not in answer.body
        assert text in answer.body, page


# --- large logs -----------------------------------------------------------------------------------------------------


def test_a_log_line_cannot_reorder_what_a_page_shows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\tb \u202e dlrow \x1b[31m\n")
    assert read_page(path, 0).lines == ("a\tb \\u202e dlrow \\x1b[31m",)
    assert read_page(path, 0, raw=True).lines == ("a\tb \u202e dlrow \x1b[31m",)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r"], ids=["no line end", "line end", "progress bar"])
def test_a_page_of_a_line_of_any_length_costs_bounded_memory(tmp_path: Path, end: bytes) -> None:
    import tracemalloc

    path = tmp_path / "rank-0.log"
    path.write_bytes(b"x\n" + b"y" * (40 * MAX_LINE_BYTES) + end)
    size = path.stat().st_size
    tracemalloc.start()
    for offset in (0, 1, 2, 3, MAX_LINE_BYTES, size // 2, size - 2, size - 1, size, -1):
        page = read_page(path, offset)
        assert page.offset <= page.end <= size
        assert page.end > min(max(offset, 0), size - 1) or page.offset == size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * MAX_LINE_BYTES
    assert read_page(path, -1).lines  # the end of the log is never blank


@pytest.mark.parametrize("seed", range(20) if NIGHTLY else range(4))
def test_pages_forward_lose_nothing_and_backward_always_move(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    path = tmp_path / "rank-0.log"
    lengths = [chosen.choice((0, 1, 10, 1000, 3000)) for _ in range(300)]
    data = b"".join(b"z" * length + chosen.choice((b"\n", b"\r", b"\r\n")) for length in lengths)
    path.write_bytes(data)
    seen: list[str] = []
    offset = 0
    while offset < len(data):
        page = read_page(path, offset, limit=1024)
        seen += page.lines
        offset = page.end
    assert seen == [line.decode() for line in data.splitlines()]
    assert read_page(path, -1, limit=1024).lines[-1] == seen[-1]
    offset = len(data)
    while offset:
        before = read_page(path, offset, limit=1024).before
        assert before is not None
        found = read_page(path, before, limit=1024).offset
        assert found < offset
        offset = found
