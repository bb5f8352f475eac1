"""What Slurm's word adds to what the files of a run say; and how a job is submitted once."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.engines.machines.details import SlurmDetails
from mlbench_cli.engines.machines.observe import NodeReport, Snapshot
from mlbench_cli.engines.slurm import engine as slurm
from mlbench_cli.engines.slurm.controller import Answer, JobReport
from mlbench_cli.engines.slurm.engine import SlurmEngine
from mlbench_cli.errors import CredentialError, UsageError
from mlbench_cli.model.run import Ending, Finding, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from tests.unit.engines.slurm.login import Login

SPEC = RunSpec("x-2", "c", "slurm", "custom", "custom", ("true",), "gloo", 2)
FOLDER = "/shared/runs/x-2"
NOW = 1_800_000_000.0
JOB = {f"{FOLDER}/job.json": json.dumps({"job": "27", "submitted": NOW - 100})}
STATE: dict[str, Any] = {"ended": None, "ranks": [], "first": None, "started": True}
ALIVE, DEAD = NodeReport(STATE, alive=True), NodeReport(STATE, alive=False)
BEGUN = Snapshot(NOW, {0: ALIVE, 1: ALIVE})
SILENT = Snapshot(NOW, {0: DEAD, 1: DEAD})
WAITING = Snapshot(NOW, {0: NodeReport(), 1: NodeReport()})


def line(state: str, reason: str = "None", ended: str = "N/A", number: str = "27") -> str:
    return f"{number}|{state}|N/A|{ended}|n1|{reason}\n"


class Lab:
    """An engine whose login node answers squeue with one text."""

    def __init__(self, folder: Path, squeue: str = "", *, files: dict[str, str] | None = None, **details: Any) -> None:
        answer = Answer(1, "", "no answer") if squeue == "silent" else Answer(0, squeue, "")
        self.login = Login(("squeue", answer), files=JOB if files is None else files)
        self.engine = SlurmEngine(SlurmDetails(folder="/shared", **details))
        self.engine._channel = self.login.channel
        self.run = Run("abc", SPEC, folder, "2027-01-15T08:00:00Z")

    def judge(
        self, snapshot: Snapshot, ended: Ending | None = None, *findings: Finding, code: int | None = None
    ) -> Observation:
        workers = (WorkerState(0, exit_code=code), WorkerState(1))
        first = None if code is None else 0
        return self.engine._judge(self.run, snapshot, Observation(NOW, workers, findings, ended, first))


def codes(observation: Observation) -> list[str]:
    return [finding.code for finding in observation.findings]


# --- a run that has not ended ----------------------------------------------------------------------------------------


def test_a_job_that_waits_for_more_than_nodes_says_why(tmp_path: Path) -> None:
    found = Lab(tmp_path, line("PENDING", "QOSMaxNodePerJob")).judge(WAITING)
    assert (found.ended, codes(found)) == (None, ["unschedulable"])
    assert {worker.reason for worker in found.workers} == {"QOSMaxNodePerJob"}
    found = Lab(tmp_path, line("PENDING", "Resources")).judge(WAITING)
    assert (codes(found), found.workers[0].reason) == ([], "Resources")
    assert Lab(tmp_path, line("PENDING", "")).judge(WAITING).workers[0].reason is None


@pytest.mark.parametrize(
    ("text", "snapshot"),
    [
        (line("RUNNING"), WAITING),
        (line("PENDING", "QOSMaxNodePerJob"), BEGUN),  # requeued, but the ranks are there
        (line("FAILED", ended=f"{NOW - 9.9}"), SILENT),  # its files may come
        ("silent", BEGUN),
    ],
)
def test_a_run_goes_on(tmp_path: Path, text: str, snapshot: Snapshot) -> None:
    found = Lab(tmp_path, text).judge(snapshot)
    assert found.ended is None
    assert codes(found) == (["controller_silent"] if text == "silent" else [])


@pytest.mark.parametrize(
    ("text", "snapshot", "ended", "code"),
    [
        (line("FAILED", ended=f"{NOW - 10}"), SILENT, Ending.LOST, "evidence_missing"),
        (line("TIMEOUT"), SILENT, Ending.DEADLINE, "time_limit"),
        (line("FAILED", "BadConstraints"), WAITING, Ending.NEVER_STARTED, "impossible_request"),
        (line("FAILED"), BEGUN, None, "job_ended_ranks_run"),
        (line("CANCELLED"), replace(SILENT, is_cancelled=True), Ending.CANCELLED, None),
    ],
)
def test_a_job_that_has_ended_ends_the_run_unless_its_ranks_run(
    tmp_path: Path, text: str, snapshot: Snapshot, ended: Ending | None, code: str | None
) -> None:
    found = Lab(tmp_path, text).judge(snapshot)
    assert (found.ended, codes(found)) == (ended, [code] if code else [])


@pytest.mark.parametrize(
    ("snapshot", "submitted", "ended", "found"),
    [
        (BEGUN, NOW - 100, None, ["controller_forgot"]),
        (SILENT, NOW - 61, Ending.LOST, ["job_vanished"]),
        (WAITING, NOW - 60, Ending.NEVER_STARTED, ["job_vanished"]),
        (WAITING, NOW - 59, None, []),
    ],
)
def test_a_job_that_the_controller_forgot_ends_a_run_without_life_after_a_minute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Snapshot,
    submitted: float,
    ended: Ending | None,
    found: list[str],
) -> None:
    files = {f"{FOLDER}/job.json": json.dumps({"job": "27", "submitted": submitted})}
    monkeypatch.setattr(slurm, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: 0.0))
    observation = Lab(tmp_path, line("RUNNING", number="28"), files=files).judge(snapshot)
    assert (observation.ended, codes(observation)) == (ended, found)


def test_the_accounting_database_is_asked_of_a_forgotten_job(tmp_path: Path) -> None:
    lab = Lab(tmp_path, has_accounting=True)
    lab.login.answers.append(("sacct", Answer(0, line("TIMEOUT"), "")))
    assert lab.judge(SILENT).ended is Ending.DEADLINE
    assert Lab(tmp_path).judge(SILENT).ended is Ending.LOST


# --- a run that has ended --------------------------------------------------------------------------------------------

FOREIGN = Finding("cancelled_by_other", "Someone else."), Finding("log_gap", "A gap.")


@pytest.mark.parametrize(
    ("ended", "code", "snapshot"),
    [
        (Ending.EXITED, None, SILENT),
        (Ending.FAILED, 3, SILENT),
        (Ending.FAILED, None, SILENT),
        (Ending.DEADLINE, None, SILENT),
        (Ending.CANCELLED, None, replace(SILENT, is_cancelled=True)),
    ],
)
def test_an_end_that_the_files_explain_is_not_asked_of_slurm(
    tmp_path: Path, ended: Ending, code: int | None, snapshot: Snapshot
) -> None:
    lab = Lab(tmp_path, line("TIMEOUT"))
    assert lab.judge(snapshot, ended, code=code).ended is ended
    assert lab.login.commands == []


@pytest.mark.parametrize(
    ("ended", "code"), [(Ending.LOST, None), (Ending.CANCELLED, None), (Ending.FAILED, 137), (Ending.FAILED, 143)]
)
def test_an_end_from_outside_has_slurms_reason(tmp_path: Path, ended: Ending, code: int | None) -> None:
    found = Lab(tmp_path, line("TIMEOUT")).judge(SILENT, ended, *FOREIGN, code=code)
    assert (found.ended, codes(found)) == (Ending.DEADLINE, ["log_gap", "time_limit"])


@pytest.mark.parametrize(
    ("text", "ended", "result"),
    [
        (line("COMPLETED"), Ending.LOST, Ending.LOST),
        (line("FAILED"), Ending.LOST, Ending.LOST),
        (line("CANCELLED"), Ending.LOST, Ending.LOST),
        (line("CANCELLED"), Ending.CANCELLED, Ending.CANCELLED),
        ("", Ending.LOST, Ending.LOST),
    ],
)
def test_a_state_of_slurm_that_says_nothing_more_changes_nothing(
    tmp_path: Path, text: str, ended: Ending, result: Ending
) -> None:
    found = Lab(tmp_path, text).judge(SILENT, ended, *FOREIGN)
    assert found.ended is result
    assert "cancelled_by_other" in codes(found)


def test_a_job_that_still_runs_may_yet_say_why_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    lab = Lab(tmp_path, line("COMPLETING"), kill_wait=30)
    monkeypatch.setattr(slurm, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: clock[0]))
    assert lab.judge(SILENT, Ending.LOST).ended is None
    clock[0] += 39.9
    assert lab.judge(SILENT, Ending.LOST).ended is None
    clock[0] += 0.1
    assert lab.judge(SILENT, Ending.LOST).ended is Ending.LOST


def test_a_step_that_slurm_killed_for_its_memory_has_failed(tmp_path: Path) -> None:
    log = "x" * 70_000 + "\nslurmstepd-n3: error: Exceeded job memory limit\n"
    found = Lab(tmp_path, line("COMPLETED"), files={**JOB, f"{FOLDER}/step.log": log}).judge(
        SILENT, Ending.LOST, Finding("node_lost", "x"), Finding("log_gap", "y")
    )
    assert (found.ended, codes(found)) == (Ending.FAILED, ["out_of_memory", "log_gap"])


# --- a run without a job ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("snapshot", "files", "ended", "found"),
    [
        (WAITING, {}, None, ["not_submitted"]),
        (WAITING, {f"{FOLDER}/started/job": "27"}, None, []),
        (replace(WAITING, is_cancelled=True), {}, Ending.CANCELLED, []),
        (replace(WAITING, exists=False), JOB, None, ["not_submitted"]),
    ],
)
def test_a_run_without_a_job(
    tmp_path: Path, snapshot: Snapshot, files: dict[str, str], ended: Ending | None, found: list[str]
) -> None:
    lab = Lab(tmp_path, files=files)
    observation = lab.judge(snapshot)
    assert (observation.ended, codes(observation)) == (ended, found)
    assert lab.judge(snapshot, Ending.FAILED, code=3).ended is Ending.FAILED


def test_a_run_whose_folder_was_removed_after_its_submission_is_lost(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "job.sh").touch()
    found = Lab(tmp_path).judge(replace(WAITING, exists=False))
    assert (found.ended, codes(found)) == (Ending.LOST, ["folder_gone"])


# --- asking the controller -------------------------------------------------------------------------------------------


def test_the_controller_is_asked_seldom_for_all_runs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(slurm, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: clock[0]))
    lab = Lab(tmp_path, line("RUNNING"))

    def asked(seconds: float, snapshot: Snapshot) -> bool:
        clock[0] += seconds
        before = len(lab.login.commands)
        assert lab.judge(snapshot).ended is None
        return len(lab.login.commands) > before

    assert asked(0, WAITING)
    assert not asked(4.9, WAITING)
    assert asked(0.1, WAITING)  # every 5 s while it waits
    assert not asked(29.9, BEGUN)
    assert asked(0.1, BEGUN)  # every 30 s while it runs


def test_a_controller_that_is_silent_is_asked_ever_more_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(slurm, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: clock[0]))
    lab = Lab(tmp_path, "silent")
    moments = []
    for _ in range(500):
        before = len(lab.login.commands)
        lab.judge(WAITING)
        if len(lab.login.commands) > before:
            moments.append(clock[0])
        clock[0] += 1.0
    assert [after - before for before, after in itertools.pairwise(moments)] == [10, 20, 40, 80, 120, 120]


def test_a_report_is_that_of_the_runs_own_job(tmp_path: Path) -> None:
    lab = Lab(tmp_path, line("FAILED", number="26") + line("RUNNING"))
    assert lab.engine._find_report("27", BEGUN, is_over=False) == JobReport("27", "RUNNING", "None", "n1")
    assert lab.engine._find_report("99", BEGUN, is_over=False) is None


# --- submitting and ending -------------------------------------------------------------------------------------------


class Cluster(Login):
    """A login node that numbers the jobs that it is given, and locks and claims folders."""

    def __init__(self, *answers: tuple[str, Answer], files: dict[str, str] | None = None) -> None:
        super().__init__(*answers, files=files)
        self.host = {"folder": "/code", "written": True}
        self.steps: list[str] = []

    def call(self, do: str, data: bytes = b"", **arguments: Any) -> dict[str, Any]:
        """As on a machine, but for the lock."""
        self.steps.append(f"{do} {arguments.get('path', '')}".strip())
        if do == "put":
            is_new = arguments["path"] not in self.files
            if is_new or not arguments.get("new"):
                self.files[arguments["path"]] = data
            return {"written": is_new}
        if do == "run":
            return self._run(arguments["argv"])
        return super().call(do, data, **arguments)

    def call_in_sequence(self, requests: list[Any], **_: Any) -> list[dict[str, Any]]:
        """One after the other."""
        return [self.call(request.do, request.data, **request.arguments) for request in requests]


SBATCH = ("sbatch --parsable", Answer(0, "31;cluster\n", ""))


def submit(cluster: Cluster, folder: Path, **details: Any) -> Run:
    engine = SlurmEngine(SlurmDetails(folder="/shared", **details))
    engine._channel = cluster.channel
    run = Run("abc", SPEC, folder, "2027")
    engine.submit(run, engine.render(SPEC))
    return run


PARTITIONS = {"p": {"max_seconds": None, "nodes": 9, "gpus_per_node": 0, "default": True}}


def test_a_run_is_submitted_with_its_script_and_plan(tmp_path: Path) -> None:
    cluster = Cluster(SBATCH)
    submit(cluster, tmp_path, partitions=PARTITIONS)
    assert cluster.steps[-1] == "unlock /shared/locks/x-2"
    assert cluster.steps.index("lock /shared/locks/x-2") < cluster.steps.index(f"put {FOLDER}/run.json")
    assert cluster.files[f"{FOLDER}/job.sh"].startswith(b"#!")
    assert json.loads(cluster.files[f"{FOLDER}/plan.json"])["name"] == "x-2"
    assert json.loads(cluster.files[f"{FOLDER}/job.json"])["job"] == "31"
    (sbatch,) = (words for words in cluster.commands if "sbatch" in words)
    assert sbatch[-2:] == ["--parsable", f"--comment=mlbench:abc:{SPEC.hash}"]
    assert sbatch[:2] == ["/bin/sh", "-c"]


def test_a_script_for_an_unknown_partition_is_tested_before(tmp_path: Path) -> None:
    cluster = Cluster(SBATCH)
    submit(cluster, tmp_path)
    assert cluster.commands[0] == ["sbatch", "--test-only"]
    refused = Cluster(("sbatch --test-only", Answer(1, "", "sbatch: error: Invalid qos specification")), SBATCH)
    with pytest.raises(CredentialError):
        submit(refused, tmp_path)
    assert refused.steps[-1] == "unlock /shared/locks/x-2"
    assert f"{FOLDER}/job.json" not in refused.files


@pytest.mark.parametrize("answer", [Answer(1, "31", "sbatch: error: no"), Answer(0, "no number", "")])
def test_a_refusal_leaves_no_number(tmp_path: Path, answer: Answer) -> None:
    cluster = Cluster(("sbatch --parsable", answer))
    with pytest.raises(UsageError, match="Slurm rejects the job"):
        submit(cluster, tmp_path, partitions=PARTITIONS)
    assert f"{FOLDER}/job.json" not in cluster.files


OWN = {f"{FOLDER}/run.json": '{"id": "abc"}'}


@pytest.mark.parametrize(
    ("files", "squeue", "number", "cancelled"),
    [
        ({f"{FOLDER}/job.json": '{"job": "7"}'}, "", "7", []),
        ({f"{FOLDER}/started/job": "8\n"}, "", "8", []),
        ({f"{FOLDER}/started/job": "x\n"}, "", "31", []),
        ({}, "", "31", []),
        ({}, f"9|RUNNING|None|mlbench:abc:{SPEC.hash}\n12|PENDING|None|mlbench:abc:{SPEC.hash}\n", "9", ["12"]),
    ],
)
def test_a_run_is_submitted_once_whoever_was_killed_in_between(
    tmp_path: Path, files: dict[str, str], squeue: str, number: str, cancelled: list[str]
) -> None:
    cluster = Cluster(SBATCH, ("squeue", Answer(0, squeue, "")), files={**OWN, **files})
    submit(cluster, tmp_path, partitions=PARTITIONS)
    assert json.loads(cluster.files[f"{FOLDER}/job.json"])["job"] == number
    assert [words[1] for words in cluster.commands if words[0] == "scancel"] == cancelled
    assert any("sbatch" in words for words in cluster.commands) is (number == "31")


def test_a_run_that_was_cancelled_or_is_anothers_is_not_submitted(tmp_path: Path) -> None:
    cancelled = Cluster(SBATCH, files={**OWN, f"{FOLDER}/cancel": ""})
    with pytest.raises(UsageError, match='The run "x-2" was canceled before it started'):
        submit(cancelled, tmp_path)
    with pytest.raises(UsageError, match='has another run "x-2"'):
        submit(Cluster(SBATCH, files={f"{FOLDER}/run.json": '{"id": "other"}'}), tmp_path)


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_cancelled_run_has_its_job_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    lab = Lab(tmp_path)
    waited: list[Run] = []
    monkeypatch.setattr(lab.engine, "_sync", lambda run: BEGUN if is_begun else WAITING)
    monkeypatch.setattr(lab.engine, "_await_end", waited.append)
    lab.engine._stop(lab.run, [])
    assert lab.login.commands == [["scancel", "27"]]
    assert waited == ([lab.run] if is_begun else [])
    without = Lab(tmp_path, files={})
    without.engine._stop(without.run, [])
    assert [words[0] for words in without.login.commands] == ["squeue"]
