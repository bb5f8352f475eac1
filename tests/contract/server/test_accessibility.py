"""Every page of the dashboard, and the report, checked by axe-core in a real browser, light and dark: no violations."""

import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.report.collect import collect
from mlbench_cli.results.report.write import write_report
from tests.browser import Browser, open_browser
from tests.contract.server.dashboards import Dashboard
from tests.unit.results.runs import sealed_run

pytestmark = pytest.mark.group("browser")
PAGES = ("/", "/experiments", "/runs/alpha-2", "/compare?a=alpha-1&b=alpha-2", "/clusters", "/report?run=alpha-1")
PATIENCE = 180.0  # seconds; a check takes 1 to 3, and blocks the page meanwhile
CHECK = """
    const show = each => each.id + ': ' + each.nodes.slice(0, 3).map(node => node.html.slice(0, 120)).join(' | ');
    window.found = null;
    setTimeout(() => axe.run(document).then(result => { window.found = result.violations.map(show); }), 0);
"""


def read_axe() -> str:
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core is not installed: pip install axe-core-python")
    return Path(found.origin).with_name("axe.min.js").read_text("utf-8")


def violations(browser: Browser, address: str, scheme: str) -> list[str]:
    """What axe-core has against a page, with the first elements of each kind."""
    browser.prefer(scheme)
    browser.open(address)
    browser.run(read_axe())
    browser.run(CHECK)
    end = time.monotonic() + PATIENCE
    while True:
        time.sleep(1)  # the page answers nothing while it is checked
        try:
            found = browser.run("return window.found")
        except AssertionError:
            found = None
        if found is not None:
            return list(found)
        assert time.monotonic() < end


@pytest.mark.slow
def test_pages_have_no_violations(dashboard: Dashboard, tmp_path: Path) -> None:
    runs = [sealed_run(tmp_path / f"run-{count}", workers=count, seconds=90.0 / count) for count in (1, 2)]
    write_report(collect([Archive.open(path) for path in runs]), tmp_path / "report.html")
    pages = [f"http://127.0.0.1:{dashboard.port}{path}" for path in PAGES]
    with open_browser() as browser:
        browser.open(dashboard.url)
        checked = [*pages, (tmp_path / "report.html").as_uri()]
        found = {
            (page, scheme): problems
            for page in checked
            for scheme in (("light", "dark") if page in (checked[0], checked[2], checked[-1]) else ("light",))
            if (problems := violations(browser, page, scheme))
        }
    assert found == {}


def test_a_page_without_names_and_contrast_is_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<title>x</title><p style='color:#ddd;background:#fff'>pale</p><input><img src=x>")
    with open_browser() as browser:
        words = " ".join(violations(browser, page.as_uri(), "light"))
    assert {"color-contrast", "label", "image-alt", "html-has-lang"} <= {word.rstrip(":") for word in words.split()}
