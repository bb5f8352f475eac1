"""The first day with a cloud's account: its steps, what it does after a failure, and what each step proves."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.clusters import first_day
from mlbench_cli.clusters.first_day import NAME, Done, FirstDay, Proof, Step, look_up
from mlbench_cli.errors import MlbenchError, UsageError

PROOFS = [
    {"row": "it is made", "step": "create"},
    {"row": "its state", "part": "ready", "step": "list", "at": "clusters.name=NAME.state", "like": "ready|running"},
    {"row": "it is gone", "step": "gone", "nameless": True},
]


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FirstDay:
    monkeypatch.setattr(
        first_day, "_load", lambda: {"gke": {"machines": [["-m", "gpu"], ["-m", "cpu"]], "proofs": PROOFS}}
    )
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return FirstDay("gke", tmp_path / "day", ["--zone", "near"], "2026-01-02T00:00:00.000Z", machine=["-m", "gpu"])


class Programs:
    """Runs no step: each ends with the code and prints the document that are given for its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codes: dict[str, Any] | None = None, **documents: Any) -> None:
        self.names: list[str] = []
        remaining = {name: list(code) if isinstance(code, list) else [code] for name, code in (codes or {}).items()}

        def run(day: FirstDay, step: Step, tell: Callable[[str], None]) -> Done:
            tell(step.command)
            self.names.append(step.name)
            known = remaining.get(step.name, [0])
            code = known.pop(0) if len(known) > 1 else known[0]
            err = f"Error: {step.name} failed.\nNext: wait" if code else ""
            day.done.append(Done(step, code, 1.23456, json.dumps(documents.get(step.name, {})), err))
            return day.done[-1]

        monkeypatch.setattr(FirstDay, "_run", run)


def done(name: str, code: int | None = 0, document: Any = None, **fields: Any) -> Done:
    return Done(Step(name, (name,)), code, out="" if document is None else json.dumps(document), **fields)


NOTHING = "the step list shows nothing at clusters.name=NAME.state"
LISTED: dict[str, Any] = {"clusters": [{"name": "other", "state": "ready"}, {"name": NAME, "state": "ready"}]}


# --- planning ---------------------------------------------------------------------------------------------------------


def test_the_first_machines_that_the_quota_allows_are_planned(day: FirstDay, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch, {"plan": [5, 0]}, plan={"plan": {"price_per_hour": 0.5}})
    told: list[str] = []
    assert day.plan(told.append) == {"price_per_hour": 0.5}
    assert programs.names == ["doctor", "prices", "plan", "plan"]
    assert told == [
        "mlbench doctor gke --zone near -o json",
        "mlbench prices update gke",
        "mlbench create-cluster gke 1 first-day -m gpu --zone near --registry auto --ttl 1h --dry-run -o json",
        "mlbench create-cluster gke 1 first-day -m cpu --zone near --registry auto --ttl 1h --dry-run -o json",
    ]
    assert (day.machine, day.has_gpu) == (["-m", "cpu"], False)


@pytest.mark.parametrize(("codes", "plans"), [([3], 1), ([5, 5], 2), ([5, 2], 2)])
def test_a_plan_that_fails_creates_nothing_and_is_written_down(
    day: FirstDay, monkeypatch: pytest.MonkeyPatch, codes: list[int], plans: int
) -> None:
    programs = Programs(monkeypatch, {"plan": codes})
    with pytest.raises(MlbenchError, match=r"The plan of the first day failed, and nothing was created: plan failed\."):
        day.plan(lambda text: None)
    assert programs.names.count("plan") == plans
    assert (day.folder / "first-day.json").exists()


def test_a_folder_that_is_not_empty_and_an_unknown_cloud_are_refused(day: FirstDay) -> None:
    day.folder.mkdir()
    (day.folder / "x").touch()
    with pytest.raises(UsageError, match="is not empty"):
        day.plan(lambda text: None)
    with pytest.raises(UsageError, match='--first-day supports gke, not "kind"'):
        FirstDay("kind", day.folder).plan(lambda text: None)


def test_an_empty_folder_is_used(day: FirstDay, monkeypatch: pytest.MonkeyPatch) -> None:
    day.folder.mkdir()
    Programs(monkeypatch, plan={"plan": {}})
    assert day.plan(lambda text: None) == {}
    assert day.has_gpu


# --- spending ---------------------------------------------------------------------------------------------------------


def test_all_steps_in_order(day: FirstDay, monkeypatch: pytest.MonkeyPatch) -> None:
    day.folder.mkdir()
    programs = Programs(monkeypatch)
    assert day.spend(lambda text: None) == 0
    assert programs.names == ["create", "push", "run", "extend", "list", "delete", "gone", "rest"]
    assert [step.command for step in day.steps() if step.ends] == [
        f"mlbench delete-cluster gke {NAME} --zone near --force --yes",
        "mlbench list-clusters --cloud -o json",
        "mlbench gc gke --zone near --dry-run -o json",
    ]
    assert f"--cluster {NAME} --to {day.folder / 'runs'} --yes" in day.steps()[2].command


