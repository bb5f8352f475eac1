"""Pages of dashboard, report, results site and docs, checked by axe-core in light and dark: no violations."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.report.facts import collect
from mlbench_cli.results.report.render import write_report
from mlbench_cli.results.site.build import SiteOptions, build_site
from mlbench_cli.storage.store import Store
from tests.browser import Browser, open_browser
from tests.contract.local_runs import until
from tests.contract.server.conftest import RUNS, record_sealed
from tests.contract.server.dashboards import BUSY, Dashboard, serve
from tests.needs import missing
from tests.unit.results.runs import new_run, observation_of, sealed_run, spec

# Of runs that have finished, failed and are in progress, and of names that do not exist.
PAGES = (
    "/",
    "/?contains=nothing",
    "/experiments",
    "/experiments/live",
    "/runs/alpha-2",
    "/runs/broken-2",
    "/runs/live-2",
    "/runs/none",
    "/new",
    "/compare",
    "/compare?a=alpha-1&b=alpha-2",
    "/compare?a=alpha-1&b=none",
    "/clusters",
    "/report?run=alpha-1",
)
MAX_HEIGHT = 15_000  # pixels of a page of the docs
PATIENCE = 180.0  # seconds; a check takes 1 to 3, and blocks the page meanwhile
# The theme of the docs gives its copy buttons landmarks without names.
CHECK = """
    const show = each => each.id + ': ' + each.nodes.slice(0, 3).map(node => node.html.slice(0, 120)).join(' | ');
    window.found = null;
    const keep = result => { window.found = result.violations.map(show); };
    setTimeout(() => axe.run({exclude: ['.md-code__nav']}).then(keep), 0);
"""


def read_axe() -> str:
    found = importlib.util.find_spec("axe_core_python")
    if found is None or found.origin is None:
        missing("axe-core is not installed: pip install axe-core-python")
    return Path(found.origin).with_name("axe.min.js").read_text("utf-8")


def violations(browser: Browser, address: str, scheme: str) -> list[str]:
    """What axe-core has against a page, with the first elements of each kind."""
    browser.prefer(scheme)
    browser.open(address)
    browser.run(read_axe())
    browser.run(CHECK)
    end = time.monotonic() + PATIENCE
    while True:
        time.sleep(0.2)  # the page answers nothing while it is checked
        try:
            found = browser.run("return window.found")
        except AssertionError:
            found = None
        if found is not None:
            return list(found)
        assert time.monotonic() < end


SCHEMES = pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])


def check_all(scheme: str, pages: list[str], first: str | None = None) -> None:
    """Check pages, after having opened `first`, which logs in."""
    with open_browser() as browser:
        if first:
            browser.open(first)
        found = {page: problems for page in pages if (problems := violations(browser, page, scheme))}
    assert found == {}


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Dashboard]:
    """May act, and has runs that have finished, failed and are in progress."""
    home = tmp_path / "home"
    home.mkdir()
    store = Store(home)
    for name, workers, seconds in RUNS:
        record_sealed(store, name, workers, seconds)
    broken = store.record_run(spec(name="broken-2", workers=2))
    new_run(broken.folder, broken.spec, {0: ["loading", "RuntimeError: CUDA out of memory."], 1: ["loading"]})
    write_run_document(broken)
    seal(broken, observation_of(2, 5.0, (1, 143)))
    store.advance(broken, RunState.FINISHED, Outcome.FAILED)
    store.close()
    with serve(home, "--allow-actions") as found:
        found.post("/api/v1/runs", {"name": "live", "workers": [2], "command": BUSY, "share_machine": True})
        try:
            until(lambda: "CPU in use per rank" in found.ask("/cluster-list").body.decode())
            yield found
        finally:
            found.post("/api/v1/experiments/live/cancel", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.nightly
def test_the_pages_of_the_dashboard_have_no_violations(busy: Dashboard, scheme: str) -> None:
    check_all(scheme, [f"http://127.0.0.1:{busy.port}{path}" for path in PAGES], busy.url)


@pytest.mark.slow
@SCHEMES
def test_reports_and_results_sites_have_no_violations(tmp_path: Path, scheme: str) -> None:
    runs = [sealed_run(tmp_path / f"run-{count}", workers=count, seconds=90.0 / count) for count in (1, 2)]
    others = [
        sealed_run(tmp_path / task, name=task, task=task, method={"name": "topk"}) for task in ("mnist", "allreduce")
    ]
    write_report(collect([Archive.open(path) for path in runs]), tmp_path / "report.html")
    write_report(collect([Archive.open(path) for path in (*runs, *others)]), tmp_path / "mix.html")
    (tmp_path / "archives").mkdir()
    for path in others:
        pack(path, tmp_path / "archives" / f"{path.name}.zip")
    build_site([tmp_path / "archives"], tmp_path / "site", SiteOptions(worker_hour=0.5))
    site = [page for page in sorted((tmp_path / "site").rglob("*.html")) if page.parent.name != "results"]
    result = next((tmp_path / "site").rglob("results/*.html"), None)
    pages = [tmp_path / "report.html", tmp_path / "mix.html", *site, *([result] if result else [])]
    assert len(pages) > 3
    check_all(scheme, [page.as_uri() for page in pages])


@pytest.mark.nightly
def test_the_pages_of_the_docs_are_short_and_have_no_violations(tmp_path: Path) -> None:
    """axe-core checks a page of each kind: start, guide, tables, reference, folded sections."""
    if importlib.util.find_spec("zensical") is None:
        missing("the generator of the site is not installed: make install")
    from tools.build_docs import main

    assert main([str(tmp_path / "build")]) == 0
    site = tmp_path / "build" / "site"
    with open_browser(1400, 900) as browser:
        heights = {}
        for page in site.rglob("*.html"):
            browser.open(page.as_uri())
            heights[page.name] = browser.run("return document.documentElement.scrollHeight")
    assert {name: height for name, height in heights.items() if height > MAX_HEIGHT} == {}
    names = ("index", "how-to/clouds", "figures", "reference/archive", "changelog")
    for scheme in ("light", "dark"):
        check_all(scheme, [(site / f"{name}.html").as_uri() for name in names])


def test_a_page_without_names_and_contrast_is_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<title>x</title><p style='color:#ddd;background:#fff'>pale</p><input><img src=x>")
    with open_browser() as browser:
        words = " ".join(violations(browser, page.as_uri(), "light"))
    assert {"color-contrast", "label", "image-alt", "html-has-lang"} <= {word.rstrip(":") for word in words.split()}
