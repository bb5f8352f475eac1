"""Untrusted text on every surface that shows it: nothing runs, nothing escapes its context, no output is forged.

The texts are metric names, parameters, data and log lines of one archive.
"""

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.storage.store import Store
from tests.browser import open_browser
from tests.contract.server.dashboards import serve
from tests.unit.results.runs import event, new_run, observation_of, result_event, spec

HOSTILE = {
    "closing script tag": "</script><script>window.hacked=1</script>",
    "image with event handler": "<img src=x onerror=window.hacked=1>",
    "attribute breakout": '" onmouseover="window.hacked=1" x=\'',
    "SVG with event handler": "</title></svg><svg onload=window.hacked=1>",
    "template expression": "{{ 7 * 7 }}{% for x in y %}",
    "Markdown link": "[click](javascript:window.hacked=1) | `x` | ![x](http://evil.example/x.png)",
    "spreadsheet formula": '=HYPERLINK("http://evil.example")',
    "terminal escape sequence": "\x1b]0;hacked\x07\x1b[2J\x1b[31m",
    "workflow command": "%0A::error title=hacked::x",
    "right-to-left text": "abc\u202edef",
    "JavaScript line separator": "a\u2028b\u2029c",
    "label breakout": 'x"} 1 # mlbench_evil 1',
    "prototype name": "__proto__",
    "path traversal": "../../etc/passwd",
    "end of CDATA": "]]>&lt;b&gt;&amp;",
    "very long name": "A" * 5000,
}
RUN = "hostile-1"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one sealed run that is full of them."""
    home = tmp_path_factory.mktemp("home")
    store = Store(home)
    goal = {
        "metric": HOSTILE["image with event handler"],
        "comparison": ">=",
        "threshold": 1.0,
        "kind": "full",
        "value": 2,
    }
    lines = [*(text.replace("\n", " ") for text in HOSTILE.values())]
    for step in (1, 2, 3):
        lines += [event("metric", at=step, name=text, value=float(step)) for text in HOSTILE.values()]
    lines.append(
        event("environment", at=1, framework=HOSTILE["closing script tag"], version=HOSTILE["template expression"])
    )
    lines.append(result_event(9.0, data=HOSTILE["SVG with event handler"], goal=goal))
    parameters = {"batch_size": 8, "text": HOSTILE["Markdown link"], "more": HOSTILE["spreadsheet formula"]}
    lines += [event("metric", at=4, name=text, value="no number") for text in HOSTILE.values()]  # a finding names it
    recorded = store.record_run(spec(RUN, 1, parameters=parameters, argv=(*HOSTILE.values(),), share_machine=True))
    new_run(recorded.folder, recorded.spec, {0: lines})
    machine = {"cpu": HOSTILE["image with event handler"], "platform": HOSTILE["Markdown link"], "cores": 2}
    machine |= {"architecture": "x86_64", "memory_bytes": 1 << 30, "gpus": []}
    about = {"mlbench": "4.0.0", "python": "3.12.1", "packages": {}, "machine": machine}
    write_run_document(recorded, {**about, "command_line": ["mlbench", *HOSTILE.values()]})
    seal(recorded, observation_of(1, 12.0))
    store.advance(recorded, RunState.FINISHED, Outcome.GOAL_REACHED)
    store.close()
    return home


def test_no_page_runs_or_loads_what_strangers_wrote(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(home))
    assert run(["report", str(tmp_path / "report.html"), RUN, "--title", HOSTILE["closing script tag"]]) == 0
    with serve(home) as dashboard, open_browser() as browser:
        browser.open(dashboard.url)
        base = f"http://127.0.0.1:{dashboard.port}"
        pages = ("/", f"/runs/{RUN}", f"/compare?a={RUN}&b={RUN}", f"/report?run={RUN}", "/runs/%3Cimg src=x%3E")
        for address in [*(base + page for page in pages), (tmp_path / "report.html").as_uri()]:
            browser.open(address)
            browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
            if address.endswith(f"/runs/{RUN}"):
                browser.wait_for("return document.getElementById('log').textContent.includes('onerror')")
            assert browser.run("return window.hacked === undefined"), address
            assert browser.run("return document.querySelectorAll('img, iframe, object, embed').length") == 0, address
            handlers = "return Array.from(document.querySelectorAll('*')).filter(e => e.getAttributeNames()"
            assert browser.run(f"{handlers}.some(n => n.startsWith('on'))).length") == 0, address
            assert browser.foreign_requests() == [], address
            assert not [line for line in browser.console() if "404" not in line], address
        assert "49" not in browser.run("return document.title")


def test_no_file_is_forged_by_what_strangers_wrote(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markdown, CSV, XML and JSON."""
    monkeypatch.setenv("MLBENCH_HOME", str(home))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert run(["report", str(tmp_path / "report.md"), RUN]) == 0
    run(["gate", RUN, "--baseline", RUN, "--junit", str(tmp_path / "gate.xml")])
    for name in ("report.md", "summary.md"):
        text = (tmp_path / name).read_text()
        assert not re.search(r"<(?!(/?(details|summary|br|sup|sub)\b))[a-z/!]", text), name
        assert not re.search(r"(?<!\\)\]\((?!#)", text), name
    for path in (tmp_path / "report-data").rglob("*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "@"))], path
    ElementTree.parse(tmp_path / "gate.xml")
    with serve(home) as dashboard:
        status = dashboard.ask(f"/api/v1/runs/{RUN}")
        plain = {text for text in HOSTILE.values() if text.isprintable() and len(text) < 300}
        assert plain <= set(status.document["metrics"])  # as they are: JSON is data
        assert status.headers["content-type"] == "application/json"
