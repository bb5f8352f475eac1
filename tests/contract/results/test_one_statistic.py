"""Seven presenters and the exit codes of compare, gate and reproduce, on the same archives: no two disagree.

compare, gate, reproduce, report, status, the dashboard and the results site have to show the same mean, the same ratio
and the same verdict, whatever the two sides are.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Outcome
from mlbench_cli.results.archive.files import pack
from mlbench_cli.results.site.build import SiteOptions, build_site
from mlbench_cli.storage.store import Store
from tests import NIGHTLY, slow
from tests.contract.server.dashboards import serve
from tests.unit.results.runs import record_sealed

Captured = pytest.CaptureFixture[str]
LIMIT = 1.10


@dataclass(frozen=True)
class Case:
    """Seconds of the runs of both sides, what else sets them apart, and the verdict: does B take 10 % longer than A?

    gate          of gate: 0 it does not, 7 it does, 9 nobody can tell
    reproduced    of reproduce within 10 %: 0 the same, 7 different, 9 nobody can tell; None: refused
    """

    a: tuple[float, ...]
    b: tuple[float, ...]
    gate: int
    reproduced: int | None
    changes: dict[str, Any] | None = None  # of B's spec
    last_fails: bool = False  # the last run of B misses its goal
    first_fails: bool = False  # the first run of A misses its goal
    rebooted: bool = False  # the machine between A and B
    is_script: bool = False  # both sides are a user's own program, B a later version of it

    def outcome(self, side: str, number: int) -> Outcome:
        failed = (side == "b" and self.last_fails and number == len(self.b) - 1) or (
            side == "a" and self.first_fails and number == 0
        )
        return Outcome.GOAL_MISSED if failed else Outcome.GOAL_REACHED


PROVENANCE = {
    "mlbench": "4.0.0",
    "python": "3.12.1",
    "command_line": ["mlbench", "run"],
    "machine": {
        "platform": "Linux",
        "architecture": "x86_64",
        "cores": 2,
        "memory_bytes": 8 << 30,
        "cpu": "Xeon",
        "gpus": [],
    },
    "packages": {"torch": "2.9"},
}
GOOD, SAME, SLOW, NEAR = (10.0, 10.2, 9.9), (10.1, 9.95, 10.15), (12.5, 12.7, 12.4), (10.6, 11.4, 10.9)
CASES = {
    "the same": Case(GOOD, SAME, 0, 0),
    "slower": Case(GOOD, SLOW, 7, 7),
    "faster": Case(SLOW, GOOD, 0, 7),
    "near the limit": Case(GOOD, NEAR, 9, 9),
    "noisy": Case((8.0, 10.0, 13.0), (9.0, 12.0, 11.0), 9, 9),
    "one run each": Case((10.0,), (15.0,), 9, 9),
    "two runs each": Case((10.0, 10.1), (15.0, 15.1), 9, 9),
    "one against three": Case(GOOD, (15.0,), 9, 9),
    "one against a history": Case((*GOOD, 10.1, 10.05), (15.0,), 7, 7),
    "no scatter": Case((10.0,) * 3, (12.0,) * 3, 7, 7),
    "no scatter, equal": Case((10.0,) * 3, (10.0,) * 3, 0, 0),
    "another session": Case(GOOD, SLOW, 9, 7, rebooted=True),
    "a failed repeat of B": Case(GOOD, SAME, 7, 9, last_fails=True),
    "a failed repeat of A": Case((99.0, *GOOD), SAME, 0, None, first_fails=True),
    "mixed conditions": Case(GOOD, SLOW, 9, 9, {"share_machine": True}),
    "another cluster": Case(GOOD, SLOW, 9, 9, {"engine": "slurm", "cluster": "big", "cluster_kind": "slurm"}),
    "two versions of a script": Case(GOOD, SLOW, 7, 9, is_script=True),
    "another backend": Case(GOOD, SLOW, 9, 7, {"backend": "mpi"}),
}
# By day one of each verdict, and what no other test has on all pages.
FIRST = ["slower", "another session", "a failed repeat of B"]
BY_DAY = [*FIRST, *slow(["noisy", "one against three", "two versions of a script"])]


def _record(store: Store, side: str, case: Case) -> None:
    changes = dict((case.changes or {}) if side == "b" else {})
    about: dict[str, Any] = {**PROVENANCE, "session": side if case.rebooted else "boot"}
    if case.is_script:
        changes |= {"task": "custom", "preset": "custom", "argv": ("python", "train.py")}
        about["command"] = {"digest": ("1" if side == "a" else "2") * 64, "files": ["train.py"]}
    for number, seconds in enumerate(case.a if side == "a" else case.b):
        name, own = f"{side}-2-r{number + 1}", {"seed": 42 + number, **changes}
        outcome, repeats = str(case.outcome(side, number)), len(case.a if side == "a" else case.b)
        record_sealed(store, name, 2, seconds, outcome, provenance=about, repeats=repeats, **own)


@pytest.fixture(params=list(CASES) if NIGHTLY else BY_DAY)
def case(request: pytest.FixtureRequest, home: Path) -> Case:
    store = Store()
    found = CASES[str(request.param)]
    for side in ("a", "b"):
        _record(store, side, found)
    store.close()
    return found


def ask(capsys: Captured, *argv: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = run([*argv, "-o", "json"])
    text = capsys.readouterr().out
    return code, json.loads(text) if text.startswith("{") else None


def test_all_presenters_agree(case: Case, capsys: Captured, tmp_path: Path) -> None:
    both = [f"{side}-2" if len(own) > 1 else f"{side}-2-r1" for side, own in (("a", case.a), ("b", case.b))]
    compared, found = ask(capsys, "compare", *both)
    gated, gate = ask(capsys, "gate", both[1], "--baseline", both[0], "--check", f"seconds={LIMIT}")
    repeated, receipt = ask(capsys, "reproduce", both[0], "--with", both[1], "--within", "10%", "--receipt", "r.json")
    assert (compared, gated) == (0, case.gate), capsys.readouterr().err
    assert repeated == (2 if case.reproduced is None else case.reproduced)

    row = found["rows"]["seconds"]
    [check] = gate["checks"]
    if check["row"] and check["baseline"]:
        assert check["row"] == row
    if case.reproduced is not None and not case.last_fails:
        [figure] = receipt["figures"]
        ends = row["ratio"]
        assert [figure["ratio"], figure["low"], figure["high"]] == [ends["mean"], ends["low"], ends["high"]]
    # A gate that passes or fails has a sentence that says as much.
    sentence = str(found["verdict"])
    if case.gate == 7 and not case.last_fails:
        assert "slower than" in sentence
    is_blocked = bool(set(found["obstacle_words"]) - {"backend"}) or case.rebooted
    if case.gate == 9 and row["ratio"] and (row["ratio"]["low"] is None or is_blocked):
        assert re.match(r"Too few runs|No verdict", sentence)

    # Of runs that did not reach their goal nobody knows the time, and the others are the faster ones.
    is_partial = case.last_fails or case.first_fails
    if is_partial:
        assert re.match(r"No verdict.* did not reach the goal", sentence)

        assert run(["compare", *both]) == 0
        assert "Left out of all figures: " in capsys.readouterr().err

    # Means, and what the pages say of the pair.
    with serve(tmp_path / "home") as dashboard:
        assert dashboard.ask(f"/api/v1/compare?a={both[0]}&b={both[1]}").document["rows"] == found["rows"]
        page = dashboard.ask(f"/compare?a={both[0]}&b={both[1]}").body.decode()
        assert row["words"] in page
        assert ("Left out of all figures: " in page) == is_partial == bool(found["excluded"])
        if is_partial:  # a row for each side, in which the failed repeat is, too
            listed = dashboard.ask("/listing", headers={"Accept": "text/html"}).body.decode()
            assert listed.partition("<tbody>")[2].count("<tr>") == 2
    archives, site = tmp_path / "archives", tmp_path / "site"
    archives.mkdir()
    for folder in (tmp_path / "home" / "runs").iterdir():
        pack(folder, archives / f"{json.loads((folder / 'run.json').read_bytes())['name']}.zip")
    build_site([archives], site, SiteOptions())
    for claim in json.loads((site / "index.json").read_bytes())["results"]:
        sides = {Path(one["file"]).name[0] for one in claim["archives"]}
        if len(sides) == 1 and not claim["failed_runs"]:  # else repeats of one setting: both sides in one
            mean = row[sides.pop()]
            assert [claim["value"], claim["low"], claim["high"]] == [mean["mean"], mean["low"], mean["high"]]
    _, status = ask(capsys, "status")
    for group in status["repeats"]:
        if group["seconds"]:
            assert group["seconds"] == row[group["name"][0]]
    assert run(["report", "page.md", *both]) == 0
    headline = re.sub(r"\\(.)", r"\1", Path("page.md").read_text()).split("\n\n")[:4]
    if len(case.a) == 1:
        assert not re.search(r"\d×", "".join(headline))
    if case.gate == 7 and not case.last_fails:
        assert "No difference" not in "".join(headline)
    if case.is_script:  # before and after: two rows, with the words of compare
        assert row["change"]["difference"] in headline[0]
        assert row["change"]["ends"] in headline[2]
        assert row["words"] in re.sub(r"\\(.)", r"\1", Path("page.md").read_text())


def test_several_results_are_each_compared_with_one_baseline(capsys: Captured, home: Path) -> None:
    store = Store()
    sides = {"a": Case(GOOD, GOOD, 0, 0), "b": CASES["the same"], "c": CASES["slower"]}
    for side, case in sides.items():
        _record(store, side, case)
    store.close()
    pairs = [ask(capsys, "compare", "a-2", other) for other in ("b-2", "c-2")]
    code, found = ask(capsys, "compare", "a-2", "b-2", "c-2", "b-2")
    assert code == 0
    assert [(each["b"], each["rows"], each["verdict"]) for each in found["comparisons"]] == [
        (pair["b"], pair["rows"], pair["verdict"]) for _, pair in pairs
    ]
    assert run(["compare", "a-2", "b-2", "c-2"]) == 0
    text = capsys.readouterr().out
    assert 0 == text.index("b-2 against a-2") < text.index("c-2 against a-2")