@pytest.mark.parametrize(
    ("codes", "taken", "code"),
    [
        ({"create": 5}, ["create", "delete", "gone", "rest"], 5),
        ({"run": 7}, ["create", "push", "run", "delete", "gone", "rest"], 7),
        ({"run": 7, "delete": 8}, ["create", "push", "run", "delete", "gone", "rest"], 8),
        ({"delete": 8, "rest": 3}, ["create", "push", "run", "extend", "list", "delete", "gone", "rest"], 3),
        ({"list": 10}, ["create", "push", "run", "extend", "list", "delete", "gone", "rest"], 10),
    ],
)
def test_after_a_failure_only_the_removal_runs_and_its_own_failure_counts(
    day: FirstDay, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], taken: list[str], code: int
) -> None:
    day.folder.mkdir()
    programs = Programs(monkeypatch, codes)
    assert day.spend(lambda text: None) == code
    assert programs.names == taken
    skipped = [item for item in day.done if item.exit_code is None]
    assert {item.why for item in skipped} <= {"an earlier step failed"}
    assert len(skipped) + len(taken) == 8


def test_without_docker_no_image_is_pushed_nor_run(day: FirstDay, monkeypatch: pytest.MonkeyPatch) -> None:
    day.folder.mkdir()
    monkeypatch.setattr("shutil.which", lambda name: None)
    programs = Programs(monkeypatch)
    assert day.spend(lambda text: None) == 0
    assert programs.names == ["create", "extend", "list", "delete", "gone", "rest"]
    assert [(item.step.name, item.why) for item in day.done if item.exit_code is None] == [
        ("push", "docker is not on PATH"),
        ("run", "docker is not on PATH"),
    ]


@pytest.mark.parametrize(("machine", "gpu"), [(["-m", "gpu"], True), (("-m", "gpu"), True), (["-m", "cpu"], False)])
def test_the_file_of_runs(day: FirstDay, machine: Any, gpu: bool) -> None:
    day.folder.mkdir()
    day.machine = machine
    document = yaml.safe_load(day.write_runs_file().read_text())
    assert document["runs"][0]["set"] == {"sizes": "1KiB:16MiB:x4", "samples": 10}
    assert [run["name"] for run in document["runs"]] == ["first-day-all-reduce", "first-day-digits"]
    del document["runs"]
    assert document == {"title": "First day on gke", "workers": [1], "gpu": gpu, "timeout": "20m"}


@pytest.mark.parametrize("end", [0, 7, None])
def test_a_step_is_a_process_whose_output_is_kept(
    day: FirstDay, monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    day.folder.mkdir()
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options))
        if end is None:
            raise subprocess.TimeoutExpired("it", options["timeout"])
        return subprocess.CompletedProcess(command, end, '{"a": 1}', "Error: it")

    monkeypatch.setattr("subprocess.run", run)
    told: list[str] = []
    found = [day._run(Step(name, ("wait", "x y")), told.append) for name in ("first", "second")]
    assert day.done == found
    assert told == ["mlbench wait x y"] * 2
    command, options = asked[0]
    assert command[1:] == ["-P", "-m", "mlbench_cli", "wait", "x y"]
    assert (options["capture_output"], options["text"], options["timeout"]) == (True, True, 5400.0)
    assert sorted(path.name for path in day.folder.iterdir()) == [
        *("01-first.err", "01-first.out", "02-second.err", "02-second.out")
    ]
    if end is None:
        assert (found[0].exit_code, found[0].err, found[0].document) == (124, "no end within 5400 s", None)
    else:
        assert (found[0].exit_code, found[0].document) == (end, {"a": 1})
        assert (day.folder / "01-first.err").read_text() == "Error: it"


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "verdict", "evidence"),
    [
        ([], "not tried", "the step create: was not reached"),
        ([done("create", 5)], "not tried", "the step create: failed (5)"),
        ([done("create", None, why="docker is not on PATH")], "not tried", "the step create: docker is not on PATH"),
        ([done("create")], "confirmed", "mlbench create succeeded"),
        ([done("create", 5), done("create")], "confirmed", "mlbench create succeeded"),
        ([done("create"), done("create", 5)], "not tried", "the step create: failed (5)"),
    ],
)
def test_a_step_proves_that_it_works(day: FirstDay, steps: list[Done], verdict: str, evidence: str) -> None:
    day.done = steps
    assert day.judge()[0] == (Proof(**PROOFS[0]), verdict, evidence)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("document", "verdict", "evidence"),
    [
        (LISTED, "confirmed", "clusters.name=NAME.state is ready"),
        ({"clusters": [{"name": NAME, "state": "not ready"}]}, "refuted", "clusters.name=NAME.state is not ready"),
        ({"clusters": [{"name": NAME, "state": 3}]}, "refuted", "clusters.name=NAME.state is 3"),
        ({"clusters": [{"name": "other", "state": "ready"}]}, "not tried", NOTHING),
        ({"clusters": [{"name": NAME}]}, "not tried", NOTHING),
        ([], "not tried", NOTHING),
    ],
)
def test_a_value_in_a_document_proves_its_row(day: FirstDay, document: Any, verdict: str, evidence: str) -> None:
    day.done = [done("list", 0, document)]
    assert day.judge()[1][1:] == (verdict, evidence)


