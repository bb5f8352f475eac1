"""Every command that groups runs has the same groups, with the same number of runs, on one store."""

import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli import api
from mlbench_cli.app import run
from mlbench_cli.model.run import Experiment, Member
from mlbench_cli.results.analysis.figures import SECONDS, THROUGHPUT
from mlbench_cli.results.exports.facts import read_facts
from mlbench_cli.storage.store import Store
from task_images.methods.catalog import describe, find_class
from tests.contract.clients import answer
from tests.contract.server.dashboards import Dashboard, serve
from tests.unit.results.runs import record_sealed

Captured = pytest.CaptureFixture[str]

# Experiments of three runs each that differ in one thing.
KINDS: dict[str, dict[str, Any]] = {
    "own": {},
    "sparse": {"method": describe(find_class("eftopk")())},
    "sparser": {"method": describe(find_class("eftopk")(density="0.001"))},
    "late": {"method": describe(find_class("eftopk")(delay="0.002,1e-9"))},
    "later": {"method": describe(find_class("eftopk")(delay="0.004,1e-9"))},
    "pinned": {"pin": True},
    "other": {"backend": "mpi"},
}
REPEATS = 3


def _record(store: Store, name: str, changes: dict[str, Any]) -> None:
    """An experiment that had one run before it was asked for two more: `own-2`, `own-2-r2`, `own-2-r3`."""
    first = Experiment(f"{name}-id", name, "2025-10-09T08:00:00.000Z", {"name": name})
    members: list[Member] = []
    for repeat in range(REPEATS):
        own = f"{name}-2" + (f"-r{repeat + 1}" if repeat else "")
        made = record_sealed(store, own, 2, 10.0 + repeat / 10, seed=42 + repeat, **changes)
        members.append(Member(repeat, made.id, made.spec.content_hash))
        store.record_experiment(replace(first, members=tuple(members)), [])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    store = Store(folder)
    for name, changes in KINDS.items():
        _record(store, name, changes)
    store.close()
    return folder


@pytest.fixture(scope="module")
def dashboard(home: Path) -> Iterator[Dashboard]:
    with serve(home) as found:
        yield found


@pytest.fixture(autouse=True)
def use(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(home))
    monkeypatch.chdir(tmp_path)


def test_status_has_one_group_of_three_for_each(capsys: Captured) -> None:
    repeats = answer(capsys, "status")["repeats"]
    assert {found["name"]: found["seconds"]["count"] for found in repeats} == {f"{name}-2": REPEATS for name in KINDS}
    one = answer(capsys, "status", "own-2-r3", "own-2", "--state", "finished")["repeats"]
    assert [(found["name"], found["repeats"]) for found in one] == [("own-2", REPEATS)]  # whole, whatever is listed


@pytest.mark.slow
def test_charts_and_the_api_have_one_group_of_three_for_each() -> None:
    assert run(["charts", "figures", *(f"{name}-2" for name in KINDS)]) == 0
    rows = list(csv.DictReader(Path("figures/summary.csv").read_text().splitlines()))
    assert len(rows) == len(KINDS)
    assert {row["runs"] for row in rows} == {str(REPEATS)}
    assert len({row["group"] for row in rows}) == len(KINDS)

    archives = [api.open_archive(path) for path in api.Client().find_archives([f"{name}-2" for name in KINDS])]
    groups = api.series(archives).groups
    assert [len(point.good) for group in groups for point in group.points] == [REPEATS] * len(KINDS)


def test_the_report_has_one_row_of_three_for_each() -> None:
    assert run(["report", "page.md", *(f"{name}-2" for name in KINDS)]) == 0
    text = re.sub(r"\\(.)", r"\1", Path("page.md").read_text())
    results = text.split("## Time", 1)[1].split("\n\n", 2)[1]
    assert len(results.splitlines()) == 2 + len(KINDS)
    for word in ("eftopk (density=0.001)", "eftopk (delay=0.002,1e-9)", "pin=true", "mpi"):
        assert word in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["later", "other"])
def test_compare_shows_the_difference_and_counts_three(capsys: Captured, dashboard: Dashboard, name: str) -> None:
    found = answer(capsys, "compare", "own-2", f"{name}-2")
    assert found["rows"]["seconds"]["a"]["count"] == found["rows"]["seconds"]["b"]["count"] == REPEATS
    assert found["differences"]
    assert found["obstacle_words"]
    other = dashboard.ask(f"/api/v1/compare?a=own-2&b={name}-2").document
    assert other == found
    page = dashboard.ask(f"/compare?a=own-2&b={name}-2").body.decode()
    assert re.search(r"differ: ", page), page[:2000]


@pytest.mark.parametrize("name", ["later", "other"])
def test_the_gate_never_holds_one_against_another(capsys: Captured, name: str) -> None:
    [check] = answer(capsys, "gate", f"{name}-2", "--baseline", "own-2", code=9)["checks"]
    assert (check["verdict"], len(check["values"]), check["baseline"]) == ("cannot_tell", REPEATS, [])
    assert "differ: " in check["reason"]


def test_the_dashboard_has_the_same_repeats(capsys: Captured, dashboard: Dashboard) -> None:
    listed = dashboard.ask("/api/v1/runs").document
    own = answer(capsys, "status")["repeats"]
    assert sorted(listed["repeats"], key=lambda each: each["name"]) == sorted(own, key=lambda each: each["name"])
    page = dashboard.ask("/listing", headers={"Accept": "text/html"}).body.decode()
    assert page.partition("<tbody>")[2].count("<tr>") == len(KINDS)  # a row for each setting, with its mean
    assert page.count("<strong>10.1\u00a0s (9.9 to 10.4)</strong>") == len(KINDS)
    assert page.count(f"{REPEATS} runs</small>") == len(KINDS)
    assert 'data-open="no"' in page  # which asks for no news of experiments that have ended
    both = dashboard.ask("/api/v1/compare?a=own&b=sparse").document
    assert both["rows"]["seconds"]["b"]["count"] == REPEATS


def test_exports_and_the_table_of_charts_have_the_figures_that_compare_relates(capsys: Captured) -> None:
    rows = answer(capsys, "compare", "own-2", "sparse-2")["rows"]
    archives = [api.open_archive(path) for path in api.Client().find_archives(["own-2"])]
    exported = [read_facts(archive).summary for archive in archives]  # what MLflow, W&B and other trackers get
    shared = [name for name, row in rows.items() if row["a"] and name in exported[0]]
    assert {SECONDS, THROUGHPUT, "run"} <= {*shared}
    for name in shared:
        mean = statistics.geometric_mean(each[name] for each in exported) if exported[0][name] else 0.0
        assert rows[name]["a"]["mean"] == pytest.approx(mean), name
    [row] = csv.DictReader(api.series(archives).to_csv().splitlines())
    for column, name in (("seconds_mean", SECONDS), ("samples_per_second", THROUGHPUT)):
        assert float(row[column]) == pytest.approx(rows[name]["a"]["mean"], rel=1e-5)