@pytest.mark.parametrize(
    ("created", "document", "verdict"),
    [
        (0, {"clusters": []}, ("confirmed", "mlbench gone: not listed")),
        (0, LISTED, ("refuted", "mlbench gone: listed")),
        (0, {"clusters": [{"name": NAME, "state": "deleted"}]}, ("confirmed", "mlbench gone: not listed")),
        (5, {"clusters": []}, ("not tried", "no cluster was created")),
    ],
)
def test_that_nothing_is_left_is_proven_only_if_there_was_something(
    day: FirstDay, created: int, document: Any, verdict: tuple[str, str]
) -> None:
    day.done = [done("create", created), done("gone", 0, document)]
    assert day.judge()[2][1:] == verdict


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([], []),
        ([done("gone", 0, {"clusters": []}), done("rest", 0, {})], []),
        ([done("gone", 0, LISTED)], [f"mlbench gone lists {NAME}"]),
        ([done("rest", 0, LISTED)], [f"mlbench rest lists {NAME}"]),
        ([done("gone", 3, LISTED, err="a\nError: No login.\nb\nNext: x")], ["unknown: mlbench gone failed: No login."]),
        ([done("gone", 0, err="a\nb\nNext: x")], ["unknown: mlbench gone failed: b"]),
        ([done("rest", 0)], ["unknown: mlbench rest failed: it printed nothing"]),
        ([done("delete", 8)], []),
    ],
)
def test_what_is_left_is_told_also_if_nobody_knows(day: FirstDay, steps: list[Done], left: list[str]) -> None:
    day.done = steps
    assert day.left() == left


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a", {"b": [{"k": "x", "v": 1}, {"k": 2, "v": 3}]}),
        ("a.b.k=x.v", 1),
        ("a.b.k=2.v", 3),
        ("a.b.k=y.v", first_day._ABSENT),
        ("a.c", first_day._ABSENT),
        ("a.b.k=x.v.w", first_day._ABSENT),
        ("n", None),
    ],
)
def test_a_place_in_a_document(path: str, value: Any) -> None:
    document = {"a": {"b": [{"k": "x", "v": 1}, {"k": 2, "v": 3}]}, "n": None}
    found = look_up(document, path)
    assert found == value
    assert (found is first_day._ABSENT) == (value is first_day._ABSENT)


def test_the_report_of_a_day(day: FirstDay) -> None:
    day.folder.mkdir()
    day.done = [
        done("create", seconds=1.23456),
        done("push", None, why="docker is not on PATH"),
        done("list", 0, {"clusters": [{"name": NAME, "state": "odd"}]}),
        done("gone", 0, LISTED),
    ]
    day.write()
    listed = {"name": "list", "command": "mlbench list", "exit_code": 0, "seconds": 0.0, "why": None}
    assert json.loads((day.folder / "first-day.json").read_text()) == {
        "cloud": "gke",
        "started": "2026-01-02T00:00:00.000Z",
        "machine": ["-m", "gpu"],
        "steps": [
            {**listed, "name": "create", "command": "mlbench create", "seconds": 1.235},
            {**listed, "name": "push", "command": "mlbench push", "exit_code": None, "why": "docker is not on PATH"},
            listed,
            {**listed, "name": "gone", "command": "mlbench gone"},
        ],
        "assumptions": [
            {"row": "it is made", "part": None, "verdict": "confirmed", "evidence": "mlbench create succeeded"},
            {
                "row": "its state",
                "part": "ready",
                "verdict": "refuted",
                "evidence": "clusters.name=NAME.state is odd",
            },
            {"row": "it is gone", "part": None, "verdict": "refuted", "evidence": "mlbench gone: listed"},
        ],
        "left": [f"mlbench gone lists {NAME}"],
    }
    assert (day.folder / "confirmed.md").read_text().splitlines() == [
        "| assumption | confirmed |",
        "| --- | --- |",
        "| it is made | 2026-01-02: mlbench create succeeded |",
        "| its state | **refuted** 2026-01-02: clusters.name=NAME.state is odd |",
        "| it is gone | **refuted** 2026-01-02: mlbench gone: listed |",
    ]
    day.done = [done("list", 0, LISTED)]
    day.write()
    assert (day.folder / "confirmed.md").read_text().splitlines()[2:] == [
        "| its state | 2026-01-02 (ready): clusters.name=NAME.state is ready |"
    ]


@pytest.mark.parametrize("cloud", ["gke", "eks", "aks"])
def test_every_row_of_a_cloud_is_proven_by_a_step_of_its_day(tmp_path: Path, cloud: str) -> None:
    day = FirstDay(cloud, tmp_path)
    day.machine = first_day._load()[cloud]["machines"][0]
    names = {step.name for step in day.steps()} | {"doctor", "prices", "plan"}
    proofs = [proof for proof, _, _ in day.judge()]
    assert proofs
    assert {proof.step for proof in proofs} <= names
    assert all(bool(proof.at) == bool(proof.like) for proof in proofs)
    assert any(proof.nameless for proof in proofs)
